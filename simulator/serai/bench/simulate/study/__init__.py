"""What the policy studies share: one cell (a system, a cluster, a workload, a seed), many of them in several processes,
scans of rates, and tables beside the PaDG paper's figures."""
