"""Fixtures of the integration tests; what they hand out is in `integration.system`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.slurm_cluster import SlurmCluster, why_not
from integration.slurm_jobs import Submitter
from integration.system import System, private_system, wait_for


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    """A private nats-server with an API key made, and nothing else yet."""
    with private_system(tmp_path) as made:
        yield made


@pytest.fixture
def small_system(system: System) -> System:
    """NATS, registry and ingress; agents as the test likes."""
    system.start_registry()
    system.start_ingress()
    return system


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A real Slurm of four nodes."""
    if reason := why_not():
        if os.environ.get("SERAI_REQUIRE_SLURM"):
            pytest.fail(reason)
        pytest.skip(reason)
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def submit(cluster: SlurmCluster, small_system: System) -> Iterator[Submitter]:
    """Submits jobs; none is left after the test."""
    yield Submitter(cluster, small_system)
    cluster.command("scancel", "--user", "root", "--full", "--signal=KILL")
    cluster.command("scancel", "--user", "root")  # Those that wait.
    wait_for(lambda: not cluster.command("squeue", "--noheader"), "no jobs are left", 60)
