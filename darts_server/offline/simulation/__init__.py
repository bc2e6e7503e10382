"""``darts-server simulate``: compare policies on a workload, without an engine.

``model/`` is the model of one rollout. The files beside it are about workloads (traces and presets), machines, policies
and the table of results.
"""
