"""The W3C traceparent: what is valid comes through, what is not is ignored."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider

from serai.runtime.service import ServiceFailure
from serai.runtime.telemetry import TraceContext, Tracing, set_up_traces

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
contexts = st.builds(
    TraceContext,
    trace_id=st.integers(1, 2**128 - 1),
    span_id=st.integers(1, 2**64 - 1),
    sampled=st.booleans(),
)


@given(contexts)
def test_a_context_comes_back_from_its_header(context: TraceContext) -> None:
    assert TraceContext.parse(context.traceparent) == context


def test_the_header_is_written_as_w3c_says() -> None:
    context = TraceContext(int(TRACE, 16), int(SPAN, 16), sampled=True)
    assert context.traceparent == f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(("flags", "sampled"), [("00", False), ("01", True), ("02", False), ("03", True), ("ff", True)])
def test_only_the_last_bit_of_the_flags_is_the_sampling_decision(flags: str, sampled: bool) -> None:
    context = TraceContext.parse(f"00-{TRACE}-{SPAN}-{flags}")
    assert context is not None
    assert context.sampled is sampled


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    assert TraceContext.parse(f"01-{TRACE}-{SPAN}-01-more") == TraceContext(int(TRACE, 16), int(SPAN, 16), sampled=True)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}0-01",
        f"00-{TRACE}-{SPAN}-1",
        f"0-{TRACE}-{SPAN}-01",
        f"00-{'g' * 32}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-xx",
        f"00_{TRACE}_{SPAN}_01",
        f"00-0x{TRACE[2:]}-{SPAN}-01",
        f"00-{TRACE[:30]}_1-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-+1",
        f"00-{TRACE}-{SPAN}-01-more",
        f"zz-{TRACE}-{SPAN}-01",
    ],
)
def test_what_is_no_traceparent_is_ignored(header: str) -> None:
    assert TraceContext.parse(header) is None


@given(st.text(max_size=60))
def test_any_text_is_a_context_or_ignored(header: str) -> None:
    context = TraceContext.parse(header)
    assert context is None or TraceContext.parse(context.traceparent) == context


@given(contexts)
def test_a_service_without_an_exporter_passes_the_context_on_and_records_nothing(context: TraceContext) -> None:
    assert Tracing("test", None, 1.0).incoming(context.traceparent) == (context, False)
    assert Tracing("test", None, 1.0).incoming(None) == (None, False)


def test_the_callers_decision_wins_and_only_without_one_the_ratio_counts() -> None:
    never, always = Tracing("test", TracerProvider(), 0.0), Tracing("test", TracerProvider(), 1.0)
    yes, no = TraceContext(1, 2, sampled=True), TraceContext(1, 2, sampled=False)
    for tracing in (never, always):
        assert tracing.incoming(yes.traceparent) == (yes, True)
        assert tracing.incoming(no.traceparent) == (no, False)
    assert never.incoming("not a header") == (None, False)
    assert always.incoming(None) == (None, True)


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"SERAI_TRACE_FILE": "{folder}/spans", "SERAI_TRACE_RATIO": "much"}, "SERAI_TRACE_RATIO: 'much' is not a"),
        ({"SERAI_TRACE_FILE": "{folder}/spans", "SERAI_TRACE_RATIO": "1.5"}, "SERAI_TRACE_RATIO: '1.5' is not a"),
        ({"SERAI_TRACE_FILE": "{folder}"}, "SERAI_TRACE_FILE: {folder}: Is a directory"),
    ],
)
def test_variables_that_cannot_be_end_the_service_with_a_line(
    tmp_path: Path, environment: dict[str, str], told: str
) -> None:
    set_up = {name: text.format(folder=tmp_path) for name, text in environment.items()}
    with pytest.raises(ServiceFailure) as failed:
        set_up_traces("ingress", set_up)
    assert failed.value.exit_code == 2
    assert str(failed.value).startswith(told.format(folder=tmp_path))
