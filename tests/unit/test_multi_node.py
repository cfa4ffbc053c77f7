"""Who takes part in an engine of several nodes, and with which command lines."""

from __future__ import annotations

import pytest

from serai.worker_agent.engine.base import EngineMisconfigured
from serai.worker_agent.engine.multi_node import (
    NODES_MAX,
    Address,
    Place,
    hosts_in,
    meeting_port,
    node_list,
    part_of,
    place_in,
)

HOSTS = ("gpu-a01", "gpu-a02")
MASTER = Address("10.1.0.1", 29_500)
VLLM = ["vllm", "serve", "/models/big", "-tp", "8", "-pp", "2"]
SGLANG = ["python", "-m", "sglang.launch_server", "--model-path", "/models/big", "--tp", "16"]


def place(rank: int) -> Place:
    return Place("4711", HOSTS, rank)


def words(kind: str, command: list[str], rank: int) -> str:
    return " ".join(part_of(kind, command, place(rank), MASTER).command)


def test_vllms_own_mode() -> None:
    common = "vllm serve /models/big -tp 8 -pp 2 --nnodes 2 --node-rank"
    assert words("vllm", VLLM, 0) == f"{common} 0 --master-addr 10.1.0.1 --master-port 29500"
    assert words("vllm", VLLM, 1) == f"{common} 1 --master-addr 10.1.0.1 --master-port 29500 --headless"


def test_sglang() -> None:
    assert words("sglang", SGLANG, 1) == (
        "python -m sglang.launch_server --model-path /models/big --tp 16 "
        "--nnodes 2 --node-rank 1 --dist-init-addr 10.1.0.1:29500"
    )
    six = part_of("sglang", SGLANG, place(0), Address("fd00::1", 1234)).command
    assert six[-1] == "[fd00::1]:1234"


@pytest.mark.parametrize("flag", [("--distributed-executor-backend", "ray"), ("--distributed_executor_backend=ray",)])
def test_vllm_by_ray(flag: tuple[str, ...]) -> None:
    command = ["apptainer", "exec", "--nv", "vllm.sif", "/opt/vllm/bin/vllm", *VLLM[1:], *flag]
    head, worker = (part_of("vllm", command, place(rank), MASTER) for rank in (0, 1))
    ray = "apptainer exec --nv vllm.sif /opt/vllm/bin/ray start --block --disable-usage-stats"
    assert " ".join(head.before) == f"{ray} --head --node-ip-address=10.1.0.1 --port=29500 --include-dashboard=false"
    assert list(head.command) == command
    assert head.environment == {"RAY_ADDRESS": "10.1.0.1:29500"}
    assert " ".join(worker.command) == f"{ray} --address=10.1.0.1:29500"
    assert not worker.before
    assert head.waits
    assert worker.waits, "until the head listens"


@pytest.mark.parametrize(
    ("kind", "command", "said"),
    [
        ("vllm", [*VLLM, "--nnodes=2"], "leave --nnodes=2 out"),
        ("sglang", [*SGLANG, "--node_rank", "0"], "leave --node_rank out"),
        ("llamacpp", ["llama-server"], "kind llamacpp runs on one node only"),
        ("vllm", ["python", "-m", "vllm.entrypoints.x", "--distributed-executor-backend", "ray"], "no place for `ray`"),
    ],
)
def test_commands_that_cannot_be_spread_are_refused(kind: str, command: list[str], said: str) -> None:
    with pytest.raises(EngineMisconfigured, match=said):
        part_of(kind, command, place(0), MASTER)


def test_h22_a_list_of_nodes_is_never_a_hosts_name() -> None:
    assert node_list({"SLURM_JOB_NODELIST": "gpu-a[01-04]"}) == "gpu-a[01-04]"
    assert node_list({"SLURM_JOB_NODELIST": "gpu-a[01-04]", "SLURM_STEP_NODELIST": "gpu-a[01-02]"}) == "gpu-a[01-02]"
    assert node_list({}) == ""
    assert hosts_in("gpu-a01\ngpu-a02\n") == HOSTS
    assert hosts_in("a.x\na.x\n\nb.x\n") == ("a.x", "b.x"), "PBS has a line for each slot"
    for text, said in (("", "is empty"), ("gpu-a[01-04]", "no host's name"), ("slurm_load: down!", "no host's name")):
        with pytest.raises(EngineMisconfigured, match=said):
            hosts_in(text)
    with pytest.raises(EngineMisconfigured, match=f"at most {NODES_MAX}"):
        hosts_in("\n".join(f"n{number}" for number in range(NODES_MAX + 1)))


def test_which_node_this_is() -> None:
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_NODEID": "1"}
    assert place_in(HOSTS, slurm, "whatever") == place(1)
    assert place(1).name == "rank 1 (gpu-a02)"
    assert place_in(HOSTS, {"PBS_JOBID": "9.pbs", "PBS_NODENUM": "1"}, "whatever").rank == 1
    assert place_in(("a.site", "b.site"), {"PBS_JOBID": "9.pbs"}, "b").rank == 1
    with pytest.raises(EngineMisconfigured, match="'elsewhere', is not among gpu-a01, gpu-a02"):
        place_in(HOSTS, {"SLURM_NODEID": "7"}, "elsewhere")
    with pytest.raises(EngineMisconfigured, match="two agents on one node"):
        place_in(HOSTS, slurm | {"SLURM_LOCALID": "1"}, "gpu-a02")


def test_all_nodes_know_where_to_meet() -> None:
    assert meeting_port("4711") == meeting_port("4711") != meeting_port("4712")
    assert all(20_000 <= meeting_port(str(job)) < 32_000 for job in range(1000))
