"""Makes what the containers need before they start: a key per role, NATS' list of users, a file for API keys.

Each role has a folder of its own, so that no container sees another's key. What is there already stays: a second run
changes nothing.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from serai.cli.embedded_nats import EmbeddedNats
from serai.ingress.access import write_keys

ROLES = {
    # key: the container that has it
    "ingress": "ingress",
    "registry": "registry",
    "ledger": "ledger",
    "agent": "agent",
    "macro-scheduler": "macro-scheduler",
    # By which NATS tells the registry whose connection has closed, and which `serai health` and `serai registry` use.
    "system": "registry",
    "tools": "registry",
    "placer": "placer",
    # Nothing here uses it; kept, so that NATS' list of users stays the same.
    "launcher": "registry",
}


def main(base: Path) -> int:
    """Fills the folders nats, ingress, registry, ledger, macro-scheduler, placer and agent in `base`."""
    with tempfile.TemporaryDirectory() as workshop:
        nats = EmbeddedNats(Path(workshop))
        for role in ROLES:
            if (kept := _key_file(base, role)).exists():
                shutil.copyfile(kept, nats.key_file(role))
        # Only the users and limits of this configuration count: nats.conf includes it and says the rest itself.
        nats.prepare(port=4222)
        for role in ROLES:
            if not (kept := _key_file(base, role)).exists():
                _write_private(kept, nats.key_file(role).read_bytes())
                sys.stdout.write(f"made a NATS key for {role}\n")
        _write_private(base / "nats" / "nats.conf", nats.config_file.read_bytes())
    api_keys = base / "ingress" / "keys.json"
    if not api_keys.exists():
        write_keys(api_keys, [])
        sys.stdout.write("there are no API keys yet; make one with: docker compose run --rm keys add NAME\n")
    return 0


def _key_file(base: Path, role: str) -> Path:
    return base / ROLES[role] / f"{role}.nk"


def _write_private(path: Path, content: bytes) -> None:
    """Whole or not at all, and readable by its owner only."""
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    fresh.replace(path)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
