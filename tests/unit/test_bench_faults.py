"""How the fault table compares gateways, what it counts and how it reads; and that its client tells ends apart."""

from __future__ import annotations

import asyncio

import pytest

from serai.bench.faults.case import Case, Finding, better_peers
from serai.bench.faults.command import CASES, figures_of
from serai.bench.faults.raw_client import CUT, SILENT, WHOLE, Answer, Connection
from serai.bench.faults.stage import Stage, whole_and_told
from serai.bench.faults.table import markdown


async def play(stage: Stage) -> Finding:
    return Finding(True, stage.name)


CASE = Case("back", "comes back", "soon", play, close_enough=1.0)
GOOD, BAD = Finding(True, "fine"), Finding(False, "bad | worse")


@pytest.mark.parametrize(
    ("ours", "theirs", "better"),
    [
        (GOOD, GOOD, False),
        (GOOD, BAD, False),
        (BAD, BAD, False),
        (BAD, GOOD, True),
        (Finding(True, "", 3.0), Finding(True, "", 1.9), True),
        (Finding(True, "", 3.0), Finding(True, "", 2.1), False),
        (Finding(True, "", 3.0), Finding(False, "", 0.0), False),
    ],
)
def test_a_peer_does_better_where_it_alone_keeps_the_rule_or_is_clearly_quicker(
    ours: Finding, theirs: Finding, better: bool
) -> None:
    assert better_peers(CASE, {"serai": ours, "smg": theirs}) == (["smg"] if better else [])


def test_figures_count_rows_that_do_not_hold() -> None:
    figures = figures_of([CASE], {"back": {"serai": BAD, "smg": GOOD}}, ["serai", "smg"])
    assert figures == {"cases": 1, "serai_failed": 1, "smg_failed": 0, "rows_where_a_peer_does_better": 1}


def test_the_table_for_a_page_has_a_row_for_each_case() -> None:
    lines = markdown([CASE], {"back": {"serai": GOOD, "smg": BAD}}, ["serai", "smg", "litellm"]).splitlines()
    assert lines[2] == "| comes back | soon | ✓ fine | **✗ bad \\| worse** | – |"


def test_names_of_cases_differ() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 65


TOLD = b'data: {"choices": []}\n\ndata: {"error": {"message": "x"}}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(
    ("body", "end", "told"),
    [(TOLD, WHOLE, True), (TOLD, CUT, False), (TOLD[:-14], WHOLE, False), (b"data: [DONE]\n\n", WHOLE, False)],
)
def test_a_client_is_told_by_event_marker_and_end_together(body: bytes, end: str, told: bool) -> None:
    assert whole_and_told(Answer(200, {}, body, end)) == told


@pytest.mark.parametrize(
    ("says", "ends"),
    [
        ([b"HTTP/1.1 200 X\r\nContent-Length: 2\r\n\r\nok"], [(200, WHOLE)]),
        ([b"HTTP/1.1 200 X\r\nContent-Length: 9\r\n\r\nok", None], [(200, CUT)]),
        ([b"HTTP/1.1 200 X\r\n\r\nok", None], [(200, WHOLE)]),
        ([b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n", None], [(200, CUT)]),
        ([b"HTTP/1.1 200 X\r\nContent-Length: 9\r\n\r\nok"], [(200, SILENT)]),
        ([b"no HTTP\r\n\r\n"], [(0, CUT)]),
        ([None], [(0, CUT)]),
        ([b"HTTP/1.1 200 X\r\nContent-Length: 0\r\n\r\n" * 2], [(200, WHOLE), (200, WHOLE)]),
    ],
)
def test_the_client_tells_how_answers_end(says: list[bytes | None], ends: list[tuple[int, str]]) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in says:
            if part is not None:
                writer.write(part)
                await writer.drain()
        if says[-1] is not None:
            await reader.read()
        writer.close()

    async def main() -> list[tuple[int, str]]:
        server = await asyncio.start_server(speak, "127.0.0.1", 0)
        async with server, Connection(server.sockets[0].getsockname()[1]) as connection:
            answers = [await connection.answer(0.3) for _ in ends]
            connection.leave()
        await asyncio.sleep(0.01)
        return [(answer.status, answer.end) for answer in answers]

    assert asyncio.run(main()) == ends
