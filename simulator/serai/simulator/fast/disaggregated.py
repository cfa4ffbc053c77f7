"""Prefill on some instances, decode on others, the KV cache sent over a link in between (DistServe, Mooncake)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from serai.ingress.routing import LeastLoaded, Policy
from serai.simulator.fast.dispatch import Arrived, Effect, Ended, Event, Prefilled, Send, Transfer
from serai.simulator.fast.routed import Routed


class Disaggregated:
    """Sends each request to a prefill instance, then its KV to a decode instance that may get it from there.

    Both choices are made by an ingress's routing policy, least-loaded unless told otherwise. `peers` names, for each
    prefill instance, the decode instances it can reach: those of its node for DistServe, all for Mooncake. With `pairs`
    each pair is one server to whoever sends requests, as DistServe's is: it has a request until all has been said.
    """

    watches_steps = False

    def __init__(
        self,
        prefill: Sequence[int],
        peers: Mapping[int, Sequence[int]],
        policy: Callable[[], Policy] = LeastLoaded,
        *,
        pairs: bool = False,
    ) -> None:
        self._prefill = Routed(policy, prefill)
        groups = sorted({tuple(peers[instance]) for instance in prefill})
        if not groups or not all(groups):
            raise ValueError("every prefill instance needs a decode instance that it can send to")
        decode = {group: Routed(policy, group) for group in groups}
        self._decode_of = {instance: decode[tuple(peers[instance])] for instance in prefill}
        self._decoding: dict[int, Routed] = {}
        self._pairs = pairs
        self._sent_to: dict[int, int] = {}
        """With `pairs`: the prefill instance of who decodes."""

    def handle(self, event: Event, now_ns: int) -> Iterable[Effect]:
        """A `Send` for who arrives, a `Transfer` for who is prefilled."""
        match event:
            case Arrived():
                return self._prefill.handle(event, now_ns)
            case Prefilled(request, instance):
                if self._pairs:
                    self._sent_to[request.number] = instance
                else:
                    # The prefill instance is done with it, as far as load goes.
                    self._prefill.handle(Ended(request, instance, True), now_ns)
                decode = self._decode_of[instance]
                self._decoding[request.number] = decode
                return [
                    Transfer(effect.number, effect.instance)
                    for effect in decode.handle(Arrived(request), now_ns)
                    if isinstance(effect, Send)
                ]
            case Ended(request, _, whole):
                prefill = self._sent_to.pop(request.number, None)
                if prefill is not None:
                    self._prefill.handle(Ended(request, prefill, whole), now_ns)
                decode_or_prefill = self._decoding.pop(request.number, self._prefill)
                return decode_or_prefill.handle(event, now_ns)
        return ()
