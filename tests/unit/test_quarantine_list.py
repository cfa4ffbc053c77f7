"""Hosts in quarantine: twice dead, broken GPUs, expiry, and what is not the host's fault (H29)."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from serai.contracts.session_record import ENGINE_DIED, Fault, Lifecycle, SessionMetadata, SessionRecord
from serai.runtime.quarantine_list import DEATHS_HELD_S, DEATHS_WITHIN_S, GPU_HELD_S, Quarantine, quarantined

NOW_S = datetime(2026, 11, 30, 12, tzinfo=UTC).timestamp()
HOUR_S = 3600.0


def died(ago_s: float) -> Fault:
    return Fault(ENGINE_DIED, at(ago_s))


def at(ago_s: float) -> str:
    return datetime.fromtimestamp(NOW_S - ago_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def record(host: str, *faults: Fault, model: str = "m", site: str = "alps") -> SessionRecord:
    metadata = SessionMetadata(model, model, "vllm", site=site, host=host, faults=list(faults))
    return SessionRecord(f"{site}-a-0-{host}", Lifecycle.LEFT, 3, metadata)


def hosts(*records: SessionRecord, now_s: float = NOW_S) -> list[str]:
    return [found.host for found in quarantined(records, "alps", now_s)]


def test_h29_a_host_on_which_two_engines_died_is_kept_out_for_hours() -> None:
    records = [record("n1", died(HOUR_S)), record("n1", died(60)), record("n2", died(60))]
    assert quarantined(records, "alps", NOW_S) == [
        Quarantine("n1", "2 engines died here while they served", NOW_S - 60 + DEATHS_HELD_S)
    ]
    assert hosts(*records, now_s=NOW_S - 60 + DEATHS_HELD_S - 1) == ["n1"]
    assert hosts(*records, now_s=NOW_S - 60 + DEATHS_HELD_S) == []


def test_deaths_that_lie_far_apart_are_accidents() -> None:
    assert hosts(record("n1", died(DEATHS_WITHIN_S + 120)), record("n1", died(60))) == []


def test_h29_a_broken_gpu_is_enough_and_is_named() -> None:
    records = [record("n1", Fault("Xid 79: fallen off the bus", at(60), "GPU-1")), record("n2")]
    (found,) = quarantined(records, "alps", NOW_S)
    assert (found.host, found.gpus, found.reason) == ("n1", ("GPU-1",), "GPU-1: Xid 79: fallen off the bus")
    assert found.until == at(60 - GPU_HELD_S)
    assert hosts(*records, now_s=NOW_S + GPU_HELD_S) == []


def test_a_model_that_dies_everywhere_is_not_held_against_hosts() -> None:
    bad = [record(f"n{number}", died(60), died(30), model="bad") for number in range(3)]
    assert hosts(*bad, *[record(f"n{number}") for number in range(20)]) == []
    assert hosts(*bad, record("n9", died(60)), record("n9", died(30)), *[record(f"n{n}") for n in range(20)]) == ["n9"]


def test_when_a_quarter_of_all_hosts_would_be_out_it_is_not_the_hosts() -> None:
    dying = [record(f"n{number}", died(60), died(30), model=f"m{number}") for number in range(4)]
    others = [record(f"o{number}") for number in range(12)]
    assert hosts(*dying, *others) == ["n0", "n1", "n2", "n3"]
    assert hosts(*dying, *others[:11]) == []
    assert hosts(dying[0]) == ["n0"]  # One may always be.


@pytest.mark.parametrize("text", ["", "yesterday", "2026-11-30T11:00:00"])
def test_faults_without_a_time_do_not_count(text: str) -> None:
    assert hosts(record("n1", Fault("ecc", text, "GPU-1"))) == []


def test_other_sites_and_clocks_that_are_ahead() -> None:
    assert hosts(record("n1", Fault("ecc", at(60)), site="lugano")) == []
    (found,) = quarantined([record("n1", Fault("ecc", at(-9999)))], "alps", NOW_S)
    assert found.until_s == NOW_S + GPU_HELD_S
