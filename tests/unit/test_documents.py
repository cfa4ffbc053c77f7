"""What the pages name is there: pages, files, make's targets, subjects of NATS, metrics, raw results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from serai.cli import embedded_nats
from serai.contracts import subjects
from serai.contracts.subjects import Subject
from serai.ingress import requirements
from serai.ingress.routing import POLICIES
from serai.ledger import schema
from unit.documents import GUIDES, PAGES, ROOT, blocks_of, name_of, prose_of, words_of

SOURCES = [ROOT / name for name in ("services", "shared", "simulator", "engines", "tests", "deploy", "docs", "bench")]
RESULTS = ROOT / "bench" / "results"
NATS_PAGE = (ROOT / "docs" / "nats.md").read_text()

each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)
each_guide = pytest.mark.parametrize("page", GUIDES, ids=name_of)


# -- links and files ---------------------------------------------------------------------------------------------------

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


@each_page
def test_every_link_within_the_project_leads_somewhere(page: Path) -> None:
    text = prose_of(page.read_text())
    links = [link for link in _LINK.findall(text) if not re.match(r"[a-z]+:", link)]
    assert [link for link in links if not _leads_somewhere(page, link)] == []


def _leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not anchor or anchor in _anchors(target))


@cache
def _anchors(page: Path) -> frozenset[str]:
    """As GitHub makes them: lower case, no punctuation, hyphens for spaces."""
    headings = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text) for text in _HEADING.findall(prose_of(page.read_text()))]
    return frozenset(re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-") for text in headings)


@cache
def _files() -> frozenset[str]:
    """Of the project, as paths from its root; each end of a path, too."""
    paths = [path for source in SOURCES for path in source.rglob("*") if "__pycache__" not in path.parts]
    paths += [path for path in ROOT.iterdir() if path.is_file()]
    parts = [path.relative_to(ROOT).parts for path in paths]
    return frozenset("/".join(of[start:]) for of in parts for start in range(len(of)))


_FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)*\.(?:py|md|sbatch|sh)")


@each_guide
def test_every_file_that_a_guide_names_is_there(page: Path) -> None:
    named = {word.partition("::")[0] for word in words_of(page.read_text())}
    files = sorted(word for word in named if _FILE.fullmatch(word) and "test_x" not in word)
    assert [file for file in files if file not in _files()] == []


@each_page
def test_no_page_names_a_folder_of_somebody_s_machine(page: Path) -> None:
    assert re.findall(r"(?<!\w)/(?:work|root|home(?!/me/)|tmp)/\S*", page.read_text()) == []


# -- make --------------------------------------------------------------------------------------------------------------


@each_page
def test_every_target_of_make_that_is_named_is_there(page: Path) -> None:
    text = page.read_text()
    pieces = [*words_of(text), *[line for _, body in blocks_of(text) for line in body.splitlines()]]
    named = {target for piece in pieces for target in re.findall(r"^(?:\w+=\S+ )*make ([a-z][\w-]*)", piece)}
    assert sorted(named - _make_targets()) == []


def test_make_help_lists_what_people_call() -> None:
    listed = set(re.findall(r'echo "make ([\w-]+) ', (ROOT / "Makefile").read_text()))
    assert listed - _make_targets() == set()


@cache
def _make_targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


# -- raw results -------------------------------------------------------------------------------------------------------


@each_page
def test_every_raw_result_that_is_named_is_there(page: Path) -> None:
    named = set(re.findall(r"bench/results/[\w./-]*\w", page.read_text()))
    assert sorted(path for path in named if not (ROOT / path).exists()) == []


def test_no_raw_result_has_a_path_of_the_machine_that_made_it() -> None:
    """Those of the programs that were measured say nothing to anybody else."""
    found = {name_of(file): sorted(_machine_paths(file))[:3] for file in RESULTS.rglob("*") if file.is_file()}
    assert {file: paths for file, paths in found.items() if paths} == {}


def _machine_paths(file: Path) -> set[str]:
    return set(re.findall(r"(?<![\w.])/(?:work|root|home|tmp)/[^\s\"']*", file.read_text(errors="replace")))


def test_every_raw_result_can_be_read() -> None:
    wrong = []
    for file in RESULTS.rglob("*.json"):
        try:
            json.loads(file.read_text())
        except ValueError as error:
            wrong.append(f"{name_of(file)}: {error}")
    assert wrong == []


# -- subjects and buckets of NATS --------------------------------------------------------------------------------------

_SUBJECTS = {one for one in vars(subjects).values() if isinstance(one, Subject)}
_BUCKETS = {value for name, value in vars(subjects).items() if name.endswith("_BUCKET") or name == "USAGE_STREAM"}


def test_the_table_of_subjects_has_each_of_them() -> None:
    table = set(re.findall(r"^\| `([a-z.]+)\.<\w+>`", subjects.__doc__ or "", re.MULTILINE))
    assert table == {one.hop for one in _SUBJECTS}


@each_guide
def test_every_subject_that_is_named_is_one(page: Path) -> None:
    named = {word for word in words_of(page.read_text()) if re.fullmatch(r"[a-z]+(?:\.[a-z]+)?\.<[a-z]+>", word)}
    assert sorted(word for word in named if word.rpartition(".")[0] not in {one.hop for one in _SUBJECTS}) == []


def test_what_the_documented_server_permits_is_what_serai_up_permits() -> None:
    """Of an agent, and of a site that dials in; the other roles are copied from `nats.conf`."""
    lists = [re.findall(r'"([^"]+)"', inner) for inner in re.findall(r"allow: \[(.*?)\]", NATS_PAGE)]
    agent_publish, agent_subscribe, system, site_publish, site_subscribe = lists
    assert (agent_publish, agent_subscribe) == embedded_nats._ROLES["agent"]
    assert system == ["$SYS.ACCOUNT.*.DISCONNECT", "_INBOX_system.>"]
    assert site_publish == site_subscribe
    needed = embedded_nats._between_sites()
    assert [subject for subject in needed if not any(_covers(said, subject) for said in site_publish)] == []
    assert [said for said in site_publish if not any(_covers(said, subject) for subject in needed)] == []


def _covers(pattern: str, subject: str) -> bool:
    """Whether `pattern` permits all that `subject` does: `macro.*.*` and `macro.wish.*`."""
    pairs = list(zip(pattern.split("."), subject.split("."), strict=False))
    return pattern.count(".") == subject.count(".") and all(said in ("*", needed) for said, needed in pairs)


def test_the_page_on_nats_names_each_role() -> None:
    comments = re.findall(r"# … (.*?)(?:, as above|: as in)", NATS_PAGE)
    assert [set(comment.split(", ")) for comment in comments] == [
        set(embedded_nats._ROLES) - {"agent"},
        set(embedded_nats._ROLES),
    ]


def test_the_page_on_nats_names_each_bucket_and_stream() -> None:
    assert {name for name in words_of(NATS_PAGE) if re.fullmatch(r"serai_[a-z]+", name)} == _BUCKETS


# -- metrics -----------------------------------------------------------------------------------------------------------

_METRIC = re.compile(r"\bserai_(?:agent|bus|ingress|launcher|ledger|macro|placer|pool|refused|registry)_[a-z_]*[a-z]")
_QUOTED = re.compile(r'^[^#\n]*"(serai_[a-z_]+)"', re.MULTILINE)
_SUFFIX = re.compile(r"_(?:total|bucket|count|sum)$")


@cache
def _metrics() -> frozenset[str]:
    """Each that a service has, without the ending that counters get."""
    sources = [*(ROOT / "services").rglob("*.py"), *(ROOT / "shared").rglob("*.py")]
    named = [name for source in sources for name in _QUOTED.findall(source.read_text())]
    return frozenset(_SUFFIX.sub("", name) for name in named if _METRIC.fullmatch(name)) - _BUCKETS


def _named_metrics(text: str) -> Iterator[str]:
    for name in _METRIC.findall(text):
        yield _SUFFIX.sub("", name)


@each_page
def test_every_metric_that_is_named_is_there(page: Path) -> None:
    assert sorted(set(_named_metrics(page.read_text())) - _metrics()) == []


def test_every_metric_is_named_in_a_guide() -> None:
    named = {name for page in GUIDES for name in _named_metrics(page.read_text())}
    assert sorted(_metrics() - named) == []


# -- log events, headers, error codes ----------------------------------------------------------------------------------


@cache
def _program_text() -> str:
    """Of all that runs in a service."""
    files = [file for name in ("services", "shared") for file in (ROOT / name).rglob("*.py")]
    return "\n".join(file.read_text() for file in files)


_EVENT = re.compile(r"(?:agent|bus|engine|gpu|inference|launcher|macro|registry|session)\.[a-z_]+")
_NO_EVENTS = {"registry.age_s"}


@each_guide
def test_every_event_of_a_log_that_is_named_is_one(page: Path) -> None:
    named = {word for word in words_of(page.read_text()) if _EVENT.fullmatch(word)} - _NO_EVENTS
    assert sorted(event for event in named if f'"{event}"' not in _program_text()) == []


@each_guide
def test_every_header_that_is_named_is_read_or_written(page: Path) -> None:
    words = " ".join(words_of(page.read_text()))
    named = set(re.findall(r"\bx-(?:serai|slo|session|request|priority)[a-z-]*[a-z]", words))
    assert sorted(header for header in named if header not in _program_text()) == []


@pytest.mark.parametrize("name", ["api.md", "request-path.md", "queueing-and-limits.md", "configuration.md"])
def test_every_error_code_and_field_in_a_table_is_one(name: str) -> None:
    rows = [line.split("|") for line in (ROOT / "docs" / name).read_text().splitlines() if line.startswith("|")]
    named = {word for row in rows for cell in row for word in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", cell)}
    known = set(re.findall(r"[a-z_]+", _program_text()))
    assert sorted(named - known) == []


# -- lists that are whole ----------------------------------------------------------------------------------------------


def _page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def test_the_page_on_usage_has_each_field_of_a_record() -> None:
    section = _page("usage.md").partition("## The record")[2].partition("Which requests have one")[0]
    firsts = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    assert {name for cell in firsts for name in re.findall(r"`(\w+)`", cell)} == set(schema.COLUMNS)


def test_the_page_on_operating_has_each_thing_that_a_request_may_demand() -> None:
    (row,) = [line for line in _page("operating.md").splitlines() if line.startswith("| `x-serai-require")]
    named = set(re.findall(r"`([a-z_]+)`", row.partition("Numbers:")[2]))
    assert named == {*requirements._NUMBERS, *requirements._WORDS}


def test_the_page_on_configuration_has_each_routing_policy() -> None:
    section = _page("configuration.md").partition("## Routing policies")[2].partition("\n## ")[0]
    firsts = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    assert {name for cell in firsts for name in re.findall(r"`([\w-]+)`", cell)} == set(POLICIES)


def test_contributing_names_each_room_of_the_house() -> None:
    named = {word for word in words_of((ROOT / "CONTRIBUTING.md").read_text()) if re.fullmatch(r"[a-z_]+", word)}
    rooms = {
        path.name
        for source in ("services", "shared", "simulator")
        for path in (ROOT / source / "serai").iterdir()
        if path.is_dir() and path.name != "__pycache__"
    }
    assert sorted(rooms - named) == []
