"""The client's queue against answers that a server gives when it is full, stops, or loses its connections."""

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from contextlib import aclosing, closing
from typing import Any

import httpx
import pytest

from darts_client import AsyncClient, Client, ConnectionFailed, NotFound, Overloaded
from darts_client._queue import StreamPrompts

URL = "http://server"
SIZES: dict[str, Any] = {"group_size": 1, "max_tokens": 8}
REFUSED = httpx.Response(429, headers={"Retry-After": "1"})


class FakeQueue:
    """A queue whose groups are ready at once.

    Attributes:
        room: prompts that it holds at most; a put that exceeds it is a 429.
        busy_until: until then takes are answered at once with nothing, as while a server stops.
        lose_takes, lose_puts: so many answers are lost after the request was served.
        slow_put: seconds until a put is served, also where its caller is gone.
        drop_next: each job is deleted as soon as prompts are put into it.
        options: of the last put.
    """

    def __init__(self) -> None:
        self.room = 100
        self.busy_until = 0.0
        self.lose_takes = self.lose_puts = 0
        self.slow_put = 0.0
        self.drop_next = False
        self.options: dict[str, Any] = {}
        self.requests: list[str] = []
        self.jobs: dict[str, list[str]] = {}
        self.leased: dict[str, str] = {}
        self.taken: dict[str, str] = {}
        self.expired: set[str] = set()
        self.keys: dict[str, list[str]] = {}
        self.tasks: list[asyncio.Task[httpx.Response]] = []
        self._numbers = itertools.count()

    def count(self, request: str) -> int:
        return self.requests.count(request)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(f"{request.method} {request.url.path.removeprefix('/darts/v1/')}".split("/jobs")[0])
        match request.method, request.url.path:
            case "POST", "/darts/v1/queue":
                return self.put(request)
            case "GET", "/darts/v1/queue/groups":
                return self.take(request)
            case "POST", "/darts/v1/queue/ack":
                leases = json.loads(request.content)["leases"]
                return httpx.Response(200, json={"leases": [{"outcome": self.ack(lease)} for lease in leases]})
            case "GET", "/darts/v1/queue":
                counts = dict.fromkeys(("queued", "running", "bytes", "max_staleness"), 0)
                jobs = [
                    {"job": job, **counts, "ready": len(ready), "leased": len(self.leased)}
                    for job, ready in self.jobs.items()
                ]
                return httpx.Response(200, json={"jobs": jobs})
            case "DELETE", path:
                found = self.jobs.pop(path.rpartition("/")[2], None)
                return httpx.Response(404) if found is None else httpx.Response(200, json={"dropped": len(found)})
        raise AssertionError(request.url)

    async def serve(self, request: httpx.Request) -> httpx.Response:
        """Serve the request, also where its caller does not wait for the answer."""

        async def answer() -> httpx.Response:
            if request.method == "POST" and request.url.path == "/darts/v1/queue":
                delay, self.slow_put = self.slow_put, 0.0
                await asyncio.sleep(delay)
            return self(request)

        self.tasks.append(asyncio.create_task(answer()))
        return await asyncio.shield(self.tasks[-1])

    def put(self, request: httpx.Request) -> httpx.Response:
        body, key = json.loads(request.content), request.headers["idempotency-key"]
        if key not in self.keys:
            held = sum(map(len, self.jobs.values())) + len(self.leased)
            if held + len(body["prompts"]) > self.room:
                return REFUSED
            self.keys[key] = [prompt["text"] for prompt in body["prompts"]]
            self.jobs.setdefault(body["job"], []).extend(self.keys[key])
        elif body["job"] not in self.jobs:
            return httpx.Response(404)
        self.options = {name: value for name, value in body.items() if name != "prompts"}
        if self.drop_next:
            self.jobs.clear()
        if self.lose_puts:
            self.lose_puts -= 1
            raise httpx.ReadError("lost", request=request)
        return httpx.Response(200, json={"ids": self.keys[key], "added": 0})

    def take(self, request: httpx.Request) -> httpx.Response:
        ready, key = self.jobs.get(request.url.params["job"], []), request.headers["idempotency-key"]
        if (lease := self.taken.get(key, "")) not in self.leased:
            if not ready or time.monotonic() < self.busy_until:
                return httpx.Response(200, json={"groups": []})
            lease = self.taken[key] = f"lease {next(self._numbers)}"
            self.leased[lease] = ready.pop(0)
        name = self.leased[lease]
        if self.lose_takes:
            self.lose_takes -= 1
            raise httpx.ReadError("lost", request=request)
        group = {"number": 0, "group_id": name, "candidates": 1, "trajectories": [], "error": {"message": name}}
        taken = {"id": name, "lease": lease, "lease_until": 1.0, "staleness": 0, "group": group}
        return httpx.Response(200, json={"groups": [taken]})

    def ack(self, lease: str) -> str:
        if lease in self.expired:
            return "expired"
        return "unknown" if self.leased.pop(lease, None) is None else "acknowledged"

    def delete(self) -> None:
        """Delete all jobs."""
        self.jobs.clear()
        self.leased.clear()

    def expire(self) -> None:
        """Hand every leased group out again."""
        for name in self.leased.values():
            next(iter(self.jobs.values())).insert(0, name)
        self.expired |= self.leased.keys()
        self.leased.clear()


@pytest.fixture
def queue() -> FakeQueue:
    return FakeQueue()


@pytest.fixture
def client(queue: FakeQueue) -> Iterator[Client]:
    with Client(URL, transport=httpx.MockTransport(queue)) as client:
        yield client


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def test_a_stream_whose_put_is_refused_takes_what_is_ready_and_puts_later(queue: FakeQueue, client: Client) -> None:
    with closing(client.stream(iter(names("p", 12)), ahead=4, **SIZES)) as groups:
        first = next(groups)
        queue.room = 2  # what is in flight is larger than allowed: one acknowledgement makes no room
        before = time.monotonic()
        rest = [next(groups), next(groups)]
        assert time.monotonic() - before < 0.9, "groups that are ready do not wait for the put"
        queue.room = 100
        rest += groups
    assert [group.group_id for group in (first, *rest)] == names("p", 12), "every prompt has its group, once"
    assert queue.count("DELETE queue") == 1


def test_a_refused_put_is_not_repeated_before_it_is_due(queue: FakeQueue, client: Client) -> None:
    with closing(client.stream(iter(names("p", 40)), ahead=20, **SIZES)) as groups:
        next(groups)
        queue.room = 10
        before = time.monotonic()
        for _ in range(8):
            next(groups)
        if time.monotonic() - before < 1:
            assert queue.count("POST queue") == 2, "the one that was accepted, and the one that was refused"


def test_a_stream_without_groups_raises_that_it_is_refused(queue: FakeQueue) -> None:
    queue.room = 0
    with (
        Client(URL, retries=0, transport=httpx.MockTransport(queue)) as client,
        pytest.raises(Overloaded),
    ):
        next(client.stream(["a"], **SIZES))
    assert queue.requests == ["POST queue", "DELETE queue"]


def test_a_slow_iterator_of_prompts_does_not_hold_groups_back(client: Client) -> None:
    drawn: list[int] = []

    def prompts() -> Iterator[str]:
        for number in range(60):
            time.sleep(0.05)
            drawn.append(number)
            yield f"p{number}"

    with closing(client.stream(prompts(), **SIZES)) as groups:
        assert next(groups).group_id == "p0"
        assert len(drawn) < 30


@pytest.mark.parametrize("option", ["job", "ids", "idempotency_key"])
def test_what_a_stream_chooses_is_no_option(client: Client, option: str) -> None:
    with pytest.raises(TypeError, match=f"own {option}.*queue.put"):
        next(client.stream(["a"], **(SIZES | {option: "x"})))


def test_a_stream_has_no_carry_and_says_what_does_the_same(client: Client) -> None:
    with pytest.raises(TypeError, match=r"no carry.*groups_ahead"):
        next(client.stream(["a"], carry="restart", **SIZES))


def test_each_put_of_a_stream_has_a_key_of_its_own(queue: FakeQueue, client: Client) -> None:
    queue.lose_puts = 1
    assert len(list(client.stream(iter(names("p", 5)), ahead=2, **SIZES))) == 5
    assert len(queue.keys) == queue.count("POST queue") - 1, "the lost one was sent again with its key"


@pytest.mark.anyio
async def test_a_stream_that_is_cancelled_during_a_put_leaves_no_job(queue: FakeQueue) -> None:
    queue.slow_put = 0.3
    async with AsyncClient(URL, transport=httpx.MockTransport(queue.serve)) as client:

        async def read() -> None:
            async with aclosing(client.stream(["a", "b"], **SIZES)) as groups:
                async for _ in groups:
                    raise AssertionError("cancelled before")

        reading = asyncio.create_task(read())
        while not queue.tasks:
            await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    await asyncio.gather(*queue.tasks)
    assert queue.count("POST queue") == 2
    assert queue.keys
    assert not queue.jobs, "the first put was served after the deletion, and created no job"


def test_a_stream_that_ends_without_an_answer_to_its_put_leaves_no_job(queue: FakeQueue) -> None:
    queue.lose_puts = 1
    with (
        Client(URL, retries=0, transport=httpx.MockTransport(queue)) as client,
        pytest.raises(ConnectionFailed),
    ):
        next(client.stream(["a"], **SIZES))
    assert queue.requests == ["POST queue", "POST queue", "DELETE queue"]


def test_polls_that_are_answered_at_once_with_nothing_are_not_repeated_at_once(
    queue: FakeQueue, client: Client
) -> None:
    queue.busy_until = time.monotonic() + 0.3
    assert [group.group_id for group in client.stream(["a"], **SIZES)] == ["a"]
    assert queue.count("GET queue/groups") <= 3
    before = time.monotonic()
    assert client.queue.take(wait=0.2) == []
    assert time.monotonic() - before >= 0.2
    assert client.queue.take(wait=0) == []
    assert queue.count("GET queue/groups") <= 6


@pytest.mark.anyio
async def test_a_take_waits_as_long_as_the_server_says() -> None:
    answers = iter([httpx.Response(503, headers={"Retry-After": "1"}), httpx.Response(200, json={"groups": []})])
    sent: list[float] = []

    def handle(request: httpx.Request) -> httpx.Response:
        sent.append(time.monotonic())
        return next(answers)

    async with AsyncClient(URL, transport=httpx.MockTransport(handle)) as client:
        assert await client.queue.take(wait=0) == []
    assert sent[1] - sent[0] >= 1


@pytest.mark.parametrize("status", [None, 502, 504])
def test_a_take_whose_answer_is_lost_is_sent_again_with_its_key(queue: FakeQueue, status: int | None) -> None:
    queue.jobs["default"] = ["a", "b"]
    lost: list[httpx.Response] = []

    def handle(request: httpx.Request) -> httpx.Response:
        answer = queue(request)
        if lost:
            return answer
        lost.append(answer)
        if status is None:
            raise httpx.ReadError("lost", request=request)
        return httpx.Response(status)

    with Client(URL, transport=httpx.MockTransport(handle)) as client:
        [first], [second] = client.queue.take(wait=0), client.queue.take(wait=0)
    assert (first.id, first.lease) == ("a", lost[0].json()["groups"][0]["lease"]), "the same group, under its lease"
    assert second.id == "b", "each take has a key of its own"


def test_a_take_that_was_never_sent_is_repeated(queue: FakeQueue) -> None:
    refusals = iter([httpx.ConnectError("refused")])

    def handle(request: httpx.Request) -> httpx.Response:
        for error in refusals:
            raise error
        return queue(request)

    with Client(URL, transport=httpx.MockTransport(handle)) as client:
        assert client.queue.take(wait=0) == []
    assert queue.requests == ["GET queue/groups"]


def test_a_stream_goes_on_after_a_lost_answer_and_yields_each_group_once(queue: FakeQueue, client: Client) -> None:
    queue.lose_takes = 1
    with closing(client.stream(["a", "b", "c"], **SIZES)) as groups:
        assert next(groups).group_id == "a", "it comes again, as its answer was lost"
        queue.expire()  # its lease too
        assert [group.group_id for group in groups] == ["b", "c"]


def test_a_stream_whose_job_was_deleted_raises(queue: FakeQueue, client: Client) -> None:
    groups = client.stream(["a", "b"], **SIZES)
    next(groups)
    queue.delete()
    with pytest.raises(NotFound, match="deleted"):
        next(groups)


def test_a_stream_that_waits_for_groups_of_a_job_that_was_deleted_raises(
    queue: FakeQueue, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("darts_client._sync_queue.WAIT_SECONDS", 0.01)
    queue.busy_until = time.monotonic() + 0.1
    groups = client.stream(iter(["a", "b"]), ahead=1, **SIZES)
    assert next(groups).group_id == "a", "while it is there, the stream waits"
    queue.drop_next = True
    with pytest.raises(NotFound, match="deleted"):
        next(groups)


def test_a_stream_raises_if_a_put_has_created_its_deleted_job_again(
    queue: FakeQueue, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("darts_client._sync_queue.WAIT_SECONDS", 0.3)
    monkeypatch.setattr("darts_client._sync_queue.POLL_SECONDS", 0.05)
    queue.busy_until = time.monotonic() + 1.0

    def prompts() -> Iterator[str]:
        for number in range(4):
            time.sleep(0.2)  # so that the stream does not wait for as long as it may
            if number == 2:
                queue.delete()
            yield f"p{number}"

    groups = client.stream(prompts(), ahead=8, **SIZES)
    with pytest.raises(NotFound, match="deleted, 2 of its prompts"):
        list(groups)


def test_a_stream_requests_how_many_prompts_its_job_has_once_in_a_while() -> None:
    now = 100.0
    waiting = StreamPrompts(iter("abcd"), 3, lambda prompts: {"json": list(prompts)}, lambda: now)
    waiting.next_put()
    waiting.put_accepted(["1", "2", "3"])
    assert [waiting.is_check_due(20.0) for _ in range(2)] == [True, False]
    now += 20.0
    assert waiting.is_check_due(20.0)
    waiting.check_held(4)
    waiting.check_held(3)
    with pytest.raises(NotFound, match="1 of its prompts"):
        waiting.check_held(2)


def test_the_job_of_a_stream_expires(queue: FakeQueue, client: Client) -> None:
    cases: list[tuple[dict[str, Any], float]] = [({}, 21_600.0), ({"expires_after": 600.0}, 600.0)]
    for options, expected in cases:
        assert len(list(client.stream(["a"], **SIZES, **options))) == 1
        assert queue.options["expires_after"] == expected


def state_of(waiting: StreamPrompts) -> tuple[object, ...]:
    return waiting.unanswered_put, waiting.next_put(), waiting.seconds_to_wait(20.0)


def test_prompts_of_a_refused_put_keep_their_request() -> None:
    now = 0.0
    waiting = StreamPrompts(iter("abcd"), 2, lambda prompts: {"json": list(prompts)}, lambda: now)
    assert waiting.next_put() == {"json": ["a", "b"]} == waiting.unanswered_put
    waiting.put_accepted(["1", "2"])
    assert state_of(waiting) == (None, None, 20.0)
    waiting.acknowledged("1", "acknowledged")
    refused = waiting.next_put()
    assert refused == {"json": ["c"]}
    waiting.put_failed(Overloaded("full", retry_after=5.0))
    assert state_of(waiting) == (None, None, 5.0)
    now = 5.0
    assert waiting.next_put() is refused
    waiting.put_failed(Overloaded("full"))
    assert waiting.next_put() is None
    waiting.acknowledged("2", "acknowledged")
    assert waiting.next_put() is refused, "with nothing in the queue there is nothing else to do"
    waiting.put_accepted(["3"])
    waiting.acknowledged("3", "unknown")
    assert waiting.next_put() == {"json": ["d"]}
    with pytest.raises(Overloaded):
        waiting.put_failed(Overloaded("full", retry_after=5.0))
