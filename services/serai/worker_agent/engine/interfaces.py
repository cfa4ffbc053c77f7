"""IPv4 addresses of this host's network interfaces."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915
_NAME_BYTES_MAX = 15


def address_of(interface: str) -> str:
    """The IPv4 address of `interface`. Raises OSError when there is no such interface, or it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        asked = struct.pack("256s", interface.encode()[:_NAME_BYTES_MAX])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)[20:24])
