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
from typing import Any, Literal, Self

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
"""Requests groups of prompts, by their numbers and tokens, and returns at least the given number of complete groups."""


class BatchesAhead:
    """Returns the groups that are complete first, and every prompt once.

    Args:
        order: numbers of prompts after ``position``.
        size: number of groups in a batch.
        ahead: additional prompts that are started, as a share of ``size``.
        batches: number of batches. Towards the end fewer prompts are started, so that none is left.
        request: is called in another thread if the batch is prefetched.
        long_rounds: whether unfinished prompts wait until they fill a batch of their own.
    """

    def __init__(
        self,
        order: Iterator[int],
        position: Position,
        *,
        size: int,
        ahead: float,
        batches: int,
        tokenize: Callable[[Sequence[int]], Sequence[TokenIds]],
        request: Request,
        long_rounds: bool = False,
    ) -> None:
        self._order = order
        self._drawn = position.drawn
        self._pending = position.pending
        # Groups that an earlier server returned beyond the wanted number.
        self._surplus: list[tuple[int, TokenIds, Group]] = []
        self._size = size
        self._max_started = ceil(size * (1 + ahead))
        self._batches_left = batches
        self._long_rounds = long_rounds
        self._tokenize = tokenize
        self._request = request
        self._background = ThreadPoolExecutor(1, "darts-ahead")
        self._next: Future[Batch] | None = None

    def next(self) -> Batch:
        """Return the prefetched batch, or request a batch."""
        prefetched = self._next
        self._next = None
        if prefetched is None:
            request_batch = self._draw()
            return request_batch()
        return prefetched.result()

    def prefetch(self) -> None:
        """Request the next batch, if any, in the background."""
        if self._batches_left:
            self._next = self._background.submit(self._draw())

    @property
    def is_prefetched(self) -> bool:
        return self._next is not None

    def close(self) -> None:
        """Start no more batches. A running request continues until it is cancelled."""
        self._background.shutdown(wait=False, cancel_futures=True)

    def _draw(self) -> Callable[[], Batch]:
        """Draw prompts, and return a function that requests and returns their batch."""
        restarted, waiting, num_new = self._choose(self._pending)
        new = tuple(islice(self._order, num_new))
        self._batches_left -= 1
        started = restarted + new
        return partial(self._request_batch, started, self._tokenize(started), self._drawn + len(new), waiting)

    def _choose(self, pending: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Return the pending prompts to start, the pending prompts that wait, and the number of new prompts."""
        num_undrawn = self._batches_left * self._size - len(pending) - len(self._surplus)
        if self._long_rounds and len(pending) >= self._size:
            return pending[: self._size], pending[self._size :], 0
        if self._long_rounds and num_undrawn >= self._size:
            return (), pending, min(self._max_started, num_undrawn)
        num_new = max(0, self._max_started - len(pending) - len(self._surplus))
        return pending, (), min(num_new, num_undrawn)

    def _request_batch(
        self,
        started: Sequence[int],
        token_ids: Sequence[TokenIds],
        drawn: int,
        waiting: tuple[int, ...],
    ) -> Batch:
        """Request groups for a batch. Keep surplus groups and prompts without a group. `waiting` were not started."""
        wanted = max(0, self._size - len(self._surplus))
        groups = self._request(started, token_ids, wanted) if wanted else ()
        places = [group.number for group in groups]
        complete = set(places)
        if len(complete) != len(places) or len(places) < wanted:
            raise ProtocolError(f"the batch has groups {places}, not {wanted} different ones of {len(started)}")

        results = self._surplus + [(started[group.number], token_ids[group.number], group) for group in groups]
        # Groups of equal rewards only fill up a batch.
        self._surplus = [result for result in results[self._size :] if not result[2].zero_variance]
        self._drawn = drawn
        self._pending = waiting + tuple(number for place, number in enumerate(started) if place not in complete)
        surplus = tuple(number for number, _, _ in self._surplus)
        prompts, prompt_tokens, prompt_groups = map(list, zip(*results[: self._size], strict=True))
        return Batch(prompts, prompt_tokens, prompt_groups, Position(drawn, self._pending + surplus))


class GroupRequests:
    """Requests groups by `POST /darts/v1/rollouts`. The server keeps unfinished prompts."""

    def __init__(self, server: Server, group_size: int, options: Mapping[str, Any], carry: Carry = "restart") -> None:
        self._server = server
        self._carry: Carry = carry
        self._group_size = group_size
        self._options = options
        self._running: Rollouts[Group] | None = None

    def request(self, prompts: Sequence[TokenIds | PromptSpec], wanted: int) -> list[Group]:
        """Return the first ``wanted`` groups that are complete, in the order of their prompts.

        With ``return_zero_variance``, groups of equal rewards come last.

        Raises:
            DartsError: a group failed, or the request failed.
        """
        with self._server.client(UPDATE_TIMEOUT, retries=RECONNECTS) as client:
            batch = client.rollouts(
                list(prompts),
                group_size=self._group_size,
                num_groups=wanted if wanted < len(prompts) else None,
                carry=self._carry,
                survivors=False,
                **self._options,
            )
            self._running = batch
            with batch:
                groups = list(batch)
            self._running = None
            for failed in batch.failed:
                assert failed.error is not None
                raise failed.error
            for prompt in batch.unfinished:
                # The prompt was aborted.
                if prompt.error is not None and len(groups) < wanted:
                    raise error_from_object(prompt.error)
        is_dynamic = "return_zero_variance" in self._options
        return sorted(groups, key=lambda group: (is_dynamic and group.zero_variance is not False, group.number))

    def cancel(self) -> None:
        """Cancel a request that still runs in another thread."""
        if self._running is not None and self._running.id is not None:
            # Otherwise the server cancels the batch a minute after this process has ended.
            with suppress(DartsError), self._server.client() as client:
                client.cancel(self._running.id)


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
