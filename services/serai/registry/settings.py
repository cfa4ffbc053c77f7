"""Settings of the registry."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from serai.runtime.connection_settings import ConnectionSettings
from serai.runtime.nats_bus import NatsAddress
from serai.runtime.settings import file_fault, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrySettings(ConnectionSettings):
    silence_grace_s: float = setting(3600.0, "a session unheard of for so long is taken to have left, in seconds")
    retention_s: float = setting(86400.0, "how long a session that left stays known, in seconds")
    nats_system_nkey_file: Path | None = setting(
        None, "NATS nkey seed of the system account: lost agents are noticed at once"
    )
    nats_system_url: str = setting("", "address for the system account, when it is not --nats-url")

    def __post_init__(self) -> None:
        ConnectionSettings.__post_init__(self)
        if self.silence_grace_s < 10:
            raise ValueError(f"--silence-grace-s {self.silence_grace_s:g}: must be at least 10; agents may reconnect")
        if self.nats_system_nkey_file is not None and (fault := file_fault(self.nats_system_nkey_file)):
            raise ValueError(f"--nats-system-nkey-file: {fault}")
        if self.nats_system_url and self.nats_system_nkey_file is None:
            raise ValueError("--nats-system-url needs --nats-system-nkey-file: the system account takes nobody else")
        if self.retention_s < self.silence_grace_s:
            raise ValueError("--retention-s must be at least --silence-grace-s, or sessions could come back from LEFT")

    @property
    def system_nats(self) -> NatsAddress:
        """Where disconnect events come from; without a key there are none."""
        return NatsAddress(self.nats_system_url or self.nats_url, self.nats_system_nkey_file)
