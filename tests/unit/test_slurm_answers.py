"""What Slurm's commands answer: recorded from 22.05, and from the documentation of others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.launcher.jobs import ExpectedStart, JobId, JobName, JobState, RefusalKind, Refused, Unknown
from serai.launcher.slurm_answers import (
    in_the_way,
    jobs_in,
    moment_s,
    plain_reason,
    refusal,
    reservations_in,
    start_in,
    submitted,
    time_before,
)
from serai.runtime.slurm_time import duration_s, duration_text

HEADING = "SERAI|JOBID|JOBID|USER|SUBMIT_TIME|STATE|PARTITION|TIME_LIMIT|TIME_LEFT|START_TIME|NODELIST|NAME|REASON\n"
ANSWER = (
    HEADING
    + """\
SERAI|10|10|root|1796049786|FAILED|all|UNLIMITED|UNLIMITED|1796049786||sbatch|BadConstraints
SERAI|1_[1-4%2]|1|root|1796049786|PENDING|all|UNLIMITED|UNLIMITED|N/A||arr|ReqNodeNotAvail, Reserved for maintenance
SERAI|1_1|18|root|1796049786|RUNNING|all|1:00:00|59:58|1796049792|node0|arr|None
SERAI|2|2|root|1796049786|PENDING|gpu|1-12:00:00|1-12:00:00|1796060000||a b|c|Priority
SERAI|3+1|4|root|1796049786|RUNNING|all|5:00|0:55|1796049787|node[1-2]|sbatch|None
SERAI|14|14|ann|1796049787|COMPLETING|all|8:00:00|INVALID|1796049787|node0|serai.llama-70b.a1b2|None
"""
)


def test_a_recorded_answer_of_squeue() -> None:
    found = jobs_in(ANSWER, "alps")
    assert not isinstance(found, Unknown)
    failed, array, element, odd, part, ending = found
    assert failed.id == JobId("alps", "10", 1796049786, "root")
    assert (failed.state, failed.reason, failed.time_left_s) == (JobState.FAILED, "BadConstraints", None)
    assert (array.id.job, array.state, array.starts_at_s) == ("1_[1-4%2]", JobState.PENDING, None)
    assert array.reason == "ReqNodeNotAvail, Reserved for maintenance"
    assert (element.id.job, element.allocation) == ("1_1", "slurm-18")
    assert (element.time_limit_s, element.time_left_s, element.reason) == (3600, 3598, "")
    assert (odd.name, odd.reason, odd.time_limit_s, odd.starts_at_s) == ("a b|c", "Priority", 129_600, 1796060000)
    assert (part.id.job, part.allocation, part.nodes, part.time_left_s) == ("3+1", "slurm-3", "node[1-2]", 55)
    assert (ending.state, ending.state.over, ending.time_left_s) == (JobState.COMPLETING, False, None)
    assert ending.ours == JobName("llama-70b", "a1b2")


def test_banners_are_told_apart_from_the_answer() -> None:
    banner = "*** Maintenance on Monday ***\n1234\nCLUSTER: alps\n"
    assert jobs_in(banner + ANSWER + "Have a nice day\n") == jobs_in(ANSWER)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "without its heading: nothing"),
        ("slurm_load_jobs error: Unable to contact slurm controller\n", "Unable to contact slurm controller"),
        ("<html>502</html>\n", "<html>502"),
        (HEADING[:-1], "cut short"),
        (ANSWER[:-20], "cut short"),
        (ANSWER[: ANSWER.index("|PENDING|gpu")] + "\n", "a line that is none"),
        (HEADING + "SERAI|x|1|root|5|RUNNING|p|1|1|1|n|j|r\n", "a line that is none"),
        (ANSWER.removeprefix(HEADING), "without its heading"),
    ],
)
def test_h01_an_answer_that_is_not_whole_is_none(text: str, told: str) -> None:
    found = jobs_in(text)
    assert isinstance(found, Unknown)
    assert told in found.reason
    assert "\n" not in found.reason


def test_a_heading_alone_means_no_jobs() -> None:
    assert jobs_in(HEADING) == ()


@given(st.text(max_size=300))
def test_garbage_is_never_taken_for_jobs(text: str) -> None:
    found = jobs_in(text)
    assert isinstance(found, Unknown) or found == ()
    assert isinstance(jobs_in(HEADING + "SERAI|" + text + "\n"), Unknown | tuple)


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("PREEMPTED", JobState.PREEMPTED),
        ("REQUEUED", JobState.PENDING),
        ("CONFIGURING", JobState.STARTING),
        ("NODE_FAIL", JobState.NODE_FAILED),
        ("A_NEW_WORD", JobState.UNKNOWN),
    ],
)
def test_states(word: str, state: JobState) -> None:
    found = jobs_in(HEADING + f"SERAI|7|7|ann|1|{word}|p|1:00|1:00|N/A||x|None\n")
    assert not isinstance(found, Unknown)
    assert (found[0].state, found[0].word) == (state, word)
    assert not JobState.UNKNOWN.over


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1-00:00:00", 86_400),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("NOT_SET", None),
        ("30", 30),
        ("5:00", 300),
        ("Partition_Limit", None),
    ],
)
def test_h12_time_limits_of_squeue(text: str, seconds: int | None) -> None:
    found = jobs_in(HEADING + f"SERAI|7|7|ann|1|RUNNING|p|{text}|{text}|1|n|x|None\n")
    assert not isinstance(found, Unknown)
    assert (found[0].time_limit_s, found[0].time_left_s) == (seconds, seconds)


@given(st.integers(min_value=1, max_value=60 * 24 * 400))
def test_h12_durations_come_back_as_they_were(minutes: int) -> None:
    assert duration_s(duration_text(minutes * 60 + 59)) == minutes * 60


def test_moments() -> None:
    assert moment_s("1796049786") == 1796049786
    assert moment_s("2026-11-30T15:00:00") is not None
    for text in ("N/A", "Unknown", "NONE", "", "soon", "9" * 40):
        assert moment_s(text) is None


def test_h13_the_number_is_found_among_banners_and_with_a_cluster() -> None:
    assert submitted(0, "Welcome to Alps\n\n4711\n", "") == JobId("", "4711")
    assert submitted(0, "4711;clusterA\n", "", "other") == JobId("clusterA", "4711")
    assert isinstance(submitted(0, "", ""), Unknown)
    assert isinstance(submitted(0, "Submitted batch job\n", ""), Unknown)
    assert isinstance(submitted(255, "4711\n", "Connection closed"), Unknown)


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [
        (
            "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates "
            "accounting/QOS policy (job submit limit, user's size and/or time limits)",
            RefusalKind.QUOTA,
            "wait until some",
        ),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
            RefusalKind.INVALID,
            "--account",
        ),
        (
            "sbatch: error: invalid partition specified: nowhere\nsbatch: error: Batch job submission failed: Invalid "
            "partition name specified",
            RefusalKind.INVALID,
            "sinfo",
        ),
        (
            "sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds limit)",
            RefusalKind.INVALID,
            "shorter --time",
        ),
        ("sbatch: error: Invalid --time specification", RefusalKind.INVALID, "shorter --time"),
        ("sbatch: error: Invalid generic resource (gres) specification", RefusalKind.INVALID, "sinfo -o"),
        ("sbatch: error: Batch job submission failed: Invalid feature specification", RefusalKind.INVALID, "sinfo -o"),
        (
            "sbatch: error: Memory specification can not be satisfied\nsbatch: error: Batch job submission failed: "
            "Requested node configuration is not available",
            RefusalKind.INVALID,
            "sinfo -o",
        ),
        ("sbatch: error: Batch job submission failed: Invalid node name specified", RefusalKind.INVALID, "take it out"),
        (
            "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
            RefusalKind.TRANSIENT,
            "try again",
        ),
        (
            "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
            RefusalKind.TRANSIENT,
            "",
        ),
        (
            "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying",
            RefusalKind.TRANSIENT,
            "try again",
        ),
        ("env: ‘sbatch’: No such file or directory", RefusalKind.INVALID, "login node"),
        ("sbatch: error: something new", RefusalKind.INVALID, "--dry-run"),
    ],
)
def test_h13_refusals_say_what_follows(text: str, kind: RefusalKind, told: str) -> None:
    found = submitted(1, "", text)
    assert isinstance(found, Refused)
    assert (found.kind, found == refusal(text)) == (kind, True)
    assert told in found.remedy
    assert not found.text.startswith("sbatch:")


def test_an_expected_start() -> None:
    text = "sbatch: Job 12 to start at 1796060000 using 1 processors on nodes node0 in partition all\n"
    assert start_in(0, text, 1796050000.0) == ExpectedStart(10_000.0, text.strip().removeprefix("sbatch: "))
    far = start_in(0, "sbatch: Job 12 to start at 195069576906 using 1 processors on nodes node0 in partition all", 1e9)
    assert isinstance(far, Unknown)
    refused = start_in(1, "allocation failure: Invalid partition name specified", 1.0)
    assert isinstance(refused, Refused)
    assert isinstance(start_in(0, "", 1.0), Unknown)


RESERVATION = (
    "ReservationName=maint StartTime=1796060587 EndTime=1796074987 Duration=04:00:00 Nodes=node[0-1] NodeCnt=2 "
    "CoreCnt=8 Features=(null) PartitionName=(null) Flags=MAINT,IGNORE_JOBS,SPEC_NODES,ALL_NODES TRES=cpu=8 Users=root "
    "Groups=(null) Accounts=(null) Licenses=(null) State=INACTIVE BurstBuffer=(null) Watts=n/a MaxStartDelay=(null)\n"
)


def test_h10_a_maintenance_is_in_the_way_of_a_longer_job() -> None:
    (maintenance,) = reservations_in("Welcome\n" + RESERVATION + "No more\n")
    assert (maintenance.name, maintenance.maintenance, maintenance.all_nodes) == ("maint", True, True)
    now_s = maintenance.starts_at_s - 6 * 3600.0
    assert in_the_way((maintenance,), now_s, 24 * 3600) == maintenance
    assert in_the_way((maintenance,), now_s, 5 * 3600) is None
    assert in_the_way((maintenance,), maintenance.starts_at_s + 1.0, 24 * 3600) is None
    assert time_before(maintenance, now_s) == 6 * 3600 - 300
    assert in_the_way((maintenance,), now_s, time_before(maintenance, now_s)) is None


def test_other_reservations_are_not_in_the_way() -> None:
    others = reservations_in(RESERVATION.replace("MAINT,", "") + "No reservations in the system\n")
    assert in_the_way(others, others[0].starts_at_s - 60.0, 86_400) is None
    assert reservations_in("No reservations in the system\n") == ()


def test_reasons_in_plain_words() -> None:
    assert plain_reason("Resources") == "it is next, and waits for free nodes"
    assert "maintenance" in plain_reason("ReqNodeNotAvail, Reserved for maintenance")
    assert "never start" in plain_reason("PartitionTimeLimit")
    assert plain_reason("(QOSMaxJobsPerUserLimit)") == "a limit of the QOS is reached"
    assert plain_reason("SomethingNew") == "SomethingNew"


def test_h03_a_requeued_job_keeps_its_identity_and_a_recycled_number_does_not() -> None:
    first = JobId("", "7", 100, "ann")
    assert first.may_be(JobId("alps", "7", 100, "ann"))
    assert first.may_be(JobId("", "7", 900, "ann"))
    assert not JobId("", "7", 900, "ann").may_be(first)
    assert not first.may_be(JobId("", "7", 900, "bob"))
    assert not JobId("a", "7").may_be(JobId("b", "7"))


@given(st.text(min_size=1, max_size=80))
def test_names_of_jobs_are_read_back(model: str) -> None:
    name = JobName.for_model(model, "a1b2c3")
    assert JobName.of(str(name)) == name
    assert JobName.of("sbatch") is None
