"""Kubernetes, by `kubectl scale`: a workload whose pods are pool agents (`serai agent --pool`). Which pods end when
there are too many, Kubernetes chooses; so it is asked for fewer only when none of them runs an engine (`wishes`).
"""

from __future__ import annotations

import re

from serai.placer.placement_file import Launchable
from serai.runtime.bounded_command import NotEnded, run_bounded

TIMEOUT_S = 20.0
_NAME = re.compile(r"[a-z]+/[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


class KubernetesLauncher:
    """By a command that is on this host; its own configuration says which cluster, and who we are."""

    def __init__(self, kubectl: str = "kubectl") -> None:
        self._kubectl = kubectl

    async def scale(self, what: Launchable, count: int, why: str) -> str:
        if not _NAME.fullmatch(what.name) or not _NAMESPACE.fullmatch(what.namespace):
            return f"{what.namespace}:{what.name} is no workload: must look like deployment/pool, in a namespace"
        command = [self._kubectl, "scale", what.name, f"--replicas={count}", f"--namespace={what.namespace}"]
        ended = await run_bounded(command, TIMEOUT_S)
        if isinstance(ended, NotEnded):
            return ended.reason
        told = " ".join((ended.errors or ended.output).split())[:300]
        return "" if ended.code == 0 else told or f"{self._kubectl} ended with exit code {ended.code}"
