"""Predicted times of an engine's steps, corrected by what its steps really take. Pure."""

from __future__ import annotations

from collections.abc import Callable

_GRID_TOKENS = 32
_WORTH_TOKENS = (32, 64, 128, 256, 384, 512, 768, 1024)
_WORTH_COST = 1.1
_SHARE = 0.2
"""Of the newest measurement in the running means."""


class StepTimes:
    """`predict_prefill_s` has the time of one prefill step over so many prompt tokens; it is asked once for every 32
    tokens. Decode and mixed steps are measured."""

    def __init__(self, predict_prefill_s: Callable[[int], float]) -> None:
        self._predict_s = predict_prefill_s
        self._known: dict[int, float] = {}
        self.decode_s = predict_prefill_s(1)
        """Of a step that only decodes; before the first, one over a single token."""
        self.saved_s = 0.0
        """What a step saves that prefills and decodes at once, against two; below 0: it costs more."""
        self.slope_s = (self.prefill_s(2048) - self.prefill_s(1024)) / 1024
        """What one more prompt token costs, in a step of some length."""
        self._measured_decode = False
        self._worth = (0, 0)
        """`worth_tokens` as of so many thousandths of a second of `saved_s`."""

    def forget(self) -> None:
        """What is predicted has changed: it is asked anew."""
        self._known.clear()
        self._worth = (0, 0)

    def worth_tokens(self) -> int:
        """From how many prompt tokens on a step beside decoding costs each of them little more than it ever can: what
        such a step costs beside them is spread over enough."""
        saved_ms = round(self.saved_s * 1000) + 1
        if self._worth[1] != saved_ms:
            costs = {tokens: (self.prefill_s(tokens) - self.saved_s) / tokens for tokens in _WORTH_TOKENS}
            most = _WORTH_COST * max(0.0, min(costs.values()))
            self._worth = (min([tokens for tokens in costs if costs[tokens] <= most], default=1), saved_ms)
        return self._worth[0]

    def prefill_s(self, tokens: int) -> float:
        """One prefill step over `tokens`; more than a step's worth is predicted as one long step."""
        if tokens <= 0:
            return 0.0
        grid = -(-tokens // _GRID_TOKENS)
        found = self._known.get(grid)
        if found is None:
            found = self._known[grid] = self._predict_s(grid * _GRID_TOKENS)
        return found

    @property
    def s_per_token(self) -> float:
        """What a prompt token adds to a step beside decoding, in steps that are long enough."""
        return (self.prefill_s(1024) - self.saved_s) / 1024

    def mixed_s(self, tokens: int) -> float:
        """One step that prefills `tokens` and decodes."""
        return max(self.decode_s, self.prefill_s(tokens) + self.decode_s - self.saved_s)

    def tokens_within(self, seconds: float, most: int) -> int:
        """How many prompt tokens, at most `most`, one prefill step takes in `seconds`; 0 when not even a few."""
        if seconds <= 0.0 or most <= 0:
            return 0
        if self.prefill_s(most) <= seconds:
            return most
        low, high = 0, -(-most // _GRID_TOKENS)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.prefill_s(middle * _GRID_TOKENS) <= seconds else (low, middle)
        return low * _GRID_TOKENS

    def measured(self, duration_s: float, prompt_tokens: int, decoded: bool) -> None:
        """A step took so long."""
        if not decoded:
            return
        if not prompt_tokens:
            if self._measured_decode:
                self.decode_s += _SHARE * (duration_s - self.decode_s)
            else:
                self.decode_s, self._measured_decode = duration_s, True
        elif self._measured_decode:
            saved_s = self.prefill_s(prompt_tokens) + self.decode_s - duration_s
            self.saved_s += _SHARE * (saved_s - self.saved_s)
