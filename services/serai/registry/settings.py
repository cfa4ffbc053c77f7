"""Settings of the registry."""

from __future__ import annotations

from dataclasses import dataclass

from serai.runtime.connection_settings import ConnectionSettings
from serai.runtime.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrySettings(ConnectionSettings):
    silence_grace_s: float = setting(3600.0, "a session unheard of for so long is taken to have left, in seconds")
    retention_s: float = setting(86400.0, "how long a session that left stays known, in seconds")

    def __post_init__(self) -> None:
        ConnectionSettings.__post_init__(self)
        if self.silence_grace_s < 10:
            raise ValueError(f"--silence-grace-s {self.silence_grace_s:g}: must be at least 10; agents may reconnect")
        if self.retention_s < self.silence_grace_s:
            raise ValueError("--retention-s must be at least --silence-grace-s, or sessions could come back from LEFT")
