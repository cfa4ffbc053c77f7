"""deploy/slurm/agent.sbatch without a Slurm: run by bash, with a stand-in for `serai` that tells what it was given."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from integration.system import wait_for

TEMPLATE = Path(__file__).parents[2] / "deploy" / "slurm" / "agent.sbatch"
SEED = "SUAAVVAHIFAEZZPLGYCHVT3ZO3IPQE6GNDX2LD6QP3TT5HQKSTGTE5EMOM"
STAND_IN = f"""#!{sys.executable}
import json, os, signal, sys, time
asked = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: (asked.append(1), print("stand-in: got", number, flush=True)))
with open(os.environ["RECORD"] + ".new", "w") as file:
    json.dump({{"argv": sys.argv[1:], "environment": dict(os.environ)}}, file)
os.replace(os.environ["RECORD"] + ".new", os.environ["RECORD"])
while os.environ.get("UNTIL_TERM") and not asked:
    time.sleep(0.01)
time.sleep(float(os.environ.get("DRAINS_FOR_S", "0")))
print("stand-in: left", flush=True)
sys.exit(int(os.environ.get("EXIT_CODE", "0")))
"""


def _hear_sigint() -> None:
    """Who is started in the background by a shell ignores it, and so would all that it starts: bash traps nothing that
    it was told to ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass
class Batch:
    """How the template runs in a job: a session of its own, output to a file."""

    folder: Path
    environment: dict[str, str]
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / "job.out").open("wb") as output:
            shell = subprocess.Popen(
                ["bash", str(TEMPLATE), *words],
                env=self.environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_hear_sigint,
            )
        self.started.append(shell)
        return shell

    def run(self, *words: str) -> int:
        return self.start(*words).wait(20)

    @property
    def output(self) -> str:
        return (self.folder / "job.out").read_text()

    @property
    def scratch(self) -> list[Path]:
        return list((self.folder / "scratch").iterdir())

    def record(self) -> dict[str, Any]:
        """What the stand-in saw."""
        path = Path(self.environment["RECORD"])
        wait_for(path.exists, "the stand-in has started")
        return dict(json.loads(path.read_text()))


@pytest.fixture
def batch(tmp_path: Path) -> Iterator[Batch]:
    stand_in = tmp_path / "serai"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    seed = tmp_path / "agent.nk"
    seed.write_text(SEED)
    seed.chmod(0o600)
    (tmp_path / "scratch").mkdir()
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "RECORD": str(tmp_path / "record.json"),
        "SLURM_JOB_ID": "4711",
        "SERAI_EXECUTABLE": str(stand_in),
        "SERAI_SCRATCH": str(tmp_path / "scratch"),
        "SERAI_MODEL": "m",
        "SERAI_NATS_URL": "nats://127.0.0.1:4222",
        "SERAI_NATS_NKEY_FILE": str(seed),
    }
    made = Batch(tmp_path, environment)
    yield made
    for shell in made.started:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()


def test_the_agent_gets_the_command_and_no_secret_on_its_command_line(batch: Batch) -> None:
    assert batch.run("vllm", "serve", "/models/a b", "--max-model-len", "4096") == 0
    record = batch.record()
    assert record["argv"] == ["agent", "--model", "m", "--", "vllm", "serve", "/models/a b", "--max-model-len", "4096"]
    assert record["environment"]["SERAI_NATS_NKEY_FILE"] == batch.environment["SERAI_NATS_NKEY_FILE"]
    assert record["environment"]["SERAI_NATS_URL"] == "nats://127.0.0.1:4222"
    assert SEED not in batch.output + str(record)


def test_caches_are_the_jobs_own_and_gone_after_it(batch: Batch) -> None:
    assert batch.run("engine") == 0
    environment = batch.record()["environment"]
    for name in ("TMPDIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "CUDA_CACHE_PATH"):
        assert environment[name].startswith(f"{batch.folder}/scratch/serai-4711-"), name
    assert batch.scratch == []


def test_without_a_command_the_template_has_an_example(batch: Batch) -> None:
    assert batch.run() == 0
    assert batch.record()["argv"][3:6] == ["--", "vllm", "serve"]


@pytest.mark.parametrize("exit_code", [0, 1, 2, 127, 143])
def test_the_exit_code_is_passed_through(batch: Batch, exit_code: int) -> None:
    batch.environment["EXIT_CODE"] = str(exit_code)
    assert batch.run("engine") == exit_code


@pytest.mark.parametrize("exit_code", [0, 3])
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_h04_a_signal_to_the_batch_shell_alone_reaches_the_agent_whose_drain_is_waited_for(
    batch: Batch, number: signal.Signals, exit_code: int
) -> None:
    batch.environment |= {"UNTIL_TERM": "1", "DRAINS_FOR_S": "0.3", "EXIT_CODE": str(exit_code)}
    shell = batch.start("engine")
    batch.record()
    shell.send_signal(number)
    assert shell.wait(10) == exit_code, batch.output
    assert "stand-in: left" in batch.output
    assert batch.scratch == []


def test_a_second_signal_while_the_agent_drains_does_not_end_the_wait(batch: Batch) -> None:
    batch.environment |= {"UNTIL_TERM": "1", "DRAINS_FOR_S": "0.5", "EXIT_CODE": "3"}
    shell = batch.start("engine")
    batch.record()
    for number in (signal.SIGUSR1, signal.SIGTERM):
        shell.send_signal(number)
        wait_for(lambda name=number.name[3:]: f"got {name}" in batch.output, "the batch shell tells of the signal")
    assert shell.wait(10) == 3
    assert "stand-in: left" in batch.output


def test_h05_a_preempted_job_is_left_to_slurm_when_its_agent_has_left(batch: Batch) -> None:
    """Had it ended before, it would not be queued again."""
    folder = batch.folder / "slurm"
    folder.mkdir()
    (folder / "scontrol").write_text("#!/bin/sh\necho JobState=RUNNING PreemptTime=2026-11-30T14:47:29")
    (folder / "scontrol").chmod(0o755)
    batch.environment |= {"PATH": f"{folder}:{os.environ['PATH']}", "UNTIL_TERM": "1"}
    shell = batch.start("engine")
    batch.record()
    shell.send_signal(signal.SIGTERM)
    wait_for(lambda: "preempted; Slurm decides" in batch.output, "it waits")
    assert shell.poll() is None
    shell.send_signal(signal.SIGTERM)
    assert shell.wait(10) == 0


def test_the_agent_hears_what_the_jobs_steps_are_told(batch: Batch) -> None:
    """With a grace before preemption Slurm signals steps, and not the batch shell."""
    folder = batch.folder / "slurm"
    folder.mkdir()
    (folder / "srun").write_text(
        '#!/bin/sh\nwhile [ "$1" != bash ]; do shift; done\n"$@" &\necho $! > "$RECORD.step"\nwait'
    )
    (folder / "srun").chmod(0o755)
    batch.environment |= {"PATH": f"{folder}:{os.environ['PATH']}", "UNTIL_TERM": "1", "EXIT_CODE": "3"}
    shell = batch.start("engine")
    batch.record()
    step = Path(batch.environment["RECORD"] + ".step")
    wait_for(lambda: step.exists() and step.read_text().strip(), "the step listens")
    catches_term = 1 << (signal.SIGTERM - 1)
    status = Path(f"/proc/{step.read_text().strip()}/status")
    wait_for(lambda: int(status.read_text().split("SigCgt:")[1].split()[0], 16) & catches_term, "it has set its trap")
    os.kill(int(step.read_text()), signal.SIGTERM)
    assert shell.wait(10) == 3, batch.output
    assert "stand-in: got 15" in batch.output
    assert "agent.sbatch: got" not in batch.output


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("SLURM_JOB_ID", "submit it with: sbatch"),
        ("SERAI_MODEL", "SERAI_MODEL is not set"),
        ("SERAI_NATS_URL", "SERAI_NATS_URL is not set"),
        ("SERAI_NATS_NKEY_FILE", "neither SERAI_NATS_NKEY_FILE nor SERAI_NATS_CREDS_FILE is set"),
    ],
)
def test_a_missing_setting_is_one_clear_line(batch: Batch, missing: str, told: str) -> None:
    del batch.environment[missing]
    assert batch.run("engine") == 2
    assert told in batch.output
    assert batch.output.count("\n") == 1


def test_a_wrong_path_is_one_clear_line(batch: Batch) -> None:
    for name, told in (
        ("SERAI_NATS_NKEY_FILE", "no such file"),
        ("SERAI_EXECUTABLE", "there is no command"),
        ("SERAI_SCRATCH", "cannot make a folder in"),
    ):
        before = dict(batch.environment)
        batch.environment[name] = str(batch.folder / "nowhere" / "at-all")
        assert batch.run("engine") == 2, name
        assert f"agent.sbatch: {'SERAI_NATS_NKEY_FILE: ' if told == 'no such file' else ''}{told}" in batch.output
        batch.environment = before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
@pytest.mark.parametrize("name", ["SERAI_NATS_NKEY_FILE", "SERAI_NATS_CREDS_FILE"])
def test_a_key_that_others_may_read_is_refused(batch: Batch, name: str, mode: int) -> None:
    path = Path(batch.environment.pop("SERAI_NATS_NKEY_FILE"))
    path.chmod(mode)
    batch.environment[name] = str(path)
    assert batch.run("engine") == 2
    assert f"others may read {path} (mode {mode:o}); say: chmod 600 {path}" in batch.output


def test_on_several_nodes_there_is_an_agent_on_each(batch: Batch) -> None:
    srun = batch.folder / "srun"
    srun.write_text(
        '#!/bin/bash\necho "$*" >> "$0.asked"\n[[ $* == *rm\\ -rf* ]] && exit\n'
        'while [[ $1 == --* ]]; do shift; done\nexec "$@"\n'
    )
    srun.chmod(0o755)
    batch.environment |= {"SLURM_JOB_NUM_NODES": "2", "PATH": f"{batch.folder}:{batch.environment['PATH']}"}
    assert batch.run("vllm", "serve", "/m") == 0
    record = batch.record()
    assert record["argv"] == ["agent", "--model", "m", "--", "vllm", "serve", "/m"]
    assert record["environment"]["SERAI_NODES"] == "auto"
    asked = (batch.folder / "srun.asked").read_text()
    assert "--nodes=2 --ntasks-per-node=1 --overlap --cpu-bind=none --kill-on-bad-exit=1 bash -c" in asked
    assert f"rm -rf -- {batch.folder}/scratch/serai-4711-" in asked
    assert batch.scratch == []


def test_a_pool_agent_has_no_engine_and_no_model(batch: Batch) -> None:
    batch.environment |= {"SERAI_NODES": "auto"}
    assert batch.run("pool", "--pool-storage-mb-s", "2000") == 0
    seen = batch.record()
    assert seen["argv"] == ["agent", "--pool", "--pool-storage-mb-s", "2000"]
    assert not {"SERAI_MODEL", "SERAI_NODES"} & set(seen["environment"])
