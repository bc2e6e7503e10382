"""Prompts that are started ahead of the step that trains on them."""

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
from .._sync_rollouts import Rollouts
from ._server import UPDATE_TIMEOUT, Server

TokenIds = Sequence[int]

POSITION_FILE = "darts-prompts.json"
"""The file in a checkpoint's folder."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far training is in the order of its prompts: how many were drawn, and which of these are not trained on."""

    drawn: int = 0
    pending: tuple[int, ...] = ()

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Self:
        fields = json.loads(path.read_text())
        return cls(int(fields["drawn"]), tuple(map(int, fields["pending"])))


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts to train on, by their numbers in the data set, with tokens and group of each; and the position after."""

    prompts: Sequence[int]
    token_ids: Sequence[TokenIds]
    groups: Sequence[Group]
    position: Position


Carry = Literal["restart", "resume"]
Request = Callable[[Sequence[TokenIds], int], Sequence[Group]]
"""Requests groups of prompts, and returns the first so many that are complete; of an earlier server a few more."""


class BatchesAhead:
    """Draw prompts in their order, and return the groups that are complete first; every prompt is returned once.

    Args:
        order: numbers of prompts, from the first that is not drawn yet; long enough for ``batches``.
        position: before the first batch.
        size: groups of a batch.
        ahead: more prompts are started, as a share of ``size``.
        batches: how many there will be. Their prompts are the next ``size`` times as many: towards the end fewer are
            started ahead, and nothing is left over.
        long_rounds: prompts that are left over wait until they fill a batch of their own, which has no others. By
            default they are in the next batch.
        tokenize: returns the tokens of prompts.
        request: called in another thread for batches that are prefetched.
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
        self._drawn, self._pending = position.drawn, position.pending
        self._spare: list[tuple[int, TokenIds, Group]] = []  # more than were needed, of an earlier server
        self._size = size
        self._most = ceil(size * (1 + ahead))
        self._batches = batches
        self._long_rounds = long_rounds
        self._tokenize = tokenize
        self._request = request
        self._background = ThreadPoolExecutor(1, "darts-ahead")
        self._next: Future[Batch] | None = None

    def next(self) -> Batch:
        """Return the next batch: the one that was prefetched, or else one that is requested now."""
        following, self._next = self._next, None
        return self._start()() if following is None else following.result()

    def prefetch(self) -> None:
        """Request the batch after the one that `next` has returned, in the background; nothing after the last."""
        if self._batches:
            self._next = self._background.submit(self._start())

    @property
    def is_prefetched(self) -> bool:
        """Whether the next batch was requested."""
        return self._next is not None

    def close(self) -> None:
        """Start nothing more. A request that still runs goes on until it is cancelled."""
        self._background.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> Callable[[], Batch]:
        """Draw prompts, and return a function that requests and returns their batch."""
        again, waiting, count = self._choose(self._pending)
        new = tuple(islice(self._order, count))
        started = again + new
        self._batches -= 1
        return partial(self._finish, started, self._tokenize(started), self._drawn + len(new), waiting)

    def _choose(self, pending: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Return which prompts that were left over start again, which wait, and how many new ones start."""
        undrawn = self._batches * self._size - len(pending) - len(self._spare)
        if self._long_rounds and len(pending) >= self._size:
            return pending[: self._size], pending[self._size :], 0
        if self._long_rounds and undrawn >= self._size:
            return (), pending, min(self._most, undrawn)
        return pending, (), min(max(0, self._most - len(pending) - len(self._spare)), undrawn)

    def _finish(
        self, started: Sequence[int], token_ids: Sequence[TokenIds], drawn: int, waiting: tuple[int, ...]
    ) -> Batch:
        wanted = max(0, self._size - len(self._spare))
        groups = self._request(token_ids, wanted) if wanted else ()
        places = [group.number for group in groups]
        if len(set(places)) != len(places) or len(places) < wanted:
            raise ProtocolError(f"the batch has groups {places}, not {wanted} different ones of {len(started)}")
        found = [*self._spare, *((started[group.number], token_ids[group.number], group) for group in groups)]
        chosen, self._spare = found[: self._size], found[self._size :]
        decided = set(places)
        self._drawn = drawn
        self._pending = waiting + tuple(number for place, number in enumerate(started) if place not in decided)
        position = Position(drawn, (*self._pending, *(number for number, _, _ in self._spare)))
        prompts, tokens, of_prompts = map(list, zip(*chosen, strict=True))
        return Batch(prompts, tokens, of_prompts, position)


class GroupRequests:
    """Request groups by `POST /darts/v1/rollouts`; undecided prompts are kept by the server, and start first later.

    ``carry``: whether they start again or go on from what they have.
    """

    def __init__(self, server: Server, group_size: int, options: Mapping[str, Any], carry: Carry = "restart") -> None:
        self._server = server
        self._carry: Carry = carry
        self._group_size = group_size
        self._options = options
        self._running: Rollouts[Group] | None = None

    def request(self, prompts: Sequence[Sequence[int]], wanted: int) -> list[Group]:
        """Return the first ``wanted`` groups that are complete, in the order of their prompts.

        Raises:
            DartsError: a group failed, or the request.
        """
        with self._server.client(UPDATE_TIMEOUT) as client:
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
                if prompt.error is not None and len(groups) < wanted:  # it was aborted
                    raise error_from_object(prompt.error)
        return sorted(groups, key=lambda group: group.number)

    def cancel(self) -> None:
        """Cancel a request that still runs in another thread."""
        if self._running is not None and self._running.id is not None:
            with suppress(DartsError), self._server.client() as client:
                client.cancel(self._running.id)


def rollout_options(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `Client.rollouts` for sampling parameters as TRL's client gets them.

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
    return options if policy is None else options | {"policy": policy}
