"""`serai launcher` on a real Slurm: a slot is kept filled from one allocation to the next."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from integration.slurm_cluster import SlurmCluster
from integration.slurm_jobs import PACED, Submitter, crowd, cut, text_of
from integration.system import System, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

TOKENS = 100
SOON = (
    "--lead-margin-s",
    "120",
    "--birth-spacing-s",
    "1",
    "--stop-margin-s",
    "10",
    "--settle-s",
    "1",
    "--lease-s",
    "6",
)


def write_site(system: System, scratch: Path) -> Path:
    """One slot."""
    engine = [sys.executable, "-m", "serai.engine_emulator", "--model", "m", *PACED]
    profile = {"engine": engine, "time": "1:00:00", "drain_s": 5, "environment": {"SERAI_ENGINE_STOP_S": "2"}}
    content = {
        "site": "local",
        "serai": str(Path(sys.executable).parent / "serai"),
        "scratch": str(scratch),
        "output": str(scratch),
        "nats": {"url": f"nats://127.0.0.1:{system.nats_port}", "nkey_file": str(system.nats.key_file("agent"))},
        "slurm": {"query_every_s": 5, "timeout_s": 10},
        "models": {"m": profile},
        "deployments": {"chat": {"model": "m", "queue_wait_s": 1, "load_s": 6, "leaves_s": 25}},
    }
    path = system.folder / "site.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_h08_one_slot_outlives_its_allocation(cluster: SlurmCluster, small_system: System, submit: Submitter) -> None:
    """Clients stream all the time while one job ends and the next has taken over."""
    site = write_site(small_system, submit.scratch)
    launcher = small_system.service("launcher", "--site-file", str(site), *SOON, environment=cluster.environment)
    small_system.wait_for_sessions(1, timeout_s=60)
    (first,) = cluster.command("squeue", "--noheader", "--format=%A").split()
    with crowd(small_system, 5, TOKENS, again=True) as streams:
        # Its time is cut short: a successor is due now, and Slurm's own warning comes within a minute or so.
        cluster.command("scontrol", "update", f"jobid={first}", "TimeLimit=2")
        wait_for(lambda: cluster.job(first).over, "the first job is over", 150)
        begun = streams.begun
        wait_for(lambda: streams.begun >= begun + 5, "new streams begin", 60)
        heard = streams.until_over()
    told = launcher.log + "\n".join(path.read_text() for path in submit.scratch.glob("*.out"))
    launcher.terminate()
    assert cut(heard, text_of(TOKENS)) == [], told
    allocations = {one.session.removeprefix("local-").rsplit("-", 2)[0] for one in heard}
    assert len(allocations) == 2, allocations
    assert cluster.job(first).state == "COMPLETED", told
