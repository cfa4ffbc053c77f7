"""A NATS server for one machine: JetStream on a file store, loopback unless told otherwise, one nkey per role.

Subject permissions are as tight as one key per role allows: an agent cannot read what other agents answer, the
ingress cannot speak for agents, and each service touches of JetStream only what is its own. The registry has a second
key, of the system account, by which the server tells it whose connection has closed.

Several sites on one machine are several such servers: one listens for leaf nodes (`leaf_port`), the others dial it
(`leaf_remotes`); each has its own name and JetStream domain.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import nkeys

from serai.contracts.subjects import (
    ADMISSION,
    ASSIGN,
    BEAT,
    BUDGETS_BUCKET,
    CANCEL,
    CLEARED,
    DIGEST,
    DISCONNECTED,
    DRAIN,
    ENDED,
    GROUPS_BUCKET,
    INFERENCE,
    INSTANCE,
    LAUNCHER_EXPLAIN,
    LAUNCHER_SCALE,
    LAUNCHER_WAKE,
    LAUNCHERS_BUCKET,
    LIMITS,
    MACRO_EXPLAIN,
    MACRO_PRESENCE,
    MACRO_WISH,
    OPINION,
    OWNERS_BUCKET,
    PLACEMENT_APPLY,
    PLACEMENT_BUCKET,
    PLACEMENT_EXPLAIN,
    PLACEMENT_KNOCK,
    PLACEMENT_STARTABLE,
    POOL,
    POOLS_BUCKET,
    PROBE,
    SESSION,
    SESSIONS_BUCKET,
    SLEEP,
    SNAPSHOT,
    STATUS,
    TAKE,
    USAGE,
    USAGE_CONSUMER,
    USAGE_DEMAND,
    USAGE_SPENT,
    USAGE_STREAM,
)

_READ_REGISTRY = [DIGEST.every, SNAPSHOT.every, OPINION.every, PROBE.every]
_HEAR_REGISTRY = [SESSION.every, STATUS.every, BEAT.every, DISCONNECTED.every]


def _compare_and_set(bucket: str) -> list[str]:
    """Reads and compare-and-sets of one bucket's keys, and makes it when it is missing."""
    return [f"$KV.{bucket}.*", *[f"$JS.API.STREAM.{what}.KV_{bucket}" for what in ("MSG.GET", "CREATE")]]


_BUDGETS = _compare_and_set(BUDGETS_BUCKET)
_LAUNCHERS = _compare_and_set(LAUNCHERS_BUCKET)
_PLACEMENT = [*_compare_and_set(PLACEMENT_BUCKET), *_compare_and_set(POOLS_BUCKET)]
_GROUPS = [*_compare_and_set(GROUPS_BUCKET), *_compare_and_set(OWNERS_BUCKET)]

_ROLES: dict[str, tuple[list[str], list[str]]] = {
    # role: (may publish, may subscribe)
    "ingress": (
        [
            *[INFERENCE.every, CANCEL.every, ADMISSION.every, *_READ_REGISTRY, LIMITS.every, *_BUDGETS],
            *[USAGE.every, USAGE_SPENT.every, PLACEMENT_KNOCK.every],
        ],
        [*_HEAR_REGISTRY, LIMITS.every, PLACEMENT_STARTABLE.every, "_INBOX_ingress.>"],
    ),
    "registry": (
        [
            *[SESSION.every, BEAT.every, DISCONNECTED.every, *_READ_REGISTRY],
            *["_INBOX_agent.>", "_INBOX_ingress.>", "_INBOX_registry.>", "_INBOX_tools.>", "_INBOX_launcher.>"],
            *["_INBOX_macro-scheduler.>", "_INBOX_placer.>", "$JS.>", f"$KV.{SESSIONS_BUCKET}.>"],
        ],
        [*_HEAR_REGISTRY, *[s.every for s in (DIGEST, SNAPSHOT, OPINION, ENDED, CLEARED)], "_INBOX_registry.>"],
    ),
    "agent": (
        # Answers go to ingress inboxes, whose names cannot be guessed. Not allow_responses: the server would keep
        # every reply subject until it expires, and walk them all each second.
        [
            *[SESSION.every, STATUS.every, PROBE.every, INSTANCE.every, POOL.every],
            *["_INBOX_agent.>", "_INBOX_ingress.>", "_INBOX_registry.>", "_INBOX_tools.>", "_INBOX_launcher.>"],
            *["_INBOX_macro-scheduler.>", "_INBOX_placer.>"],
            # A pool agent that starts anew reads what it is to run; it writes nothing there.
            f"$JS.API.STREAM.MSG.GET.KV_{POOLS_BUCKET}",
        ],
        [
            *[SESSION.every, INFERENCE.every, CANCEL.every, PROBE.every],
            *[DRAIN.every, SLEEP.every, TAKE.every, ASSIGN.every],
            "_INBOX_agent.>",
        ],
    ),
    # Of JetStream the ledger has its one stream and its one consumer of that, and nothing else.
    "ledger": (
        [
            *[f"$JS.API.STREAM.{what}.{USAGE_STREAM}" for what in ("INFO", "CREATE")],
            *[
                f"$JS.API.CONSUMER.{what}.{USAGE_STREAM}.{USAGE_CONSUMER}"
                for what in ("INFO", "DURABLE.CREATE", "MSG.NEXT")
            ],
            *["$JS.ACK.>", "_INBOX_ingress.>", "_INBOX_tools.>", "_INBOX_placer.>"],
        ],
        [USAGE_SPENT.every, USAGE_DEMAND.every, "_INBOX_ledger.>"],
    ),
    # `serai registry …` and `serai health`: they look, pass on the batch system's word, and ask sessions to end.
    "tools": (
        [
            *[*_READ_REGISTRY, ENDED.every, CLEARED.every, DRAIN.every, USAGE_SPENT.every],
            *[LAUNCHER_EXPLAIN.every, LAUNCHER_WAKE.every, MACRO_EXPLAIN.every],
            *[PLACEMENT_EXPLAIN.every, PLACEMENT_APPLY.every],
        ],
        [*_HEAR_REGISTRY, "_INBOX_tools.>"],
    ),
    # Says which instance prefills what, and takes instances over; it sees no prompt.
    "macro-scheduler": (
        [
            *[*_READ_REGISTRY, TAKE.every, DRAIN.every, SLEEP.every, MACRO_PRESENCE.every, MACRO_WISH.every, *_GROUPS],
            *["_INBOX_ingress.>", "_INBOX_tools.>"],
        ],
        [
            *[*_HEAR_REGISTRY, INSTANCE.every, ADMISSION.every, MACRO_EXPLAIN.every, MACRO_PRESENCE.every],
            "_INBOX_macro-scheduler.>",
        ],
    ),
    # Starts successors, and asks those whose time is up to end.
    "launcher": (
        [*_READ_REGISTRY, ENDED.every, DRAIN.every, *_LAUNCHERS, "_INBOX_tools.>", "_INBOX_placer.>"],
        [
            *[*_HEAR_REGISTRY, POOL.every, MACRO_WISH.every],
            *[LAUNCHER_EXPLAIN.every, LAUNCHER_WAKE.every, LAUNCHER_SCALE.every, "_INBOX_launcher.>"],
        ],
    ),
    # Says which engine runs where; it sees no request.
    "placer": (
        [
            *[*_READ_REGISTRY, ASSIGN.every, USAGE_DEMAND.every, LAUNCHER_SCALE.every],
            *[*_PLACEMENT, PLACEMENT_STARTABLE.every, "_INBOX_tools.>"],
            # Which pools have keys, and clearing away those of pools that are no more.
            *[f"$JS.API.STREAM.{what}.KV_{POOLS_BUCKET}" for what in ("INFO", "PURGE")],
        ],
        [
            *[*_HEAR_REGISTRY, POOL.every, MACRO_WISH.every, PLACEMENT_EXPLAIN.every, PLACEMENT_APPLY.every],
            *[PLACEMENT_KNOCK.every, "_INBOX_placer.>"],
        ],
    ),
}


_SYSTEM = "system"
_LEAF = "leaf"


@dataclass(frozen=True, slots=True)
class LeafRemote:
    """Another server to be a leaf node of."""

    url: str
    """`nats-leaf://host:port`, of its leaf-node listener."""
    nkey_file: Path
    """The seed of its user `leaf`: its `key_file("leaf")`, there once it is prepared."""

    @property
    def configuration(self) -> str:
        seed = self.nkey_file.read_text().strip()  # The server takes no name of a file here.
        return f'{{ url: "{self.url}", nkey: {seed}, account: SERAI, ignore_discovered_servers: true }}'


@dataclass(frozen=True, slots=True)
class EmbeddedNats:
    """Files of one embedded server below `folder`."""

    folder: Path
    server_name: str = "serai-local"
    domain: str | None = None
    """JetStream domain. Servers that are linked must have different ones: else they take each other's KV."""
    host: str = "127.0.0.1"
    """The address it listens on."""
    leaf_port: int | None = None
    """Where it listens for leaf nodes; None = not at all."""
    leaf_remotes: tuple[LeafRemote, ...] = ()

    @property
    def config_file(self) -> Path:
        return self.folder / "nats.conf"

    def key_file(self, role: str) -> Path:
        """The nkey seed of `role`: one of the services, `tools`, `system`, or `leaf`."""
        return self.folder / f"{role}.nk"

    def prepare(self, port: int) -> None:
        """Makes keys that do not exist yet, and writes the configuration anew for `port`."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        permissions = dict(_ROLES)
        if self.leaf_port is not None:
            permissions[_LEAF] = (_between_sites(), _between_sites())
        users = "\n".join(self._user(role, *allowed) for role, allowed in permissions.items())
        domain = f', domain: "{self.domain}"' if self.domain else ""
        # Pings: the server, too, must notice within a minute that a client is gone without a word; its default is four.
        # Who dials another server pings it always, and must give up a link that is cut in silence within 6 s: what TCP
        # sends again comes at ever longer intervals, so an old connection may stay mute as long again as the cut was.
        ping_s = 2 if self.leaf_remotes else 15
        self.config_file.write_text(
            f"""# Written by `serai up` at each start.
server_name: "{self.server_name}"
listen: "{self.host}:{port}"
max_payload: 8MB
write_deadline: "5s"
ping_interval: "{ping_s}s"
ping_max: 2
jetstream {{ store_dir: "{self.folder / "jetstream"}"{domain} }}
accounts {{
  SERAI {{
    jetstream: enabled
    users: [
{users}
    ]
  }}
  SYS {{
    users: [
{self._user(_SYSTEM, [], ["$SYS.ACCOUNT.*.DISCONNECT", "_INBOX_system.>"])}
    ]
  }}
}}
system_account: SYS
{self._leaf_nodes()}"""
        )
        self.config_file.chmod(0o600)

    def _leaf_nodes(self) -> str:
        # No addresses by gossip: a leaf would dial the inner one it learns, past the proxy or tunnel it was given.
        lines = []
        if self.leaf_port is not None:
            lines += [f"  listen: 127.0.0.1:{self.leaf_port}", "  no_advertise: true"]
        if self.leaf_remotes:
            remotes = [f"    {remote.configuration}" for remote in self.leaf_remotes]
            lines += ["  remotes: [", *remotes, "  ]"]
        return "\n".join(["leafnodes {", *lines, "}", ""]) if lines else ""

    def _user(self, role: str, publish: list[str], subscribe: list[str]) -> str:
        public = nkeys.from_seed(self._seed(role)).public_key.decode()
        # An empty list of what is allowed would mean everything.
        published = f"allow: {_list(publish)}" if publish else 'deny: ">"'
        return (
            f"      {{ nkey: {public}, permissions: {{ publish: {{ {published} }}, "
            f"subscribe: {{ allow: {_list(subscribe)} }} }} }}"
        )

    def _seed(self, role: str) -> bytearray:
        path = self.key_file(role)
        if not path.exists():
            seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(bytes(seed))
        return bytearray(path.read_bytes().strip())


def _between_sites() -> list[str]:
    """What passes from one site to another: every conversation of the services, and nothing of JetStream. But for
    asks: a site's macro-scheduler leads its own instances for its own ingresses, and two answers would be one too many.
    """
    subjects = {one for allowed in _ROLES.values() for part in allowed for one in part}
    return sorted(one for one in subjects if not one.startswith("$") and one != ADMISSION.every)


_SMALL_MACHINE_CORES = 4
_NEVER_MS = 2**31 - 1


def server_environment() -> dict[str, str]:
    """Variables for a server that shares a small machine with everything else, where nobody has set them.

    On one thread its messages cost a third less CPU, since none is passed between cores that are busy with our own
    processes. Go's monitor wakes each 20 µs for as long as a server that is now and then idle has something to do: a
    quarter of its CPU, unless its scheduler is traced, which is told to happen in 24 days. Then it looks each 10 ms.
    """
    if (os.cpu_count() or 1) > _SMALL_MACHINE_CORES:
        return {}
    wanted = {"GOMAXPROCS": "1", "GODEBUG": f"schedtrace={_NEVER_MS}"}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def server_binary() -> str | None:
    """The nats-server beside our Python, else the one on PATH; None when there is none."""
    beside = Path(sys.executable).parent / "nats-server"
    return str(beside) if beside.exists() else shutil.which("nats-server")


def _list(subjects: list[str]) -> str:
    return "[" + ", ".join(f'"{subject}"' for subject in subjects) + "]"
