"""Many cells in several processes, each run once; results kept in a folder, if one is named."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from serai.bench.report import say
from serai.bench.simulate.study.cells import Cell
from serai.bench.simulate.study.code_digest import code_digest
from serai.bench.simulate.study.systems import Result, is_macro_scheduled, measured

_FORMAT = 1
SAY_EACH_S = 30.0


class CellFailed(RuntimeError):
    """A simulation broke: a defect, told with the cell that shows it."""


class Job(Protocol):
    """Part of a study that asks for cells until it knows enough."""

    def wanted(self) -> list[Cell]:
        """Cells to run now, each asked for once; empty while it waits for answers, and at the end."""
        ...

    def learn(self, cell: Cell, result: Result) -> None:
        """The answer to one cell that was asked for."""
        ...


class FixedCells:
    """A job that asks for all its cells at once."""

    def __init__(self, cells: Iterable[Cell]) -> None:
        self.results: dict[Cell, Result] = {}
        self._cells = list(dict.fromkeys(cells))

    def wanted(self) -> list[Cell]:
        """All, the first time."""
        cells, self._cells = self._cells, []
        return cells

    def learn(self, cell: Cell, result: Result) -> None:
        """Kept in `results`."""
        self.results[cell] = result


class Runs:
    """Runs cells in `workers` processes; `cache` is a folder for results of other runs of the same code."""

    def __init__(self, workers: int, cache: Path | None = None, *, label: str = "") -> None:
        self.known: dict[Cell, Result] = {}
        self.from_cache = 0
        self._workers = workers
        self._cache = cache
        self._label = label

    def complete(self, jobs: Sequence[Job]) -> None:
        """Answer `jobs` until none asks any more. Cells that are asked for first are run first."""
        with _progress(self._label) as bar, _pool(self._workers) as pool:
            asking: dict[Cell, list[Job]] = {}
            queue: deque[Cell] = deque()
            running: dict[Future[Result], Cell] = {}
            self._ask(jobs, asking, queue, bar)
            while queue or running:
                while queue and len(running) < 2 * self._workers:
                    cell = queue.popleft()
                    running[pool.submit(measured, cell)] = cell
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                answered: list[Job] = []
                for future in done:
                    cell = running.pop(future)
                    self._keep(cell, _answer(future, cell))
                    bar.update()
                    answered += self._tell(cell, asking)
                self._ask(answered, asking, queue, bar)

    def _ask(self, jobs: Iterable[Job], asking: dict[Cell, list[Job]], queue: deque[Cell], bar: Any) -> None:
        """Cells that are known are answered at once, and the job is asked again."""
        left = deque(jobs)
        while left:
            job = left.popleft()
            again = False
            for cell in job.wanted():
                if self._lookup(cell):
                    job.learn(cell, self.known[cell])
                    again = True
                    continue
                if cell not in asking:
                    queue.append(cell)
                    bar.total = (bar.total or 0) + 1
                asking.setdefault(cell, []).append(job)
            if again:
                left.append(job)

    def _tell(self, cell: Cell, asking: dict[Cell, list[Job]]) -> list[Job]:
        jobs = asking.pop(cell)
        for job in jobs:
            job.learn(cell, self.known[cell])
        return jobs

    def _lookup(self, cell: Cell) -> bool:
        if cell in self.known:
            return True
        file = self._file(cell)
        if file is None or not file.exists():
            return False
        try:
            self.known[cell] = Result(**json.loads(file.read_text())["result"])
        except (ValueError, KeyError, TypeError):
            return False
        self.from_cache += 1
        return True

    def _keep(self, cell: Cell, result: Result) -> None:
        self.known[cell] = result
        file = self._file(cell)
        if file is None:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        # Renamed into place, so that another run of a study never reads half of it.
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({"cell": asdict(cell), "result": asdict(result)}))
        part.rename(file)

    def _file(self, cell: Cell) -> Path | None:
        if self._cache is None:
            return None
        name = f"{_FORMAT}\0{code_digest(is_macro_scheduled(cell.candidate.system))}\0{cell.text()}"
        key = hashlib.sha256(name.encode()).hexdigest()
        return self._cache / key[:2] / f"{key}.json"


def _answer(future: Future[Result], cell: Cell) -> Result:
    try:
        return future.result()
    except Exception as error:
        raise CellFailed(f"a run of {cell.candidate.name} failed: {error!r} in {cell.text()}") from error


class _Here:
    """Runs cells in this process, one by one: for small studies, and tests."""

    def submit(self, run: Callable[[Cell], Result], cell: Cell) -> Future[Result]:
        """Run it now."""
        future: Future[Result] = Future()
        try:
            future.set_result(run(cell))
        except Exception as error:
            future.set_exception(error)
        return future


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor | _Here]:
    if workers == 1:
        yield _Here()
        return
    # Fresh processes: what was imported here (a progress bar's threads, say) does not go along.
    pool = ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=_end_with_the_parent
    )
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_the_parent() -> None:
    """A killed study leaves nobody behind who goes on computing."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class _Lines:
    """Progress where there is no terminal: a line now and then."""

    def __init__(self) -> None:
        self.total = 0
        self._done = 0
        self._said_at_s = time.monotonic()

    def update(self) -> None:
        """One run more."""
        self._done += 1
        if time.monotonic() - self._said_at_s > SAY_EACH_S:
            self._said_at_s = time.monotonic()
            say(f"{self._done:,} of {self.total:,} runs known so far")


@contextmanager
def _progress(label: str) -> Iterator[Any]:
    """A bar on standard error, or lines where that is no terminal."""
    bar: Any = _Lines()
    if sys.stderr.isatty():
        try:
            from tqdm import tqdm
        except ModuleNotFoundError:
            pass
        else:
            bar = tqdm(total=0, unit="run", desc=label, file=sys.stderr, dynamic_ncols=True)
    try:
        yield bar
    finally:
        if not isinstance(bar, _Lines):
            bar.close()
