"""What the macro-scheduler counts. Labels are closed sets or names of models that exist."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from serai.runtime.metrics import Counts, Histograms

LEADS = Gauge("serai_macro_leads", "1 while this process leads the model's group", ["model"])
INSTANCES = Gauge("serai_macro_instances", "Instances of the group that this process leads", ["model"])
WAITING = Gauge("serai_macro_waiting", "Asks that were told to wait, and wait", ["model"])
TERMS = Counter("serai_macro_terms_total", "Times that this process began to lead a group", ["model"])
ANSWERS = Counts("serai_macro_answers", "Answers to asks, WAIT included, by decision", ["model", "decision"])
DECISION = Histograms(
    "serai_macro_decision_seconds",
    "From an ask's message until its answers leave, per message",
    ["model"],
    (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25),
)
REPORTS = Counts("serai_macro_reports", "Reports of instances: taken, or why not", ["outcome"])
TAKES = Counts("serai_macro_takes", "Instances told whom to obey: accepted, refused, no answer", ["model", "outcome"])
CLAIMS = Counts("serai_macro_claims", "Compare-and-sets of an instance's owner: won, lost, no answer", ["outcome"])
UNHEARD = Counter("serai_macro_unheard_total", "Answers that nobody heard: their ingress had gone")
SCALE = Counts("serai_macro_scale_wishes", "Wishes for one instance more or less", ["model", "change"])
