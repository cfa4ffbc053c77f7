"""The macro-scheduler: which instance of a model prefills next, so that latency targets hold (design §6; PaDG, of
EcoServe, OSDI '26).

Owns: a group per model: its macro-instances, their members, and the leases given to requests. One process leads a
group (by a lease in KV, fenced by its epoch), others stand by.
Reads: session records (`session.*`), instances' reports (`instance.*`), asks (`admission.<model>`).
Writes: answers to asks, `take.<session>`, owners and leaders in KV.
When it dies: ingresses use a local policy after a few milliseconds of silence; instances admit by themselves after two
beats; another process takes over and asks the instances for their whole state, which is the truth.
"""
