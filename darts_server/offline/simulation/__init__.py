"""``darts-server simulate``: what policies would bring on a workload, without an engine.

The model of a rollout is in ``model/``. This room gives it workloads (traces and presets), machines and
policies, and reports what comes out.
"""
