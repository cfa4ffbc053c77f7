"""What a registry shows of itself."""

from __future__ import annotations

from prometheus_client import Gauge

from serai.runtime.metrics import Counts

SESSIONS = Gauge("serai_registry_sessions", "Session records known, by lifecycle and site", ["lifecycle", "site"])
STANDINGS = Gauge("serai_registry_standings", "Sessions of the own site, by this registry's opinion", ["standing"])
BRAKED = Gauge("serai_registry_mass_loss_brake", "1 while so many are silent that nothing is closed")
UNSTORED = Gauge("serai_registry_unstored_records", "Records that wait to be written to KV")

CLOSED = Counts("serai_registry_closed_records", "Records closed by this registry, by cause", ["cause"])
FORGOTTEN = Counts("serai_registry_forgotten_records", "Records dropped for good", [])
ASKED = Counts("serai_registry_probes", "Silent sessions asked after, by path and outcome", ["path", "outcome"])
BEATS = Counts("serai_registry_beats", "Beats sent", [])
REPAIRS = Counts("serai_registry_repairs", "Comparisons with another site's registry, by outcome", ["site", "outcome"])
REPAIRED = Counts("serai_registry_repaired_records", "Records that a comparison brought or renewed", ["site"])
KV_REWRITES = Counts("serai_registry_kv_rewrites", "Times everything was written to KV again", ["reason"])
KV_FAILURES = Counts("serai_registry_kv_failures", "Operations on KV that failed", [])
