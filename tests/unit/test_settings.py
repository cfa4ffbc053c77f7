"""Flags beat variables beat defaults; what is wrong is said in one line that names where it was given."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from serai.ingress.settings import IngressSettings
from serai.registry.settings import RegistrySettings
from serai.runtime.settings import add_settings, read_settings, setting
from serai.worker_agent.settings import AgentSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    name: str = setting(MISSING, "what it is called")
    port: int = setting(8000, "TCP port")
    wait_s: float = setting(1.5, "how long, in seconds")
    loud: bool = setting(False, "more words")
    file: Path | None = setting(None, "a file")
    odd: str = setting("", "spelled differently", flag="--other-flag", env="OTHER_VARIABLE")

    def __post_init__(self) -> None:
        if self.port == 13:
            raise ValueError("--port 13: not that one")


def read(kind: type[Any], *flags: str, **environment: str) -> Any:
    return read_with(kind, flags, environment)


def read_with(kind: type[Any], flags: tuple[str, ...], environment: Mapping[str, str]) -> Any:
    parser = argparse.ArgumentParser()
    add_settings(parser, kind)
    return read_settings(kind, parser.parse_args(flags), environment)


def refused(capsys: pytest.CaptureFixture[str], kind: type[Any], *flags: str, **environment: str) -> str:
    """The line a person sees."""
    with pytest.raises(SystemExit) as ended:
        read(kind, *flags, **environment)
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0].removeprefix("serai: ")


@given(st.none() | st.integers(), st.none() | st.integers())
def test_a_flag_beats_a_variable_beats_the_default(flag: int | None, variable: int | None) -> None:
    flags = ("--name=n",) if flag is None else ("--name=n", f"--port={flag}")
    environment = {} if variable is None else {"SERAI_PORT": str(variable)}
    expected = next(value for value in (flag, variable, 8000) if value is not None)
    assume(expected != 13)
    assert read_with(Settings, flags, environment).port == expected


def test_every_kind_of_value_is_read_from_flags() -> None:
    flags = ["--name=n", "--port=1", "--wait-s=2", "--loud", "--file=/x/y", "--other-flag=z"]
    assert read(Settings, *flags) == Settings(name="n", port=1, wait_s=2.0, loud=True, file=Path("/x/y"), odd="z")


def test_every_kind_of_value_is_read_from_variables() -> None:
    environment = {
        "SERAI_NAME": "n",
        "SERAI_PORT": "1",
        "SERAI_WAIT_S": "0.25",
        "SERAI_LOUD": "true",
        "SERAI_FILE": "~/y",
        "OTHER_VARIABLE": "z",
    }
    expected = Settings(name="n", port=1, wait_s=0.25, loud=True, file=Path("~/y").expanduser(), odd="z")
    assert read(Settings, **environment) == expected


def test_a_switch_can_be_turned_off_against_the_environment() -> None:
    assert read(Settings, "--name=n", SERAI_LOUD="1").loud is True
    assert read(Settings, "--name=n", "--no-loud", SERAI_LOUD="1").loud is False


def test_an_empty_variable_is_as_good_as_none() -> None:
    assert read(Settings, "--name=n", SERAI_PORT="").port == 8000


@pytest.mark.parametrize(
    ("flags", "environment", "line"),
    [
        ([], {}, "--name (or SERAI_NAME) is required: what it is called"),
        (["--port=x"], {}, "--port: 'x' is not a whole number"),
        (["--port="], {}, "--port: '' is not a whole number"),
        (["--port=1.5"], {}, "--port: '1.5' is not a whole number"),
        ([], {"SERAI_PORT": "x"}, "SERAI_PORT: 'x' is not a whole number"),
        ([], {"SERAI_WAIT_S": "long"}, "SERAI_WAIT_S: 'long' is not a number"),
        (["--wait-s=inf"], {}, "--wait-s: 'inf' is not a number"),
        (["--wait-s=nan"], {}, "--wait-s: 'nan' is not a number"),
        ([], {"SERAI_WAIT_S": "-inf"}, "SERAI_WAIT_S: '-inf' is not a number"),
        ([], {"SERAI_LOUD": "maybe"}, "SERAI_LOUD: 'maybe' is neither true nor false"),
        (["--port=13"], {}, "--port 13: not that one"),
        ([], {"SERAI_PORT": "13"}, "--port 13: not that one"),
    ],
)
def test_a_bad_value_ends_with_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], flags: list[str], environment: dict[str, str], line: str
) -> None:
    named = [] if "required" in line else ["--name=n"]
    assert refused(capsys, Settings, *named, *flags, **environment) == line


def test_the_help_names_flag_variable_and_default() -> None:
    parser = argparse.ArgumentParser()
    add_settings(parser, Settings)
    text = " ".join(parser.format_help().split())
    assert "--port PORT TCP port (SERAI_PORT; default: 8000)" in text
    assert "--name NAME what it is called (SERAI_NAME; required)" in text
    assert "--other-flag ODD spelled differently (OTHER_VARIABLE; default: none)" in text


# -- the services' own settings --------------------------------------------------------------------------------------

NEEDED: dict[type[Any], list[str]] = {
    IngressSettings: ["--anonymous"],
    AgentSettings: ["--model=m"],
    RegistrySettings: [],
}


@pytest.mark.parametrize("kind", NEEDED, ids=lambda kind: kind.__name__)
def test_a_service_starts_with_as_little_as_possible_said(kind: type[Any]) -> None:
    assert read(kind, *NEEDED[kind]).nats.url == "nats://127.0.0.1:4222"


@pytest.mark.parametrize("kind", NEEDED, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "flag",
    [
        "--nats-url=here:4222",
        "--nats-url=http://host",
        "--nats-url=nats://",
        "--nats-url=nats://host:port",
        "--nats-nkey-file=/none",
        "--nats-creds-file=/none",
        "--log-level=loud",
        "--metrics-port=-1",
        "--metrics-port=65536",
    ],
)
def test_every_service_checks_how_it_is_connected(
    capsys: pytest.CaptureFixture[str], kind: type[Any], flag: str
) -> None:
    assert refused(capsys, kind, *NEEDED[kind], flag).startswith(flag.partition("=")[0])


def test_two_kinds_of_credentials_are_one_too_many(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch()
    line = refused(capsys, RegistrySettings, f"--nats-nkey-file={key}", f"--nats-creds-file={key}")
    assert "--nats-nkey-file and --nats-creds-file" in line
    assert str(tmp_path / "none") in refused(capsys, RegistrySettings, f"--nats-nkey-file={tmp_path}/none")


@pytest.mark.parametrize(
    ("kind", "flags", "named"),
    [
        (IngressSettings, ["--port=0"], "--port 0"),
        (IngressSettings, ["--port=65536"], "--port 65536"),
        (IngressSettings, ["--policy=best"], "--policy 'best'"),
        (IngressSettings, ["--window-bytes=65535"], "--window-bytes 65535"),
        (IngressSettings, ["--window-bytes=16777217"], "--window-bytes 16777217"),
        (IngressSettings, ["--body-bytes-max=0"], "--body-bytes-max 0"),
        (IngressSettings, ["--answer-bytes-max=-1"], "--answer-bytes-max -1"),
        (IngressSettings, ["--request-timeout-s=0"], "--request-timeout-s 0"),
        (IngressSettings, ["--accept-timeout-s=0"], "--accept-timeout-s 0"),
        (IngressSettings, ["--silence-timeout-s=0"], "--silence-timeout-s 0"),
        (IngressSettings, ["--client-stall-s=-0.5"], "--client-stall-s -0.5"),
        (IngressSettings, ["--shutdown-s=-1"], "--shutdown-s -1"),
        (IngressSettings, ["--drain-delay-s=-1"], "--drain-delay-s -1"),
        (IngressSettings, ["--workers=0"], "--workers 0"),
        (IngressSettings, ["--workers=257"], "--workers 257"),
        (AgentSettings, ["--engine=abacus"], "--engine 'abacus'"),
        (AgentSettings, ["--model="], "--model must not be empty"),
        (AgentSettings, ["--engine-url=here"], "--engine-url: "),
        (AgentSettings, ["--engine-url=http://h:99999"], "--engine-url: "),
        (AgentSettings, ["--concurrency-max=0"], "--concurrency-max 0"),
        (AgentSettings, ["--body-bytes-max=0"], "--body-bytes-max 0"),
        (AgentSettings, ["--start-timeout-s=0"], "--start-timeout-s 0"),
        (AgentSettings, ["--engine-silence-s=0"], "--engine-silence-s 0"),
        (AgentSettings, ["--status-interval-s=0"], "--status-interval-s 0"),
        (AgentSettings, ["--drain-s=-1"], "--drain-s -1: must not be negative"),
        (AgentSettings, ["--engine-stop-s=-1"], "--engine-stop-s -1: must not be negative"),
        (AgentSettings, ["--grace-s=-1"], "--grace-s -1: must not be negative"),
        (AgentSettings, ["--allocation-s=-1"], "--allocation-s -1: must not be negative"),
        (RegistrySettings, ["--silence-grace-s=9"], "--silence-grace-s 9"),
        (RegistrySettings, ["--retention-s=3599"], "--retention-s must be at least --silence-grace-s"),
    ],
)
def test_a_value_out_of_range_is_refused_and_named(
    capsys: pytest.CaptureFixture[str], kind: type[Any], flags: list[str], named: str
) -> None:
    assert refused(capsys, kind, *NEEDED[kind], *flags).startswith(named)


@pytest.mark.parametrize(
    ("environment", "name", "restarts"),
    [
        ({"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": "2", "POD_NAME": "p"}, "slurm-4711", 2),
        ({"POD_NAME": "pod-x"}, "pod-x", 0),
        ({"POD_NAME": "pod-x", "SLURM_RESTART_COUNT": "many"}, "pod-x", 0),
    ],
)
def test_the_allocation_is_named_by_what_runs_the_agent(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], name: str, restarts: int
) -> None:
    for variable in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "POD_NAME"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    settings = AgentSettings(model="m")
    assert (settings.allocation_name, settings.restart_count) == (name, restarts)
    assert AgentSettings(model="m", allocation="mine").allocation_name == "mine"
