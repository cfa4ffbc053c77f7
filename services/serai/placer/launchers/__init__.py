"""What brings pool agents: a site's Slurm launcher, Kubernetes, or a list for tests."""
