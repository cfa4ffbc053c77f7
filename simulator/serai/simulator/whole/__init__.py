"""The whole system in one process and in virtual time: the real services on simulated time, network and NATS.

What is real: every line of ingress, registry, worker-agent and emulated engine, and of the asyncio code under them.
What is not: the clock (`virtual_loop`), sockets (`memory_network`), NATS (`simulated_bus`), the engine's process.
A run is its seed: the same seed gives the same deliveries, in the same order, at the same virtual nanoseconds.
"""
