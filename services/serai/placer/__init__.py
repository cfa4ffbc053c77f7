"""The placer: which model runs where, decided by constraint programming and kept right while demand moves (design §7).

Owns: the placement plan, numbered by generation. One process acts (by a lease in KV), others stand by.
Reads: session records, demand from the usage ledger, a placement file.
Writes: plans in KV, assignments to pool agents, wishes to launchers.
When it dies: nothing that runs is touched; another process takes the lease and goes on from the last plan.
"""
