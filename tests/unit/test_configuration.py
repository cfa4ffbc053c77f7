"""The configuration of an ingress: a file is in effect as it is documented; what is wrong is told to the line."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.cli import main as cli
from serai.ingress.access import Access, StoredKey, write_keys
from serai.ingress.configuration import AliasCycle, Configuration, Interchange, Issuer, Period, Project, flattened
from serai.ingress.configuration_file import BadConfiguration, Configured, read_document
from serai.ingress.limits import Limits, Price
from serai.ingress.patterns import REMEMBERED_MAX, ByPattern
from serai.ingress.queueing import QueueSettings
from serai.ingress.reloading import Reloading
from serai.ingress.requirements import Providers
from serai.ingress.settings import IngressSettings
from serai.runtime.fields import BadInput
from serai.runtime.settings import add_settings

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


def written(folder: Path, text: str) -> Path:
    file = folder / "ingress.yaml"
    file.write_text(text)
    file.chmod(0o644)
    return file


def configured(*flags: str, **environment: str) -> Configured:
    parser = argparse.ArgumentParser()
    add_settings(parser, IngressSettings)
    return Configured(parser.parse_args(flags), environment)


def refused(folder: Path, text: str) -> str:
    """What is said of a file, without the folder."""
    with pytest.raises(BadInput) as wrong:
        read_document(written(folder, text))
    return str(wrong.value).replace(f"{folder}/", "")


# -- what a file says --------------------------------------------------------------------------------------------------


def test_the_documented_file_is_in_effect_as_it_is_explained(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    write_keys(tmp_path / "keys.json", [])
    found = configured(f"--config={written(tmp_path, example)}", "--nats-url=nats://127.0.0.1:4222")
    assert (found.settings.port, found.settings.request_timeout_s) == (8000, 600.0)
    assert found.settings.keys_file == tmp_path / "keys.json"
    assert found.configuration == Configuration(
        projects={
            "default": Project(limits=Limits(requests_per_minute=60)),
            "physics": Project(
                limits=Limits(600, 2_000_000, 100, 500_000_000),
                budget_period=Period.MONTH,
                weight=2.0,
                priority="interactive",
                models=("llama-*", "qwen-72b"),
                providers=Providers(frozenset({"alps"}), frozenset({"cloud"})),
                may_opt_out=True,
            ),
            "teaching": Project(Limits(budget_micros=20_000_000), Period.WEEK, priority="batch"),
        },
        oidc=(
            Issuer(
                "https://login.example.org/realms/hpc",
                ("serai",),
                {"physicists": "physics", "*": "teaching"},
                "groups",
                "preferred_username",
                ("*",),
                algorithms=("RS256", "ES256"),
                leeway_s=30.0,
            ),
        ),
        aliases={
            "gpt-4o": ("llama-70b", "llama-70b-fp8", "qwen-72b"),
            "small": ("llama-8b",),
            "llama-70b": ("llama-70b", "llama-70b-fp8"),
        },
        policies={"llama-*": "prefix-affine", "qwen-72b": "session-sticky"},
        fingerprints={"llama-70b": Interchange.SAME},
        prices={"llama-*": Price(500_000, 1_500_000), "qwen-72b": Price(400_000, 1_200_000)},
        queue=QueueSettings(entries_max=1024, bytes_max=268_435_456, ageing_s=15.0, patience_s=60.0),
    )


def test_an_empty_file_is_one_that_says_nothing(tmp_path: Path) -> None:
    document = read_document(written(tmp_path, "# nothing yet\n"))
    assert (document.settings, document.configuration) == ({}, Configuration())


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(tmp_path: Path) -> None:
    file = written(tmp_path, "anonymous: true\nport: 1\nshutdown_s: 1\nhost: file\npolicy: round-robin\n")
    found = configured(f"--config={file}", "--port=3", SERAI_PORT="2", SERAI_SHUTDOWN_S="2")
    settings = found.settings
    assert (settings.port, settings.shutdown_s, settings.host, settings.body_bytes_max) == (3, 2.0, "file", 33554432)
    assert found.configuration.policy == settings.policy == "round-robin"
    sources = {name: given.source.replace(f"{tmp_path}/", "") for name, given in found.given.items()}
    assert (sources["port"], sources["shutdown_s"]) == ("--port", "SERAI_SHUTDOWN_S")
    assert sources["host"] == "ingress.yaml:4: host"


def test_the_file_may_be_named_by_a_variable(tmp_path: Path) -> None:
    assert configured(SERAI_CONFIG=str(written(tmp_path, "anonymous: true\nport: 77\n"))).settings.port == 77


WRONG = {
    "prt: 1": ":1: prt: is not known; take it out; did you mean `port`?",
    "a: 1\na: 2": ": is not YAML (line 2: key 'a' is written twice); correct it there",
    "a: 1\nb: ]": ": is not YAML (line 2: ",
    "- 1": ": is [1]; write a mapping of names to values",
    "projects:\n  physics:\n    wieght: 1": ":3: projects.physics.wieght: is not known; take it out; "
    "did you mean `weight`?",
    "projects:\n  physics: {weight: 0}": ":2: projects.physics.weight: is 0; write a number above 0",
    "projects:\n  physics: {weight: .nan}": ":2: projects.physics.weight: is nan; write a number",
    "projects:\n  physics: {budget: -1}": ":2: projects.physics.budget: is -1; write 0 or more",
    "projects:\n  physics: {requests_per_minute: 1.5}": ":2: projects.physics.requests_per_minute: is 1.5; "
    "write a whole number",
    "projects:\n  physics: {may_opt_out: 1}": ":2: projects.physics.may_opt_out: is 1; write true or false",
    "projects:\n  physics: {priority: high}": ":2: projects.physics.priority: `high` is not known; choose one "
    "of interactive, normal, batch",
    "projects:\n  physics: {models: []}": ":2: projects.physics.models: is []; write a text, or a list of them",
    "projects:\n  physics: {models: [a, 1]}": ":2: projects.physics.models[1]: is 1; write text",
    "projects:\n  physics: {providers: ['a b!']}": ":2: projects.physics.providers: 'a b!' is no name of a "
    "provider; write [alps, jsc] or [-cloud]",
    "projects:\n  'a b': {}": ":2: projects.a b: is no name of a project; write up to 64 letters, digits and . _ -",
    "projects: [a]": ":1: projects: is ['a']; write a mapping of names to values",
    "projects:\n  1: {}": ":2: projects.1: the name is 1; write text; put it in quotes",
    "aliases:\n  a: b\n  b: [c, a]": ":2: aliases.a: leads back to itself (a → b → a); name models",
    "aliases:\n  a: []": ":2: aliases.a: is []; write a text, or a list of them",
    "policies:\n  m: least-laoded": ":2: policies.m: `least-laoded` is not known; choose one of least-loaded, "
    "round-robin, uniform-random, hardware-weighted, prefix-affine, session-sticky, macro-scheduled; "
    "did you mean `least-loaded`?",
    "fingerprints:\n  m: sam": ":2: fingerprints.m: `sam` is not known; choose one of same, retries, any; "
    "did you mean `same`?",
    "prices:\n  m: {prompt: 1}": ":2: prices.m.output: is missing; write it",
    "prices:\n  m: {prompt: 1, ouput: 2}": ":2: prices.m.output: is missing; write it (there is `ouput`)",
    "queue: {entries_max: -1}": ":1: queue.entries_max: is -1; write 0 or more",
    "queue: {ageing_s: 0}": ":1: queue.ageing_s: is 0; write a number above 0",
    "queue: {classes: 4}": ":1: queue.classes: is not known; take it out",
    "oidc: {}": ":1: oidc: is no list; write a list of mappings",
    "oidc:\n  - {issuer: 'https://i', audience: a}": ":2: oidc[0].projects: is missing; write it",
    "oidc:\n  - {issuer: 'https://i', audience: a, projects: {g: nobody}}": ":2: oidc[0].projects.g: there is "
    "no project `nobody`; write one of default, or add it",
    "oidc:\n  - {issuer: 'http://i', audience: a, projects: {g: default}}": ":2: oidc[0].issuer: would be asked "
    "for its keys without TLS; write https://…",
    "oidc:\n  - {issuer: login, audience: a, projects: {g: default}}": ":2: oidc[0].issuer: is 'login'; write an "
    "address like https://login.example.org/realms/hpc",
    "oidc:\n  - {issuer: 'https://i', audience: a, projects: {g: default}, algorithms: [none]}": ":2: "
    "oidc[0].algorithms[0]: `none` is not taken; choose from RS256, RS384, RS512, PS256, PS384, PS512, ES256, ES384, "
    "ES512, EdDSA",
    "oidc:\n  - {issuer: 'https://i', audience: a, projects: {g: default}, algorithms: HS256}": ":2: "
    "oidc[0].algorithms[0]: `HS256` is not taken; choose from RS256, RS384, RS512, PS256, PS384, PS512, ES256, ES384, "
    "ES512, EdDSA",
}


@pytest.mark.parametrize(("text", "said"), WRONG.items(), ids=range(len(WRONG)))
def test_what_is_wrong_is_said_with_line_and_field_and_what_is_allowed(tmp_path: Path, text: str, said: str) -> None:
    assert refused(tmp_path, text).startswith(f"ingress.yaml{said}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("anonymous: true\nport: abc", "ingress.yaml:2: port: 'abc' is not a whole number"),
        ("anonymous: true\nport: '8000'", "ingress.yaml:2: port: '8000' is not a whole number"),
        ("anonymous: true\nport: true", "ingress.yaml:2: port: True is not a whole number"),
        ("anonymous: true\nlog_json: 'yes'", "ingress.yaml:2: log_json: 'yes' is neither true nor false"),
        ("anonymous: true\nshutdown_s: .inf", "ingress.yaml:2: shutdown_s: inf is not a number"),
        ("anonymous: true\nkeys_file: 3", "ingress.yaml:2: keys_file: 3 is not a path"),
        ("anonymous: true\nport: 70000", "ingress.yaml:2: port 70000: must be between 1 and 65535"),
        ("anonymous: true\npolicy: best", "ingress.yaml:2: policy 'best': must be one of least-loaded, "),
        ("port: 8000", "give --keys-file (make one with `serai keys add NAME --keys-file FILE`) or an `oidc` section"),
        ("anonymous: true\nkeys_file: k", "--keys-file and --anonymous exclude each other"),
        (
            "anonymous: true\noidc: [{issuer: 'https://i', audience: a, projects: {g: default}}]",
            "the `oidc` section of --config and --anonymous exclude each other",
        ),
    ],
)
def test_settings_of_the_wrong_kind_or_range_and_unsafe_ones_are_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadConfiguration) as wrong:
        configured(f"--config={written(tmp_path, text)}")
    assert str(wrong.value).replace(f"{tmp_path}/", "").startswith(said)


def test_oidc_alone_is_enough_to_know_people(tmp_path: Path) -> None:
    text = "oidc: [{issuer: 'http://127.0.0.1:1/', audience: a, projects: {g: default}}]"
    assert configured(f"--config={written(tmp_path, text)}").configuration.oidc[0].issuer == "http://127.0.0.1:1/"


def test_a_file_that_everyone_may_change_is_not_read(tmp_path: Path) -> None:
    file = written(tmp_path, "anonymous: true")
    file.chmod(0o666)
    with pytest.raises(BadInput, match=r"can be changed by everyone on this machine; run `chmod o-w .*ingress\.yaml`"):
        read_document(file)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a: \xff", "is not UTF-8 text"),
        (b"#" * (1024 * 1024 + 1), "has more than 1048576 bytes"),
        (b"[" * 3_000, "is not YAML"),
        (b"a: &x [*x]", "is not known"),
        (b"date: 2026-99-99", "is not YAML"),
    ],
)
def test_a_file_that_is_none_is_told_so(tmp_path: Path, content: bytes, said: str) -> None:
    file = written(tmp_path, "")
    file.write_bytes(content)
    with pytest.raises(BadInput, match=said):
        read_document(file)


def test_a_file_that_is_not_there_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match=r"gone\.yaml: cannot be read \(No such file or directory\)"):
        configured(f"--config={tmp_path / 'gone.yaml'}", "--anonymous")


# -- names and patterns ------------------------------------------------------------------------------------------------


def test_a_written_out_name_goes_before_patterns_and_the_first_pattern_before_others() -> None:
    found = ByPattern({"*": 1, "llama-*": 2, "llama-70b": 3}, 0)
    assert [found.of(name) for name in ("llama-70b", "llama-8b", "qwen")] == [3, 1, 1]
    assert ByPattern({"llama-?b": 1, "[qp]wen": 2}, 0).of("qwen") == 2
    assert [ByPattern({"llama-?b": 1}, 0).of(name) for name in ("llama-8b", "llama-70b", "Llama-8b")] == [1, 0, 0]


def test_names_from_clients_are_not_kept_without_end() -> None:
    found = ByPattern({"a": 1}, 0)
    for number in range(3 * REMEMBERED_MAX):
        found.of(f"m{number}")
    assert len(found._found) <= REMEMBERED_MAX


def test_aliases_of_aliases_mean_their_models_in_order_and_once() -> None:
    aliases = {"best": ("big", "m1"), "big": ("m1", "m2"), "m1": ("m1", "m3")}
    assert flattened(aliases) == {"best": ("m1", "m3", "m2"), "big": ("m1", "m3", "m2"), "m1": ("m1", "m3")}


names = st.sampled_from("abcde")


@given(st.dictionaries(names, st.lists(names, min_size=1, max_size=3).map(tuple), max_size=5))
def test_aliases_end_at_models_or_are_refused_with_a_way_that_is_there(aliases: dict[str, tuple[str, ...]]) -> None:
    try:
        found = flattened(aliases)
    except AliasCycle as error:
        way = str(error).split(" → ")
        assert way[0] == way[-1]
        assert len(way) > 2
        assert all(after in aliases[before] for before, after in pairwise(way))
    else:
        assert found.keys() == aliases.keys()
        for alias, models in found.items():
            assert models
            assert len(set(models)) == len(models)
            assert all(model not in aliases or model in aliases[model] for model in models), (alias, models)


# -- while it runs -----------------------------------------------------------------------------------------------------


def change(file: Path, text: str) -> None:
    fresh = file.with_name("fresh")
    fresh.write_text(text)
    fresh.chmod(0o644)
    os.utime(fresh, ns=(file.stat().st_mtime_ns + 1_000_000, file.stat().st_mtime_ns + 1_000_000))
    fresh.replace(file)


class Stage:
    """An ingress's files, and what it is told of them."""

    def __init__(self, folder: Path, text: str) -> None:
        self.keys = folder / "keys.json"
        write_keys(self.keys, [StoredKey("alice", "0" * 64)])
        self.file = written(folder, text)
        self.configured = configured(f"--config={self.file}", f"--keys-file={self.keys}")
        self.told: list[Configuration] = []
        self.reloading = Reloading(Access(self.keys), self.configured, self.told.append)


def test_a_changed_file_is_taken_over_once(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "aliases: {a: m1}")
    asyncio.run(stage.reloading.look())
    assert stage.told == []
    change(stage.file, "aliases: {a: m2}\npolicy: round-robin")
    asyncio.run(stage.reloading.look())
    asyncio.run(stage.reloading.look())
    assert stage.told == [Configuration(aliases={"a": ("m2",)}, policy="round-robin")]


def test_a_wrong_file_changes_nothing_and_is_shown_until_it_is_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = Stage(tmp_path, "aliases: {a: m1}")
    before = stage.configured.configuration
    for _ in range(3):
        change(stage.file, "aliases: {a: 1")
        asyncio.run(stage.reloading.look())
        assert (stage.told, stage.reloading.wrong) == ([], ["configuration"])
        assert stage.configured.configuration == before
    assert capsys.readouterr().out.count("configuration.wrong") == 1
    change(stage.file, "aliases: {a: m3}")
    asyncio.run(stage.reloading.look())
    assert (stage.told, stage.reloading.wrong) == ([Configuration(aliases={"a": ("m3",)})], [])


def test_a_file_that_goes_and_comes_back_unchanged_is_right_again(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "aliases: {a: m1}")
    hidden = stage.file.rename(tmp_path / "hidden")
    asyncio.run(stage.reloading.look())
    assert stage.reloading.wrong == ["configuration"]
    hidden.rename(stage.file)
    asyncio.run(stage.reloading.look())
    assert stage.reloading.wrong == []


def test_changed_keys_are_taken_over_beside_the_configuration(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "aliases: {a: m1}")
    stage.keys.write_text("[")
    asyncio.run(stage.reloading.look())
    assert (stage.told, stage.reloading.wrong) == ([], ["keys"])
    write_keys(stage.keys, [StoredKey("bob", "1" * 64, requests_per_minute=3)])
    asyncio.run(stage.reloading.look())
    assert (stage.told, stage.reloading.wrong) == ([stage.configured.configuration], [])


def test_settings_that_cannot_change_now_are_named(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "port: 8000")
    change(stage.file, "port: 9000\nsilence_timeout_s: 9\npolicy: round-robin")
    assert stage.configured.refresh()
    assert stage.configured.needs_restart() == ["port", "silence_timeout_s"]
    assert stage.configured.settings.port == 8000
    assert stage.configured.configuration == replace(Configuration(), policy="round-robin")


# -- by command --------------------------------------------------------------------------------------------------------


def serai(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(words)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_a_file_is_checked_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys.json"
    write_keys(keys, [StoredKey("alice", "0" * 64, project="nowhere")])
    file = str(written(tmp_path, "keys_file: keys.json\nprojects: {physics: {budget: 1}}\naliases: {a: b, c: d}"))
    code, shown, complaint = serai(capsys, "config", "check", file)
    assert (code, complaint) == (0, "")
    assert shown.splitlines() == [
        f"{file} is right: 2 projects, 0 issuers, 2 aliases, 0 policies, 0 prices; 1 setting",
        "warning: key `alice` has the project `nowhere`, which is not configured; its holder would be refused",
    ]
    code, shown, _ = serai(capsys, "config", "check", file, "--json")
    assert json.loads(shown)["configuration"]["projects"]["physics"]["limits"]["budget_micros"] == 1_000_000
    keys.write_text("[")
    assert serai(capsys, "config", "check", file)[::2][0] == 2


def test_a_wrong_file_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(written(tmp_path, "anonymous: true\npolcy: round-robin"))
    said = f"serai config check: {file}:2: polcy: is not known; take it out; did you mean `policy`?\n"
    assert serai(capsys, "config", "check", file) == (2, "", said)


def test_settings_are_shown_with_where_they_come_from_and_without_secrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERAI_NATS_URL", "nats://me:secret@127.0.0.1:4222")
    file = written(tmp_path, "anonymous: true\nport: 81\naliases: {a: b}")
    code, shown, _ = serai(capsys, "config", "show", f"--config={file}", "--host=::1")
    assert code == 0
    assert {
        "nats_url = nats://***@127.0.0.1:4222   (SERAI_NATS_URL)",
        f"port = 81   ({file}:2: port)",
        "host = ::1   (--host)",
        "keys_file = none   (default)",
        'aliases: {"a": ["b"]}',
    } <= set(shown.splitlines())
    assert "secret" not in shown
