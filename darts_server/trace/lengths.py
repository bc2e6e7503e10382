"""Read from a saved state what a server has learned of its prompts' lengths, and draw a trace from it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from darts_server.exceptions import InvalidSetting
from darts_server.policy.auto.state import AutoState
from darts_server.policy.lengths.profile import LengthProfile, ProfileState
from darts_server.policy.lengths.stats import PromptStats
from darts_server.store.archive import LIMIT_BYTES, unpack

RATIOS = 4096
"""Quantiles of the ratios of lengths to their prompt's mean: the longest of a batch is one in thousands."""


@dataclass(slots=True)
class LearnedLengths:
    """What is known of lengths, in tokens.

    ``profile``: of their ratios to their prompt's mean; ``None`` before a group has ended. ``max_tokens``: at which
    trajectories were truncated; ``None`` if that is not known.
    """

    prompts: list[PromptStats] = field(default_factory=list)
    profile: ProfileState | None = None
    max_tokens: int | None = None

    @classmethod
    def of_state(cls, data: bytes) -> "LearnedLengths":
        """Read a saved state.

        Raises:
            InvalidSetting: it contains lengths that cannot be used.
            StateDamaged, StateTooNew
        """
        found = cls()
        for kind, key, text in unpack(data, LIMIT_BYTES):
            try:
                document = json.loads(text)
                if kind == "prompt":
                    found.prompts.append(PromptStats(**document))
                elif kind == "profile":
                    found.profile = ProfileState(**json.loads(document["value"]))
                elif kind == "auto":
                    limit = AutoState(**json.loads(document["value"])).max_tokens
                    found.max_tokens = max(found.max_tokens or 0, limit or 0) or None
            except (KeyError, TypeError, ValueError) as error:
                raise InvalidSetting(f"the state's {kind} {key[:64]!r} cannot be used: {error}") from error
        return found

    def trace(
        self, samples: int, prompt_tokens: int, cap: int | None, rng: np.random.Generator
    ) -> Iterator[dict[str, int | list[int]]]:
        """Yield a line for each prompt, with so many lengths around its mean; ``cap``: the longest, if not as learned.

        Raises:
            InvalidSetting: nothing was learned.
        """
        ratios = None if self.profile is None else LengthProfile(self.profile).quantiles(RATIOS)
        if ratios is None or not self.prompts:
            raise InvalidSetting("the state has no lengths: no group with more than one trajectory has ended there yet")
        cap = cap or self.max_tokens
        for prompt in self.prompts:
            lengths = np.maximum(1, np.ceil(prompt.mean_ema * rng.choice(ratios, samples)))
            if cap is not None:
                lengths = np.minimum(lengths, cap)
            line: dict[str, int | list[int]] = {
                "step": prompt.weight_version or 0,
                "prompt_tokens": prompt_tokens,
                "lengths": [int(length) for length in lengths],
            }
            yield line if cap is None else {**line, "cap": cap}
