"""Whole clusters at engine-step granularity, in virtual integer nanoseconds: an hour of eight instances in seconds.

The engines are the batch schedulers of the emulated engine, the routing policies those of the ingress; only sockets,
NATS and clocks are left out. Pure: the same workload, settings and seed give the same outcomes on any machine.

| module | what it knows |
|---|---|
| `dispatch` | the seam: events in, effects out; every policy is behind it |
| `routed`, `disaggregated` | the ingress's routing policies behind it; prefill and decode apart |
| `cluster` | the event loop |
| `instance` | one engine with its notes: phases, gaps between tokens |
| `links` | first-in-first-out links that carry KV caches |
| `step_times` | a latency model with older engines' overheads on top |
| `presets`, `paper_clusters` | baselines by name; the clusters of the PaDG paper |
| `run` | what a run hands out |
"""
