"""The worker-agent: wraps one unmodified engine in one allocation and dials out to NATS; nothing dials in.

Owns      its sessions and their engine processes; the records of those sessions.
Reads     `inference.<session>` (request, body and credit frames), `cancel.<session>`, `probe.<session>`.
Writes    `session.<session>` (the record), `status.<session>` (about once a second, and at once when its engine stalls
          or gets on again), `probe.<other session>` when somebody asks for it, frames on reply subjects.
Dies      its sessions end; ingresses see it at once (no responders) or within seconds (silence) and send the work
          to other sessions. Its engine dies with it.
"""
