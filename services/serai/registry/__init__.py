"""The registry: one per site; keeps the site's session records and gives them to whoever starts or has missed some.

Owns      the KV bucket of session records (a cache: agents re-announce, so losing it loses nothing for long).
Reads     `session.*` (records), `status.*` (signs of life), `registry.snapshot` (requests).
Writes    the KV bucket; acknowledgements with the joined record; LEFT for sessions silent beyond the grace.
Dies      routing goes on from the ingresses' own copies and the agents' signs of life.
"""
