"""Settings of the launcher."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path

from serai.launcher.job_book import BookRules
from serai.launcher.picture import Rules
from serai.runtime.connection_settings import ConnectionSettings
from serai.runtime.settings import file_fault, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherSettings(ConnectionSettings):
    site_file: Path = setting(MISSING, "the site file: what the site has, and what is kept served")
    site: str = setting("", "the site's name, when it is not that of the site file")
    count: tuple[str, ...] = setting(
        (), "DEPLOYMENT=N, instead of the site file's count; may be repeated", flag="--count"
    )
    lead_factor: float = setting(1.25, "successors come earlier than waiting and loading may take, by this factor")
    lead_margin_s: float = setting(120.0, "… and by so many seconds more")
    birth_spacing_s: float = setting(60.0, "successors of a deployment are submitted at least so far apart, in seconds")
    stop_margin_s: float = setting(20.0, "drains are over so long before the end of their allocation, in seconds")
    linger_s: float = setting(300.0, "a job whose session has left is cancelled after so long, in seconds")
    gone_answers: int = setting(3, "a job missing from so many answers in a row is over, if no session of it is alive")
    brake_s: float = setting(300.0, "when most jobs are missing at once, nothing is done for so long, in seconds")
    settle_s: float = setting(15.0, "after its start, or a lost connection, it only listens for so long, in seconds")
    lease_s: float = setting(60.0, "another launcher takes over when this one has been silent for so long, in seconds")
    dry_run: bool = setting(False, "say what would be done, once, and do nothing")

    def __post_init__(self) -> None:
        ConnectionSettings.__post_init__(self)
        if fault := file_fault(self.site_file):
            raise ValueError(f"--site-file: {fault}")
        if self.lead_factor < 1:
            raise ValueError(f"--lead-factor {self.lead_factor:g}: must be at least 1")
        if self.lease_s < 3:
            raise ValueError(f"--lease-s {self.lease_s:g}: must be at least 3")
        if self.gone_answers < 1:
            raise ValueError(f"--gone-answers {self.gone_answers}: must be at least 1")
        for flag in ("lead_margin_s", "birth_spacing_s", "stop_margin_s", "linger_s", "brake_s", "settle_s"):
            if getattr(self, flag) < 0:
                raise ValueError(f"--{flag.replace('_', '-')} must not be negative")
        for word in self.count:
            name, equals, number = word.rpartition("=")
            if not (name and equals and number.isdigit()):
                raise ValueError(f"--count {word!r}: must look like DEPLOYMENT=N")

    @property
    def counts(self) -> dict[str, int]:
        """Given by hand, per deployment."""
        return {name: int(number) for name, _, number in (word.rpartition("=") for word in self.count)}

    @property
    def rules(self) -> Rules:
        return Rules(
            lead_factor=self.lead_factor,
            lead_margin_s=self.lead_margin_s,
            birth_spacing_s=self.birth_spacing_s,
            stop_margin_s=self.stop_margin_s,
            linger_s=self.linger_s,
        )

    @property
    def book_rules(self) -> BookRules:
        return BookRules(gone_answers=self.gone_answers, brake_s=self.brake_s)
