"""The paged KV cache as counts: blocks in use, and shared prompt blocks by key.

Blocks without a key are only counted. A block with a key is either held by sequences (reference count) or idle: its
content stays until the room is needed, longest unused first, and it counts as free, as in vLLM's free list.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class KvBlocks:
    """All blocks of one engine: `used + free == total`, and idle ones are among the free."""

    __slots__ = ("_holders", "_idle", "prefixes_version", "total", "used")

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self.prefixes_version = 0
        """Changes whenever `leading` could give another answer than before."""
        self._holders: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Blocks that can be taken, idle ones included."""
        return self.total - self.used

    @property
    def idle(self) -> int:
        """Free blocks whose content can still be found by key."""
        return len(self._idle)

    def take(self, blocks: int) -> None:
        """Use `blocks` more; idle ones give way when nothing else is left. The caller has looked at `free`."""
        self.used += blocks
        excess = self.used + len(self._idle) - self.total
        if excess > 0:
            self.prefixes_version += 1
            for _ in range(excess):
                self._idle.popitem(last=False)

    def give_back(self, blocks: int, keys: Sequence[int]) -> None:
        """Stop using `blocks` blocks, of which those in `keys` are shared."""
        self.used -= blocks - len(keys)
        if keys:
            self.prefixes_version += 1
        holders = self._holders
        for key in reversed(keys):  # the end of a prefix is worth less than its beginning: it goes first
            left = holders[key] - 1
            if left:
                holders[key] = left
            else:
                del holders[key]
                self._idle[key] = None
                self.used -= 1

    def leading(self, keys: Sequence[int], most: int) -> tuple[int, int]:
        """How many of the first `most` keys are there without a gap, and how many of these are idle."""
        holders, idle = self._holders, self._idle
        found = idle_found = 0
        for key in keys[:most]:
            if key in idle:
                idle_found += 1
            elif key not in holders:
                break
            found += 1
        return found, idle_found

    def hold(self, keys: Iterable[int]) -> None:
        """One more sequence holds these shared blocks; all of them are there."""
        holders, idle = self._holders, self._idle
        self.prefixes_version += 1
        for key in keys:
            if key in idle:
                del idle[key]
                holders[key] = 1
                self.used += 1
            else:
                holders[key] += 1

    def share(self, keys: Iterable[int]) -> list[int]:
        """The blocks just computed for `keys` can be found from now on. The keys that are new: who computed what was
        there already keeps a copy of its own."""
        new = []
        for key in keys:
            if key not in self._holders and key not in self._idle:
                self._holders[key] = 1
                new.append(key)
        self.prefixes_version += 1
        return new
