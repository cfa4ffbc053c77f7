"""The batch scheduler of an emulated engine, one step at a time: which requests share a step, how long it takes, what
it leaves in the KV cache. Pure; the emulated engine runs it in real time, the fast simulator in virtual time."""
