"""Register the backend when veRL is imported. All names that veRL does not document are checked here."""

from typing import Any

import verl
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

VERSIONS = ("0.9.0", "0.9.1")
"""Versions of veRL whose rollout interfaces this package is written for."""


def is_supported() -> bool:
    return str(verl.__version__).split("+")[0] in VERSIONS


def load_replica() -> Any:
    """Return the replica class.

    Raises:
        ImportError: this version of veRL is not supported.
    """
    if not is_supported():
        raise ImportError(
            f"rollout.name=darts supports veRL {', '.join(VERSIONS)}, but {verl.__version__} is installed"
        )
    from .replica import DartsReplica

    return DartsReplica


RolloutReplicaRegistry.register("darts", load_replica)
_ROLLOUT_REGISTRY["darts", "async"] = "darts_client.verl.weights.ServerAdapter"
if is_supported():
    from .groups import replace_methods

    replace_methods()
