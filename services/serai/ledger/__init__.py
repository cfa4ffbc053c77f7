"""The ledger: keeps the usage records of its site in SQL, each once, and says what has been spent.

Owns      the table of usage records, in SQLite or PostgreSQL; the JetStream stream `serai_usage` and its consumer.
Reads     that stream; questions on `usage.spent|demand.<site>`.
Writes    SQL, then acknowledgements: what is acknowledged is committed.
Dies      records wait in the stream, and beyond that with the ingresses; who asks what was spent gets no answer.
"""
