"""The registry: one per site; the authority for its site's session records, and a copy of the others'.

Owns      the KV bucket of its site's records (a cache: agents re-announce, so losing it loses nothing for long).
Reads     `session.*`, `status.*`, `registry.beat.*`, `registry.disconnected.*`; questions on `registry.digest|snapshot|
          opinion.<site>`; the batch system's word on `registry.ended.<site>`; the NATS server's disconnect events.
Writes    acknowledgements with the joined record; beats; LEFT for sessions of its site, on evidence or beyond the
          grace (`membership.py`); probes of silent sessions; the KV bucket.
Dies      routing goes on from the ingresses' own copies and the agents' signs of life.
"""
