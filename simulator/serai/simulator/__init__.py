"""The same decision code and services in virtual time.

Nothing here yet but this page: the simulator runs the modules that decide in production (membership, routing,
retry, admission, placement) on a simulated bus and clock, with seeds, so that a failing run is a seed.
"""
