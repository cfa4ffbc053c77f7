"""What brings pool agents: kubectl by a stand-in, Slurm's launcher by its subject, with real processes and messages."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from serai.contracts.codec import decode, encode
from serai.contracts.launcher import LauncherWord, ScaleRequest
from serai.contracts.subjects import LAUNCHER_SCALE
from serai.placer.launchers.kubernetes import KubernetesLauncher
from serai.placer.launchers.recording import RecordingLauncher
from serai.placer.launchers.slurm import SlurmLauncher
from serai.placer.placement_file import Launchable
from unit.fakes import FakeBus

PODS = Launchable("kubernetes", "deployment/pool", "h100-sxm-80", 1, most=4, namespace="serai")


def kubectl(folder: Path, body: str) -> KubernetesLauncher:
    program = folder / "kubectl"
    program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\n{body}\n')
    program.chmod(0o755)
    return KubernetesLauncher(str(program))


def test_kubectl_is_told_how_many(tmp_path: Path) -> None:
    assert asyncio.run(kubectl(tmp_path, "exit 0").scale(PODS, 3, "m lacks 2")) == ""
    assert (tmp_path / "asked").read_text() == "scale deployment/pool --replicas=3 --namespace=serai\n"


def test_what_kubectl_says_when_it_cannot(tmp_path: Path) -> None:
    refuses = kubectl(tmp_path, "echo 'deployments \"pool\" not found' >&2; exit 1")
    assert asyncio.run(refuses.scale(PODS, 3, "")) == 'deployments "pool" not found'
    assert "cannot be started" in asyncio.run(KubernetesLauncher(str(tmp_path / "none")).scale(PODS, 3, ""))


@pytest.mark.parametrize("name", ["pool", "--all", "deployment/pool --all", "deployment/--all"])
def test_what_is_no_workload_is_not_given_to_kubectl(tmp_path: Path, name: str) -> None:
    told = asyncio.run(kubectl(tmp_path, "exit 0").scale(replace(PODS, name=name), 3, ""))
    assert "is no workload" in told
    assert not (tmp_path / "asked").exists()


def test_slurms_launcher_is_asked_by_message() -> None:
    bus, asked = FakeBus(), []

    def answer(data: bytes) -> bytes:
        asked.append(decode(ScaleRequest, data))
        return encode(LauncherWord("alps", "l", True, problem="may be scaled to 2 at most"))

    launcher = SlurmLauncher(bus, "alps")
    what = Launchable("slurm", "pool-h100", "h100-sxm-80", 4, most=4)
    assert asyncio.run(launcher.scale(what, 3, "why")) == "no launcher runs for site 'alps'"
    bus.answers[LAUNCHER_SCALE.of_site("alps")] = answer
    assert asyncio.run(launcher.scale(what, 3, "why")) == "may be scaled to 2 at most"
    assert asked == [ScaleRequest("pool-h100", 3, "why")]


def test_the_one_for_tests_keeps_what_it_was_asked() -> None:
    launcher = RecordingLauncher()
    asyncio.run(launcher.scale(PODS, 2, "why"))
    assert launcher.asked == [("deployment/pool", 2, "why")]
