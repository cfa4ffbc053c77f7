"""Steps of an engine that does not tell them, worked out from what its streams say. Pure.

A prompt's first token is the end of a prefill; until then prompts are taken to be worked on as fast as usual.
While streams say tokens the engine decodes: those that run together make their steps together, so the mean number of
tokens that they said since the last look is how many steps there were. How long one takes is measured only while no
prompt is worked on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from serai.worker_agent.phase_gate import Stepped

_STEPS_AT_ONCE_MAX = 1000
"""What a single look may find: more is a clock that jumped."""
_SHARE = 0.2
"""Of the newest measurement in the running mean."""


class UntoldSteps:
    """One engine's. Told of requests as they go through it; gives steps as a `PhaseGate` wants them."""

    def __init__(self, prefill_s_per_token: Callable[[], float]) -> None:
        """`prefill_s_per_token`: as far as is known now."""
        self._s_per_token = prefill_s_per_token
        self.decode_s = 0.0
        """Of a step that only decodes; 0 = none was seen."""
        self._waiting: dict[str, int] = {}
        """Prompt tokens of those that have no first token yet."""
        self._backlog_tokens = 0
        self._ahead_tokens = 0
        """Of those prompts, that are taken to be computed."""
        self._began_s = 0.0
        """When the prefill under way began, as far as can be seen."""
        self._said: dict[str, int] = {}
        """Tokens of streams, as of the last look."""
        self._silent: set[str] = set()
        """Who decodes without showing it: answers in one piece."""
        self._looked_s = 0.0
        self._prefilled = False
        """Since the last look."""
        self._rest = 0.0
        """Of a step, that the last look found too much or too little."""
        self.kv_tokens_free = 0

    @property
    def busy(self) -> bool:
        """Whether there is anything to be worked out."""
        return bool(self._waiting or self._silent or self._prefilled)

    def released(self, key: str, tokens: int, now_s: float) -> None:
        """The engine was given a request."""
        if not self._waiting:
            self._began_s = now_s
            if not self._said and not self._silent:
                self._looked_s = now_s  # What was before is rest.
        self._waiting[key] = tokens
        self._backlog_tokens += tokens

    def first(self, key: str, now_s: float, *, shows: bool) -> Stepped | None:
        """Its first token is there. `shows`: further ones will be seen. None: nothing was known of it."""
        tokens = self._waiting.pop(key, None)
        if tokens is None:
            return None
        self._backlog_tokens -= tokens
        if shows:
            self._said[key] = 1
        else:
            self._silent.add(key)
        took_s, self._began_s = now_s - self._began_s, now_s
        self._prefilled = True
        ahead, self._ahead_tokens = self._ahead_tokens, max(0, self._ahead_tokens - tokens)
        return self._step(took_s, decoded=False, prompt_tokens=max(1, tokens - ahead), first=(key,))

    def ended(self, key: str) -> Stepped | None:
        """However that came about. An empty step when no first token of it was seen, as of an answer in one piece that
        was quick: its prompt is no work any more, which nothing else would tell."""
        tokens = self._waiting.pop(key, None)
        self._said.pop(key, None)
        self._silent.discard(key)
        if tokens is None:
            return None
        self._backlog_tokens -= tokens
        self._ahead_tokens = min(self._ahead_tokens, self._backlog_tokens)
        return self._step(0.0, decoded=False)

    def look(self, said: Mapping[str, int], now_s: float) -> Sequence[Stepped]:
        """The decode steps since the last look, from how many tokens each stream has said; those that are not in it
        have said nothing new. With none, one empty step, so that the gate can decide by the clock."""
        since_s, self._looked_s = now_s - self._looked_s, now_s
        clean = not self._waiting and not self._prefilled
        self._prefilled = False
        steps = self._steps_made(said, since_s)
        self._said.update((key, tokens) for key, tokens in said.items() if key in self._said)
        if steps and clean and 0 < since_s < 10.0:
            each_s = since_s / steps
            self.decode_s += (_SHARE if self.decode_s else 1.0) * (each_s - self.decode_s)
        whole = min(int(steps + self._rest), _STEPS_AT_ONCE_MAX)
        self._rest = max(0.0, min(1.0, steps + self._rest - whole))
        prompt_tokens = self._worked_on(since_s)
        if not whole:
            return (self._step(since_s if prompt_tokens else 0.0, decoded=False, prompt_tokens=prompt_tokens),)
        each_s = since_s / whole if prompt_tokens or not self.decode_s else self.decode_s
        return (self._step(each_s, decoded=True, prompt_tokens=prompt_tokens // whole),) * whole

    def _worked_on(self, since_s: float) -> int:
        """Tokens of the prompts that wait, that are taken to have been computed meanwhile: never the last of each."""
        left = self._backlog_tokens - self._ahead_tokens - len(self._waiting)
        if not self._waiting:
            return 0
        s_per_token = self._s_per_token()
        tokens = min(left, round(since_s / s_per_token)) if s_per_token > 0 else left
        self._ahead_tokens += max(0, tokens)
        return max(1, tokens)

    def _steps_made(self, said: Mapping[str, int], since_s: float) -> float:
        if self._said:
            more = sum(max(0, tokens - self._said[key]) for key, tokens in said.items() if key in self._said)
            return more / len(self._said)
        # Nobody shows: as fast as it was when somebody did, when prompts do not hold them up.
        return since_s / self.decode_s if self._silent and self.decode_s and not self._waiting else 0.0

    def _step(self, duration_s: float, *, decoded: bool, prompt_tokens: int = 0, first: Sequence[str] = ()) -> Stepped:
        return Stepped(
            duration_s,
            decoded,
            prompt_tokens=prompt_tokens,
            backlog_tokens=self._backlog_tokens - self._ahead_tokens,
            first=first,
            kv_tokens_free=self.kv_tokens_free,
        )
