"""A digest of many records that is cheap to keep up to date and to compare: 256 buckets of 64 bits, XORed.

Two copies that know the same sessions at the same lifecycle and version have the same digest, in whatever order they
learned of them. Records that LEFT are not in it: each copy forgets them in its own time.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from serai.contracts.session_record import Lifecycle, SessionRecord

BUCKETS = 256


def bucket_of(session: str) -> int:
    """The bucket, 0…255, that `session` falls into, everywhere."""
    return blake2b(session.encode(), digest_size=1).digest()[0]


def _mark(record: SessionRecord) -> int:
    text = f"{record.session} {int(record.lifecycle)} {record.version}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


class Digest:
    """The digest of one site's records; `add` and `remove` as records come, change and go."""

    __slots__ = ("buckets",)

    def __init__(self, records: Iterable[SessionRecord] = ()) -> None:
        self.buckets = [0] * BUCKETS
        for record in records:
            self.add(record)

    def add(self, record: SessionRecord) -> None:
        """`record` is part of the copy now. Adding it again takes it out: XOR is its own inverse."""
        if record.lifecycle is not Lifecycle.LEFT:
            self.buckets[bucket_of(record.session)] ^= _mark(record)

    remove = add

    @property
    def root(self) -> int:
        """All buckets as one number of 63 bits; 0 for no records."""
        if not any(self.buckets):
            return 0
        packed = b"".join([bucket.to_bytes(8, "big") for bucket in self.buckets])
        return int.from_bytes(blake2b(packed, digest_size=8).digest(), "big") >> 1

    def differing(self, buckets: list[int]) -> list[int]:
        """Numbers of the buckets that differ from those of another copy."""
        return [number for number, (own, other) in enumerate(zip(self.buckets, buckets, strict=True)) if own != other]
