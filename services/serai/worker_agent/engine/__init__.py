"""Engines: the child process, and per kind what differs (its port flags, how it shows that it serves)."""
