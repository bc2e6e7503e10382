"""The requests of a worker that have a probe, and the steps in which each can reach its next point."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from darts_server.vllm.probe.wire import ARGUMENT


@dataclass(slots=True, eq=False)
class ProbedRequest:
    """A request with a probe.

    ``number``: identifies it in the API process. ``prompt_tokens``: their number. ``points``: numbers of generated
    tokens, ascending, at which no state was taken yet.
    """

    request_id: str
    number: int
    prompt_tokens: int
    points: tuple[int, ...]
    prompt_step: int | None = None
    """The step that computed the last token of its prompt."""

    def reaches(self, computed: int) -> bool:
        """Whether the ``computed``-th token, prompt included, is at or past a point."""
        points = self.points  # one read, because the sender's thread may replace them
        return bool(points) and computed - self.prompt_tokens >= points[0]

    def take(self, computed: int) -> int | None:
        """Remove the points that the ``computed``-th token has reached; return its number of generated tokens.

        ``None`` if there are none. One state stands for all points that it has reached, so it is sent once.
        """
        if not self.reaches(computed):
            return None
        tokens = computed - self.prompt_tokens
        self.points = tuple(point for point in self.points if point > tokens)
        return tokens


class ProbedRequests:
    """The requests with a probe, from their first step to their end, and when to look at each.

    Requests whose points are all taken are kept as well: vLLM's second model runner receives a preempted request as if
    it were new, and it must not be probed a second time. A request is looked at when it can have reached its next
    point: however often it is preempted, a step adds at most ``max_step_tokens`` to what it has generated since its
    prompt was computed.

    Args:
        max_step_tokens: generated tokens of a request per step, with speculative decoding.
    """

    def __init__(self, max_step_tokens: int) -> None:
        self._max_step_tokens = max_step_tokens
        self._requests: dict[str, ProbedRequest] = {}
        self._due: dict[int, list[ProbedRequest]] = {}
        self._step = 0

    def __len__(self) -> int:
        return len(self._requests)

    def update(self, scheduled: Any) -> None:
        """Remove ended and add new requests before a step. ``scheduled``: vLLM's ``SchedulerOutput``."""
        if self._requests:
            for request_id in scheduled.finished_req_ids:  # first, because a new request may reuse the id
                self._requests.pop(request_id, None)
        for new in scheduled.scheduled_new_reqs:
            arguments = new.sampling_params and new.sampling_params.extra_args
            if arguments and ARGUMENT in arguments and new.req_id not in self._requests:
                number, *points = arguments[ARGUMENT]
                request = ProbedRequest(new.req_id, number, count_prompt_tokens(new), tuple(points))
                self._requests[new.req_id] = request
                self._due.setdefault(self._step + 1, []).append(request)

    def due(self) -> Sequence[ProbedRequest]:
        """Return the requests that this step may have brought to a point. Call it in each step while there are any."""
        self._step += 1
        return [r for r in self._due.pop(self._step, ()) if r.points and self._requests.get(r.request_id) is r]

    def reschedule(self, request: ProbedRequest, computed: int | None) -> None:
        """Schedule the next look at a request of which this step computed the ``computed``-th token, if any."""
        if not (points := request.points):
            return
        if request.prompt_step is None and computed is not None and computed >= request.prompt_tokens:
            request.prompt_step = self._step
        steps = -(-points[0] // self._max_step_tokens)  # rounded up
        earliest = 0 if request.prompt_step is None else request.prompt_step + steps
        self._due.setdefault(max(self._step + 1, earliest), []).append(request)


def count_prompt_tokens(new: Any) -> int:
    """Count them in vLLM's ``NewRequestData``, which has either their ids or their embeddings."""
    return len(new.prompt_token_ids if new.prompt_token_ids is not None else new.prompt_embeds)
