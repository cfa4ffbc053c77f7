"""What is around an engine: its port and who listens there, its environment, orphans, and GPUs that others hold."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from integration.system import wait_for
from serai.contracts.session_record import GpuDevice
from serai.worker_agent.engine import clearance as clearance_module
from serai.worker_agent.engine import process as process_module
from serai.worker_agent.engine import process_table
from serai.worker_agent.engine.clearance import NodeBusy, NodeClearance, end_left_over
from serai.worker_agent.engine.environment import engine_environment
from serai.worker_agent.engine.gpu_memory import Held, held_in
from serai.worker_agent.engine.interfaces import address_of
from serai.worker_agent.engine.listeners import Listener, listener_on, listening_on, ports_of, whose
from serai.worker_agent.engine.ports import PORT_RANGE, HeldPort, free_port, port_range
from serai.worker_agent.engine.process import EngineProcess
from serai.worker_agent.engine.process_table import MARK, identity_of

GIB = 1 << 30


# -- ports -------------------------------------------------------------------------------------------------------------


def listen(port: int, *options: int, host: str = "127.0.0.1") -> socket.socket:
    bound = socket.socket()
    for option in options:
        bound.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        bound.bind((host, port))
        bound.listen()
    except OSError:
        bound.close()
        raise
    return bound


@pytest.mark.parametrize("option", [socket.SO_REUSEADDR, socket.SO_REUSEPORT])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_h21_a_held_port_is_the_engine_s_and_nobody_else_s(option: int, host: str) -> None:
    held = HeldPort()
    with pytest.raises(OSError, match="in use"):
        listen(held.number)
    # This is how another agent would choose it.
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", held.number))
    with listen(held.number, option, host=host) as engine, socket.create_connection(("127.0.0.1", held.number), 5):
        engine.accept()[0].close()
        held.release()
        with socket.create_connection(("127.0.0.1", held.number), 5):
            engine.accept()[0].close()


def test_ports_may_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert port_range(None) == port_range("") == PORT_RANGE
    assert port_range("24000-24999") == range(24000, 25000)
    monkeypatch.setenv("SERAI_PORTS", "24000-24999")
    handed_out = [free_port() for _ in range(50)]
    assert all(port in range(24000, 25000) for port in handed_out)
    assert len(set(handed_out)) == 50, "none twice before it could be bound"


@pytest.mark.parametrize("told", ["24000", "x-y", "80-90", "24000-23000", "24000-70000", "-5-7", "24000-"])
def test_wrong_ports_are_refused(told: str) -> None:
    with pytest.raises(ValueError, match=f"SERAI_PORTS={told}: write FIRST-LAST"):
        port_range(told)


def test_h21_ports_held_at_once_differ() -> None:
    held = [HeldPort() for _ in range(100)]
    assert len({one.number for one in held}) == 100
    for one in held:
        one.release()


TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:5BA0 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 111 1 0000 100 0 0 10 0
   1: 00000000:5BA0 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 222 1 0000 100 0 0 10 0
   2: 0A00000A:5BA0 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 333 1 0000 100 0 0 10 0
   3: 0100007F:5BA0 0100007F:9000 01 00000000:00000000 00:00000000 00000000  1000        0 444 1 0000 100 0 0 10 0
   4: 0100007F:5BA1 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 555 1 0000 100 0 0 10 0
"""
TABLE_6 = """\
  sl  local_address                         remote_address                        st ... uid timeout inode
   0: 00000000000000000000000000000000:5BA0 00000000000000000000000000000000:0000 0A 0:0 0:0 0 1000 0 666 1 0 100
   1: 00000000000000000000000001000000:5BA0 00000000000000000000000000000000:0000 0A 0:0 0:0 0 1000 0 777 1 0 100
   2: 0000000000000000FFFF00000100007F:5BA0 00000000000000000000000000000000:0000 0A 0:0 0:0 0 1000 0 888 1 0 100
"""


@pytest.mark.skipif(sys.byteorder != "little", reason="the table is of a little-endian host")
def test_who_takes_connections_on_loopback_as_the_kernel_tells_it() -> None:
    assert listening_on(0x5BA0, [TABLE, TABLE_6]) == {111: 1000, 222: 0, 666: 1000, 888: 1000}
    assert listening_on(0x5BA2, [TABLE, TABLE_6]) == {}
    assert ports_of({111, 555, 999}, [TABLE]) == [0x5BA0, 0x5BA1]


@pytest.mark.parametrize(
    ("listening", "ours", "others", "expected"),
    [
        ({}, {1}, {2}, Listener.NOBODY),
        ({1: 1000}, {1}, {2}, Listener.OURS),
        ({2: 1000}, {1}, {2}, Listener.STRANGER),
        ({1: 1000, 2: 1000}, {1}, {2}, Listener.STRANGER),
        ({3: 1000}, {1}, {2}, Listener.UNSEEN),
        ({3: 0}, {1}, {2}, Listener.UNSEEN),
        ({3: 1001}, {1}, {2}, Listener.STRANGER),
        ({1: 1000, 3: 1000}, {1}, {2}, Listener.UNSEEN),
    ],
)
def test_h21_whose_a_listener_is(
    listening: dict[int, int], ours: set[int], others: set[int], expected: Listener
) -> None:
    assert whose(listening, ours, others, 1000) is expected


LISTENER = """
import socket, sys
s = socket.socket()
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
s.bind(("127.0.0.1", int(sys.argv[1])))
s.listen()
print("listens", flush=True)
sys.stdin.read()
"""


@contextmanager
def listening_child(port: int) -> Iterator[int]:
    child = subprocess.Popen([sys.executable, "-c", LISTENER, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == b"listens\n"
            yield child.pid
        finally:
            child.kill()


def test_h21_a_stranger_that_shares_the_port_with_our_engine_is_seen() -> None:
    held = HeldPort()
    port = held.number
    assert listener_on(port, {1}) is Listener.NOBODY
    with listening_child(port) as ours:
        held.release()
        assert listener_on(port, {ours}) is Listener.OURS
        with listening_child(port) as stranger:
            assert listener_on(port, {ours}) is Listener.STRANGER
            assert listener_on(port, {ours, stranger}) is Listener.OURS
        assert listener_on(port, {ours}) is Listener.OURS


# -- environment -------------------------------------------------------------------------------------------------------


def test_an_engine_gets_no_proxies_and_no_secrets_of_ours() -> None:
    ours = {
        "PATH": "/bin",
        "https_proxy": "http://proxy:3128",
        "HTTP_PROXY": "http://proxy:3128",
        "no_proxy": "10.0.0.0/8",
        "SERAI_NATS_NKEY_FILE": "/secret.nk",
        "SERAI_ENGINE_API_KEY": "sk",
        "HF_HOME": "/project/hf",
    }
    made = engine_environment(ours, {"VLLM_NO_USAGE_STATS": "1"}, mark="m")
    assert made["PATH"] == "/bin"
    assert made["VLLM_NO_USAGE_STATS"] == "1"
    assert not [name for name in made if name.lower().endswith("s_proxy") or name.lower() == "http_proxy"]
    assert [name for name in made if name.startswith("SERAI_")] == [MARK]
    assert made["NO_PROXY"] == made["no_proxy"] == "10.0.0.0/8,127.0.0.1,localhost,::1"
    kept = engine_environment(ours, {}, mark="m", keep_proxies=True)
    assert kept["https_proxy"] == "http://proxy:3128"
    assert kept["no_proxy"] == "10.0.0.0/8,127.0.0.1,localhost,::1"


def test_caches_go_to_scratch_and_weights_stay_and_what_is_set_stays() -> None:
    ours = {"HF_HOME": "/project/hf", "TRITON_CACHE_DIR": "/mine"}
    made = engine_environment(ours, {}, mark="m", scratch="/local/7/")
    assert made["VLLM_CACHE_ROOT"] == "/local/7/serai-engine-caches/vllm"
    assert made["HF_HOME"] == "/project/hf"
    assert made["TRITON_CACHE_DIR"] == "/mine"
    assert "HF_HUB_CACHE" not in made


def test_h23_the_interface_is_named_and_never_guessed() -> None:
    made = engine_environment({"GLOO_SOCKET_IFNAME": "eth9"}, {}, mark="m", interface="ib0", address="10.1.2.3")
    assert (made["NCCL_SOCKET_IFNAME"], made["VLLM_HOST_IP"]) == ("ib0", "10.1.2.3")
    assert made["GLOO_SOCKET_IFNAME"] == "eth9"
    assert "VLLM_HOST_IP" not in engine_environment({}, {}, mark="m")
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(OSError, match="No such device"):
        address_of("nosuch0")


# -- orphans -----------------------------------------------------------------------------------------------------------


@contextmanager
def sleeper(mark: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"], env={"PATH": os.environ["PATH"], MARK: mark}) as child:
        try:
            yield child
        finally:
            child.kill()


def test_h40_engines_whose_agent_is_gone_are_ended_and_no_others() -> None:
    own = process_table.new_mark("1")
    here, _, rest = own.partition(f":{os.getpid()}:")
    with subprocess.Popen(["true"]) as gone:
        pass
    dead = f"{here}:{gone.pid}:{rest}"
    elsewhere = f"another-host:4026531836:{gone.pid}:{rest}"
    with sleeper(own) as alive, sleeper(dead) as orphan, sleeper(elsewhere) as far, sleeper("odd") as odd:
        # A process that has its agent's number by now is not its agent.
        with sleeper(f"{here}:{os.getpid()}:1:1") as reused:
            ended = asyncio.run(end_left_over())
            assert {orphan.pid, reused.pid} <= {process.pid for process in ended}
            assert orphan.wait(5) == reused.wait(5) == -signal.SIGTERM
        assert [child.poll() for child in (alive, far, odd)] == [None] * 3
        assert {process.pid for process in process_table.marked(own)} == {alive.pid}


WIPES = """
import ctypes, subprocess, sys
# As setproctitle does: the title takes the place of the arguments, and the environment behind them is emptied.
low, high = (int(open("/proc/self/stat").read().rpartition(")")[2].split()[field]) for field in (47, 48))
ctypes.memset(low, 0, high - low)
print(flush=True)
sys.stdin.read()
"""


def test_h40_a_process_that_wiped_its_environment_belongs_to_the_leader_of_its_session() -> None:
    """vLLM's engine core and workers do."""
    own = process_table.new_mark("1")
    leads = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WIPES!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", leads],
        env={"PATH": os.environ["PATH"], MARK: own},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as leader:
        assert leader.stdout is not None
        leader.stdout.readline()
        found = {process.pid for process in process_table.marked(own)}
        assert leader.pid in found
        assert len(found) == 2
        assert all(os.getsid(pid) == leader.pid for pid in found)
        leader.communicate()


def test_an_orphan_that_ignores_the_request_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clearance_module, "ORPHAN_GRACE_S", 0.2)
    own = process_table.new_mark("1")
    with subprocess.Popen(["true"]) as gone:
        pass
    dead = own.replace(f":{os.getpid()}:", f":{gone.pid}:")
    script = "trap '' TERM; echo ready; while :; do sleep 1; done"
    environment = {"PATH": os.environ["PATH"], MARK: dead}
    with subprocess.Popen(["sh", "-c", script], env=environment, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            asyncio.run(end_left_over())
            assert child.wait(5) == -signal.SIGKILL
        finally:
            child.kill()


def test_a_process_is_known_by_number_and_start() -> None:
    me = identity_of(os.getpid())
    assert me is not None
    assert me.alive
    with subprocess.Popen(["sleep", "600"]) as child:
        other = identity_of(child.pid)
        assert other is not None
        child.kill()
    assert not other.alive


# -- GPUs --------------------------------------------------------------------------------------------------------------

GPUS = [GpuDevice("GPU-a", "H100", 80 * GIB), GpuDevice("GPU-b", "H100", 80 * GIB)]


def test_h31_memory_that_our_own_engines_hold_is_nobody_s_fault() -> None:
    used = "GPU-a, 20480\nGPU-b, 30\nGPU-z, 70000\nNo devices\nGPU-c, [N/A]\n"
    apps = "GPU-a, 77, 10240\nGPU-a, 78, 4096\nGPU-a, 99, [N/A]\n"
    held = held_in(used, apps, ["GPU-a", "GPU-b", "GPU-c"], {77})
    assert held == [Held("GPU-a", 10 * GIB, (78, 99)), Held("GPU-b", 30 << 20)]
    assert held_in("", "garbage", ["GPU-a"], ()) == []


def put_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    file = folder / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


USED = """
case "$*" in
  *compute-apps*) echo "GPU-a, 4242, $(cat "$0.used")" ;;
  *memory.used*) echo "GPU-a, $(cat "$0.used")" ;;
  *) echo GPU-a ;;
esac
"""


def test_h18_memory_of_a_job_that_is_ending_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clearance_module, "LOOK_EVERY_S", 0.05)
    put_nvidia_smi(tmp_path, monkeypatch, USED)
    used = tmp_path / "nvidia-smi.used"
    used.write_text("20480")
    waited: list[str] = []

    def on_waiting() -> None:
        waited.append(used.read_text())
        used.write_text("300")  # The old job's process is gone now.

    asyncio.run(NodeClearance(GPUS[:1], wait_s=30, borne_bytes=2 * GIB).clear(on_waiting))
    assert waited == ["20480"]


def test_h31_a_gpu_that_stays_held_is_told_as_the_node_s_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clearance_module, "LOOK_EVERY_S", 0.05)
    put_nvidia_smi(tmp_path, monkeypatch, USED)
    (tmp_path / "nvidia-smi.used").write_text("20480")
    began_s = time.monotonic()
    with pytest.raises(NodeBusy, match=r"20\.0 GiB of GPU-a are held by process 4242") as raised:
        asyncio.run(NodeClearance(GPUS[:1], wait_s=0.2, borne_bytes=2 * GIB).clear(lambda: None))
    assert "--gpu-others-gib" in str(raised.value)
    assert time.monotonic() - began_s < 5
    fault = asyncio.run(NodeClearance(GPUS[:1], wait_s=0, borne_bytes=2 * GIB).fault())
    assert fault is not None
    assert fault.busy


def test_a_gpu_that_is_gone_is_a_fault_and_silence_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, USED)
    (tmp_path / "nvidia-smi.used").write_text("0")
    fault = asyncio.run(NodeClearance(GPUS, wait_s=0, borne_bytes=GIB).fault())
    assert fault is not None
    assert not fault.busy
    assert "GPU-b is gone" in fault.story
    assert asyncio.run(NodeClearance([*GPUS[:1], GpuDevice("MIG-x")], wait_s=0, borne_bytes=GIB).fault()) is None
    put_nvidia_smi(tmp_path, monkeypatch, "exit 9")
    assert asyncio.run(NodeClearance(GPUS, wait_s=0, borne_bytes=GIB).fault()) is None


# As vLLM: a server, and behind it a process that outlives it.
SERVER = ["sh", "-c", "sleep 600 & echo $!; exec sleep 600"]


def test_a_killed_server_is_noticed_though_its_child_holds_its_output() -> None:
    async def run() -> None:
        engine = await EngineProcess.start(SERVER, {"PATH": os.environ["PATH"]}, 1)
        while not engine.last_lines:
            await asyncio.sleep(0.01)
        child = identity_of(int(engine.last_lines[0]))
        assert child is not None
        os.kill(engine.pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            assert await asyncio.shield(engine.exited) == -signal.SIGKILL
        assert child.alive
        assert await engine.stop(1) == -signal.SIGKILL
        wait_for(lambda: not child.alive, "the child has ended, too", 5)

    asyncio.run(run())


def test_h40_an_engine_whose_start_is_given_up_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    async def hangs(group: int) -> None:
        begun.append(group)
        await asyncio.Event().wait()

    monkeypatch.setattr(process_module, "_keeper_of", hangs)

    async def run() -> None:
        starting = asyncio.create_task(EngineProcess.start(SERVER, {"PATH": os.environ["PATH"]}, 1))
        while not begun:
            await asyncio.sleep(0.01)
        engine = identity_of(begun[0])
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        assert engine is not None
        wait_for(lambda: not engine.alive, "the engine has ended", 5)

    asyncio.run(run())


def test_h40_nothing_outlives_a_killed_agent() -> None:
    """Its child dies with it; that child's children have no such luck by themselves."""
    agent = f"""
import asyncio, os
from serai.worker_agent.engine.process import EngineProcess
async def run():
    engine = await EngineProcess.start({SERVER}, {{"PATH": os.environ["PATH"]}}, 1)
    while not engine.last_lines:
        await asyncio.sleep(0.01)
    print(engine.pid, *engine.last_lines, flush=True)
    await asyncio.sleep(600)
asyncio.run(run())
"""
    with subprocess.Popen([sys.executable, "-c", agent], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        processes = [identity_of(int(number)) for number in child.stdout.readline().split()]
        assert len(processes) == 2
        child.kill()
    wait_for(lambda: not any(process is not None and process.alive for process in processes), "all have ended", 10)
