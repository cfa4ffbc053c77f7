"""The cost model: what a prefill, a decode step and a KV cache cost on a given GPU. Pure functions, no I/O."""
