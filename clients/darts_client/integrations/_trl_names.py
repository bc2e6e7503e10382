"""Names of TRL's internals, with their places in the supported versions. No other module of ours imports them.

The code looks for a name, never for a version. Places in TRL 1.18 are from its release notes.
"""

import logging
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import version
from typing import Any

logger = logging.getLogger(__name__)

TESTED_VERSION = "1.16"
SUPPORTED_VERSIONS = "TRL 1.16 to 1.18"

ROLLOUT_LOOP = (
    "trl.trainer.async_grpo_trainer:AsyncRolloutLoop",
    "trl.experimental.async_grpo.async_rollout_worker:_AsyncRolloutLoop",
)
"""Places of the asynchronous trainer's loop that generates, the newest first. Tests run the loop."""


def unsupported_error(what: str) -> ImportError:
    """Return the error for a version of TRL in which something is missing."""
    return ImportError(f"{what}: darts-client works with {SUPPORTED_VERSIONS}, and TRL {version('trl')} is installed")


def find_object(*places: str) -> Any:
    """Return the object at the first place that exists. A place is `module:name`.

    Raises:
        ImportError: TRL has none of the places.
    """
    for place in places:
        module, _, name = place.partition(":")
        try:
            return getattr(import_module(module), name)
        except AttributeError:
            continue
        except ModuleNotFoundError as exc:
            # A module of TRL may need a package that is not installed.
            if not (exc.name or "").startswith("trl"):
                raise
    raise unsupported_error(f"no {' or '.join(places)}")


def check_names_exist(owner: Any, names: Iterable[str]) -> None:
    """Raise ImportError if a name that we replace is missing. TRL would not use what we put in its place."""
    for name in names:
        if not hasattr(owner, name):
            raise unsupported_error(f"{owner.__name__} has no {name}")


try:
    from trl.generation import vllm_generation
    from trl.generation.vllm_client import VLLMClient
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.utils import RepeatSampler
except ImportError as exc:
    if (exc.name or "").startswith("trl."):
        raise unsupported_error(exc.msg) from exc
    raise ModuleNotFoundError(f"{exc.msg}: this needs darts-client[trl]", name=exc.name) from exc

__all__ = ["GRPOConfig", "GRPOTrainer", "RepeatSampler", "VLLMClient", "vllm_generation"]

check_names_exist(vllm_generation, ["VLLMClient"])
check_names_exist(
    GRPOTrainer,
    ["_generate", "_calculate_rewards", "_generate_and_score_completions", "_tokenize_prompts"],
)
check_names_exist(
    VLLMClient,
    [
        "generate",
        "check_server",
        "_post",
        "init_communicator",
        "update_named_params",
        "reset_prefix_cache",
        "get_server_info",
    ],
)
if not version("trl").startswith(f"{TESTED_VERSION}."):
    logger.warning("TRL %s was not run with darts-client; TRL %s was", version("trl"), TESTED_VERSION)
