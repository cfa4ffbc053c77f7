"""The server configurations in docs/nats.md are ones that nats-server takes."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import nkeys
import pytest

from serai.cli.embedded_nats import server_binary

DOCUMENT = Path(__file__).parents[2] / "docs" / "nats.md"
EXAMPLES = re.findall(r"```conf\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


def seed() -> bytes:
    return bytes(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER))


def public() -> str:
    return str(nkeys.from_seed(bytearray(seed())).public_key.decode())


def test_there_are_three() -> None:
    assert len(EXAMPLES) == 3


@pytest.mark.parametrize("example", EXAMPLES, ids=["site", "hub", "site behind a hub"])
def test_an_example_is_a_configuration(example: str, tmp_path: Path) -> None:
    """Certificates and keys aside, which a document cannot have."""
    text = re.sub(r"^\s*tls \{.*\}.*$", "", example, flags=re.MULTILINE)
    text = re.sub(r"\bSUSITE\b", seed().decode(), text)
    text = re.sub(r"\bU(AGENT|SYSTEM|SITE)\b", lambda match: public(), text)
    (tmp_path / "nats.conf").write_text(text)
    binary = server_binary()
    assert binary
    done = subprocess.run(
        [binary, "-t", "-c", str(tmp_path / "nats.conf")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
