"""The three policies beside the paper: Algorithm 1 check by check, what the released code does instead, and ours."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from serai.contracts.admission import AdmissionAsk, GateMode, InstanceReport, Lease, Spread
from serai.macro_scheduler.admission import AuthorCode, Paper, Request, Scan, Serai, Verdict
from serai.macro_scheduler.instance_view import InstanceView, StepPredictor
from serai.macro_scheduler.macro_instance import MacroInstance

PREDICT = StepPredictor(lambda tokens: tokens / 1000, lambda sequences, context: 0.05)
"""A thousand prompt tokens a second."""


def slack(count: int, mean_s: float, **others: float) -> Spread:
    return Spread(
        count, mean_s, others.get("least_s", mean_s), others.get("low_s", mean_s), others.get("most_s", mean_s)
    )


def view(session: str = "a", **fields: Any) -> InstanceView:
    found = InstanceView(session, 10_000, PREDICT)
    found.owned(1)
    report = InstanceReport(session, 1, 1, 0, GateMode.PADG, False, 0.0, Spread(0), 0, 0.0, 1e9, 10_000, 10_000)
    assert found.take_report(msgspec.structs.replace(report, **fields), 0.0) == ""
    return found


def request(tokens: int = 500, arrived_s: float = 0.0, **fields: Any) -> Request:
    return Request(AdmissionAsk("r", tokens, **fields), arrived_s, 5.0, 0.1)


def window(found: InstanceView, prefill_s: float) -> InstanceView:
    found.window, found.window_prefill_s = 1, prefill_s
    return found


# Algorithm 1


def test_ttft_check_counts_all_since_the_phase_switch() -> None:
    assert Paper().judge(window(view(), 4.4), request(500), True, 0.0).fits
    assert Paper().judge(window(view(), 4.6), request(500), True, 0.0).failed == "ttft"


def test_an_instance_that_is_not_active_would_begin_a_window_with_this_request() -> None:
    assert Paper().judge(window(view(), 4.6), request(500), False, 0.0).fits


def test_tpot_check_asks_for_the_mean_of_what_exists() -> None:
    decoding = slack(2, 0.6, least_s=-0.2, low_s=-0.2, most_s=1.4)
    assert Paper().judge(view(decoding=decoding), request(500), False, 0.0).fits
    assert Paper().judge(view(decoding=decoding), request(700), False, 0.0).failed == "tpot"


def test_slack_has_gone_down_since_the_report() -> None:
    found = view(decoding=slack(1, 0.6))
    assert Paper().judge(found, request(500), False, 0.09).fits
    assert Paper().judge(found, request(500), False, 0.11).failed == "tpot"


def test_who_began_in_the_window_does_not_exist_for_it() -> None:
    found = window(view(decoding=slack(9, 0.0), older=slack(1, 3.0), window=1), 0.0)
    assert Paper().judge(found, request(500), True, 0.0).fits
    assert Paper().judge(found, request(500), False, 0.0).failed == "tpot"
    found.window = 2  # the instance does not know of it yet: all that it reports was there before
    assert Paper().judge(found, request(500), True, 0.0).failed == "tpot"


def test_nobody_exists_so_nobody_is_hurt() -> None:
    assert Paper().judge(view(), request(4900), False, 0.0).fits


def test_memory_check_looks_at_the_prompt_alone() -> None:
    assert Paper().judge(view(kv_tokens_free=500), request(500), False, 0.0).fits
    assert Paper().judge(view(kv_tokens_free=499), request(500), False, 0.0).failed == "memory"


def test_fixed_windows_go_by_the_clock() -> None:
    policy = Paper(interval_share=0.5)
    found = window(view(decoding=slack(5, -3.0)), 9.0)
    assert policy.judge(found, request(), True, 2.4).fits
    assert policy.judge(found, request(), True, 2.6).failed == "interval"


def views(*spreads: Spread) -> dict[str, InstanceView]:
    return {name: view(name, decoding=spread) for name, spread in zip("abcd", spreads, strict=False)}


def circle(found: dict[str, InstanceView]) -> MacroInstance:
    macro = MacroInstance("m")
    for session in found:
        macro.join(session)
    return macro


def test_the_scan_goes_on_with_the_active_one_and_then_round_the_circle() -> None:
    found = views(slack(1, 0.0), slack(1, 9.0), slack(1, 9.0))
    macro = circle(found)
    chosen, verdicts = macro.choose(request(), found, Paper(), (), 0.0)
    assert chosen is found["b"]
    assert [one.session for one in verdicts] == ["a", "b"]
    macro.activate(found["b"], 0.5, 0.0)
    chosen, verdicts = macro.choose(request(), found, Paper(), (), 0.0)
    assert (chosen, [one.session for one in verdicts]) == (found["b"], ["b"])
    chosen, verdicts = macro.choose(request(4800), found, Paper(), (), 0.0)
    assert (chosen, [one.session for one in verdicts]) == (found["c"], ["b", "c"])


def test_round_the_circle_the_active_one_may_begin_anew() -> None:
    found = views(slack(1, 9.0))
    macro = circle(found)
    macro.activate(found["a"], 4.9, 0.0)
    chosen, verdicts = macro.choose(request(), found, Paper(), (), 0.0)
    assert chosen is found["a"]
    assert [one.fits for one in verdicts] == [False, True]
    macro.activate(found["a"], 0.5, 1.0, anew=True)
    assert (found["a"].window, found["a"].window_prefill_s) == (2, 0.5)


def test_when_nobody_may_take_it_nobody_does() -> None:
    found = views(slack(1, 0.1), slack(1, 0.2))
    assert circle(found).choose(request(), found, Paper(), (), 0.0)[0] is None


def test_the_random_scan_depends_on_the_request_alone() -> None:
    found = views(slack(1, 0.0), slack(1, 9.0), slack(1, 9.0), slack(1, 9.0))
    macro = circle(found)
    order = {}
    for number in range(20):
        one = replace_id(request(), str(number))
        order[number] = macro.choose(one, found, Paper(scan=Scan.RANDOM), (), 0.0)[0]
        assert macro.choose(one, found, Paper(scan=Scan.RANDOM), (), 0.0)[0] is order[number]
    assert {one.session for one in order.values() if one is not None} == {"b", "c", "d"}


def replace_id(one: Request, request_id: str) -> Request:
    return one._replace(ask=msgspec.structs.replace(one.ask, request_id=request_id))


# The released code


def test_author_code_lets_the_most_optimistic_speak_for_all() -> None:
    decoding = slack(2, -1.0, least_s=-3.0, low_s=-3.0, most_s=1.0)
    assert AuthorCode().judge(view(decoding=decoding), request(900), False, 0.0).fits
    assert not AuthorCode().judge(view(decoding=decoding), request(1100), False, 0.0).fits


def test_author_code_takes_slack_as_of_the_switch() -> None:
    found = window(view(decoding=slack(1, 1.0), older=slack(1, 1.0), window=1), 0.0)
    found.switched_at_s = 0.0
    assert AuthorCode().judge(found, request(900), True, 0.8).fits
    assert not AuthorCode().judge(found, request(900), False, 0.8).fits


def test_author_code_never_lets_anybody_wait_here() -> None:
    found = views(slack(1, 0.1), slack(1, 0.1))
    assert circle(found).choose(request(), found, AuthorCode(), (), 0.0)[0] is not None


def test_author_code_stays_while_the_next_one_has_saved_too_little() -> None:
    policy, kept = AuthorCode(), Verdict("a", False, "tpot")
    assert not policy.moves_on(view("b", decoding=slack(1, 2.4)), request(), kept, 2, 0.0)
    assert policy.moves_on(view("b", decoding=slack(1, 2.6)), request(), kept, 2, 0.0)
    assert policy.moves_on(view("b", decoding=slack(1, 0.0)), request(), Verdict("a", False, "ttft"), 2, 0.0)


def test_author_code_counts_prompt_blocks_only() -> None:
    assert AuthorCode().judge(view(kv_tokens_free=512), request(490), False, 0.0).fits
    assert AuthorCode().judge(view(kv_tokens_free=511), request(500), False, 0.0).failed == "memory"


# Ours


def test_time_already_waited_counts() -> None:
    found = view(waiting=1, waiting_prefill_s=3.0)
    assert Serai().judge(found, request(500), False, 0.0).fits
    assert Serai().judge(found, request(500, arrived_s=-4.6), False, 0.0).failed == "ttft"


def test_a_lease_on_its_way_is_spent_already() -> None:
    one, other = view("a", decoding=slack(1, 2.0)), view("b", decoding=slack(1, 2.0))
    before = Serai().judge(one, request(), False, 0.0).cost
    assert before == Serai().judge(other, request(), False, 0.0).cost
    one.lease("x", lease(1, prefill_s=0.5), 0.0)
    assert Serai().judge(one, request(), False, 0.0).cost > before


def test_the_low_quantile_decides_and_not_the_mean() -> None:
    plenty = view("a", decoding=slack(9, 2.0, least_s=1.9, low_s=1.9))
    uneven = view("b", decoding=slack(9, 2.0, least_s=-0.5, low_s=-0.5, most_s=9.0))
    assert Serai().judge(plenty, request(), False, 0.0).cost < Serai().judge(uneven, request(), False, 0.0).cost


def test_room_for_the_answer_counts_and_so_do_leases() -> None:
    found = view(kv_tokens_free=700)
    assert Serai().judge(found, request(500), False, 0.0).fits
    found.lease("x", lease(1, kv_tokens=150), 0.0)
    assert Serai().judge(found, request(500), False, 0.0).failed == "memory"


def test_a_target_that_a_single_stream_misses_is_no_case_for_windows() -> None:
    found = view()
    assert found.choose_mode(0.1) is GateMode.PADG
    assert found.choose_mode(0.04) is GateMode.ORDINARY
    assert found.choose_mode(0.048) is GateMode.ORDINARY  # not before there is some room again
    assert found.choose_mode(0.06) is GateMode.PADG


def lease(sequence: int, prefill_s: float = 0.5, kv_tokens: int = 500) -> Lease:
    return Lease(1, sequence, prefill_s, kv_tokens, 4.0, 5.0, 0.1)


# Reports


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"epoch": 2}, "epoch 2"),
        ({"sequence": 1}, "not above 1"),
        ({"decoding": Spread(2, 1.0, 3.0, 2.0, 1.0)}, "no such spread"),
        ({"decoding": Spread(2, float("nan"), float("nan"), float("nan"), 1.0)}, "no such spread"),
        ({"waiting": -1}, "not possible"),
        ({"waiting_prefill_s": float("inf")}, "not possible"),
        ({"kv_tokens_free": -1}, "kv_tokens_free"),
        ({"step_s": float("nan")}, "step_s"),
    ],
)
def test_a_report_that_cannot_be_is_not_believed(fields: dict[str, Any], word: str) -> None:
    found = view(decoding=slack(1, 2.0))
    report = found.report
    assert report is not None
    new = msgspec.structs.replace(report, **{"sequence": 2, **fields})
    assert word in found.take_report(new, 1.0)
    assert found.report is report


def test_streams_behind_their_target_are_believed() -> None:
    assert view(decoding=slack(1, -2.0)).report is not None


def test_applied_leases_are_the_reports_own() -> None:
    found = view()
    for sequence in (1, 2, 3):
        found.lease(f"r{sequence}", lease(sequence), 0.0)
    report = found.report
    assert report is not None
    found.take_report(msgspec.structs.replace(report, sequence=2, applied=2), 0.1)
    debit_s = 0.5 - found.predict.prefill_s(1)
    assert (list(found.leases), found.leased_kv_tokens) == ([3], 500)
    assert found.leased_prefill_s == pytest.approx(debit_s)
    found.expire(0.2)
    assert (list(found.leases), found.leased_prefill_s, found.leased_kv_tokens) == ([], 0.0, 0)


def test_short_prompts_share_the_cost_of_a_step() -> None:
    step_s, token_s = 0.03, 0.0001
    predict = StepPredictor(lambda tokens: step_s + tokens * token_s, lambda sequences, context: 0.02)
    found = InstanceView("a", 0, predict)
    found.owned(1)
    for sequence in range(1, 11):
        promised = msgspec.structs.replace(lease(sequence), prefill_s=predict.prefill_s(20), prompt_tokens=20)
        found.lease(f"r{sequence}", promised, 0.0)
    in_one_step_s = predict.prefill_s(11 * 20)
    assert found.finish_in_s(predict.prefill_s(20), 0.1, 0.0) == pytest.approx(in_one_step_s, abs=2 * 11 * token_s)


def test_an_instance_that_lets_long_answers_go_has_no_slack_to_wait_for() -> None:
    behind = {"decoding": slack(5, -2.0), "step_s": 0.05}
    assert not Serai().judge(view(**behind), request(500, arrived_s=-2.0), False, 0.0).cost < 2.0
    assert Serai().judge(view(**behind, lets_go=True), request(500, arrived_s=-2.0), False, 0.0).cost < 2.0


def test_of_those_the_one_with_the_fewest_about_to_end_costs_least() -> None:
    many, few = (
        view(name, decoding=slack(5, -2.0), lets_go=True, ending=ending) for name, ending in (("a", 2), ("b", 1))
    )
    assert Serai().judge(many, request(), False, 0.0).cost > Serai().judge(few, request(), False, 0.0).cost
    few.lease("one", Lease(1, 1, 0.0, 0, 5.0, 5.0, 0.1), 0.0)
    few.lease("two", Lease(1, 2, 0.0, 0, 5.0, 5.0, 0.1), 0.0)
    few.lease("three", Lease(1, 3, 0.0, 0, 5.0, 5.0, 0.1), 0.0)
    assert Serai().judge(many, request(), False, 0.0).cost < Serai().judge(few, request(), False, 0.0).cost


def test_parts_of_ours_can_be_switched_off() -> None:
    busy = view(waiting_prefill_s=4.9, waiting=9, decoding=slack(9, 0.1), step_s=0.05)
    assert not Serai().judge(busy, request(100), False, 0.0).fits, "it waits for a better one"
    assert Serai("patience").judge(busy, request(100), False, 0.0).fits
    full = view(kv_tokens_free=520)
    assert Serai().judge(full, request(500), False, 0.0).failed == "memory"
    assert Serai("growth").judge(full, request(500), False, 0.0).fits
    forgetful = InstanceView("a", 10_000, PREDICT, "leases")
    forgetful.lease("r", Lease(1, 1, 2.0, 400, 5.0, 5.0, 0.1), 0.0)
    assert (forgetful.waiting_prefill_s(), forgetful.kv_tokens_left(), forgetful.sequence) == (0.0, 10_000, 1)
    slow = StepPredictor(lambda tokens: tokens / 1000, lambda sequences, context: 0.2)
    assert InstanceView("a", 10_000, slow).choose_mode(0.1) is GateMode.ORDINARY
    assert InstanceView("a", 10_000, slow, "ordinary-mode").choose_mode(0.1) is GateMode.PADG


def test_where_no_slot_is_free_a_request_waits_until_one_has_ended() -> None:
    busy = {"decoding": slack(4, 1.0), "slot_every_s": 0.5}
    free, full = view(**busy, slots_free=1), view(**busy, slots_free=-2)
    assert full.slot_in_s() == pytest.approx(1.5)
    assert free.slot_in_s() == 0.0 == view(**busy).slot_in_s()
    assert Serai().judge(full, request(), False, 0.0).cost == pytest.approx(
        Serai().judge(free, request(), False, 0.0).cost + 1.5
    )
    free.lease("other", Lease(1, 1, 0.1, 100, 5.0, 5.0, 0.1), 0.0)
    assert free.slot_in_s() == pytest.approx(0.5), "the lease on its way takes the slot"
