"""Prompts that are started before the training step that uses them."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from .._errors import DartsError, ProtocolError, error_from_object
from .._models import Group
from .._prompts import PromptSpec
from .._sync_rollouts import Rollouts
from ._server import RECONNECTS, UPDATE_TIMEOUT, Server

TokenIds = Sequence[int]

POSITION_FILE = "darts-prompts.json"
"""File name in a checkpoint's folder."""


@dataclass(frozen=True, slots=True)
class Position:
    """Progress of training through the order of its prompts."""

    drawn: int = 0
    """Number of prompts that were drawn from the order."""
    pending: tuple[int, ...] = ()
    """Numbers of drawn prompts that were not trained on yet."""

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Self:
        fields = json.loads(path.read_text())
        return cls(int(fields["drawn"]), tuple(map(int, fields["pending"])))


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts to train on, by their numbers in the data set, with the tokens and the group of each prompt."""

    prompts: Sequence[int]
    token_ids: Sequence[TokenIds]
    groups: Sequence[Group]
    position: Position
    """Position after this batch."""


Carry = Literal["restart", "resume"]
Request = Callable[[Sequence[int], Sequence[TokenIds], int], Sequence[Group]]
"""Requests groups of prompts, by their numbers and tokens, and returns at least a given number of complete groups."""


class CompletePrompt(NamedTuple):
    number: int
    token_ids: TokenIds
    group: Group


class PromptChoice(NamedTuple):
    pending_to_start: tuple[int, ...]
    pending_to_wait: tuple[int, ...]
    num_new: int


class BatchesAhead:
    """Returns the groups that are complete first, and every prompt once.

    Args:
        order: numbers of prompts after ``position``.
        size: number of groups in a batch.
        ahead_share: additional prompts that are started, as a share of ``size``.
        batches: number of batches. Towards the end fewer prompts are started, so that none is left.
        request: is called in another thread if the batch is prefetched.
        long_rounds: whether unfinished prompts wait until they fill a batch of their own.
        only_informative: whether the server counts only groups of unequal rewards (dynamic sampling).
    """

    def __init__(
        self,
        order: Iterator[int],
        position: Position,
        *,
        size: int,
        ahead_share: float,
        batches: int,
        tokenize: Callable[[Sequence[int]], Sequence[TokenIds]],
        request: Request,
        long_rounds: bool = False,
        only_informative: bool = False,
    ) -> None:
        self._order = order
        self._num_drawn = position.drawn
        self._pending = position.pending
        # A server of an earlier version may return more groups than wanted.
        self._surplus: list[CompletePrompt] = []
        self._size = size
        self._max_started = ceil(size * (1 + ahead_share))
        self._remaining_batches = batches
        self._long_rounds = long_rounds
        self._only_informative = only_informative
        self._tokenize = tokenize
        self._request = request
        self._background = ThreadPoolExecutor(1, "darts-ahead")
        self._prefetched: Future[Batch] | None = None

    def next(self) -> Batch:
        prefetched = self._prefetched
        self._prefetched = None
        if prefetched is None:
            request_batch = self._prepare_request()
            return request_batch()
        return prefetched.result()

    def prefetch(self) -> None:
        if self._remaining_batches:
            # Prompts are drawn in this thread: the data set and the tokenizer belong to the trainer.
            request_batch = self._prepare_request()
            self._prefetched = self._background.submit(request_batch)

    @property
    def is_prefetched(self) -> bool:
        return self._prefetched is not None

    def close(self) -> None:
        """Start no more batches. A running request continues until it is cancelled."""
        self._background.shutdown(wait=False, cancel_futures=True)

    def _prepare_request(self) -> Callable[[], Batch]:
        """Draw prompts, and return a function that requests their batch."""
        choice = self._choose_prompts()
        new = tuple(islice(self._order, choice.num_new))
        self._remaining_batches -= 1
        started = choice.pending_to_start + new
        return partial(
            self._request_batch,
            started,
            self._tokenize(started),
            self._num_drawn + len(new),
            waiting=choice.pending_to_wait,
        )

    def _choose_prompts(self) -> PromptChoice:
        pending = self._pending
        # The remaining batches have no place for more new prompts.
        max_new = max(0, self._remaining_batches * self._size - len(pending) - len(self._surplus))
        # Pending prompts are likely to be long. A long round has no other prompts.
        if self._long_rounds and len(pending) >= self._size:
            return PromptChoice(pending[: self._size], pending[self._size :], num_new=0)
        # In the last batches, pending prompts cannot wait for a batch of their own.
        if self._long_rounds and max_new >= self._size:
            return PromptChoice((), pending, num_new=min(self._max_started, max_new))
        num_new = max(0, self._max_started - len(pending) - len(self._surplus))
        return PromptChoice(pending, (), num_new=min(num_new, max_new))

    def _request_batch(
        self,
        started: Sequence[int],
        token_ids: Sequence[TokenIds],
        num_drawn: int,
        waiting: tuple[int, ...],
    ) -> Batch:
        num_wanted = max(0, self._size - len(self._surplus))
        groups = self._request(started, token_ids, num_wanted) if num_wanted else ()
        # `number` is an index into the request's prompts, not a number of the data set.
        indices = [group.number for group in groups]
        complete_indices = set(indices)
        if len(complete_indices) != len(indices) or len(indices) < num_wanted:
            raise ProtocolError(f"the batch has groups {indices}, not {num_wanted} different ones of {len(started)}")

        received = [CompletePrompt(started[group.number], token_ids[group.number], group) for group in groups]
        complete = self._surplus + received
        batch = complete[: self._size]
        # Groups of equal rewards, and under dynamic sampling groups without rewards, only fill up a batch.
        uninformative = (True, None) if self._only_informative else (True,)
        self._surplus = [each for each in complete[self._size :] if each.group.zero_variance not in uninformative]
        self._num_drawn = num_drawn
        unfinished = [number for index, number in enumerate(started) if index not in complete_indices]
        self._pending = waiting + tuple(unfinished)
        # A resumed training has no surplus groups, so it requests their prompts again.
        untrained = self._pending + tuple(prompt.number for prompt in self._surplus)
        return Batch(
            prompts=[prompt.number for prompt in batch],
            token_ids=[prompt.token_ids for prompt in batch],
            groups=[prompt.group for prompt in batch],
            position=Position(num_drawn, untrained),
        )


class GroupRequests:
    """Requests groups by `POST /darts/v1/rollouts`. The server keeps unfinished prompts."""

    def __init__(
        self,
        server: Server,
        group_size: int,
        options: Mapping[str, Any],
        carry: Carry = "restart",
    ) -> None:
        self._server = server
        self._carry: Carry = carry
        self._group_size = group_size
        self._options = options
        self._running_batch: Rollouts[Group] | None = None

    def request(self, prompts: Sequence[TokenIds | PromptSpec], num_wanted: int) -> list[Group]:
        """Return the first ``num_wanted`` groups that are complete, in the order of their prompts.

        Raises:
            DartsError: a group failed, or the request failed.
        """
        # The timeout limits only the upload of the prompts. Events have `idle_timeout`.
        with self._server.client(UPDATE_TIMEOUT, retries=RECONNECTS) as client:
            batch = client.rollouts(
                list(prompts),
                group_size=self._group_size,
                num_groups=num_wanted if num_wanted < len(prompts) else None,
                carry=self._carry,
                survivors=False,
                **self._options,
            )
            # `cancel` reads it in another thread.
            self._running_batch = batch
            with batch:
                groups = list(batch)
            self._running_batch = None
            if batch.failed:
                first_error = batch.failed[0].error
                assert first_error is not None
                raise first_error
            for prompt in batch.unfinished:
                # An error means that the prompt was aborted. The others may have enough groups.
                if prompt.error is not None and len(groups) < num_wanted:
                    raise error_from_object(prompt.error)

        groups.sort(key=lambda group: group.number)
        if "return_zero_variance" in self._options:
            # The caller trains on the first groups, so groups of equal rewards are last.
            groups.sort(key=lambda group: group.zero_variance is not False)
        return groups

    def cancel(self) -> None:
        batch = self._running_batch
        if batch is not None and batch.id is not None:
            # Otherwise the server cancels the batch a minute after this process has ended.
            with suppress(DartsError), self._server.client() as client:
                client.cancel(batch.id)


def rollout_options(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `Client.rollouts` for the sampling parameters of TRL's client.

    Raises:
        ValueError: `vllm_xargs` has more than the policy's name.
    """
    options = dict(sampling)
    xargs = dict(options.pop("vllm_xargs", None) or {})
    policy = xargs.pop("darts_policy", None)
    if xargs:
        raise ValueError(
            f"generation_kwargs' vllm_xargs has {', '.join(sorted(xargs))}: with prompts_ahead or max_staleness only "
            "darts_policy can be chosen there; leave the others out"
        )
    if policy is not None:
        options["policy"] = policy
    return options
