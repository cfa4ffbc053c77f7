"""What the agent needs to know of an engine kind. All of them speak the OpenAI API over HTTP on loopback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from serai.worker_agent.engine.traits import Traits


class NotServing(Exception):
    """The engine does not serve yet; the text says what is missing."""


class StrangerListens(Exception):
    """Another process answers where the engine should. Nothing was sent to it, and nothing may be."""


class EngineMisconfigured(Exception):
    """The engine runs but will never serve what was asked for; the text says what to change."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a running engine says of the model it serves."""

    engine_model: str
    """The name the engine answers to."""
    context_tokens_max: int = 0
    """0 = it does not say."""
    details: dict[str, Any] = field(default_factory=dict)
    """Its own entry in /v1/models, for the fingerprint."""
    endpoints: list[str] = field(default_factory=list)
    """Paths it has; empty = not known."""
    traits: Traits = Traits()


class SleepCalls(NamedTuple):
    """How an engine is put to sleep and woken over its HTTP, by POST."""

    sleep: str
    wake: str
    asks: str = ""
    """Where it says whether it sleeps (`is_sleeping`); empty: its answers to the others come when it does."""
    variables: Mapping[str, str] = MappingProxyType({})
    """Of its environment, without which it has none of these."""


class Engine(Protocol):
    """One engine kind; stateless."""

    kind: str
    counters: Sequence[str]
    """Names, in its /metrics, of what moves while it works (`counters.py`)."""
    counter_grain_s: float | None
    """For how long they may stand still while it works, in seconds; None = no limit is known."""
    prefill_s_per_token: float
    """What a prompt token may take at worst, in seconds, until the engine itself has shown."""
    setup_s: float
    """Work before a first token that is neither prefill nor decode, at worst: some engines load their model again."""

    shares_port: bool
    """Whether it binds its port with SO_REUSEADDR or SO_REUSEPORT, so that the port can be held until it does."""
    load_every_s: float | None
    """How often its `/v1/loads` may be asked while a phase gate orders its work; None: `/metrics` is all it has."""
    trait_paths: Sequence[str]
    """Where it tells what it is (GET, JSON)."""

    def recognises(self, command: Sequence[str]) -> bool:
        """Whether `command` starts an engine of this kind."""

    def tells_steps(self, command: Sequence[str]) -> bool:
        """Whether an engine started so dials the agent, obeys phases and tells of its steps (`phase_socket.py`)."""

    def sleep_calls(self, command: Sequence[str]) -> SleepCalls | None:
        """Of an engine started so; None: it cannot sleep."""

    def with_address(self, command: Sequence[str], host: str, port: int) -> list[str]:
        """`command` so that the engine listens on `host:port`. Raises EngineMisconfigured when it cannot be told."""

    def environment(self) -> dict[str, str]:
        """Variables the engine gets beside its parent's."""

    def served(self, models: dict[str, Any], wanted: str) -> ServedModel:
        """From the body of GET /v1/models. Raises NotServing or EngineMisconfigured."""

    def traits_in(self, body: dict[str, Any]) -> Traits:
        """From the body of an answer at one of `trait_paths`."""

    def traits_of(self, command: Sequence[str]) -> Traits:
        """From its command line."""
