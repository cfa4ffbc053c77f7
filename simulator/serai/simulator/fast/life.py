"""One request in a simulated cluster, and what became of it so far."""

from __future__ import annotations

from serai.engine_emulator.batching.sequence import Sequence
from serai.simulator.fast.dispatch import Request
from serai.simulator.outcomes import Outcome
from serai.simulator.workloads.workload import Arrival


class Life:
    """Notes of the cluster on one request."""

    __slots__ = (
        "arrival",
        "cached_tokens",
        "decode_began_ns",
        "decoding",
        "delivered_ns",
        "finished_ns",
        "first_ns",
        "gap_ns",
        "instance",
        "kept",
        "preemptions",
        "refused",
        "request",
        "said_before",
        "sequence",
        "spoke_ns",
    )

    def __init__(self, request: Request, arrival: Arrival) -> None:
        self.request = request
        self.arrival = arrival
        self.instance = -1
        self.first_ns: int | None = None
        self.decode_began_ns: int | None = None
        self.finished_ns: int | None = None
        self.preemptions = 0
        self.cached_tokens = 0
        self.refused = False
        self.spoke_ns = 0
        """When it said its last token, as of the last note."""
        self.gap_ns = 0
        self.decoding = False
        self.delivered_ns = 0
        """Until when its output was held back; 0: it never was."""
        self.sequence: Sequence | None = None
        """In the engine that it was given to last."""
        self.said_before = 0
        """Tokens said on instances that it was moved away from."""
        self.kept: Sequence | None = None
        """The sequence in the prefill instance that holds its KV."""

    def gap(self, gap_ns: int, spoke_ns: int) -> None:
        if gap_ns > self.gap_ns:
            self.gap_ns = gap_ns
        self.spoke_ns = spoke_ns

    def _seen(self, at_ns: int | None) -> int | None:
        """When the client saw what happened at `at_ns`."""
        return at_ns if at_ns is None or at_ns >= self.delivered_ns else self.delivered_ns

    def outcome(self) -> Outcome:
        arrival = self.arrival
        return Outcome(
            arrival_ns=arrival.at_ns,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=arrival.output_tokens,
            instance=self.instance,
            first_token_ns=self._seen(self.first_ns),
            decode_began_ns=self._seen(self.decode_began_ns),
            finished_ns=self._seen(self.finished_ns),
            preemptions=self.preemptions,
            cached_tokens=self.cached_tokens,
            refused=self.refused,
            model=arrival.model,
            client=arrival.client,
            itl_max_ns=self.gap_ns if self.finished_ns is not None else None,
        )
