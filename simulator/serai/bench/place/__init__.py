"""`serai place bench …` and `serai place simulate`: placements judged, by formula and in virtual time.

| command | module |
|---|---|
| `serai place bench opentela` | `opentela`, with `opentela_case` (fleet, demand, scores) and `opentela_replay` |
| `serai place bench scale` | `scale`, with `scale_case` |
| `serai place bench dynamic` | `dynamic`, with `replay`, `policies`, `traces` |
| `serai place simulate TRACE` | `simulate`, on the same |
"""
