"""The launcher of a site: renders, submits and watches the jobs that agents live in, so that a service outlives them.

Owns      nothing that runs; one key of the KV bucket `serai_launchers`: which job fills which slot, and who acts.
Reads     a site file; what the batch system says; records and statuses of sessions; `launcher.explain|wake.<site>`.
Writes    jobs, by the batch system; `drain.<session>`; `registry.ended.<site>`.
Dies      jobs and their sessions go on; another launcher, or its next start, finds them by that key and their names.
"""
