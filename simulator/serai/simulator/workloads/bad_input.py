"""The one error of workloads: what is wrong, where, and what to do, in a line."""

from __future__ import annotations


class BadInput(Exception):
    """A trace, a distribution or a scenario's field that cannot be used. `place` names the file and line, or
    the field."""

    def __init__(self, place: str, problem: str, remedy: str) -> None:
        super().__init__(f"{place}: {problem}; {remedy}")
        self.place, self.problem, self.remedy = place, problem, remedy
