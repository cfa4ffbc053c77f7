"""How long this engine's prefills take, by its own first tokens: `base_s` for a step and `s_per_token`. Pure.

Released prompts are one burst from the first that waits until none does. Its first tokens come at a few moments, one a
step (several prompts may share one); so a burst says: so many steps over so many tokens took so long. Two numbers are
fitted to that by least squares which forget: what else the engine does meanwhile changes, and so do they.
"""

from __future__ import annotations

STEP_GAP_S = 0.002
"""First tokens that come closer together than this came of one step."""
_KEPT = 0.93
"""Weight of what was known, at each new burst."""
_TOKENS_ALONE_MAX = 16_384
"""A burst that does not end is taken for one after so many tokens."""


class PrefillRate:
    """One engine's. Told of releases and first tokens, asked for predictions."""

    def __init__(self, s_per_token: float) -> None:
        """`s_per_token`: what is taken for true until the engine has shown."""
        self.base_s = 0.0
        self.s_per_token = s_per_token
        self.known = False
        self._waiting = 0
        self._since_s = 0.0
        self._last_s = float("-inf")
        self._steps = 0
        self._tokens = 0
        # Sums of steps², steps·tokens, tokens², steps·time, tokens·time, each divided by time²: it is relative errors
        # that count, or the longest bursts alone would decide.
        self._nn = self._nt = self._tt = self._nd = self._td = 0.0

    def predict_s(self, tokens: int) -> float:
        """Of one prefill step over so many prompt tokens."""
        return self.base_s + self.s_per_token * tokens

    def released(self, now_s: float) -> None:
        """A prompt was given to the engine."""
        if not self._waiting:
            self._since_s = now_s
            self._steps = self._tokens = 0
        self._waiting += 1

    def first_token(self, tokens: int, now_s: float) -> None:
        """The prompt of one that was released is computed; so many tokens it had."""
        self._waiting = max(0, self._waiting - 1)
        self._tokens += tokens
        if now_s - self._last_s > STEP_GAP_S or not self._steps:
            self._steps += 1
        self._last_s = now_s
        if not self._waiting or self._tokens >= _TOKENS_ALONE_MAX:
            self._learn(self._steps, self._tokens, now_s - self._since_s)
            self._since_s = now_s
            self._steps = self._tokens = 0

    def gone(self) -> None:
        """One that was released ended without a first token: its burst says nothing."""
        self._waiting = max(0, self._waiting - 1)
        if not self._waiting:
            self._steps = self._tokens = 0

    def measured(self, tokens: int, took_s: float) -> None:
        """The engine's own word on one step over prompts alone."""
        self._learn(1, tokens, took_s)

    def _learn(self, in_steps: int, of_tokens: int, took_s: float) -> None:
        if took_s <= 0 or of_tokens <= 0:
            return
        steps, tokens = in_steps / took_s, of_tokens / took_s
        self._nn = _KEPT * self._nn + steps * steps
        self._nt = _KEPT * self._nt + steps * tokens
        self._tt = _KEPT * self._tt + tokens * tokens
        self._nd = _KEPT * self._nd + steps
        self._td = _KEPT * self._td + tokens
        self.base_s, self.s_per_token = self._fitted()
        self.known = True

    def _fitted(self) -> tuple[float, float]:
        """Neither is below 0: of a fit that says so, the better of the two that leave one number out."""
        determinant = self._nn * self._tt - self._nt * self._nt
        if determinant > 1e-6 * self._nn * self._tt:
            base_s = (self._nd * self._tt - self._td * self._nt) / determinant
            s_per_token = (self._td * self._nn - self._nd * self._nt) / determinant
            if base_s >= 0 and s_per_token >= 0:
                return base_s, s_per_token
            if s_per_token < 0:
                return self._nd / self._nn, 0.0
        return 0.0, self._td / self._tt
