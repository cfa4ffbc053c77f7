"""Settings of the ledger."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from serai.ledger.sql_store import BadLedgerUrl, parsed_url
from serai.runtime.connection_settings import ConnectionSettings
from serai.runtime.settings import setting

LEDGER_HELP = "sqlite:///FILE or postgresql://…; without it usage.sqlite in the state folder of `serai up`"
RETENTION_DAYS_MAX = 36_500


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings(ConnectionSettings):
    ledger_url: str = setting("", f"where records are kept: {LEDGER_HELP}", flag="--ledger")
    retention_days: int = setting(400, "records older than so many days are deleted; 0: never")
    stream_bytes_max: int = setting(
        256 * 1024 * 1024, "size of the stream in which records wait for this service, when it has to be made, in bytes"
    )

    def __post_init__(self) -> None:
        ConnectionSettings.__post_init__(self)
        try:
            parsed_url(self.url)
        except BadLedgerUrl as error:
            raise ValueError(f"--ledger: {error}") from error
        if not 0 <= self.retention_days <= RETENTION_DAYS_MAX:
            raise ValueError(f"--retention-days {self.retention_days}: must be from 0 to {RETENTION_DAYS_MAX}")
        if self.stream_bytes_max < 1024 * 1024:
            raise ValueError(f"--stream-bytes-max {self.stream_bytes_max}: must be at least 1048576")

    @property
    def url(self) -> str:
        return self.ledger_url or default_url()


def default_url() -> str:
    """Where `serai up` keeps it."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    folder = Path(os.environ.get("SERAI_STATE") or Path(base) / "serai").expanduser()
    return sqlite_url(folder)


def sqlite_url(folder: Path) -> str:
    """Of the ledger in a state folder."""
    return f"sqlite:///{folder.absolute() / 'usage.sqlite'}"
