"""What a request is called: as its client says, where that is a name, else by us. Every answer tells it."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Mapping

REQUEST_ID = "x-request-id"
_NAME = re.compile(r"[\x21-\x7e]{1,128}")


class RequestIds:
    """One per ingress."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(8)
        self._numbers = itertools.count(1)

    def of(self, headers: Mapping[str, str]) -> str:
        """The id of the request that came with `headers`."""
        named = headers.get(REQUEST_ID)
        return named if named and _NAME.fullmatch(named) else f"{self._prefix}{next(self._numbers):010x}"
