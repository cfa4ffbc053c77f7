"""The whole chain: a model lacks GPUs, the placer asks the launcher, a job brings a pool agent, the model serves."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import yaml

from integration.system import System, wait_for

STAND_IN = Path(__file__).parent / "stand_in_slurm.py"


def site_file(system: System, folder: Path) -> Path:
    content = {
        "site": "local",
        "serai": str(Path(sys.executable).parent / "serai"),
        "scratch": str(folder),
        "nats": {
            "url": f"nats://127.0.0.1:{system.nats_port}",
            "nkey_file": str(system.nats.key_file("agent")),
        },
        "slurm": {"prefix": [sys.executable, str(STAND_IN), str(folder)], "query_every_s": 5, "timeout_s": 4},
        "models": {
            "pool": {
                "engine": ["pool", "--pool-gpus", "H100:1", "--pool-report-s", "1"],
                "time": "1:00:00",
                "drain_s": 5,
                "environment": {"SERAI_ENGINE_STOP_S": "2"},
            }
        },
        "deployments": {"pool-h100": {"model": "pool", "count": 0, "scale_to": 2, "queue_wait_s": 1, "load_s": 5}},
    }
    path = system.folder / "site.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def placement_file(system: System) -> Path:
    content = {
        "models": {
            "m": {
                "engine": "emulated",
                "min_replicas": 1,
                "instances": [{"gpu": "h100", "requests_s": 2, "load_s": 1}],
            }
        },
        "rules": {"mode": "automatic", "cold_after_s": "never"},
        "launch": [{"slurm": "pool-h100", "gpu": "h100", "gpus": 1, "most": 2}],
    }
    path = system.folder / "placement.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def jobs(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in folder.glob("*.json") if path.stem != "settings"]


def test_a_model_without_gpus_gets_a_job_with_a_pool_agent(small_system: System) -> None:
    folder = small_system.folder / "slurm"
    folder.mkdir()
    (folder / "settings.json").write_text(json.dumps({"limit_s": 600.0}))
    flags = ["--settle-s", "1", "--lease-s", "6"]
    try:
        launcher = small_system.service("launcher", "--site-file", str(site_file(small_system, folder)), *flags)
        wait_for(lambda: "launcher.lease_taken" in launcher.log, "the launcher acts")
        assert jobs(folder) == [], "nobody has asked for a job yet"
        often = ["--plan-every-s", "1", "--solve-s", "0", *flags]
        placer = small_system.service("placer", "--placement-file", str(placement_file(small_system)), *often)
        small_system.wait_for_sessions(1, timeout_s=40)
        (job,) = jobs(folder)
        assert job["state"] == "RUNNING"
        assert '"launchable":"pool-h100","count":1' in placer.log
        assert "launcher.scaled" in launcher.log
    finally:
        for process in small_system.processes:
            if process.name in ("launcher", "placer"):
                process.kill()  # Or they would replace the jobs that are ended here.
        for job in jobs(folder):
            if job["state"] in ("PENDING", "RUNNING") and "runner" in job:
                os.kill(job["runner"], signal.SIGTERM)
        wait_for(lambda: all(job["state"] not in ("PENDING", "RUNNING") for job in jobs(folder)), "all jobs are over")
