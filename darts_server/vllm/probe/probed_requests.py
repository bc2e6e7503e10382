"""Who is to be told of what, and when to look: the bookkeeping of a worker."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from darts_server.vllm.probe.wire import ARGUMENT


@dataclass(slots=True, eq=False)
class ProbedRequest:
    """A request whose states are wanted.

    ``number``: what the API process knows it by. ``prompt``: its tokens. ``points``: numbers of generated tokens,
    ascending, of which nothing was told yet.
    """

    request_id: str
    number: int
    prompt: int
    points: tuple[int, ...]
    began: int | None = None
    """The step that computed the last token of its prompt."""

    def reaches(self, computed: int) -> bool:
        """Whether the ``computed``-th token, prompt included, is at or past a point."""
        points = self.points  # which the sender may take away meanwhile
        return bool(points) and computed - self.prompt >= points[0]

    def take(self, computed: int) -> int | None:
        """The number of generated tokens, if a state at the ``computed``-th token is wanted.

        It stands for every point that it has reached, so nothing is told twice.
        """
        if not self.reaches(computed):
            return None
        tokens = computed - self.prompt
        self.points = tuple(point for point in self.points if point > tokens)
        return tokens


class ProbedRequests:
    """The requests that asked, from their first step to their end.

    vLLM's second model runner is given one that was preempted as if it were new, so all are kept until they end, and
    those of which everything was told too. One is looked at again when it can have reached its next point: what it has
    generated since its prompt was computed is at most so much a step, however often it is put aside.

    Args:
        most: tokens that a step generates of a request, at most.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._watches: dict[str, ProbedRequest] = {}
        self._due: dict[int, list[ProbedRequest]] = {}
        self._step = 0

    def __len__(self) -> int:
        return len(self._watches)

    def update(self, scheduled: Any) -> None:
        """Before a step: who ended, and who is new. ``scheduled``: vLLM's ``SchedulerOutput``."""
        if self._watches:
            for request_id in scheduled.finished_req_ids:  # first: the name of one that ended may be taken again
                self._watches.pop(request_id, None)
        for new in scheduled.scheduled_new_reqs:
            asked = new.sampling_params and new.sampling_params.extra_args
            if asked and ARGUMENT in asked and new.req_id not in self._watches:
                number, *points = asked[ARGUMENT]
                watch = ProbedRequest(new.req_id, number, prompt_tokens(new), tuple(points))
                self._watches[new.req_id] = watch
                self._due.setdefault(self._step + 1, []).append(watch)

    def due(self) -> Sequence[ProbedRequest]:
        """Those that this step may have brought to a point. To be called once a step, while there are any."""
        self._step += 1
        return [w for w in self._due.pop(self._step, ()) if w.points and self._watches.get(w.request_id) is w]

    def again(self, watch: ProbedRequest, computed: int | None) -> None:
        """Look again, now that the step has computed so many of its tokens, prompt included, or none of them."""
        if not (points := watch.points):
            return
        if watch.began is None and computed is not None and computed >= watch.prompt:
            watch.began = self._step
        soonest = 0 if watch.began is None else watch.began + -(-points[0] // self._most)
        self._due.setdefault(max(self._step + 1, soonest), []).append(watch)


def prompt_tokens(new: Any) -> int:
    """Of vLLM's ``NewRequestData``, which has either."""
    return len(new.prompt_token_ids if new.prompt_token_ids is not None else new.prompt_embeds)
