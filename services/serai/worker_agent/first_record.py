"""The record a session begins with: what is known before its engine runs."""

from __future__ import annotations

import random
from collections.abc import Sequence

from serai.contracts.session_record import GpuDevice, Lifecycle, SessionMetadata, SessionRecord, new_session_id
from serai.runtime.connection_settings import host_name
from serai.runtime.version import VERSION
from serai.worker_agent.command_line import parallelism_of
from serai.worker_agent.engine.start_watch import Phase
from serai.worker_agent.settings import AgentSettings


def first_record(
    settings: AgentSettings,
    engine_kind: str,
    command: Sequence[str],
    connection: str,
    gpus: Sequence[GpuDevice],
    allocation_ends_at: str = "",
) -> SessionRecord:
    """A new session's, under an id that was never used."""
    metadata = SessionMetadata(
        model=settings.model,
        engine_model=settings.engine_model or settings.model,
        engine=engine_kind,
        site=settings.site,
        provider=settings.provider,
        allocation=settings.allocation_name,
        allocation_ends_at=allocation_ends_at,
        host=host_name(),
        concurrency_max=settings.concurrency_max,
        loading_phase=str(Phase.IMPORT),
        agent_version=VERSION,
        labels=settings.label_values,
        connection=connection,
        worker_group=settings.worker_group,
        gpus=list(gpus),
        parallelism=parallelism_of(command),
        restart_count=settings.restart_count,
    )
    random_part = random.SystemRandom().randbytes(6).hex()
    session = new_session_id(settings.site, settings.allocation_name, settings.restart_count, random_part)
    return SessionRecord(session, Lifecycle.JOIN, 0, metadata)
