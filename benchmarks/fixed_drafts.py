"""Our drafter with as many drafted tokens as are allowed in every step, as a control for draft lengths that adapt."""

import numpy as np
from numpy.typing import NDArray
from vllm.config import VllmConfig

from darts_server.vllm.engine_core.drafter import Drafter


class FreeTokens:
    """Step times under which a step takes no longer with more tokens, so that all drafts are worth it."""

    sizes: NDArray[np.float64] = np.array([0.0, 1e9])
    seconds: NDArray[np.float64] = np.array([1.0, 1.0])
    explored = seconds

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn nothing."""


class FixedDrafter(Drafter):
    """Drafts ``num_speculative_tokens`` tokens wherever there is a draft."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self.drafts.times = FreeTokens()  # type: ignore[assignment]
