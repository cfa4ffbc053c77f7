"""What arrives at a simulated system: when, how long, sharing which prefixes. Pure, and the same for a seed anywhere.

| module | what it knows |
|---|---|
| `workload` | `Arrival`, `Workload`: the only things the rest of the simulator sees |
| `processes` | gaps between arrivals, and how their mean rate changes over time |
| `lengths` | token-length distributions, and the named datasets |
| `prefixes` | shared system prompts and sessions, as keys of KV blocks |
| `synthetic` | the three above joined |
| `trace_rows`, `traces`, `servegen` | replays of recorded traffic |
| `fields` | a workload from the mapping of a scenario file |
"""
