"""What callers may demand of what answers, and that in doubt nothing answers."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.contracts.session_record import EngineParallelism, GpuDevice, SessionRecord
from serai.ingress.requirements import (
    HEADER_CHARACTERS_MAX,
    ITEMS_MAX,
    PROVIDERS_HEADER,
    REQUIRE_HEADER,
    BadHeader,
    Providers,
    read_providers,
    read_requirements,
    read_version,
)
from unit.fakes import record_of

KNOWN = record_of(
    "alps-1-0-aa",
    engine="vllm",
    site="alps",
    provider="CSCS",
    fingerprint="f00d",
    context_tokens_max=40_000,
    kv_tokens_max=500_000,
    concurrency_max=64,
    gpus=[GpuDevice(f"u{n}", "NVIDIA H100 80GB HBM3", 85_000_000_000) for n in range(4)],
    parallelism=EngineParallelism(tensor=4),
    labels={"quantization": "none", "engine_version": "0.25.1+cu128", "Owner": "physics", "dtype": "bfloat16"},
)
UNKNOWN = record_of("s1", engine="", site="", provider="")


def meets(record: SessionRecord, header: str) -> bool:
    return read_requirements(header).unmet(record) is None


@pytest.mark.parametrize(
    ("header", "met"),
    [
        ("context>=32768, quantization=none, engine=vllm>=0.25", True),
        ("context >= 32768 ,quantization = none", True),
        ("context>=40000", True),
        ("context>40000", False),
        ("context<=40000", True),
        ("context<40000", False),
        ("context=40000", True),
        ("context==40000", True),
        ("context!=40000", False),
        ("CONTEXT>=1, Engine=VLLM", True),
        ("kv_tokens>=500000, concurrency<=64, gpus=4, gpu_memory_gib>=79", True),
        ("gpu_memory_gib>=80", False),
        ("tensor_parallel=4, pipeline_parallel=1, data_parallel=1", True),
        ("quantization!=fp8", True),
        ("quantization=fp8|awq", False),
        ("quantization=fp8|none", True),
        ("quantization!=fp8|none", False),
        ("engine=sglang", False),
        ("engine=sglang|vllm", True),
        ("engine!=sglang", True),
        ("engine=vllm>=0.25.2", False),
        ("engine=vllm<0.26", True),
        ("engine=vllm==0.25.1", True),
        ("engine=sglang>=0.1", False),
        ("engine_version>=0.9", True),
        ("engine_version>0.25.1", False),
        ("gpu=H100", True),
        ("gpu=nvidia h100 80gb hbm3", True),
        ("gpu=A100|H200", False),
        ("gpu!=H100", False),
        ("dtype=bfloat16, fingerprint=f00d, site=alps, provider=cscs, session=alps-1-0-aa", True),
        ("label.Owner=physics", True),
        ("label.owner=physics", False),
        ("label.Owner!=physics", False),
        ("context>=1, site=jsc", False),
    ],
)
def test_a_session_meets_what_it_tells_of_itself(header: str, met: bool) -> None:
    assert meets(KNOWN, header) is met


FACTS = ["context", "kv_tokens", "concurrency", "gpus", "gpu_memory_gib"]
FACTS += ["tensor_parallel", "pipeline_parallel", "data_parallel"]
WORDS = ["engine", "engine_version", "quantization", "dtype", "fingerprint", "provider", "site", "gpu", "label.x"]


@pytest.mark.parametrize(
    "header",
    [f"{fact}{sign}1" for fact in FACTS for sign in (">=", "<=", "=", "!=", "<", ">")]
    + [f"{word}{sign}1" for word in WORDS for sign in ("=", "!=")]
    + ["engine=vllm>=0.1", "engine_version<9"],
)
def test_what_is_not_known_of_a_session_meets_nothing(header: str) -> None:
    assert not meets(UNKNOWN, header)


def test_gpus_of_two_kinds_are_no_kind_and_the_smallest_counts() -> None:
    mixed = record_of(gpus=[GpuDevice("a", "H100", 80 << 30), GpuDevice("b", "A100", 40 << 30)])
    assert not meets(mixed, "gpu=H100")
    assert not meets(mixed, "gpu!=T4")
    assert not meets(mixed, "gpu_memory_gib>=41")
    assert meets(mixed, "gpu_memory_gib>=40")


def test_one_gpu_is_no_parallelism() -> None:
    assert meets(record_of(gpus=[GpuDevice("a")]), "tensor_parallel=1")


@pytest.mark.parametrize(
    ("header", "named"),
    [
        ("", "is empty"),
        ("  ", "is empty"),
        ("context>=1,,site=x", "empty item"),
        ("context>=1,", "empty item"),
        ("context", "'context' is no requirement"),
        ("context>=", "'context>=' is no requirement"),
        (">=5", "'>=5' is no requirement"),
        ("context=>5", "'context=>5' is no requirement"),
        ("context>=32k", "'32k' is no whole number"),
        ("context>=-1", "'-1' is no whole number"),
        ("context>=1e9", "no whole number"),
        ("context>=" + "9" * 16, "no whole number"),
        ("colour=blue", "asks for 'colour'; known are context, "),
        ("site>=x", "words take = or !=, not >="),
        ("site=a||b", "is no word"),
        ("quantization=;drop", "is no word"),
        ("engine=vllm>=new", "'new' is no version"),
        ("engine_version>=x.y", "'x.y' is no version"),
        ("site=" + "x" * HEADER_CHARACTERS_MAX, f"at most {HEADER_CHARACTERS_MAX}"),
        (",".join(["gpus>=1"] * (ITEMS_MAX + 1)), f"at most {ITEMS_MAX}"),
    ],
)
def test_what_cannot_be_understood_is_refused_with_its_header_and_an_example(header: str, named: str) -> None:
    with pytest.raises(BadHeader) as caught:
        read_requirements(header)
    assert caught.value.header == REQUIRE_HEADER
    assert named in str(caught.value)
    assert str(caught.value).startswith("x-serai-require: ")
    assert str(caught.value).endswith("expected something like `context>=32768, quantization=none, engine=vllm>=0.25`")
    assert "\n" not in str(caught.value)


def test_without_the_header_everybody_fits() -> None:
    assert read_requirements(None).fitting([KNOWN, UNKNOWN]) == [KNOWN, UNKNOWN]


def test_the_message_for_a_request_that_nobody_fits_says_what_is_in_the_way() -> None:
    requirements = read_requirements("gpus>=1, quantization=fp8")
    assert requirements.fitting([KNOWN, UNKNOWN]) == []
    assert requirements.in_the_way([KNOWN, UNKNOWN, KNOWN]) == ["quantization=fp8", "gpus>=1"]


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("0.9", "0.10"),
        ("0.25.0rc1", "0.25"),
        ("0.25", "0.25.1"),
        ("1.9.9", "2"),
        ("0.25.dev3", "0.25.0"),
        ("0.1", "v1"),
    ],
)
def test_versions_compare_by_their_numbers(older: str, newer: str) -> None:
    known = read_version(older), read_version(newer)
    assert known[0] is not None
    assert known[1] is not None
    assert known[0] < known[1]


def test_versions_that_are_the_same() -> None:
    assert read_version("0.25") == read_version("0.25.0") == read_version("v0.25.0+cu128") == read_version("0.25.post1")
    assert [read_version(text) for text in ("", "latest", "0..1", "b6123", "1.2.3.4.5.6.7")] == [None] * 4 + [
        read_version("1.2.3.4.5.6")
    ]


@given(st.text(max_size=60))
def test_any_text_is_understood_or_refused(text: str) -> None:
    for read in (read_requirements, read_providers):
        with contextlib.suppress(BadHeader):
            read(text)


@given(
    st.lists(st.sampled_from(["context>=9", "site=alps", "engine=vllm", "gpus<2", "quantization!=none"]), min_size=1)
)
def test_all_must_be_met(items: list[str]) -> None:
    if len(items) <= ITEMS_MAX:
        assert meets(KNOWN, ",".join(items)) == all(meets(KNOWN, item) for item in items)


# -- providers -------------------------------------------------------------------------------------------------------

HERE, THERE, NAMELESS = (record_of(f"s{n}", provider=name) for n, name in enumerate(("CSCS", "jsc", "")))


@pytest.mark.parametrize(
    ("header", "permitted"),
    [
        (None, [HERE, THERE, NAMELESS]),
        ("cscs", [HERE]),
        ("cscs, JSC", [HERE, THERE]),
        ("-jsc", [HERE]),  # Who does not tell its name may be it.
        ("cscs, jsc, -cscs", [THERE]),
        ("-cscs, - jsc", []),
        ("elsewhere", []),
    ],
)
def test_providers_are_allowed_or_denied(header: str | None, permitted: list[SessionRecord]) -> None:
    assert read_providers(header).permitted([HERE, THERE, NAMELESS]) == permitted


@pytest.mark.parametrize("header", ["", ",", "a,,b", "-", "a, -", "--a", "a/../\x00", "ä"])
def test_providers_that_cannot_be_understood_are_refused(header: str) -> None:
    with pytest.raises(BadHeader, match=r"^x-serai-providers: .*`alps, jsc, -cloud`$") as caught:
        read_providers(header)
    assert caught.value.header == PROVIDERS_HEADER


names = st.frozensets(st.sampled_from(["cscs", "jsc", "elsewhere"]))
lists = st.builds(Providers, st.none() | names, names)


@given(lists, lists)
def test_a_request_never_widens_what_its_key_may_use(key: Providers, request: Providers) -> None:
    both = key.both(request)
    for record in (HERE, THERE, NAMELESS):
        assert both.permit(record) == (key.permit(record) and request.permit(record))
    assert both == request.both(key)
