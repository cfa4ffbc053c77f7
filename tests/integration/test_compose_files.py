"""deploy/compose without a Docker: what the files say, and that NATS takes what `init` and nats.conf make together."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from integration.system import System, port_answers, wait_for
from serai.cli.embedded_nats import server_binary
from serai.cli.main import COMMANDS, Command
from serai.ingress.access import read_keys
from serai.ingress.settings import IngressSettings
from serai.placer.placement_file import read_placement
from serai.worker_agent.engine.process import free_port
from serai.worker_agent.settings import AgentSettings

FOLDER = Path(__file__).parents[2] / "deploy" / "compose"
ALWAYS = {"nats", "registry", "ledger", "ingress", "agent"}
ON_REQUEST = {"agent-small-model", "agent-pool", "keys", "macro-scheduler", "placer"}
ONCE = {"init", "keys"}
SERAI = {"registry", "ledger", "macro-scheduler", "ingress", "agent", "agent-small-model", "placer", "agent-pool"}
ROLES = ("ingress", "registry", "ledger", "agent", "macro-scheduler", "placer")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((FOLDER / "docker-compose.yml").read_text()))


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return dict(compose["services"])


@pytest.mark.parametrize("files", [["docker-compose.yml"], ["docker-compose.yml", "docker-compose.tls.yml"]])
@pytest.mark.parametrize("command", [["docker-compose"], ["docker", "compose"]], ids=" ".join)
def test_docker_compose_takes_the_files(command: list[str], files: list[str]) -> None:
    if shutil.which(command[0]) is None or subprocess.run([*command, "version"], capture_output=True).returncode:
        pytest.skip(f"{' '.join(command)} is not installed")
    profiles = ["--profile", "pool", "--profile", "small-model", "--profile", "tools", "--profile", "padg"]
    flags = [word for file in files for word in ("-f", str(FOLDER / file))]
    environment = os.environ | {"NATS_BIND": "192.0.2.1", "NATS_TLS_FOLDER": "/nowhere"}
    done = subprocess.run([*command, *flags, *profiles, "config", "--services"], capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr.decode()
    assert set(done.stdout.decode().split()) == ALWAYS | ON_REQUEST | ONCE


def test_what_runs_by_default_and_what_on_request(services: dict[str, dict[str, Any]]) -> None:
    assert set(services) == ALWAYS | ON_REQUEST | ONCE
    assert {name for name, service in services.items() if service.get("profiles")} == ON_REQUEST


def test_only_the_ingress_is_published_and_only_on_loopback(services: dict[str, dict[str, Any]]) -> None:
    published = {name: service["ports"] for name, service in services.items() if service.get("ports")}
    assert list(published) == ["ingress"]
    assert all(port.startswith("127.0.0.1:") for port in published["ingress"])


def test_only_the_ingress_has_a_way_out(compose: dict[str, Any], services: dict[str, dict[str, Any]]) -> None:
    assert compose["networks"]["inside"]["internal"] is True
    for name, service in services.items():
        if name in ONCE:
            assert service["network_mode"] == "none", name
        else:
            assert service["networks"] == (["inside", "edge"] if name == "ingress" else ["inside"]), name


def test_every_container_is_hardened(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert service["user"] == "10001:10001", name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert not service.get("privileged"), name


def test_every_service_is_checked_restarted_and_given_time_to_stop(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        if name in ONCE:
            assert service["restart"] == "no", name
            continue
        assert service["healthcheck"]["test"][0] == "CMD", name
        assert service["restart"] == "unless-stopped", name
        assert re.fullmatch(r"\d+s", service["stop_grace_period"]), name


def test_a_service_gets_longer_to_stop_than_it_takes(services: dict[str, dict[str, Any]]) -> None:
    agent = AgentSettings(model="m")
    ingress = IngressSettings(anonymous=True)
    assert int(services["agent"]["stop_grace_period"][:-1]) > agent.drain_s + agent.engine_stop_s
    assert int(services["ingress"]["stop_grace_period"][:-1]) > ingress.shutdown_s


def test_each_role_sees_its_own_key_only(services: dict[str, dict[str, Any]]) -> None:
    for name in SERAI:
        role = "agent" if name.startswith("agent") else name
        volumes = services[name]["volumes"]
        data = [f"{role}-data:/var/lib/serai"] if role in ("ingress", "ledger") else []
        data += ["./placement.yaml:/etc/serai/placement.yaml:ro"] if role == "placer" else []
        assert volumes == [f"{role}-credentials:/run/serai:ro", *data], name
        assert services[name]["environment"]["SERAI_NATS_NKEY_FILE"] == f"/run/serai/{role}.nk", name


def test_the_placement_file_is_one() -> None:
    read = read_placement((FOLDER / "placement.yaml").read_text(), "placement.yaml")
    assert set(read.models) == {"model-a", "model-b"}


def test_the_commands_exist(services: dict[str, dict[str, Any]]) -> None:
    """Every `serai …` in the file is a command of today."""
    found = 0
    for service in services.values():
        words = " ".join(service.get("command") or []) + " " + " ".join(service.get("entrypoint") or [])
        for match in re.finditer(r"\bserai (\w+)(?: (\w+))?", words):
            node = COMMANDS[match[1]]
            if not isinstance(node, Command) and match[2]:
                assert match[2] in node
            found += 1
    assert found >= 7


def test_every_variable_is_explained(compose: dict[str, Any]) -> None:
    texts = [(FOLDER / name).read_text() for name in ("docker-compose.yml", "docker-compose.tls.yml")]
    used = set(re.findall(r"(?<!\$)\$\{(\w+)", "".join(texts)))
    explained = set(re.findall(r"^#?(\w+)=", (FOLDER / ".env.example").read_text(), re.MULTILINE))
    assert used | {"COMPOSE_PROJECT_NAME"} == explained


@pytest.fixture
def made_by_init(tmp_path: Path) -> Path:
    base = tmp_path / "init"
    for name in ("nats", *ROLES):
        (base / name).mkdir(parents=True)
    run_init(base)
    return base


def run_init(base: Path) -> None:
    subprocess.run([sys.executable, str(FOLDER / "init.py"), str(base)], check=True, capture_output=True)


def test_init_makes_private_files_once(made_by_init: Path) -> None:
    files = {path: path.read_bytes() for path in made_by_init.rglob("*") if path.is_file()}
    names = sorted(str(path.relative_to(made_by_init)) for path in files)
    assert names == [
        "agent/agent.nk",
        "ingress/ingress.nk",
        "ingress/keys.json",
        "ledger/ledger.nk",
        "macro-scheduler/macro-scheduler.nk",
        "nats/nats.conf",
        "placer/placer.nk",
        "registry/launcher.nk",
        "registry/registry.nk",
        "registry/system.nk",
        "registry/tools.nk",
    ]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)
    assert read_keys(made_by_init / "ingress" / "keys.json") == []
    for path, content in files.items():
        if path.suffix == ".nk":
            assert content not in files[made_by_init / "nats" / "nats.conf"], "NATS needs public keys only"
    run_init(made_by_init)
    for path, content in files.items():
        if path.suffix == ".conf":
            assert users_in(path.read_bytes()) == users_in(content) != []
        else:
            assert path.read_bytes() == content


def users_in(config: bytes) -> list[bytes]:
    return re.findall(rb"nkey: (U\w+)", config)


def test_a_request_goes_through_on_what_init_and_nats_conf_make(made_by_init: Path, tmp_path: Path) -> None:
    """The same configuration as in the container, but for the places: ports, data folder."""
    binary = server_binary()
    assert binary
    port, monitor = free_port(), free_port()
    config = (FOLDER / "nats.conf").read_text()
    for there, here in (
        ('"0.0.0.0:4222"', f'"127.0.0.1:{port}"'),
        ('"127.0.0.1:8222"', f'"127.0.0.1:{monitor}"'),
        ('"/data"', f'"{tmp_path / "data"}"'),
    ):
        assert there in config
        config = config.replace(there, here)
    (tmp_path / "nats.conf").write_text(config)
    (tmp_path / "generated").symlink_to(made_by_init / "nats")

    system = System(tmp_path, port, _Keys(made_by_init), key="")  # type: ignore[arg-type]
    try:
        system.start("nats", [binary, "--config", str(tmp_path / "nats.conf")])
        wait_for(lambda: port_answers(port) and port_answers(monitor), "nats-server listens")
        facts = httpx2.get(f"http://127.0.0.1:{monitor}/varz").json()
        assert (facts["max_payload"], facts["auth_required"]) == (8 * 1024 * 1024, True)
        keys_file = made_by_init / "ingress" / "keys.json"
        words = ["keys", "add", "me", "--keys-file", str(keys_file)]
        added = subprocess.run([sys.executable, "-m", "serai.cli.main", *words], check=True, capture_output=True)
        system.key = added.stdout.decode().strip()
        shutil.copy(keys_file, tmp_path / "keys.json")
        system.start_registry()
        system.start_ingress()
        system.start_agent()
        system.wait_for_sessions(1)
        body = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "x" * 2_000_000}]}
        with system.client() as client:
            answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 3
    finally:
        system.stop()


class _Keys:
    """Where `System` finds the keys that `init` has made."""

    def __init__(self, base: Path) -> None:
        self._base = base

    def key_file(self, role: str) -> Path:
        return self._base / role / f"{role}.nk"


def test_each_image_is_a_target_of_the_one_dockerfile_and_the_placer_has_its_solver(
    services: dict[str, dict[str, Any]],
) -> None:
    text = (FOLDER / "Dockerfile").read_text()
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE))
    targets = {name: service["build"]["target"] for name, service in services.items() if "build" in service}
    assert set(targets.values()) <= stages
    assert targets["placer"] == "placer"
    assert {targets[name] for name in ("ingress", "registry", "agent")} == {"serai"}
    assert "optional-dependencies']['placer']" in text.split("AS build-placer")[1].split("FROM")[0]
    images = {(service["image"], targets[name]) for name, service in services.items() if name in targets}
    assert len({image for image, _ in images}) == len(images), "no image is built in two ways"
