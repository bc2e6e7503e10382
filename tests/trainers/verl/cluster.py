"""A small Ray cluster without GPUs, and veRL's configuration for the tiny model in it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from hydra import compose, initialize_config_module

from darts_server.offline.demo.server import MODEL

OBJECT_STORE_BYTES = 100 << 20
REPLICAS = 2
SIZE = 4
"""Trajectories of a prompt."""
ROLLOUT = {
    "name": "darts",
    "tensor_model_parallel_size": 1,
    "dtype": "float32",
    "enforce_eager": True,
    # The CPU build cannot free its memory.
    "free_cache_engine": False,
    "max_model_len": 320,
    "n": SIZE,
    "prompt_length": 64,
    "response_length": 64,
    "agent.num_workers": 1,
    "checkpoint_engine.backend": "darts",
    "checkpoint_engine.custom_backend_module": "darts_client.verl.weights",
}


def overrides(rollout: dict[str, Any], darts: dict[str, Any]) -> list[str]:
    """Return Hydra's arguments: of the rollout, and of the server's flags."""
    arguments = [f"actor_rollout_ref.rollout.{name}={value}" for name, value in (ROLLOUT | rollout).items()]
    arguments += [f"+actor_rollout_ref.rollout.engine_kwargs.darts.{name}={value}" for name, value in darts.items()]
    return [*arguments, f"actor_rollout_ref.model.path={MODEL}"]


def configure(arguments: Sequence[str]) -> Any:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=list(arguments))


@contextmanager
def cluster() -> Iterator[None]:
    """Start Ray with more CPUs and GPUs than there are, because veRL reserves one GPU and two CPUs for a replica."""
    ray.init(num_cpus=16, num_gpus=REPLICAS, include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES)
    try:
        yield
    finally:
        ray.shutdown()
