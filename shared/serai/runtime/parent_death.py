"""Child processes that the kernel ends with their parent, however that ends (Linux: `prctl(PR_SET_PDEATHSIG)`)."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # Now: between fork and exec nothing may be loaded any more.


def die_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """To be called in the child, before its program starts: `preexec_fn`. Its own children get no signal."""
    _libc.prctl(_PR_SET_PDEATHSIG, by)
