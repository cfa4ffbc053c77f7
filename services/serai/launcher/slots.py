"""Slots: the places of a deployment that are to be filled, and how a job's name says which one it fills. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import sha256

from serai.launcher.jobs import JobName

_TAG = re.compile(r"(?P<deployment>[0-9a-f]{8})s(?P<slot>\d{1,4})g(?P<generation>\d{1,6})x[0-9a-z]{1,10}")


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """One place of a deployment, from 0."""

    deployment: str
    number: int

    def __str__(self) -> str:
        return f"{self.deployment}/{self.number}"

    @classmethod
    def of(cls, text: str) -> Slot | None:
        deployment, _, number = text.rpartition("/")
        return cls(deployment, int(number)) if deployment and number.isdigit() else None


def slot_name(site: str, slot: Slot, generation: int, model: str, random_part: str) -> JobName:
    """The name of a job that fills `slot` for the `generation`-th time. `random_part` makes it new even when the memory
    of earlier generations has been lost: up to 10 of 0-9 and a-z."""
    tag = f"{_digest(site, slot.deployment)}s{slot.number}g{generation}x{random_part}"
    return JobName.for_model(model, tag)


@dataclass(frozen=True, slots=True)
class NamedSlot:
    """What a job's name says."""

    slot: Slot
    generation: int


class SlotNames:
    """Reads names back. Only names of this site and of these deployments are known."""

    def __init__(self, site: str, deployments: list[str]) -> None:
        self._deployments = {_digest(site, deployment): deployment for deployment in deployments}

    def read(self, name: str) -> NamedSlot | None:
        """None: not a job of one of these deployments."""
        job_name = JobName.of(name)
        found = _TAG.fullmatch(job_name.tag) if job_name else None
        if found is None or (deployment := self._deployments.get(found["deployment"])) is None:
            return None
        return NamedSlot(Slot(deployment, int(found["slot"])), int(found["generation"]))


def _digest(site: str, deployment: str) -> str:
    return sha256(f"{site}\n{deployment}".encode()).hexdigest()[:8]
