"""Each call is recorded once, before the last bytes of its answer; anonymously where that was asked for and allowed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from serai.contracts.codec import decode_lines
from serai.contracts.inference import FailureCode, FrameKind
from serai.contracts.session_record import GpuDevice
from serai.contracts.usage import Outcome, UsageRecord
from serai.ingress import metrics
from serai.ingress.access import Access
from serai.ingress.accounting import is_tracked
from serai.ingress.caller import Caller
from serai.ingress.http_server import HttpServer, HttpStream
from serai.ingress.openai_format import DONE, ApiError
from serai.ingress.service import Ingress
from serai.ingress.settings import IngressSettings
from serai.ingress.usage_sender import UsageSender
from serai.ingress.usage_spool import MemorySpool
from serai.runtime.telemetry import Tracing
from unit.fakes import record_of
from unit.raw_http import Client, answer, answer_head, connected, post
from unit.test_calls import ASKED, EVENT, AgentsBus, Part, data, end, error, head, whole

USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":1}}\n\n'
STREAM = [head(), data(EVENT), data(USAGE), data(DONE), end(len(EVENT + USAGE + DONE))]
PLAIN = b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}}'


class Kept:
    """An ingress whose records stay where they were written."""

    def __init__(self, says: dict[str, list[Part] | None]) -> None:
        self.bus = AgentsBus(says)
        self.spool = MemorySpool()
        self.client: Client = None  # type: ignore[assignment]

    @property
    def records(self) -> list[UsageRecord]:
        return decode_lines(UsageRecord, self.spool.read(1_000_000))[0]

    async def ask(self, body: bytes = ASKED, *headers: str, path: str = "/v1/completions") -> tuple[int, Any, bytes]:
        self.client[1].write(post(body, *headers, path=path))
        return await answer(self.client[0])


def run(says: dict[str, list[Part] | None], talk: Callable[[Kept], Awaitable[None]], **metadata: Any) -> None:
    async def main() -> None:
        kept = Kept(says)

        async def nowhere(payload: bytes, message_id: str) -> None:
            raise AssertionError("the sender was not started")

        ingress = Ingress(
            IngressSettings(anonymous=True),
            kept.bus,
            Access(None, anonymous=True),
            Tracing("test", None, 0.0),
            usage=UsageSender(kept.spool, nowhere),
        )
        await ingress._client.start()
        for session in says:
            ingress.replica.merge(record_of(session, **metadata), time.monotonic(), heard=True)
        server = HttpServer(ingress.on_http, body_bytes_max=10_000)
        await server.start("127.0.0.1", 0)
        kept.client = await connected(server)
        try:
            async with asyncio.timeout(10):
                await talk(kept)
        finally:
            kept.client[1].close()
            await server.aclose()

    asyncio.run(main())


def test_a_stream_whose_client_did_not_ask_for_usage_is_counted_all_the_same() -> None:
    async def talk(kept: Kept) -> None:
        status, _, body = await kept.ask()
        assert (status, body) == (200, EVENT + DONE)
        (record,) = kept.records
        assert (record.prompt_tokens, record.output_tokens, record.tokens_estimated) == (7, 1, False)
        assert (record.outcome, record.stream, record.model, record.attempts) == (Outcome.COMPLETE, True, "m", 1)
        sent = b"".join(
            frame.payload for one in kept.bus.published for frame in one.frames if frame.kind == FrameKind.BODY
        )
        assert sent == b'{"stream_options":{"include_usage":true},' + ASKED[1:]

    run({"s1": STREAM}, talk)


def test_a_client_that_asks_for_usage_gets_all_events_as_they_came() -> None:
    async def talk(kept: Kept) -> None:
        _, _, body = await kept.ask(b'{"model":"m","stream":true,"stream_options":{"include_usage":true}}')
        assert body == EVENT + USAGE + DONE
        assert kept.records[0].output_tokens == 1

    run({"s1": STREAM}, talk)


@pytest.mark.parametrize("streamed", [False, True])
def test_the_record_is_written_before_the_answers_last_bytes(streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    async def talk(kept: Kept) -> None:
        ends = HttpStream.end

        def noted(self: HttpStream, data: bytes = b"") -> None:
            seen.append(len(kept.records))
            ends(self, data)

        monkeypatch.setattr(HttpStream, "end", noted)
        if streamed:
            await kept.ask()
            assert seen == [1]
        else:
            await kept.ask(b'{"model":"m"}')
            (record,) = kept.records
            assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (7, 4, 3)

    run({"s1": STREAM if streamed else whole(200, PLAIN)}, talk)


def test_a_stream_that_breaks_is_guessed_by_its_events() -> None:
    async def talk(kept: Kept) -> None:
        await kept.ask()
        (record,) = kept.records
        assert (record.outcome, record.status, record.error_code) == (Outcome.TRUNCATED, 200, "engine_cut")
        assert (record.output_tokens, record.tokens_estimated) == (3, True)
        assert record.prompt_tokens == -(-len(ASKED) // 3)

    run({"s1": [head(), *[data(EVENT)] * 3, error(FailureCode.ENGINE_CUT)]}, talk)


def test_a_client_that_leaves_is_recorded_as_such() -> None:
    async def talk(kept: Kept) -> None:
        kept.client[1].write(post(ASKED, path="/v1/completions"))
        await answer_head(kept.client[0])
        kept.client[1].close()
        await kept.bus.cancelled.get()
        while not kept.records:
            await asyncio.sleep(0)
        (record,) = kept.records
        assert (record.outcome, record.status, record.tokens_estimated) == (Outcome.CANCELLED, 499, True)

    run({"s1": [head(), data(EVENT)]}, talk)


def test_refusals_are_recorded_and_name_what_was_asked_for() -> None:
    async def talk(kept: Kept) -> None:
        assert (await kept.ask(b'{"model":"other"}'))[0] == 503
        assert (await kept.ask(b"{"))[0] == 400
        unknown, unreadable = kept.records
        assert (unknown.outcome, unknown.status, unknown.error_code) == (Outcome.REFUSED, 503, "no_session")
        assert (unknown.model, unknown.model_asked, unknown.attempts) == ("", "other", 0)
        assert (unreadable.status, unreadable.error_code, unreadable.endpoint) == (
            400,
            "invalid_json",
            "/v1/completions",
        )
        assert unknown.id != unreadable.id

    run({"s1": STREAM}, talk)


def test_a_translated_request_is_recorded_as_it_was_asked() -> None:
    async def talk(kept: Kept) -> None:
        body = b'{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"hello"}]}'
        await kept.ask(body, path="/v1/messages")
        await kept.ask(b'{"model":"m"}', path="/v1/messages")
        assert [record.endpoint for record in kept.records] == ["/v1/messages"] * 2

    run({"s1": whole(200, PLAIN)}, talk)


def test_every_answer_names_its_request() -> None:
    async def talk(kept: Kept) -> None:
        for body, path in ((b"{", "/v1/completions"), (b"", "/v1/nothing"), (b"{", "/v1/messages")):
            made = (await kept.ask(body, path=path))[1]["x-request-id"]
            named = (await kept.ask(body, "x-request-id: mine", path=path))[1]["x-request-id"]
            assert (len(made), named) == (26, "mine")

    run({"s1": STREAM}, talk)


def test_an_engines_own_error_has_no_tokens() -> None:
    async def talk(kept: Kept) -> None:
        await kept.ask(b'{"model":"m"}')
        (record,) = kept.records
        assert (record.outcome, record.status) == (Outcome.FAILED, 400)
        assert (record.prompt_tokens, record.tokens_estimated) == (0, False)

    run({"s1": whole(400, b'{"error":{"message":"no"}}')}, talk)


def test_gpu_seconds_are_those_of_all_the_sessions_gpus() -> None:
    async def talk(kept: Kept) -> None:
        await kept.ask()
        (record,) = kept.records
        assert (record.gpus, record.gpu) == (2, "H100")
        assert 0 < record.gpu_seconds <= 2 * record.duration_s

    run({"s1": STREAM}, talk, gpus=[GpuDevice("a", "H100", 1), GpuDevice("b", "H100", 1)])


def test_who_must_be_tracked_may_not_opt_out() -> None:
    async def talk(kept: Kept) -> None:
        status, _, body = await kept.ask(ASKED, "x-serai-track: none")
        assert (status, b"tracking_required" in body) == (403, True)
        (record,) = kept.records
        assert (record.outcome, record.key, record.tracked) == (Outcome.REFUSED, "anonymous", True)

    run({"s1": STREAM}, talk)


def test_who_may_opt_out_leaves_nothing_that_names_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Access, "known", lambda *_: Caller("alice", "climate", may_opt_out=True))

    async def talk(kept: Kept) -> None:
        status, _, _ = await kept.ask(ASKED, "x-serai-track: none", "x-request-id: mine")
        assert status == 200
        await kept.ask(b"{", "x-serai-track: none")
        for record in kept.records:
            assert (record.tracked, record.project, record.key, record.request_id) == (False, "", "", "")
            assert record.started.endswith(":00:00.000Z"), "the hour, by which nobody finds a line in a log"
        first, second = kept.records
        assert first.id[:16] != second.id[:16], "no process or order shows in the ids"
        assert (first.output_tokens, first.model) == (1, "m")

    run({"s1": STREAM}, talk)


@pytest.mark.parametrize("wish", ["", "no", "all"])
def test_the_header_can_only_be_none(wish: str) -> None:
    with pytest.raises(ApiError, match="only be `none`"):
        is_tracked({"x-serai-track": wish}, Caller("a", may_opt_out=True))
    assert is_tracked({}, Caller("a"))
    assert not is_tracked({"x-serai-track": " None "}, Caller("a", may_opt_out=True))


def test_series_of_models_that_have_gone_are_forgotten() -> None:
    for model in ("gone", "here"):
        metrics.REQUESTS.of(model, "200").add()
        metrics.TTFT.of(model).observe(1.0)
        metrics.FAILURES.labels(model, "busy").inc()
        metrics.RETRIES.labels(model).inc()
    metrics.REQUESTS.of("unknown", "404").add()
    metrics.retain({"here"})
    families = (metrics.REQUESTS, metrics.TTFT, metrics.FAILURES, metrics.RETRIES)
    shown = {sample.labels["model"] for family in families for metric in family.collect() for sample in metric.samples}
    assert "gone" not in shown
    assert {"here", "unknown"} <= shown


def test_an_answer_that_cannot_be_translated_is_no_answer_in_the_record() -> None:
    async def talk(kept: Kept) -> None:
        body = b'{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"hello"}]}'
        assert (await kept.ask(body, path="/v1/messages"))[0] == 502
        (record,) = kept.records
        assert (record.outcome, record.status, record.error_code) == (Outcome.FAILED, 502, "engine_protocol")

    run({"s1": whole(200, b'{"choices":5}')}, talk)
