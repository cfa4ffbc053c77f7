"""The configuration file of an ingress (`--config`), read strictly: docs/configuration.md has all that may stand in it.

Its first level holds settings, by the names of their flags, and the sections of `Configuration`. Flags win over
environment variables, and these over the file.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from serai.ingress.configuration import (
    DEFAULT_PROJECT,
    AliasCycle,
    Configuration,
    Interchange,
    Issuer,
    Period,
    Project,
    flattened,
)
from serai.ingress.limits import Limits, Price
from serai.ingress.queueing import CLASSES, QueueSettings
from serai.ingress.requirements import BadHeader, Providers, read_providers
from serai.ingress.routing import POLICIES
from serai.ingress.settings import IngressSettings
from serai.runtime import strict_yaml
from serai.runtime.fields import BadInput, Fields
from serai.runtime.settings import BadSettings, Given, given_settings, setting_names, settings_of

FILE_BYTES_MAX = 1024 * 1024
ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
"""Of which only the issuer can sign. With `HS…` whoever can check a token could make one."""
CHANGEABLE = frozenset({"policy"})
"""Settings that take effect while the ingress runs."""
_PROJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PATHS = frozenset({"keys_file", "nats_nkey_file", "nats_creds_file"})


class BadConfiguration(Exception):
    """What is given does not make a configuration; one line that says where, what is wrong, and what to do."""


@dataclass(frozen=True, slots=True)
class Document:
    """What one file says."""

    settings: Mapping[str, Given]
    configuration: Configuration


class Configured:
    """Flags, environment and file, joined. Keeps what it has when the file has become wrong."""

    def __init__(self, arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> None:
        """Raises BadConfiguration."""
        self._arguments = arguments
        self._environment = environment
        given = given_settings(IngressSettings, arguments, environment)
        self._path = Path(given["config"].value).expanduser() if "config" in given else None
        self._read_at: tuple[int, int, int] | None = None
        self.settings, self.configuration = self._read()

    def refresh(self) -> bool:
        """Reads the file again when it has changed; True then. Raises BadConfiguration, once for each change."""
        if self._path is None or self._stamp() == self._read_at:
            return False
        _, self.configuration = self._read()
        return True

    def needs_restart(self) -> list[str]:
        """Settings that the file has now otherwise than they are in effect."""
        now = self._settings_now
        names = [name for name in setting_names(IngressSettings) if name not in CHANGEABLE]
        return [name for name in names if getattr(now, name) != getattr(self.settings, name)]

    def _read(self) -> tuple[IngressSettings, Configuration]:
        self._read_at = self._stamp()
        try:
            document = Document({}, Configuration()) if self._path is None else read_document(self._path)
            self.given = given_settings(IngressSettings, self._arguments, self._environment, document.settings)
            self._settings_now = settings_of(IngressSettings, self.given)
            refuse_unsafe(self._settings_now, document.configuration)
        except (BadInput, BadSettings) as error:
            raise BadConfiguration(str(error)) from error
        return self._settings_now, replace(document.configuration, policy=self._settings_now.policy)

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            facts = self._path.stat() if self._path is not None else None
        except OSError:
            return None  # Reading it will say why.
        return (facts.st_mtime_ns, facts.st_size, facts.st_ino) if facts is not None else None


def refuse_unsafe(settings: IngressSettings, configuration: Configuration) -> None:
    """Raises BadSettings when the ingress would serve people whom nobody has named, or it is not clear whom."""
    named = settings.keys_file is not None or bool(configuration.oidc)
    if not named and not settings.anonymous:
        raise BadSettings(
            "give --keys-file (make one with `serai keys add NAME --keys-file FILE`) or an `oidc` section in the file "
            "of --config, or say --anonymous to serve everyone who reaches the port"
        )
    if named and settings.anonymous:
        other = "--keys-file" if settings.keys_file is not None else "the `oidc` section of --config"
        raise BadSettings(f"{other} and --anonymous exclude each other")


def read_document(path: Path) -> Document:
    """Raises BadInput, its place beginning with the file and the line."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
            others_may_write = bool(os.fstat(file.fileno()).st_mode & 0o002)
        text = content.decode()
    except OSError as error:
        raise BadInput(str(path), f"cannot be read ({error.strerror})", "name a file with --config") from error
    except UnicodeDecodeError as error:
        raise BadInput(str(path), "is not UTF-8 text", "save it as UTF-8") from error
    if len(content) > FILE_BYTES_MAX:
        raise BadInput(str(path), f"has more than {FILE_BYTES_MAX} bytes", "name a file with --config")
    if others_may_write:
        raise BadInput(str(path), "can be changed by everyone on this machine", f"run `chmod o-w {path}`")
    try:
        found = strict_yaml.load(text)
    except strict_yaml.NotYaml as error:
        raise BadInput(str(path), f"is not YAML ({error})", "correct it there") from error
    try:
        return _document(Fields({} if found is None else found, ""), path, strict_yaml.lines(text))
    except BadInput as error:
        place = strict_yaml.placed(str(path), error.place, strict_yaml.lines(text))
        raise BadInput(place, error.problem, error.remedy) from error


def _document(top: Fields, path: Path, lines: Mapping[str, int]) -> Document:
    written = {
        name: Given(_from_here(name, top.any(name), path), strict_yaml.placed(str(path), name, lines), in_file=True)
        for name in setting_names(IngressSettings)
        if name != "config" and top.has(name)
    }
    projects = {DEFAULT_PROJECT: Project()} | _each(top, "projects", _project)
    configuration = Configuration(
        projects=projects,
        oidc=tuple(_issuer(part, projects) for part in top.parts("oidc")) if top.has("oidc") else (),
        aliases=_aliases(top),
        policies=_each(top, "policies", lambda part, model: part.choice(model, list(POLICIES))),
        fingerprints=_each(top, "fingerprints", lambda part, model: Interchange(part.choice(model, Interchange))),
        prices=_each(top, "prices", _price),
        queue=_queue(top),
    )
    top.done()
    return Document(written, configuration)


def _from_here(name: str, value: Any, path: Path) -> Any:
    """A path is meant from where the file is, not from where the process was started."""
    if name in _PATHS and isinstance(value, str):
        return str(path.absolute().parent / Path(value).expanduser())
    return value


def _each(top: Fields, name: str, read: Callable[[Fields, str], Any]) -> dict[str, Any]:
    """A section whose names are the operator's own."""
    if not top.has(name):
        return {}
    section = top.part(name)
    return {own: read(section, own) for own in section.names()}


def _part(section: Fields, name: str) -> Fields:
    """A part that may be empty."""
    return section.part(name) if section.has(name) else Fields({}, section.at(name))


def _project(section: Fields, name: str) -> Project:
    if not _PROJECT.fullmatch(name):
        raise BadInput(section.at(name), "is no name of a project", "write up to 64 letters, digits and . _ -")
    part = _part(section, name)
    usual = Project()
    project = Project(
        limits=Limits(
            requests_per_minute=_whole(part, "requests_per_minute"),
            tokens_per_minute=_whole(part, "tokens_per_minute"),
            concurrent_max=_whole(part, "concurrent_max"),
            budget_micros=_micros(part, "budget") if part.has("budget") else None,
        ),
        budget_period=Period(part.choice("budget_period", Period))
        if part.has("budget_period")
        else usual.budget_period,
        weight=_above_zero(part, "weight", usual.weight),
        priority=part.choice("priority", list(CLASSES)) if part.has("priority") else usual.priority,
        models=_models(part),
        providers=_providers(part),
        may_opt_out=part.flag("may_opt_out", usual.may_opt_out),
    )
    part.done()
    return project


def _issuer(part: Fields, projects: Mapping[str, Project]) -> Issuer:
    usual = Issuer("", (), {})
    section = part.part("projects")
    groups = {group: section.text(group) for group in section.names()}
    for group, project in groups.items():
        if project not in projects:
            known = ", ".join(projects)
            raise BadInput(section.at(group), f"there is no project `{project}`", f"write one of {known}, or add it")
    if not groups:
        raise BadInput(section.place, "is empty", 'write {GROUP: PROJECT}, or {"*": PROJECT} for everyone')
    algorithms = tuple(part.texts("algorithms")) if part.has("algorithms") else usual.algorithms
    for number, name in enumerate(algorithms):
        if name not in ALGORITHMS:
            place = f"{part.at('algorithms')}[{number}]"
            raise BadInput(place, f"`{name}` is not taken", f"choose from {', '.join(ALGORITHMS)}")
    issuer = Issuer(
        issuer=_issuer_url(part),
        audience=tuple(part.texts("audience")),
        projects=groups,
        groups_claim=part.text("groups_claim", usual.groups_claim),
        name_claim=part.text("name_claim", usual.name_claim),
        models=_models(part),
        providers=_providers(part),
        algorithms=algorithms,
        leeway_s=part.number("leeway_s", usual.leeway_s, least=0),
    )
    part.done()
    return issuer


def _issuer_url(part: Fields) -> str:
    url = part.text("issuer")
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        host = ""
    if not host or parts.scheme not in ("https", "http") or parts.query or parts.fragment:
        raise BadInput(part.at("issuer"), f"is {url!r}", "write an address like https://login.example.org/realms/hpc")
    if parts.scheme == "http" and not _is_loopback(host):
        raise BadInput(part.at("issuer"), "would be asked for its keys without TLS", "write https://…")
    return url


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _aliases(top: Fields) -> dict[str, tuple[str, ...]]:
    written = _each(top, "aliases", lambda part, alias: tuple(part.texts(alias)))
    try:
        return flattened(written)
    except AliasCycle as error:
        first = str(error).partition(" ")[0]
        raise BadInput(f"aliases.{first}", f"leads back to itself ({error})", "name models") from None


def _price(section: Fields, model: str) -> Price:
    part = section.part(model)
    price = Price(_micros(part, "prompt"), _micros(part, "output"))
    part.done()
    return price


def _queue(top: Fields) -> QueueSettings:
    part = _part(top, "queue")
    given: dict[str, Any] = {}
    for item in fields(QueueSettings):
        if item.name == "classes" or not part.has(item.name):
            continue
        whole = isinstance(item.default, int)
        given[item.name] = part.whole(item.name, least=0) if whole else _above_zero(part, item.name, 1.0)
    part.done()
    return replace(QueueSettings(), **given)


def _models(part: Fields) -> tuple[str, ...] | None:
    return tuple(part.texts("models")) if part.has("models") else None


def _providers(part: Fields) -> Providers:
    if not part.has("providers"):
        return Providers()
    try:
        return read_providers(", ".join(part.texts("providers")))
    except BadHeader as error:
        problem = str(error).partition(": ")[2].partition(";")[0]
        raise BadInput(part.at("providers"), problem, "write [alps, jsc] or [-cloud]") from None


def _whole(part: Fields, name: str) -> int | None:
    return part.whole(name, least=0) if part.has(name) else None


def _micros(part: Fields, name: str) -> int:
    return round(part.number(name, least=0) * 1_000_000)


def _above_zero(part: Fields, name: str, default: float) -> float:
    value = part.number(name, default)
    if value <= 0:
        raise BadInput(part.at(name), f"is {value:g}", "write a number above 0")
    return value
