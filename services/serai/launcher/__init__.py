"""The launcher of a site: renders, submits and watches the jobs that agents live in.

Reads a site file and what the batch system says; owns nothing that runs. When it dies, jobs and their sessions go on;
its next start finds them again by their names.
"""
