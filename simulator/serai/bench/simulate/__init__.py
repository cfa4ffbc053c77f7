"""`serai simulate …`: serving systems compared in virtual time, and the simulator itself judged.

| command | module |
|---|---|
| `serai simulate SCENARIO.yaml` | `scenario` (what the file says), `points` (one run), `scenario_run` (all of them) |
| `serai simulate validate` | `validate`, with `logged_runs`, `live_engines`, `drain_test`, `repeatability` |
"""
