"""deploy/slurm/agent.sbatch on a real Slurm: it serves, warns, leaves, comes back under another name, and tells why it
failed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import pytest

from integration.slurm_cluster import SlurmCluster
from integration.slurm_jobs import PACED, Submitter
from integration.system import System, wait_for

pytestmark = pytest.mark.slurm

CHAT = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Tell me of caravans."}]}


def stream(system: System, max_tokens: int, after_three: Callable[[], object]) -> tuple[str, list[str]]:
    """A streamed answer, and something done in another thread once three events are there. The session that answered,
    and the data of all events."""
    data: list[str] = []
    meanwhile = threading.Thread(target=after_three)
    with (
        system.client() as client,
        client.stream("POST", "/v1/chat/completions", json=CHAT | {"max_tokens": max_tokens}) as answer,
    ):
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: "):
                data.append(line[6:])
                if len(data) == 3:
                    meanwhile.start()
    meanwhile.join()
    return answer.headers["x-serai-session"], data


def finish_reasons(data: list[str]) -> list[str]:
    choices = [choice for one in data if one != "[DONE]" for choice in json.loads(one).get("choices", [])]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"]]


def test_h04_a_warned_job_finishes_its_streams_then_leaves(
    cluster: SlurmCluster, small_system: System, submit: Submitter
) -> None:
    """The early signal goes to the batch shell alone, while the agent runs below it."""
    job = submit.and_wait_until_it_serves(*PACED)

    def warn() -> None:
        cluster.command("scancel", "--batch", "--signal=USR1", job)
        wait_for(lambda: "agent.draining" in cluster.output(job), "it drains", timeout_s=1.5)

    session, data = stream(small_system, 150, warn)
    assert session.startswith(f"local-slurm-{job}-0-")
    assert finish_reasons(data) == ["length"]
    assert len(data) > 150
    assert data[-1] == "[DONE]"
    small_system.wait_for_sessions(0, timeout_s=5)
    wait_for(lambda: cluster.job(job).over, "the job ends")
    assert (cluster.job(job).state, cluster.job(job).exit_code) == ("COMPLETED", 0), cluster.output(job)
    assert "agent.left" in cluster.output(job)
    assert list(submit.scratch.iterdir()) == []


def test_a_failing_engine_shows_its_last_lines_and_fails_the_job(cluster: SlurmCluster, submit: Submitter) -> None:
    job = submit("--fault", "refuse-start")
    wait_for(lambda: cluster.job(job).over, "the job ends")
    output = cluster.output(job)
    assert (cluster.job(job).state, cluster.job(job).exit_code) == ("FAILED", 2), output
    assert "the engine ended with exit code 1 before it served" in output
    assert "CUDA out of memory" in output.partition("its last lines:")[2]


def test_h07_slurm_warns_before_the_time_limit(cluster: SlurmCluster, small_system: System, submit: Submitter) -> None:
    """`--signal` in the template reaches the agent minutes before the limit; the job then ends by itself, in order."""
    job = submit.and_wait_until_it_serves(*PACED, sbatch_flags=("--time=00:10:00",))
    cluster.command("scontrol", "update", f"jobid={job}", "TimeLimit=3")
    # The limit is three minutes and the warning due 180 s before it: now. Slurm looks every 30 s.
    wait_for(lambda: cluster.job(job).over, "the job ends by itself", timeout_s=45)
    output = cluster.output(job)
    assert (cluster.job(job).state, cluster.job(job).exit_code) == ("COMPLETED", 0), output
    assert "got USR1" in output
    assert "agent.left" in output
    assert "CANCELLED" not in output
