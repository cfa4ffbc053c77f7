"""`serai submit` and `serai jobs` on a real Slurm: what they render is taken, what they read is what Slurm writes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from integration.slurm_cluster import SlurmCluster
from integration.system import System, wait_for

pytestmark = pytest.mark.slurm


class Operator:
    """Somebody at the login node with a site file."""

    def __init__(self, cluster: SlurmCluster, system: System) -> None:
        self._cluster, self._folder = cluster, system.folder
        (system.folder / "scratch").mkdir()
        self.site = system.folder / "site.yaml"
        self.site.write_text(
            yaml.safe_dump(
                {
                    "site": "local",
                    "serai": str(Path(sys.executable).parent / "serai"),
                    "scratch": str(system.folder / "scratch"),
                    "output": str(system.folder / "jobs"),
                    "nats": {
                        "url": f"nats://127.0.0.1:{system.nats_port}",
                        "nkey_file": str(system.nats.key_file("agent")),
                        "tools_nkey_file": str(system.nats.key_file("tools")),
                    },
                    "gpus": {"h100": {"gres": "gpu:h100", "per_node": 2}, "a100": {"gres": "gpu:a100", "per_node": 2}},
                    "models": {
                        "m": {
                            "engine": [sys.executable, "-m", "serai.engine_emulator", "--model", "m"],
                            "gpu": "h100",
                            "gpus": 1,
                            "time": "1:00:00",
                        }
                    },
                }
            )
        )

    def serai(self, *words: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "serai.cli.main", words[0], "--site", str(self.site), *words[1:]]
        done = subprocess.run(
            command, env=self._cluster.environment, cwd=self._folder, capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stdout, done.stderr

    def submit(self, *words: str) -> list[str]:
        """The numbers of the jobs."""
        code, out, err = self.serai("submit", "--model", "m", *words)
        assert code == 0, err
        return [line.split()[0] for line in out.splitlines()]

    def jobs(self) -> dict[str, dict[str, Any]]:
        code, out, err = self.serai("jobs", "--json")
        assert code == 0, out + err
        return {job["job"]: job for job in json.loads(out)["jobs"]}


@pytest.fixture
def operator(cluster: SlurmCluster, small_system: System) -> Iterator[Operator]:
    yield Operator(cluster, small_system)
    cluster.command("scancel", "--user", "root", "--full", "--signal=KILL")
    cluster.command("scancel", "--user", "root")
    wait_for(lambda: not cluster.command("squeue", "--noheader"), "no jobs are left")


def test_a_submitted_model_serves_and_is_listed(operator: Operator, small_system: System) -> None:
    (job,) = operator.submit()
    small_system.wait_for_sessions(1)
    listed = operator.jobs()[job]
    assert (listed["state"], listed["model"]) == ("running", "m")
    assert 3000 < listed["time_left_s"] <= 3600
    assert [one["state"] for one in listed["sessions"]] == ["serving"]
    with small_system.client() as client:
        question = {"model": "m", "messages": [{"role": "user", "content": "Tell me of caravans."}], "max_tokens": 4}
        assert client.post("/v1/chat/completions", json=question).status_code == 200


def test_a_chain_waits_for_its_turn_and_goes_on_when_a_job_ends(operator: Operator, cluster: SlurmCluster) -> None:
    first, second = operator.submit("--chain", "2", "--handover", "10")
    wait_for(lambda: operator.jobs()[first]["state"] == "running", "the first runs")
    waiting = operator.jobs()[second]
    assert (waiting["state"], waiting["reason"]) == ("pending", "Dependency")
    assert waiting["why"].startswith("it waits for another job")
    cluster.command("scancel", "--full", "--signal=KILL", first)
    wait_for(lambda: operator.jobs()[second]["state"] == "running", "the second runs")


def test_arrays_are_listed_by_element_with_their_sessions(operator: Operator, small_system: System) -> None:
    (array,) = operator.submit("--count", "2", "--array")
    small_system.wait_for_sessions(2)
    listed = operator.jobs()
    assert set(listed) == {f"{array}_1", f"{array}_2"}
    assert all(len(job["sessions"]) == 1 for job in listed.values())


def test_h10_a_job_starts_before_the_maintenance(operator: Operator, cluster: SlurmCluster) -> None:
    cluster.command(
        *("scontrol", "create", "reservation", "reservationname=maint", "starttime=now+2hours", "duration=60"),
        *("flags=maint,ignore_jobs", "users=root", "nodes=ALL"),
    )
    try:
        code, out, err = operator.serai("submit", "--model", "m", "--time", "8:00:00")
        assert code == 0, err
        assert "maintenance `maint` begins in 1:59:00: 8:00:00 is shortened to 1:5" in err
        job = out.split()[0]
        wait_for(lambda: operator.jobs()[job]["state"] == "running", "it runs, before the maintenance")
    finally:
        cluster.command("scancel", "--user", "root", "--full", "--signal=KILL")
        cluster.command("scontrol", "delete", "reservationname=maint")


def test_refusals_of_slurm_are_explained(operator: Operator) -> None:
    resources = "compare GPUs, CPUs, memory and nodes"
    for words, told in (
        (("--partition", "gone"), "change `partition` in the site file or give --partition"),
        (("--sbatch=--gres=gpu:v100:1",), resources),
        (("--memory", "900G"), resources),
        (("--constraint", "none"), resources),
        (("--sbatch=--bogus",), "look at the script with --dry-run"),
    ):
        code, out, err = operator.serai("submit", "--model", "m", *words)
        assert (code, out) == (1, ""), err
        assert "Slurm refused the job: " in err
        assert told in err
