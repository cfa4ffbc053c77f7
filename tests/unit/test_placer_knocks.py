"""A knock is a small demand, for as long as nobody serves; ingresses knock no more often than they must."""

from __future__ import annotations

from serai.contracts.codec import decode, encode
from serai.contracts.placement import Knock, StartableModels
from serai.contracts.subjects import PLACEMENT_KNOCK, PLACEMENT_STARTABLE
from serai.ingress.cold_models import EPISODE_S, KNOCK_EVERY_S, SOON_S, ColdModels
from serai.placer.knocks import HOLDS_S, Knocks, with_knocks
from serai.placer.observed import Observed
from serai.runtime.bus import Message
from unit.fakes import FakeBus


def test_a_knock_holds_until_the_model_is_served_or_nobody_has_knocked_for_long() -> None:
    knocks = Knocks()
    assert knocks.hear(Knock("m", 3), ["m"], 0.0)
    assert not knocks.hear(Knock("m", 4), ["m"], 2.0), "it is known already"
    assert not knocks.hear(Knock("other"), ["m"], 2.0), "the placement file has it not"
    assert knocks.waiting(2.0) == {"m": 4}
    assert knocks.waiting(2.0 + HOLDS_S) == {}
    assert knocks.hear(Knock("m", -1), ["m"], 500.0)
    assert knocks.waiting(500.0) == {"m": 1}
    knocks.answered(["m", "other"])
    assert knocks.waiting(500.0) == {}


def test_who_knocks_counts_as_asked_for_and_as_used() -> None:
    seen = with_knocks({"busy": Observed(requests_s=5.0, high=6.0, unused_s=1.0)}, {"busy": 6, "cold": 6})
    assert (seen["cold"].requests_s, seen["cold"].high, seen["cold"].unused_s) == (0.1, 0.1, 0.0)
    assert (seen["busy"].requests_s, seen["busy"].high) == (5.0, 6.0)


class Heard:
    """An ingress's view, by a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.bus = FakeBus()
        self.cold = ColdModels(self.bus, lambda: self.now)

    def say(self, site: str, models: dict[str, float], subject: str = "") -> None:
        data = encode(StartableModels(site, 15.0, models))
        self.cold.on_startable(Message(subject or PLACEMENT_STARTABLE.of_site(site), data))

    def knocks(self) -> list[tuple[str, Knock]]:
        return [(one.subject, decode(Knock, one.payload)) for one in self.bus.take()]


def test_only_what_a_placer_said_lately_is_counted_on() -> None:
    here = Heard()
    assert here.cold.load_s("m") is None
    here.say("alps", {"m": 70.0, "n": 40.0})
    here.say("eiger", {"m": 50.0})
    here.say("alps", {"evil": 1.0}, subject=PLACEMENT_STARTABLE.of_site("eiger"))
    assert here.cold.names(0.0) == ("m", "n")
    assert here.cold.load_s("m") == 50.0, "the quicker site"
    here.now = 15.0
    assert here.cold.names(15.0) == ()
    assert here.cold.load_s("m") is None


def test_all_sites_that_start_it_hear_a_knock_and_not_too_often() -> None:
    here = Heard()
    here.say("alps", {"m": 70.0})
    here.say("eiger", {"m": 50.0, "n": 9.0})
    here.cold.knock("m", 2, 1.0)
    here.cold.knock("m", 3, 1.0 + KNOCK_EVERY_S / 2)
    here.cold.knock("unheard", 1, 1.0)
    assert here.knocks() == [
        (PLACEMENT_KNOCK.of_site("alps"), Knock("m", 2)),
        (PLACEMENT_KNOCK.of_site("eiger"), Knock("m", 2)),
    ]
    here.cold.knock("m", 3, 1.0 + KNOCK_EVERY_S)
    assert len(here.knocks()) == 2


def test_what_is_left_of_a_start_is_told_from_the_first_knock_on() -> None:
    here = Heard()
    here.say("alps", {"m": 70.0})
    assert here.cold.starts_in_s("m", 0.0) == 70.0
    here.cold.knock("m", 1, 0.0)
    here.cold.knock("m", 1, 10.0)
    assert here.cold.starts_in_s("m", 20.0) == 50.0
    here.cold.knock("m", 1, 100.0)
    assert here.cold.starts_in_s("m", 100.0) == SOON_S, "later than it should be"
    assert here.cold.starts_in_s("m", 100.0 + EPISODE_S) == 70.0
    here.cold.tidy(1000.0)
    assert here.cold.names(1000.0) == ()
