"""The drafter, with doubles of vLLM's runner and of the drafts."""

from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.sampling_params import SamplingParams

from darts_server.vllm.engine_core.drafter import Drafter

LONGEST = 320
PROMPT_TOKENS = 10


class Drafts:
    """Keeps the arguments of calls."""

    def __init__(self) -> None:
        self.longest: list[list[int]] = []

    def propose(self, names: list[str], _ids: Any, _ends: Any, _decodes: Any, _prompt: Any, longest: Any) -> list[Any]:
        self.longest.append(longest.tolist())
        return [[] for _ in names]


class Runner:
    """vLLM's runner with the requests of a batch, by the ``min_tokens`` of each."""

    def __init__(self, **min_tokens: int | None) -> None:
        self.input_batch = SimpleNamespace(req_ids=list(min_tokens))
        self.requests = {
            name: SimpleNamespace(
                num_prompt_tokens=PROMPT_TOKENS,
                sampling_params=None if least is None else SamplingParams(min_tokens=least, max_tokens=200),
            )
            for name, least in min_tokens.items()
        }


class DrafterOfDoubles(Drafter):
    """A drafter that starts no worker, and compiles nothing."""

    def __init__(self) -> None:
        self.drafts: Any = Drafts()
        self._max_model_len = LONGEST
        self._batch_ids = []
        self._first_ends = np.zeros(0, np.int64)


def longest_of(drafter: DrafterOfDoubles, runner: Runner, *generated: int) -> list[int]:
    drafter.runner = runner
    ends = np.asarray([PROMPT_TOKENS + tokens for tokens in generated], np.int32)
    drafter.propose([[1]] * len(generated), ends, np.zeros((len(generated), LONGEST), np.int32))
    longest: list[int] = drafter.drafts.longest[-1]
    return longest


def test_no_draft_reaches_the_place_where_an_answer_may_first_end() -> None:
    """A text of at most `longest` tokens has room for a draft that is one token shorter: the step adds a token."""
    drafter = DrafterOfDoubles()
    runner = Runner(free=0, embeddings=None, early=20, late=8)
    assert longest_of(drafter, runner, 5, 5, 5, 5) == [LONGEST, LONGEST, 30, 18]
    assert longest_of(drafter, runner, 9, 9, 19, 7) == [LONGEST, LONGEST, 30, 18]
    assert longest_of(drafter, runner, 9, 9, 20, 8) == [LONGEST] * 4
    other = Runner(late=8, free=0)
    assert longest_of(drafter, other, 7, 7) == [18, LONGEST]
