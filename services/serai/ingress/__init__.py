"""The ingress: the OpenAI-compatible door. Every ingress is equal; any number of them may run.

Owns      nothing durable but usage records on their way (`--usage-spool`): a full local copy of the registry, and the
          requests it is answering.
Reads     `session.*` and `status.*` into its copy, `registry.snapshot` to fill and repair it; frames on its inbox.
Writes    `inference.<session>` (request, body, credit frames), `cancel.<session>`; `usage.record.<site>`.
Dies      its clients reconnect to another ingress; agents notice that nobody reads and free their engines.
"""
