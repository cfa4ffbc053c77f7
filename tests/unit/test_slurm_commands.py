"""Slurm's commands against stand-ins that hang, fail, say nothing, or say something else."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from serai.launcher.jobs import Cancelled, ExpectedStart, JobId, Jobs, RefusalKind, Refused, Unknown
from serai.launcher.site import CommandSettings
from serai.launcher.slurm_commands import Circuit, SlurmCommands, command_line

HEADING = "SERAI|JOBID|JOBID|USER|SUBMIT_TIME|STATE|PARTITION|TIME_LIMIT|TIME_LEFT|START_TIME|NODELIST|NAME|REASON"
RUNNING = "SERAI|7|7|ann|100|RUNNING|p|1:00:00|59:00|200|n1|serai.m.abcd|None"


class Bench:
    """A PATH of stand-ins, and a clock that is moved by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_s = 1000.0

    def put(self, name: str, script: str) -> None:
        file = self.folder / name
        file.write_text(f"#!/bin/bash\necho \"$@\" >> '{self.folder}/{name}.asked'\n{script}\n")
        file.chmod(0o755)

    def asked(self, name: str) -> list[str]:
        file = self.folder / f"{name}.asked"
        return file.read_text().splitlines() if file.exists() else []

    def slurm(self, **changed: float) -> SlurmCommands:
        settings = CommandSettings(**({"timeout_s": 20.0} | changed))  # type: ignore[arg-type]
        return SlurmCommands(settings, lambda: self.now_s)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Bench(tmp_path)


def reason(answer: object) -> str:
    assert isinstance(answer, Unknown), answer
    return answer.reason


def test_h01_an_empty_or_failed_squeue_is_unknown_and_the_next_answer_counts_on(bench: Bench) -> None:
    async def follow() -> None:
        slurm = bench.slurm()
        bench.put("squeue", f"echo banner; echo '{HEADING}'; echo '{RUNNING}'")
        first = await slurm.jobs()
        assert isinstance(first, Jobs)
        assert [job.id for job in first.jobs] == [JobId("", "7", 100, "ann")]
        for script, told in (
            ("exit 0", "without its heading"),
            ("echo 'Unable to contact slurm controller' >&2; exit 1", "Unable to contact slurm controller"),
            (f"echo '{HEADING}'; printf 'SERAI|7|7|an'", "cut short"),
        ):
            bench.put("squeue", script)
            bench.now_s += 3600
            assert told in reason(await slurm.jobs())
            # An answer in between, or the next would not be asked for.
            bench.put("squeue", f"echo '{HEADING}'; echo '{RUNNING}'")
            bench.now_s += 3600
            again = await slurm.jobs()
            assert isinstance(again, Jobs)
            assert again.jobs == first.jobs
        assert again.number == 4

    asyncio.run(follow())


def test_h15_a_squeue_that_hangs_is_killed_with_its_children_and_left_in_peace(bench: Bench) -> None:
    bench.put("squeue", f"trap '' TERM; sleep 600 & echo $! > '{bench.folder}/child'; wait; sleep 600")

    async def follow() -> None:
        slurm = bench.slurm(timeout_s=0.5, query_every_s=1)
        began_s = time.monotonic()
        for _ in range(3):
            bench.now_s += 2
            assert "has not ended after 0.5 s" in reason(await slurm.jobs())
        assert time.monotonic() - began_s < 15
        bench.now_s += 2
        assert "not asked for 58 s more" in reason(await slurm.jobs())
        assert len(bench.asked("squeue")) == 3
        # Nor by another command; after the pause one is let through.
        assert "not asked" in reason(await slurm.cancel(JobId("", "7")))
        bench.put("squeue", f"echo '{HEADING}'")
        bench.now_s += 60
        assert isinstance(await slurm.jobs(), Jobs)

    asyncio.run(follow())
    child = int((bench.folder / "child").read_text())
    wait_until(lambda: not alive(child))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(there: Callable[[], bool]) -> None:
    give_up_at_s = time.monotonic() + 10
    while not there():
        assert time.monotonic() < give_up_at_s
        time.sleep(0.01)


def test_h15_the_queue_is_asked_seldom_whoever_asks(bench: Bench) -> None:
    bench.put("squeue", f"echo '{HEADING}'")

    async def follow() -> None:
        slurm = bench.slurm(query_every_s=30)
        answers = await asyncio.gather(*[slurm.jobs() for _ in range(5)])
        assert [answer.number for answer in answers if isinstance(answer, Jobs)] == [1] * 5
        bench.now_s += 29
        same = await slurm.jobs()
        assert isinstance(same, Jobs)
        assert (same.number, same.age_s) == (1, 29)
        bench.now_s += 1
        fresh = await slurm.jobs()
        assert isinstance(fresh, Jobs)
        assert (fresh.number, fresh.age_s) == (2, 0)

    asyncio.run(follow())
    assert len(bench.asked("squeue")) == 2


def test_pauses_become_longer_and_end_with_an_answer() -> None:
    circuit = Circuit(CommandSettings(failures_max=2, pause_s=60, pause_max_s=200))
    circuit.failed("x", 0)
    assert circuit.refuses(0) == ""
    for failed_at_s, pause_s in ((0, 60), (60, 120), (180, 200), (380, 200)):
        circuit.failed("it hangs", failed_at_s)
        assert "it hangs" in circuit.refuses(failed_at_s + pause_s - 1)
        assert circuit.refuses(failed_at_s + pause_s) == ""
    circuit.answered()
    circuit.failed("x", 600)
    assert circuit.refuses(600) == ""


def test_h13_of_three_submissions_the_second_fails_and_the_others_are_told(bench: Bench) -> None:
    bench.put(
        "sbatch",
        f"""cat > '{bench.folder}/script'
n=$(wc -l < '{bench.folder}/sbatch.asked')
echo "Welcome to Alps"
if [ $n = 2 ]; then echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1; fi
echo "$n;clusterA"
""",
    )

    async def follow() -> None:
        slurm = bench.slurm()
        first, second, third = [await slurm.submit("#!/bin/bash\ntrue\n", ["--time=5"]) for _ in range(3)]
        assert (first, third) == (JobId("clusterA", "1"), JobId("clusterA", "3"))
        assert isinstance(second, Refused)
        assert second.kind is RefusalKind.QUOTA

    asyncio.run(follow())
    assert (bench.folder / "script").read_text() == "#!/bin/bash\ntrue\n"
    assert bench.asked("sbatch")[0] == "--parsable --time=5"


def test_h13_a_submission_that_hangs_may_have_been_done(bench: Bench) -> None:
    bench.put("sbatch", "sleep 600")
    assert "has not ended" in reason(asyncio.run(bench.slurm(timeout_s=0.3).submit("#!/bin/bash\n")))


def test_h11_a_cancellation_is_plain_and_ends_in_time(bench: Bench) -> None:
    bench.put("scancel", 'case "$*" in *signal*) sleep 600;; esac')

    async def follow() -> None:
        slurm = bench.slurm(timeout_s=5)
        assert await slurm.cancel(JobId("", "12_3")) == Cancelled()
        assert await slurm.cancel(JobId("alps", "12")) == Cancelled()
        bench.put("scancel", "echo 'scancel: error: Kill job error on job id 5: Invalid job id specified' >&2; exit 1")
        assert await slurm.cancel(JobId("", "5")) == Cancelled()
        bench.put("scancel", "echo 'scancel: error: Kill job error: Access/permission denied' >&2; exit 1")
        assert isinstance(await slurm.cancel(JobId("", "5")), Refused)

    asyncio.run(follow())
    assert bench.asked("scancel")[:2] == ["12_3", "--clusters alps 12"]


def test_h10_the_expected_start_and_reservations(bench: Bench) -> None:
    soon = int(time.time()) + 3600
    bench.put("sbatch", f"echo 'sbatch: Job 9 to start at {soon} using 1 processors on nodes n1 in partition p' >&2")
    bench.put("scontrol", "echo 'ReservationName=m StartTime=100 EndTime=200 Flags=MAINT Nodes=n1'")

    async def follow() -> None:
        slurm = bench.slurm()
        start = await slurm.expected_start("#!/bin/bash\n")
        assert isinstance(start, ExpectedStart)
        assert start.wait_s == pytest.approx(3600, abs=30)
        found = await slurm.reservations()
        assert not isinstance(found, Unknown)
        assert [(one.name, one.maintenance, one.all_nodes) for one in found] == [("m", True, False)]

    asyncio.run(follow())
    assert bench.asked("sbatch") == ["--test-only"]


def test_without_slurm_it_says_where_to_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "env").symlink_to("/usr/bin/env")
    monkeypatch.setenv("PATH", str(tmp_path))
    slurm = SlurmCommands(CommandSettings())
    assert "squeue" in reason(asyncio.run(slurm.jobs()))
    refused = asyncio.run(slurm.submit("#!/bin/bash\n"))
    assert isinstance(refused, Refused)
    assert "login node" in refused.remedy


def test_over_ssh_words_are_quoted_and_bounded_at_the_other_end() -> None:
    settings = CommandSettings(prefix=("ssh", "-o", "BatchMode=yes", "login1"), timeout_s=20)
    words = command_line(["squeue", "--format=SERAI|%i"], settings)
    assert words[:4] == ["ssh", "-o", "BatchMode=yes", "login1"]
    assert words[4:] == ["timeout --kill-after=5 20 env SLURM_TIME_FORMAT=%s squeue '--format=SERAI|%i'"]
    plain = command_line(["squeue"], CommandSettings(prefix=("sudo", "-u", "serai")))
    assert plain == ["sudo", "-u", "serai", "env", "SLURM_TIME_FORMAT=%s", "squeue"]


def test_the_flags_of_squeue(bench: Bench) -> None:
    bench.put("squeue", f"echo '{HEADING}'")
    slurm = SlurmCommands(CommandSettings(cluster="alps"))
    assert isinstance(asyncio.run(slurm.jobs()), Jobs)
    (asked,) = bench.asked("squeue")
    assert asked.startswith("--clusters alps --me --all --array --states=all --format=SERAI|%i|%A|")


def test_the_names_of_nodes_are_told_apart_from_banners(bench: Bench) -> None:
    bench.put("sinfo", "echo 'Welcome n9'; echo 'SERAI n1'; echo 'SERAI n2'; echo 'SERAI n1'")

    async def follow() -> None:
        slurm = bench.slurm()
        assert await slurm.nodes() == {"n1", "n2"}
        bench.put("sinfo", "exit 1")
        assert "sinfo" in reason(await slurm.nodes())

    asyncio.run(follow())


def test_over_ssh_the_shell_at_the_other_end_reads_what_was_meant(bench: Bench) -> None:
    bench.put("ssh", 'echo "*** login1 ***"; cd /; exec bash -c "${@: -1}"')
    bench.put("squeue", f"echo '{HEADING}'; echo '{RUNNING}'")
    bench.put("sbatch", "cat > /dev/null; echo 12")

    async def follow() -> None:
        slurm = SlurmCommands(CommandSettings(prefix=("ssh", "-o", "BatchMode=yes", "login1")))
        jobs = await slurm.jobs()
        assert isinstance(jobs, Jobs)
        assert len(jobs.jobs) == 1
        option = "--dependency=after:1+5?afterany:1"
        assert await slurm.submit("#!/bin/bash\n", [option]) == JobId("", "12")

    asyncio.run(follow())
    assert bench.asked("squeue")[0].endswith("|%N|%j|%r")
    assert bench.asked("sbatch") == ["--parsable --dependency=after:1+5?afterany:1"]
