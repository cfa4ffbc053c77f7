"""The emulated engine: an OpenAI-compatible server that behaves like an engine in time, without a model.

It stands in for vLLM or llama.cpp in tests and benchmarks: fixed time to first token and per output token, a fixed
number of slots, the metric names of vLLM, and faults on demand. Its text is a pure function of seed and prompt, so a
continued answer can be compared word by word.

Owns nothing durable; reads and writes nothing but its sockets. When it dies, its requests end and its agent notices,
as with any engine.
"""
