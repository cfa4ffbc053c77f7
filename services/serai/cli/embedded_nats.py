"""A NATS server for one machine: JetStream on a file store, loopback only, one generated nkey per role.

Subject permissions are as tight as one key per role allows: an agent cannot read what other agents answer, the
ingress cannot speak for agents, and nobody but the registry touches JetStream.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import nkeys

from serai.contracts.subjects import (
    BEAT,
    CANCEL,
    DIGEST,
    DISCONNECTED,
    ENDED,
    INFERENCE,
    OPINION,
    PROBE,
    SESSION,
    SESSIONS_BUCKET,
    SNAPSHOT,
    STATUS,
)

_READ_REGISTRY = [DIGEST.every, SNAPSHOT.every, OPINION.every, PROBE.every]
_HEAR_REGISTRY = [SESSION.every, STATUS.every, BEAT.every, DISCONNECTED.every]

_ROLES: dict[str, tuple[list[str], list[str]]] = {
    # role: (may publish, may subscribe)
    "ingress": (
        [INFERENCE.every, CANCEL.every, *_READ_REGISTRY],
        [*_HEAR_REGISTRY, "_INBOX_ingress.>"],
    ),
    "registry": (
        [
            *[SESSION.every, BEAT.every, DISCONNECTED.every, *_READ_REGISTRY],
            *["_INBOX_agent.>", "_INBOX_ingress.>", "_INBOX_registry.>", "_INBOX_tools.>"],
            *["$JS.>", f"$KV.{SESSIONS_BUCKET}.>"],
        ],
        [*_HEAR_REGISTRY, DIGEST.every, SNAPSHOT.every, OPINION.every, ENDED.every, "_INBOX_registry.>"],
    ),
    "agent": (
        # Answers go to ingress inboxes, whose names cannot be guessed. Not allow_responses: the server would keep
        # every reply subject until it expires, and walk them all each second.
        [
            *[SESSION.every, STATUS.every, PROBE.every],
            *["_INBOX_agent.>", "_INBOX_ingress.>", "_INBOX_registry.>", "_INBOX_tools.>"],
        ],
        [SESSION.every, INFERENCE.every, CANCEL.every, PROBE.every, "_INBOX_agent.>"],
    ),
    # `serai registry …` and `serai health`: they look, and pass on the batch system's word.
    "tools": (
        [*_READ_REGISTRY, ENDED.every],
        [*_HEAR_REGISTRY, "_INBOX_tools.>"],
    ),
}


@dataclass(frozen=True, slots=True)
class EmbeddedNats:
    """Files of one embedded server below `folder`."""

    folder: Path

    @property
    def config_file(self) -> Path:
        return self.folder / "nats.conf"

    def key_file(self, role: str) -> Path:
        """The nkey seed of `role`."""
        return self.folder / f"{role}.nk"

    def prepare(self, port: int) -> None:
        """Makes keys that do not exist yet, and writes the configuration anew for `port`."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        users = "\n".join(self._user(role) for role in _ROLES)
        self.config_file.write_text(
            f"""# Written by `serai up` at each start.
server_name: serai-local
listen: 127.0.0.1:{port}
max_payload: 8MB
write_deadline: "5s"
jetstream {{ store_dir: "{self.folder / "jetstream"}" }}
authorization {{
  users: [
{users}
  ]
}}
"""
        )
        self.config_file.chmod(0o600)

    def _user(self, role: str) -> str:
        publish, subscribe = _ROLES[role]
        public = nkeys.from_seed(self._seed(role)).public_key.decode()
        return (
            f"    {{ nkey: {public}, permissions: {{ publish: {{ allow: {_list(publish)} }}, "
            f"subscribe: {{ allow: {_list(subscribe)} }} }} }}"
        )

    def _seed(self, role: str) -> bytearray:
        path = self.key_file(role)
        if not path.exists():
            seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(bytes(seed))
        return bytearray(path.read_bytes().strip())


def server_environment() -> dict[str, str]:
    """Variables for a server that shares a small machine with everything else: on one thread its messages cost a third
    less CPU, since none is passed between cores that are busy with our own processes."""
    return {"GOMAXPROCS": "1"} if (os.cpu_count() or 1) <= 4 and "GOMAXPROCS" not in os.environ else {}


def server_binary() -> str | None:
    """The nats-server beside our Python, else the one on PATH; None when there is none."""
    beside = Path(sys.executable).parent / "nats-server"
    return str(beside) if beside.exists() else shutil.which("nats-server")


def _list(subjects: list[str]) -> str:
    return "[" + ", ".join(f'"{subject}"' for subject in subjects) + "]"
