"""What Slurm does to jobs while their streams run: time limits, warnings, preemption, requeues, lost nodes, a
controller that dies. To the clients it is one service."""

from __future__ import annotations

import os
import sys

import pytest

from integration.slurm_cluster import GRACE_S, SlurmCluster
from integration.slurm_jobs import CHAT_PATH, PACED, Submitter, crowd, cut, dishonest, text_of
from integration.system import System, wait_for
from integration.test_continuation import Heard, listen, metric
from serai.cli.up import small_model

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

CLIENTS = 20
SLOW_MS = 40
SLOW = ("--ttft-ms", "5", "--tpot-ms", str(SLOW_MS))
LONG = 300
"""Tokens that take 6 s at the pace of `PACED`, 12 s at that of `SLOW`."""


def continued(system: System) -> float:
    with system.client() as client:
        return metric(client, "serai_ingress_continuations_total")


def lost_tokens(system: System) -> float:
    with system.client() as client:
        return metric(client, "serai_ingress_tokens_lost_total")


def allocation_of(heard: Heard) -> str:
    """Where the stream began."""
    return heard.session.removeprefix("local-").rsplit("-", 2)[0]


def tokens_in(duration_s: float) -> int:
    """Of a stream at the pace of `SLOW`."""
    return round(duration_s * 1000 / SLOW_MS)


def test_jobs_get_the_gpus_they_ask_for(cluster: SlurmCluster, submit: Submitter) -> None:
    job = submit.and_wait_until_it_serves(*PACED, sbatch_flags=("--gres=gpu:h100:1",))
    assert cluster.nodes[cluster.job(job).node] == "h100"
    seen = {cluster.environment_of(pid).get("CUDA_VISIBLE_DEVICES", "") for pid in cluster.processes_of(job)}
    assert seen - {""} in ({"0"}, {"1"})


def test_h07_the_time_limit_of_a_job_cuts_none_of_twenty_streams(
    cluster: SlurmCluster, small_system: System, submit: Submitter
) -> None:
    """A limit of one real minute, and streams that take longer, all of which begin at the job that ends."""
    warned_late = ("--time=00:10:00", "--signal=B:USR1@10")
    old = submit.and_wait_until_it_serves(*SLOW, sbatch_flags=warned_late)
    with crowd(small_system, CLIENTS, tokens_in(60)) as streams:
        new = submit.and_wait_until_it_serves(*SLOW, sessions=2)
        cluster.command("scontrol", "update", f"jobid={old}", "TimeLimit=1")
        wait_for(lambda: cluster.job(old).over, "the old job ends", 90)
        heard = streams.until_over()
    output = cluster.output(old)
    assert cut(heard, text_of(tokens_in(60))) == [], output
    assert {allocation_of(one) for one in heard} == {f"slurm-{old}"}
    assert continued(small_system) == CLIENTS
    assert lost_tokens(small_system) == 0
    assert (cluster.job(old).state, cluster.job(old).exit_code) == ("COMPLETED", 0), output
    assert "got USR1" in output
    assert "agent.left" in output
    assert cluster.job(new).state == "RUNNING"


def test_h03_a_requeued_job_is_a_new_session_and_cuts_no_stream(
    cluster: SlurmCluster, small_system: System, submit: Submitter
) -> None:
    old = submit.and_wait_until_it_serves(*PACED)
    with crowd(small_system, CLIENTS, LONG) as streams:
        submit.and_wait_until_it_serves(*PACED, sessions=2)
        cluster.command("scontrol", "requeue", old)
        heard = streams.until_over()
    assert cut(heard, text_of(LONG)) == []
    wait_for(lambda: cluster.job(old).state == "PENDING", "it waits again", 60)
    small_system.wait_for_sessions(1)
    assert "agent.left" in cluster.output(old)
    cluster.start_again(old)
    submit.until_it_serves(old, sessions=2, runs=2)
    assert cluster.job(old).restarts == 1
    assert {allocation_of(one) for one in heard} == {f"slurm-{old}"}
    output = cluster.output(old)
    assert heard[0].session in output, "the requeued run must append to the output of the first"
    assert f"local-slurm-{old}-1-" in output


def test_h05_a_preempted_job_uses_its_grace(cluster: SlurmCluster, small_system: System, submit: Submitter) -> None:
    """A job of a higher partition wants the GPUs of one that serves. Short answers are finished, long ones handed over
    before the grace time is up, and the job comes back when it can."""
    victim = submit.and_wait_until_it_serves(*SLOW, sbatch_flags=("--partition=scavenger", "--gres=gpu:h100:2"))
    node = cluster.job(victim).node
    long = tokens_in(1.5 * GRACE_S)
    with crowd(small_system, CLIENTS, long) as longs:
        submit.and_wait_until_it_serves(*SLOW, sessions=2, sbatch_flags=("--gres=gpu:a100:1",))
        with crowd(small_system, CLIENTS, tokens_in(4)) as shorts:
            higher = cluster.sbatch(f"--nodelist={node}", "--gres=gpu:h100:2", "--wrap", "true")
            assert cut(shorts.until_over(), text_of(tokens_in(4))) == []
        assert continued(small_system) == 0, "those that fit are finished where they are"
        wait_for(lambda: cluster.job(higher).state == "COMPLETED", "the higher job has had its turn", 90)
        heard = longs.until_over()
    assert cut(heard, text_of(long)) == []
    assert continued(small_system) == CLIENTS
    assert "preempted" in cluster.output(victim)
    assert "agent.left" in cluster.output(victim)
    wait_for(lambda: cluster.job(victim).state == "PENDING", "it is requeued", 60)
    cluster.start_again(victim)
    submit.until_it_serves(victim, sessions=2, runs=2)


def test_a_cancelled_job_without_another_ends_its_streams_honestly(
    cluster: SlurmCluster, small_system: System, submit: Submitter
) -> None:
    job = submit.and_wait_until_it_serves(*PACED)
    with crowd(small_system, CLIENTS, 3 * LONG) as streams:
        cluster.command("scancel", job)
        heard = streams.until_over()
    assert dishonest(heard, text_of(3 * LONG)) == []
    assert all(one.error is not None for one in heard), "there was nobody to go on with them"
    small_system.wait_for_sessions(0)
    wait_for(lambda: cluster.job(job).over, "the job ends", 60)
    assert cluster.job(job).state == "CANCELLED"
    with small_system.client() as client:
        wait_for(lambda: client.get("/v1/models").json()["data"] == [], "it is not listed")
    wait_for(lambda: list(submit.scratch.iterdir()) == [], "the scratch folder is removed")
    assert "agent.left" in cluster.output(job)


def test_a_controller_that_dies_and_comes_back_harms_nothing(
    cluster: SlurmCluster, small_system: System, submit: Submitter
) -> None:
    jobs = [submit.and_wait_until_it_serves(*PACED, sessions=1), submit.and_wait_until_it_serves(*PACED, sessions=2)]
    with crowd(small_system, CLIENTS, LONG // 3, again=True) as streams:
        cluster.kill_controller()
        begun = streams.begun
        wait_for(lambda: streams.begun >= begun + CLIENTS, "new streams begin without a controller", 60)
        cluster.start_controller()
        begun = streams.begun
        wait_for(lambda: streams.begun >= begun + CLIENTS, "new streams begin with it", 60)
        heard = streams.until_over()
    assert cut(heard, text_of(LONG // 3)) == []
    assert continued(small_system) == 0
    assert small_system.sessions() == 2
    assert [cluster.job(job).state for job in jobs] == ["RUNNING", "RUNNING"]
    assert [cluster.output(job).count("agent.serving") for job in jobs] == [1, 1]


def test_a_lost_node_cuts_no_stream_and_its_job_comes_back(
    cluster: SlurmCluster, small_system: System, submit: Submitter
) -> None:
    lost = submit.and_wait_until_it_serves(*PACED)
    node = cluster.job(lost).node
    with crowd(small_system, CLIENTS, LONG) as streams:
        submit.and_wait_until_it_serves(*PACED, sessions=2, sbatch_flags=(f"--exclude={node}",))
        cluster.lose_node(node)
        heard = streams.until_over()
    try:
        assert cut(heard, text_of(LONG)) == []
        assert continued(small_system) == CLIENTS
        wait_for(lambda: cluster.job(lost).restarts == 1, "Slurm has seen it and requeues the job", 90)
        cluster.start_again(lost)
        submit.until_it_serves(lost, sessions=2, runs=2)
        assert cluster.job(lost).node != node
    finally:
        cluster.find_node(node)


def test_a_node_that_is_drained_goes_on_serving(cluster: SlurmCluster, small_system: System, submit: Submitter) -> None:
    """Slurm lets jobs on a drained node run; only new ones go elsewhere."""
    job = submit.and_wait_until_it_serves(*PACED)
    node = cluster.job(job).node
    cluster.command("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
    try:
        assert listen(small_system, CHAT_PATH, {"max_tokens": 30}).finish_reasons == ["length"]
        other = submit.and_wait_until_it_serves(*PACED, sessions=2)
        assert cluster.job(other).node != node
    finally:
        cluster.command("scontrol", "update", f"nodename={node}", "state=resume")


def test_h15_commands_of_slurm_that_hang_harm_nothing(
    cluster: SlurmCluster, small_system: System, submit: Submitter
) -> None:
    """Every command of Slurm's that the agent could ask hangs and ignores SIGTERM; the job serves, and drains when it
    is warned."""
    folder = small_system.folder / "hanging"
    folder.mkdir()
    for name in ("squeue", "scontrol", "sacct"):
        (folder / name).write_text("#!/bin/bash\ntrap '' TERM\nwhile :; do sleep 600; done\n")
        (folder / name).chmod(0o755)
    job = submit.and_wait_until_it_serves(*PACED, settings={"PATH": f"{folder}:{os.environ['PATH']}"})
    with crowd(small_system, CLIENTS, 100) as streams:
        cluster.command("scancel", "--batch", "--signal=USR1", job)
        heard = streams.until_over()
    assert cut(heard, text_of(100)) == []
    wait_for(lambda: cluster.job(job).over, "the job ends", 60)
    assert (cluster.job(job).state, cluster.job(job).exit_code) == ("COMPLETED", 0), cluster.output(job)
    wait_for(lambda: not cluster.processes_of(job), "nothing of it is left")


def test_real_tokens_come_out_of_a_job(cluster: SlurmCluster, small_system: System, submit: Submitter) -> None:
    """SmolLM2-135M on llama.cpp, asked for a GPU; warned while it answers, it finishes what it says."""
    engine = [sys.executable, "-m", "serai.worker_agent.engine.llamacpp_server", "--model-file", str(small_model())]
    job = submit.and_wait_until_it_serves(
        "--alias", "m", "--threads", "1", engine=engine, sbatch_flags=("--gres=gpu:a100:1",)
    )

    def warn(_: Heard) -> None:
        cluster.command("scancel", "--batch", "--signal=USR1", job)

    heard = listen(small_system, CHAT_PATH, {"max_tokens": 16}, warn, after=3)
    assert heard.error is None
    assert heard.ends == 1
    assert len(heard.finish_reasons) == 1
    assert len(heard.text.split()) > 2
    wait_for(lambda: cluster.job(job).over, "the job ends", 60)
    assert (cluster.job(job).state, cluster.job(job).exit_code) == ("COMPLETED", 0), cluster.output(job)
