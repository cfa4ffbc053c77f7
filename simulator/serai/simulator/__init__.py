"""The same decision code and services in virtual time, so that a failing run is a seed.

| package or module | what it knows |
|---|---|
| `workloads` | what arrives when: made-up traffic and recorded traces |
| `fast` | whole clusters at engine-step granularity: batch schedulers and dispatch policies, no sockets |
| `whole` | the real services on a virtual clock, an in-memory network and a simulated bus |
| `outcomes`, `summary`, `fairness`, `queues`, `goodput` | what became of requests, and how good that is |
| `reports` | pictures and tables; the only part that writes files |
"""
