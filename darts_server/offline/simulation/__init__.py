"""``darts-server simulate``: compare policies on a workload, without an engine."""
