"""Requests go where there is time for them (H07)."""

from __future__ import annotations

import pytest

from serai.contracts.session_record import Lifecycle
from serai.contracts.status import SessionStatus
from serai.ingress.choosing import Wish
from serai.ingress.routing import Ask
from serai.ingress.time_left import MARGIN_S, NEAR_S, ends, in_time
from unit.fakes import record_of
from unit.test_choosing import NOW, Fleet

A, B, C = (record_of(session, allocation=session) for session in "abc")


def status(session: str, remaining_s: float | None, sequence: int = 1) -> SessionStatus:
    return SessionStatus(session, sequence, Lifecycle.SERVING, 1, 1.0, allocation_remaining_s=remaining_s)


def test_only_ends_that_are_near_count() -> None:
    said = {"a": status("a", 90.0), "b": status("b", NEAR_S), "c": status("c", None)}
    assert ends([A, B, C], said.get) == {"a": 90.0 - MARGIN_S}
    assert ends([A], {"a": status("a", MARGIN_S / 2)}.get) == {"a": 0.0}
    assert ends([A], {}.get) == {}


@pytest.mark.parametrize(
    ("tokens", "speeds", "fit"),
    [
        (2400, {"a": 20.0, "b": 20.0}, "b"),  # 120 s at 20 tokens/s; a has 70 s.
        (1400, {"a": 20.0, "b": 20.0}, "ab"),
        (2400, {"a": 40.0, "b": 20.0}, "ab"),
        (0, {"a": 20.0}, "ab"),  # It sets no limit.
        (2400, {}, "ab"),  # Nobody has shown a pace.
        (2400, {"b": 20.0}, "b"),  # a is new: at the pace of the others.
    ],
)
def test_h07_a_request_goes_where_it_is_predicted_to_finish(tokens: int, speeds: dict[str, float], fit: str) -> None:
    found = in_time([A, B], {"a": 70.0}, tokens, lambda session: speeds.get(session, 0.0))
    assert "".join(record.session for record in found) == fit


class Ending(Fleet):
    """Sessions of which some end soon, and that give 20 tokens a second."""

    def __init__(self, *remaining_s: float | None) -> None:
        records = [record_of(f"s{number}", allocation=f"a{number}") for number in range(len(remaining_s))]
        super().__init__(*records)
        for record, left_s in zip(records, remaining_s, strict=True):
            self.replica.hear(status(record.session, left_s, 9), NOW)
            self.chooser.speeds.published(record.session, 20.0)


def asking(tokens: int) -> Wish:
    return Wish(Ask("m", output_tokens_max=tokens))


def test_h07_remaining_90_s_predicted_120_s_goes_elsewhere_and_nowhere_without_an_elsewhere() -> None:
    two = Ending(90.0, 3600.0)
    assert two.choose(wish=asking(2400)) == "s1"
    assert not two.chooser.lacks_time(asking(2400), NOW)
    one = Ending(90.0)
    assert one.choose(wish=asking(2400)) is None
    assert one.chooser.lacks_time(asking(2400), NOW)
    assert one.choose(wish=asking(100)) == "s0"
    assert one.choose(wish=asking(0)) == "s0"
    assert not one.chooser.lacks_time(asking(100), NOW)


def test_who_has_no_session_at_all_does_not_lack_time() -> None:
    assert not Ending(90.0).chooser.lacks_time(Wish(Ask("other", output_tokens_max=5)), NOW)


def test_what_is_known_of_ends_is_forgotten_with_the_model() -> None:
    fleet = Ending(90.0)
    fleet.choose(wish=asking(10))
    fleet.chooser.retain((), (), NOW)
    assert fleet.chooser._ends == {}
