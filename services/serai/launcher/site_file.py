"""The site file, read strictly: deploy/slurm/site.example.yaml shows all that may stand in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, TypeVar

from serai.launcher.site import (
    CommandSettings,
    Exclude,
    GpuKind,
    Kept,
    Nats,
    Partition,
    Profile,
    Runtime,
    RuntimeKind,
    Site,
)
from serai.runtime import strict_yaml
from serai.runtime.fields import BadInput, Fields
from serai.runtime.slurm_time import duration_s

_T = TypeVar("_T")
FILE_BYTES_MAX = 1024 * 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NEEDS = {
    RuntimeKind.VENV: "path",
    RuntimeKind.MODULES: "modules",
    RuntimeKind.APPTAINER: "image",
    RuntimeKind.ENROOT: "image",
    RuntimeKind.PYXIS: "image",
    RuntimeKind.PODMAN: "image",
}


def read_site(path: Path) -> Site:
    """Raises BadInput, with file, line and field."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        remedy = "give a site file with --site, or copy deploy/slurm/site.example.yaml there and change it"
        raise BadInput(str(path), f"cannot be read ({error.strerror})", remedy) from error
    if len(data) > FILE_BYTES_MAX:
        raise BadInput(str(path), f"has more than {FILE_BYTES_MAX} bytes", "is it a site file?")
    try:
        text = data.decode()
        found = strict_yaml.load(text)
    except UnicodeDecodeError as error:
        raise BadInput(str(path), "is not UTF-8 text", "look at deploy/slurm/site.example.yaml") from error
    except strict_yaml.NotYaml as error:
        raise BadInput(str(path), f"is no YAML: {error}", "look at deploy/slurm/site.example.yaml") from error
    try:
        return site_of({} if found is None else found)
    except BadInput as error:
        place = strict_yaml.placed(str(path), error.place, strict_yaml.lines(text))
        raise BadInput(place, error.problem, error.remedy) from error


def site_of(found: object) -> Site:
    """What a file says. Raises BadInput."""
    top = Fields(found, "")
    site = Site(
        name=_name(top, "site"),
        provider=_text(top, "provider", "local"),
        executable=_text(top, "serai", "serai"),
        scratch=_text(top, "scratch"),
        output=_text(top, "output"),
        nats=_nats(top.part("nats")),
        commands=_commands(_part(top, "slurm")),
        usual=_profile(_part(top, "usual")),
        gpus=_each(top, "gpus", _gpu),
        partitions=_each(top, "partitions", _partition),
        runtimes=_each(top, "runtimes", _runtime),
        models=_each(top, "models", _profile),
        exclude=tuple(_exclude(part) for part in top.parts("exclude")) if top.has("exclude") else (),
        deployments=_each(top, "deployments", _kept),
    )
    top.done()
    _check(site)
    return site


def _check(site: Site) -> None:
    """What one part says of another."""
    for name, profile in [("usual", site.usual), *((f"models.{name}", one) for name, one in site.models.items())]:
        for field, among, must in (
            ("gpu", site.gpus, True),
            ("runtime", site.runtimes, True),
            ("partition", site.partitions, bool(site.partitions)),
        ):
            value = getattr(profile, field)
            if must and value and value not in among:
                problem = f"there is no `{value}` below `{field}s`"
                raise BadInput(f"{name}.{field}", problem, f"add it, or write one of {_list(among)}")
    for name, kept in site.deployments.items():
        if kept.profile not in site.models:
            problem = f"there is no `{kept.profile}` below `models`"
            raise BadInput(f"deployments.{name}.model", problem, f"add it, or write one of {_list(site.models)}")


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "none yet"


def _each(top: Fields, name: str, read: Callable[[Fields], _T]) -> dict[str, _T]:
    section = _part(top, name)
    found: dict[str, _T] = {}
    for own in section.names():
        if not _NAME.fullmatch(own):
            raise BadInput(section.at(own), "is no name", "write up to 128 letters, digits and . _ - : / @ +")
        found[own] = read(_part(section, own))
    return found


def _part(section: Fields, name: str) -> Fields:
    return section.part(name) if section.has(name) else Fields({}, section.at(name))


def _nats(part: Fields) -> Nats:
    nats = Nats(
        url=_text(part, "url", None),
        nkey_file=_text(part, "nkey_file"),
        creds_file=_text(part, "creds_file"),
        ca_file=_text(part, "ca_file"),
        tools_nkey_file=_text(part, "tools_nkey_file"),
        tools_url=_text(part, "tools_url"),
    )
    part.done()
    for name in ("url", "tools_url"):
        url = getattr(nats, name)
        if (url or name == "url") and not re.fullmatch(r"(nats|tls|ws|wss)://[^\s/@]+(:\d+)?/?", url):
            raise BadInput(
                part.at(name), f"is {url!r}", "write nats://host:4222 or tls://host:4222, without a password"
            )
    if bool(nats.nkey_file) == bool(nats.creds_file):
        raise BadInput(part.at("nkey_file"), "and creds_file: one of them", "write the file with the agents' key")
    return nats


def _commands(part: Fields) -> CommandSettings:
    usual = CommandSettings()
    commands = CommandSettings(
        prefix=tuple(part.texts("prefix")) if part.has("prefix") else (),
        cluster=_text(part, "cluster"),
        timeout_s=part.number("timeout_s", usual.timeout_s, least=1),
        query_every_s=part.number("query_every_s", usual.query_every_s, least=5),
    )
    part.done()
    return commands


def _gpu(part: Fields) -> GpuKind:
    kind = GpuKind(
        gres=_text(part, "gres", "gpu"),
        constraint=_text(part, "constraint"),
        per_node=part.whole("per_node", 0, least=1),
        partition=_text(part, "partition"),
    )
    if not re.fullmatch(r"gpu(:[\w.-]+)?", kind.gres):
        raise BadInput(part.at("gres"), f"is {kind.gres!r}", "write gpu, or gpu:h100; the number is put behind it")
    part.done()
    return kind


def _partition(part: Fields) -> Partition:
    partition = Partition(
        time_max_s=_duration(part, "time_max"),
        preemptible=part.flag("preemptible", False),
        grace_s=part.number("grace_s", Partition().grace_s, least=0),
    )
    part.done()
    return partition


def _runtime(part: Fields) -> Runtime:
    kind = RuntimeKind(part.choice("kind", RuntimeKind))
    runtime = Runtime(
        kind=kind,
        path=_text(part, "path"),
        image=_text(part, "image"),
        command=_text(part, "command"),
        options=_words(part, "options"),
        mounts=_words(part, "mounts"),
        modules=_words(part, "modules"),
    )
    needed = _NEEDS.get(kind)
    if needed and not getattr(runtime, needed):
        raise BadInput(part.at(needed), "is missing", f"a runtime of kind `{kind}` needs it")
    part.done()
    return runtime


def _profile(part: Fields) -> Profile:
    profile = Profile(
        engine=_words(part, "engine"),
        model=_text(part, "model"),
        engine_kind=_text(part, "engine_kind"),
        gpus=part.whole("gpus", least=0) if part.has("gpus") else None,
        gpu=_text(part, "gpu"),
        nodes=part.whole("nodes", 0, least=1),
        time_s=_duration(part, "time"),
        time_least_s=_duration(part, "time_min"),
        cpus=part.whole("cpus", least=1) if part.has("cpus") else None,
        memory=_text(part, "memory"),
        partition=_text(part, "partition"),
        account=_text(part, "account"),
        qos=_text(part, "qos"),
        constraint=_text(part, "constraint"),
        reservation=_text(part, "reservation"),
        runtime=_text(part, "runtime"),
        requeue=part.flag("requeue", True) if part.has("requeue") else None,
        drain_s=part.number("drain_s", least=0) if part.has("drain_s") else None,
        sbatch=_sbatch(part),
        environment=_environment(_part(part, "environment")),
    )
    part.done()
    return profile


SLOTS_MAX = 1000


def _kept(part: Fields) -> Kept:
    usual = Kept(profile="")
    kept = Kept(
        profile=_text(part, "model", None),
        count=part.whole("count", usual.count, least=0),
        time_s=_duration(part, "time"),
        queue_wait_s=part.number("queue_wait_s", usual.queue_wait_s, least=0),
        load_s=part.number("load_s", usual.load_s, least=0),
        load_s_max=part.number("load_s_max", least=1) if part.has("load_s_max") else None,
        idle_s=part.number("idle_s", least=60) if part.has("idle_s") else None,
        leaves_s=part.number("leaves_s", least=0) if part.has("leaves_s") else None,
        scale_to=part.whole("scale_to", 0, least=0),
    )
    part.done()
    if kept.scale_to > SLOTS_MAX:
        raise BadInput(part.at("scale_to"), f"is {kept.scale_to}", f"write at most {SLOTS_MAX}")
    if kept.count > SLOTS_MAX:
        raise BadInput(part.at("count"), f"is {kept.count}", f"write at most {SLOTS_MAX}")
    return kept


def _sbatch(part: Fields) -> tuple[str, ...]:
    words = _words(part, "sbatch")
    for number, word in enumerate(words):
        if not re.fullmatch(r"--?[A-Za-z].*", word):
            place = f"{part.at('sbatch')}[{number}]"
            raise BadInput(place, f"`{word}` is no option", "write option and value together: --mail-type=FAIL")
    return words


def _environment(part: Fields) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in part.names():
        if not _VARIABLE.fullmatch(name):
            raise BadInput(part.at(name), "is no name of a variable", "write letters, digits and _")
        value = part.any(name)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise BadInput(part.at(name), f"is {value!r}", "write text")
        found[name] = _line_of_text(part, name, str(value))
    return found


def _exclude(part: Fields) -> Exclude:
    exclude = Exclude(
        node=_text(part, "node", None), reason=_text(part, "reason", None), until_s=_moment(part, "until")
    )
    if not re.fullmatch(r"[A-Za-z0-9._,\[\]-]+", exclude.node):
        raise BadInput(part.at("node"), f"is {exclude.node!r}", "write a node's name, or several: n[1-3]")
    part.done()
    return exclude


def _moment(part: Fields, name: str) -> float | None:
    """`2026-12-05`, or with a time; UTC unless it says otherwise."""
    if not part.has(name):
        return None
    value = part.any(name)
    try:
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        if not isinstance(value, datetime) and isinstance(value, date):
            value = datetime(value.year, value.month, value.day, tzinfo=UTC)
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        pass
    raise BadInput(part.at(name), f"is {value!r}", "write a day, 2026-12-05, or a moment, 2026-12-05T12:00:00Z")


def _duration(part: Fields, name: str) -> float | None:
    if not part.has(name):
        return None
    value = part.any(name)
    return written_duration_s(part.at(name), value)


def written_duration_s(place: str, value: Any) -> float:
    """A time limit as sbatch takes it, of at least a minute. Raises BadInput."""
    found = duration_s(str(value)) if isinstance(value, str | int) and not isinstance(value, bool) else None
    if found is None or found < 60:
        raise BadInput(place, f"is {value!r}", "write minutes, hours:minutes:seconds or days-hours: 90, 8:00:00, 1-12")
    return found


def _name(part: Fields, name: str) -> str:
    value = part.text(name)
    if not _NAME.fullmatch(value):
        raise BadInput(part.at(name), f"is {value!r}", "write up to 128 letters, digits and . _ -")
    return value


def _text(part: Fields, name: str, default: str | None = "") -> str:
    return _line_of_text(part, name, part.text(name, default))


def _words(part: Fields, name: str) -> tuple[str, ...]:
    """A list of words; numbers may stand without quotes."""
    if not part.has(name):
        return ()
    value = part.any(name)
    if not isinstance(value, list):
        raise BadInput(part.at(name), f"is {value!r}", "write a list of words: [vllm, serve, /models/m]")
    words = []
    for number, word in enumerate(value):
        place = f"{name}[{number}]"
        if isinstance(word, bool) or not isinstance(word, str | int | float) or word == "":
            raise BadInput(part.at(place), f"is {word!r}", "write a word, in quotes if need be")
        words.append(_line_of_text(part, place, str(word)))
    return tuple(words)


def _line_of_text(part: Fields, name: str, value: str) -> str:
    if any(character in value for character in "\n\r\0"):
        raise BadInput(part.at(name), "has several lines", "write one line")
    return value
