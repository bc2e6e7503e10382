"""The port to an inference engine: the calls that running a group needs.

``RequestT`` is the engine's own request for the candidates of one prompt, ``OutputT`` its own output of one candidate.
The rooms above pass both on without reading them.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from darts_server.types import FinishReason, PromptSpec, Sample

RequestT = TypeVar("RequestT")
OutputT = TypeVar("OutputT")
RequestT_contra = TypeVar("RequestT_contra", contravariant=True)
OutputT_contra = TypeVar("OutputT_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class CandidateResult(Generic[OutputT]):
    """The output of a candidate that finished or was aborted.

    ``tokens``: number of tokens in ``output``. ``finish_reason``: None if the candidate was aborted, by us or by
    another client of the engine.
    """

    tokens: int
    finish_reason: FinishReason | None
    output: OutputT


@dataclass(frozen=True, slots=True)
class RequestTokens:
    """Tokens of a request's prompt, and the maximum that a candidate may generate. None if unknown."""

    prompt: int | None = None
    max_tokens: int | None = None


UNKNOWN_TOKENS = RequestTokens()


@dataclass(frozen=True, slots=True)
class TokenSlice:
    """A candidate's generated tokens from some position on, with their log-probs if the engine computes them.

    ``logprobs_requested``: False if the log-probs are for a `Probe`, and must not be returned to the caller.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None
    logprobs_requested: bool = True


NO_TOKENS = TokenSlice((), None)


@dataclass(frozen=True, slots=True, eq=False)
class HiddenState:
    """The model's final hidden state at the last of a candidate's first ``tokens`` tokens. ``vector``: [width]."""

    tokens: int
    vector: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Probe:
    """What the engine reports about a candidate while it runs.

    ``detect_at``: numbers of generated tokens, ascending, at which the hidden state is taken; where one step makes
    several tokens, after the first step that reaches each. ``on_state``: called with each state at most once, in order,
    in the event loop, possibly after the candidate has finished; it must return fast and never raise. ``logprobs``:
    include log-probs in `RunningCandidate.tokens_from`, even if the request asks for none.
    """

    detect_at: tuple[int, ...]
    on_state: Callable[[HiddenState], None]
    logprobs: bool = False


class RunningCandidate(Protocol[OutputT]):
    """A candidate that was started on an engine."""

    def count_tokens(self) -> int | None:
        """Return the number of tokens so far, or None after the end. A timer calls this for all candidates."""

    def tokens_from(self, start: int) -> TokenSlice | None:
        """Return the tokens from position ``start`` on, or None after the end."""

    def stop(self) -> int:
        """Abort the candidate, and return the number of tokens generated so far.

        Called at most once. Returns before the engine has aborted the candidate; `result` then returns the output up to
        the abort. A finished candidate does not change, and the number is 0 if its result was taken.
        """

    async def result(self) -> CandidateResult[OutputT]:
        """Wait until the candidate has finished or was aborted.

        Raises:
            CandidateFailed, EngineRefused, EngineDead
        """


class Engine(Protocol[RequestT_contra, OutputT]):
    """An inference engine."""

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next token will be generated with."""

    @property
    def capacity(self) -> int | None:
        """Maximum number of candidates that run at once, ``None`` if unlimited. More candidates wait in a queue."""

    @property
    def num_engines(self) -> int:
        """Number of engines behind this port. Each runs its own batch, with an equal share of `capacity`."""

    @property
    def unfinished_requests(self) -> int:
        """Number of running and queued requests, including requests of other clients."""

    @property
    def has_priorities(self) -> bool:
        """Whether queued candidates start by the ``order`` of `start`, not first come, first served."""

    @property
    def drafts_from_siblings(self) -> bool:
        """Whether a candidate decodes in fewer steps if other candidates of its prompt have generated before."""

    @property
    def probe_width(self) -> int | None:
        """Width of the hidden states that the engine reports to a `Probe`, ``None`` if it reports none."""

    async def start(
        self,
        request: RequestT_contra,
        index: int,
        probe: Probe | None = None,
        order: float = 0.0,
        prefix: TokenSlice = NO_TOKENS,
    ) -> RunningCandidate[OutputT]:
        """Start candidate ``index`` of a request.

        ``order``: if the engine `has_priorities`, queued candidates of equal priority start from the lowest order.

        ``prefix``: tokens that the candidate had generated when it was stopped, with log-probs if the request asks for
        them. The candidate continues after them, and its token counts and outputs include them. If it has a seed, new
        tokens get another seed, made from it and the prefix's length, unless sampling is coupled.

        Raises:
            CandidateFailed, EngineRefused, EngineBusy, EngineDead
        """

    def check_resumable(self, request: RequestT_contra) -> None:
        """Check that candidates of this request continue from a prefix as if they had not been stopped.

        Raises:
            InvalidRequest: names the sampling parameter that depends on more than the tokens so far.
        """

    def truncate(self, request: RequestT_contra, output: OutputT, tokens: int) -> OutputT:
        """Truncate an output to its first ``tokens`` tokens, as if the request's ``max_tokens`` had been ``tokens``."""

    def aborted_output(self, request: RequestT_contra, prefix: TokenSlice = NO_TOKENS) -> OutputT:
        """Return the output of a candidate that was aborted before the engine started it: ``prefix`` alone."""

    def finished_output(
        self,
        request: RequestT_contra,
        tokens: TokenSlice,
        finish_reason: FinishReason,
        text: str,
    ) -> OutputT:
        """Return the output of a candidate that finished with these tokens and this text on another engine."""

    def tokens_from(self, output: OutputT, start: int) -> TokenSlice: ...

    def token_ids(self, request: RequestT_contra, output: OutputT) -> tuple[Sequence[int], Sequence[int]]:
        """Return the token ids of the prompt and of the completion: the engine's own lists, not copies."""


class PromptRenderer(Protocol[RequestT, OutputT_contra]):
    """Renders callers' prompts into the engine's requests, and its outputs into samples."""

    def effective_sampling(self, sampling: Mapping[str, object]) -> Mapping[str, object]:
        """Check sampling parameters, and return the parameters in force as JSON values. Unset parameters are omitted.

        Raises:
            InvalidRequest: names the invalid parameter, which is ``logprobs`` if the engine's log-probs ignore another
                parameter, such as ``temperature``.
        """

    async def make_request(
        self,
        prompt: PromptSpec,
        sampling: Mapping[str, object],
        size: int,
        request_id: str,
    ) -> RequestT:
        """Build a request for ``size`` trajectories, and check it as far as possible.

        Raises:
            InvalidRequest: names the field of ``prompt`` or ``sampling``.
        """

    def prompt_key(self, request: RequestT) -> str:
        """Return the key of the prompt's statistics for callers that give no key. The seed does not change it."""

    def known_token_counts(self, request: RequestT) -> RequestTokens:
        """Return what is known before the request runs."""

    def tail_seed(self, request: RequestT) -> Sequence[int] | None:
        """Return the seed for sampling the group's tail, ``None`` for a random seed."""

    def reuse_streams(self, request: RequestT) -> AbstractContextManager[None]:
        """Let candidates have the random numbers of earlier groups of the prompt in the block, if that is wanted.

        Groups of a prompt that run at the same time have different random numbers.
        """

    def has_numbered_streams(self, request: RequestT) -> bool:
        """Return whether a candidate's random numbers depend on its index."""

    async def to_sample(self, output: OutputT_contra) -> Sample:
        """Convert a trajectory's output to a `Sample`. Other tasks run while a long output is converted."""
