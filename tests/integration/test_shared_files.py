"""Nothing is agreed upon through files: on a cluster they lie where answers come late, are wrong, or never come."""

from __future__ import annotations

import subprocess
import sys

from integration.system import Process, System, wait_for
from integration.test_continuation import listen


def without_files(system: System, role: str, *flags: str) -> Process:
    """A service every write of which to a file fails."""
    nats = ["--nats-url", f"nats://127.0.0.1:{system.nats_port}", "--nats-nkey-file", str(system.nats.key_file(role))]
    command = ["prlimit", "--fsize=0", "--", sys.executable, "-m", "serai.cli.main", role, *nats, *flags]
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process = Process(role, popen, system.folder / "none")
    system.processes.append(process)
    return process


def test_h33_registry_and_agents_need_no_file_that_they_can_write(system: System) -> None:
    without_files(system, "registry")
    system.start_ingress()
    engine = [sys.executable, "-m", "serai.engine_emulator", "--model", "m"]
    agent = without_files(system, "agent", "--model", "m", "--", *engine)
    system.wait_for_sessions(1, timeout_s=60)
    assert listen(system, "/v1/chat/completions", {"max_tokens": 5}).finish_reasons == ["length"]
    assert agent.terminate() == 0
    system.wait_for_sessions(0)
    with system.client() as client:
        wait_for(lambda: client.get("/v1/models").json()["data"] == [], "the registry has heard that it left")
    for process in system.processes:
        if process.popen.stdout is not None:
            process.popen.kill()
            process.popen.stdout.close()
