"""`serai submit` and `serai jobs` with stand-ins for Slurm's commands."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from serai.cli import main as command_line
from serai.cli import submit
from serai.runtime.quarantine_list import Quarantine

SITE = """\
site: s
nats: {url: "nats://127.0.0.1:4222", nkey_file: /k}
slurm: {timeout_s: 5}
gpus:
  h100: {gres: "gpu:h100", per_node: 4}
partitions:
  gpu: {time_max: 1-00:00:00}
models:
  m: {engine: [vllm, serve, /m], gpus: 2, gpu: h100, time: 8:00:00, partition: gpu}
exclude:
  - {node: n13, reason: "Xid 79"}
"""
HEADING = "SERAI|JOBID|JOBID|USER|SUBMIT_TIME|STATE|PARTITION|TIME_LIMIT|TIME_LEFT|START_TIME|NODELIST|NAME|REASON"


class Login:
    """A login node."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys
        self.site = folder / "site.yaml"
        self.site.write_text(SITE)
        self.put("scontrol", "echo 'No reservations in the system'")
        self.put("sbatch", self.sbatch())

    def put(self, name: str, script: str) -> None:
        file = self.folder / name
        file.write_text(f"#!/bin/bash\n{script}\n")
        file.chmod(0o755)

    def sbatch(self, at_second: str = "") -> str:
        """Numbers its jobs from 1; `at_second` is done instead of the second."""
        return f"""cd '{self.folder}'
echo "$*" >> asked; n=$(wc -l < asked); cat > script.$n
if [ $n = 2 ]; then :; {at_second or ":"}; fi
echo "Welcome"; echo $n"""

    def serai(self, *words: str) -> tuple[int, str, str]:
        try:
            code = command_line.main([words[0], "--site", str(self.site), *words[1:]])
        except SystemExit as refused:
            code = int(str(refused.code))
        told = self._capsys.readouterr()
        return code, told.out, told.err

    def asked(self) -> list[str]:
        file = self.folder / "asked"
        return file.read_text().splitlines() if file.exists() else []

    def script(self, number: int) -> str:
        return (self.folder / f"script.{number}").read_text()


@pytest.fixture
def login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Login:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Login(tmp_path, capsys)


def test_a_job_is_submitted_and_told(login: Login) -> None:
    code, out, err = login.serai("submit", "--model", "m", "--gpus", "4", "--account", "a1")
    assert code == 0
    assert out.startswith("1  serai.m.")
    assert login.asked() == ["--parsable"]
    for line in ("--gres=gpu:h100:4", "--account=a1", "--exclude=n13", "--time=8:00:00", "--partition=gpu"):
        assert f"#SBATCH {line}\n" in login.script(1)
    assert "without node n13: Xid 79" in err


def test_a_dry_run_shows_the_script_and_submits_nothing(login: Login) -> None:
    code, out, _ = login.serai("submit", "--model", "m", "--dry-run")
    assert (code, login.asked()) == (0, [])
    assert out.startswith("#!/bin/bash\n")
    assert "set -- vllm serve /m\n" in out


def test_several_engines_of_a_job_share_its_gpus(login: Login) -> None:
    code, out, _ = login.serai("submit", "--model", "m", "--gpus", "4", "--engines", "2", "--dry-run")
    assert code == 0
    assert "export SERAI_ENGINES=2\n" in out
    assert "#SBATCH --gres=gpu:h100:4\n" in out


def test_a_model_of_no_profile_needs_a_command(login: Login) -> None:
    code, _, err = login.serai("submit", "--model", "other")
    assert (code, err.count("\n")) == (2, 1)
    assert "give the engine's command after `--`" in err
    code, out, _ = login.serai("submit", "--model", "other", "--dry-run", "--", "my-engine", "--flag", "a b")
    assert code == 0
    assert "set -- my-engine --flag 'a b'\n" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--time", "soon"), "--time: is 'soon'"),
        (("--time", "2-0"), "48 h is above what partition `gpu` allows"),
        (("--gpu", "h10"), "did you mean `h100`?"),
        (("--partition", "gone"), "no such partition"),
        (("--count", "0"), "--count: is 0"),
        (("--gpus", "-1"), "--gpus: is -1"),
        (("--engines", "0"), "--engines: is 0"),
        (("--engines", "3"), "--engines: 3 cannot share 2 GPUs evenly"),
        (("--engines", "2", "--gpus", "8"), "--engines: cannot be had on 2 nodes"),
        (("--chain", "2", "--array"), "cannot be had with --chain"),
        (("--chain", "2", "--handover", "9:00:00"), "not below --time"),
    ],
)
def test_mistakes_are_one_line(login: Login, words: tuple[str, ...], told: str) -> None:
    code, out, err = login.serai("submit", "--model", "m", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err
    assert login.asked() == []


def test_a_chain_is_submitted_up_front(login: Login) -> None:
    code, _, _ = login.serai("submit", "--model", "m", "--chain", "3")
    assert code == 0
    assert login.asked() == [
        "--parsable",
        "--parsable --dependency=after:1+450?afterany:1",
        "--parsable --dependency=after:2+450?afterany:2",
    ]


def test_h08_copies_of_a_chain_do_not_end_in_the_same_minute(login: Login) -> None:
    login.serai("submit", "--model", "m", "--count", "2", "--chain", "2")
    limits = [next(line for line in login.script(n).splitlines() if "--time=" in line) for n in range(1, 5)]
    assert [limit.partition("--time=")[2] for limit in limits] == ["8:00:00", "8:00:00", "6:00:00", "8:00:00"]
    assert login.asked()[3] == "--parsable --dependency=after:3+330?afterany:3"


def test_an_array_is_one_submission(login: Login) -> None:
    login.serai("submit", "--model", "m", "--count", "4", "--array")
    assert len(login.asked()) == 1
    assert "#SBATCH --array=1-4\n" in login.script(1)


def test_h13_what_was_submitted_before_a_failure_is_told(login: Login) -> None:
    login.put("sbatch", login.sbatch("echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; exit 1"))
    code, out, err = login.serai("submit", "--model", "m", "--count", "3")
    assert (code, out.count("\n")) == (1, 1)
    assert out.startswith("1  serai.m.")
    assert "QOSMaxSubmitJobPerUserLimit" in err
    assert "wait until some of your jobs have ended" in err
    assert "1 of 3 submitted" in err


def test_h13_a_submission_that_was_done_and_not_answered_is_found_by_its_name(login: Login) -> None:
    login.put("sbatch", login.sbatch("exec >&-") + "\ntrue")
    login.put(
        "squeue",
        f"""name=$(sed -n 's/#SBATCH --job-name=//p' '{login.folder}/script.2')
echo '{HEADING}'; echo "SERAI|77|77|ann|100|PENDING|gpu|8:00:00|8:00:00|N/A||$name|Priority\"""",
    )
    code, out, _ = login.serai("submit", "--model", "m", "--count", "2")
    assert code == 0
    assert out.splitlines()[1].startswith("77  serai.m.")


def test_h13_an_unknown_submission_is_not_repeated(login: Login) -> None:
    login.put("sbatch", login.sbatch("echo '<html>'; exit 0"))
    login.put("squeue", "exit 1")
    code, _, err = login.serai("submit", "--model", "m", "--count", "3")
    assert (code, len(login.asked())) == (1, 2)
    assert "look with `serai jobs` before you submit again" in err


@pytest.mark.parametrize(
    ("flags", "starts_at", "limit", "told"),
    [
        ("MAINT,ALL_NODES", "", "5:55:00", "is shortened to 5:55:00"),
        ("MAINT", "after", "5:55:00", "is shortened to 5:55:00"),
        ("MAINT", "now", "8:00:00", ""),
        ("SPEC_NODES", "", "8:00:00", ""),
    ],
)
def test_h10_a_job_is_made_to_end_before_the_maintenance(
    login: Login, flags: str, starts_at: str, limit: str, told: str
) -> None:
    now = int(time.time())
    begins, ends = now + 6 * 3600 + 30, now + 12 * 3600
    login.put("scontrol", f"echo 'ReservationName=maint StartTime={begins} EndTime={ends} Flags={flags}'")
    start = now if starts_at == "now" else ends
    login.put(
        "sbatch",
        f"case \"$*\" in *test-only*) echo 'Job 9 to start at {start} using' >&2; exit;; esac\n" + login.sbatch(),
    )
    code, _, err = login.serai("submit", "--model", "m")
    assert code == 0
    assert f"#SBATCH --time={limit}\n" in login.script(1)
    assert (told in err) if told else ("maintenance" not in err)


def test_h10_a_maintenance_that_begins_at_once_is_waited_for(login: Login) -> None:
    now = int(time.time())
    login.put("scontrol", f"echo 'ReservationName=r StartTime={now + 600} EndTime={now + 7200} Flags=MAINT,ALL_NODES'")
    _, _, err = login.serai("submit", "--model", "m")
    assert "#SBATCH --time=8:00:00\n" in login.script(1)
    assert "the job starts when it is over" in err


def test_h29_nodes_in_quarantine_are_left_out(login: Login, monkeypatch: pytest.MonkeyPatch) -> None:
    in_quarantine = [
        Quarantine("n7.cluster.example.org", "engines died twice", time.time() + 600),
        Quarantine("not-a-node", "GPU-1: ecc", time.time() + 600),
        Quarantine("n13", "GPU-2: ecc", time.time() + 600),
    ]

    async def look(*_: object) -> list[Quarantine]:
        return in_quarantine

    monkeypatch.setattr(submit, "look", look)
    login.put("sinfo", "echo 'SERAI n7'; echo 'SERAI n13'")
    code, _, err = login.serai("submit", "--model", "m")
    assert code == 0
    assert "#SBATCH --exclude=n13,n7\n" in login.script(1)
    assert "without node n7: engines died twice" in err
    login.put("sinfo", "exit 1")
    login.serai("submit", "--model", "m")
    assert "#SBATCH --exclude=n13\n" in login.script(2)


# -- serai jobs ------------------------------------------------------------------------------------------------------


def queue(*rows: str) -> str:
    return "\n".join(f"echo '{row}'" for row in (HEADING, *rows))


def test_jobs_are_listed_in_plain_words(login: Login) -> None:
    soon = int(time.time()) + 7230
    login.put(
        "squeue",
        queue(
            "SERAI|7|7|ann|100|RUNNING|gpu|8:00:00|7:30:00|200|n1|serai.m.abcd|None",
            f"SERAI|8|8|ann|100|PENDING|gpu|8:00:00|8:00:00|{soon}||serai.m.bcde|Resources",
            "SERAI|9|9|ann|100|COMPLETING|gpu|8:00:00|INVALID|200|n2|serai.m.cdef|None",
            "SERAI|5|5|ann|100|RUNNING|gpu|8:00:00|1:00|200|n3|other|None",
            "SERAI|6|6|ann|100|FAILED|gpu|8:00:00|1:00|200|n3|serai.m.dcba|NonZeroExitCode",
            "SERAI|4|4|ann|100|RUNNING|gpu|8:00:00|1:00|200|n3|serai-agent|None",
        ),
    )
    code, out, err = login.serai("jobs")
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines] == ["JOB", "7", "8", "9", "4"]
    assert lines[1].split()[1:6] == ["m", "running", "7:30:00", "gpu", "n1"]
    assert "it is next, and waits for free nodes; expected in 2:00:00" in lines[2]
    assert lines[3].split()[2:4] == ["completing", "–"]
    assert "tools_nkey_file" in err
    _, out, _ = login.serai("jobs", "--all")
    assert len(out.splitlines()) == 7
    _, out, _ = login.serai("jobs", "--json")
    told = json.loads(out)
    assert [job["slurm_state"] for job in told["jobs"]] == ["RUNNING", "PENDING", "COMPLETING", "RUNNING"]
    assert told["slurm"] == {"answered": True, "problem": ""}
    assert told["jobs"][1]["starts_at_s"] == soon


def test_h15_a_squeue_that_hangs_is_told(login: Login) -> None:
    login.site.write_text(SITE.replace("timeout_s: 5", "timeout_s: 1"))
    login.put("squeue", "trap '' TERM; sleep 600")
    code, out, err = login.serai("jobs")
    assert (code, len(out.splitlines())) == (1, 1)
    assert "has not ended after 1 s; what runs goes on" in err
    assert json.loads(login.serai("jobs", "--json")[1])["slurm"]["answered"] is False


def test_h01_an_empty_answer_is_not_an_empty_queue(login: Login) -> None:
    login.put("squeue", "exit 0")
    code, _, err = login.serai("jobs")
    assert code == 1
    assert "without its heading" in err
    login.put("squeue", queue())
    code, _, err = login.serai("jobs")
    assert code == 0
    assert "no jobs with agents in the queue" in err
