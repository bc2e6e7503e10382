"""The port to any inference engine: what the rollout room needs and nothing more.

``RequestT`` is whatever the adapter needs to start a candidate of one prompt, ``OutputT`` whatever it makes of a
finished one. Both pass through the rooms above unread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from darts_server.types import FinishReason, PromptSpec, Sample

RequestT = TypeVar("RequestT")
OutputT = TypeVar("OutputT")
RequestT_contra = TypeVar("RequestT_contra", contravariant=True)
OutputT_contra = TypeVar("OutputT_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class Ended(Generic[OutputT]):
    """A candidate's end. ``reason`` is ``None`` for one that was aborted, whoever asked for it.

    ``tokens`` is the number of generated tokens in ``output``.
    """

    tokens: int
    reason: FinishReason | None
    output: OutputT


@dataclass(frozen=True, slots=True)
class Generated:
    """Tokens of a candidate from some place on, and their log-probs if these were asked for."""

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None


class Running(Protocol[OutputT]):
    """A candidate that was started."""

    def tokens(self) -> int | None:
        """Tokens generated so far and not finished with; ``None`` once it has ended. Cheap, never blocks."""
        ...

    def generated(self, start: int) -> Generated | None:
        """What it has generated from token ``start`` on; ``None`` once it has ended. Cheap, never blocks.

        Its output will begin with just these tokens.
        """
        ...

    def stop(self) -> int:
        """Ask the engine to abort it. Returns at once, with the number of tokens that it has generated, running or not.

        :meth:`ended` then gives what there is.
        """
        ...

    async def ended(self) -> Ended[OutputT]:
        """Wait for its end.

        Raises:
            CandidateFailed, EngineRefused, EngineDead
        """
        ...


class Engine(Protocol[RequestT_contra, OutputT]):
    """An inference engine."""

    @property
    def weight_version(self) -> int:
        """The version of the weights that the next token will be generated with."""
        ...

    @property
    def capacity(self) -> int | None:
        """Most candidates that it runs at once; others wait. ``None`` if there is no such bound."""
        ...

    async def start(self, request: RequestT_contra, index: int) -> Running[OutputT]:
        """Start candidate ``index`` of the request's prompt.

        Raises:
            CandidateFailed, EngineRefused, EngineDead
        """
        ...

    def cut(self, request: RequestT_contra, output: OutputT, tokens: int) -> OutputT:
        """The first ``tokens`` tokens of an output, as if they had been the request's ``max_tokens``."""
        ...

    def generated(self, output: OutputT, start: int) -> Generated:
        """What an output holds from token ``start`` on."""
        ...

    def token_ids(self, request: RequestT_contra, output: OutputT) -> tuple[Sequence[int], Sequence[int]]:
        """Of the prompt, and of what was generated. Cheap: the engine's own lists."""
        ...


class Prompter(Protocol[RequestT, OutputT_contra]):
    """Makes an engine's requests from what callers say, and reads its outputs."""

    async def request(self, prompt: PromptSpec, sampling: Mapping[str, object], size: int, request_id: str) -> RequestT:
        """A request for ``size`` trajectories, checked as far as it can be before it runs.

        Raises:
            InvalidRequest: names the field of ``prompt`` or ``sampling``.
        """
        ...

    def key(self, request: RequestT) -> str:
        """Under which the prompt's lengths are remembered where the caller names no key."""
        ...

    def lots(self, request: RequestT) -> Sequence[int] | None:
        """Seed of the tail's lottery; ``None`` for a fresh one."""
        ...

    def sample(self, output: OutputT_contra) -> Sample:
        """What a trajectory holds."""
        ...
