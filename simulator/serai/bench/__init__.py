"""`serai bench …`: measurements against real NATS, real engines and peers.

Every benchmark prints one JSON object on standard output with `--json` (name, machine, config, figures, raw) and its
progress on standard error. Peers found in `.peers/` take part in the same run, interleaved, so that ratios compare
like with like. No figure here is ever a unit test.
"""
