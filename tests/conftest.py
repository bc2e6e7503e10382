"""Property tests try the same worlds on every run; ``HYPOTHESIS_PROFILE=search`` looks for new ones.

TRL, once imported, has everything that is started from here log errors alone, unless a level is set.
"""

import os

from hypothesis import HealthCheck, settings

SLOW_MACHINES = [HealthCheck.too_slow]
settings.register_profile(
    "repeatable", max_examples=150, derandomize=True, deadline=None, suppress_health_check=SLOW_MACHINES
)
settings.register_profile("search", max_examples=3_000, deadline=None, suppress_health_check=SLOW_MACHINES)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
