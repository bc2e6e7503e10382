"""Send examples to a server and check its answers and its state."""

import asyncio
import itertools
import json
import re
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import httpx

from darts_server.demo.server import Server
from faults.bystanders import check_idle, get_group
from faults.case import Outcome
from faults.fuzz.request import Example, Request, Upload
from faults.fuzz.uploads import FULL, content
from faults.fuzz.watch import Stopwatch, processes

ANSWER_SECONDS = 30.0
"""Timeout of a request on an engine that is not paused. The longest takes a second or two on a quiet machine."""
STEP_SECONDS = 0.5
"""After this the next request of a sequence is sent, even if the last one has no answer: the engine may be paused."""
RESUME_SECONDS = 2.0
SETTLE_SECONDS = 20.0
SERVED_SECONDS = 2.0
"""In which an idle server answers a plain group. Alone on a machine it takes a tenth of that."""
MAX_STALL_SECONDS = 1.0
MAX_DETAIL = 300
BATCH_ID = re.compile(r'"id": ?"(batch-[0-9a-f]+)"')
TRAJECTORY_ID = re.compile(r'"trajectory_id": ?"([^"\\]+)"')
SERVER_ERROR = re.compile(r'"code": ?(5\d\d)')
LEFT = "left"
GROUP_HEADER = "X-Darts-Group-Id"
STATES, WEIGHTS, POLICY = "/darts/v1/state", "/darts/v1/weights", "/darts/v1/policy"
DISRUPTIVE = ("/pause", "/abort_requests", "/sleep", "/start_weight_update", "/finish_weight_update", WEIGHTS)
"""Routes that may end or fail other requests with a 503, as their documentation says."""
VLLMS_ERRORS = ("/pause", "/sleep", "/wake_up", "/start_weight_update", "/update_weights", "/finish_weight_update")
"""Where vLLM itself answers 500 to calls in the wrong order, or that took too long."""
NOT_SUPPORTED = 501
UNAVAILABLE = 503
WEIGHT_UPDATES = ("/start_weight_update", "/update_weights", "/finish_weight_update", WEIGHTS)


@dataclass(frozen=True)
class Violation:
    """Something that must not happen. ``route``: with its method; empty if no single request did it."""

    kind: str
    route: str
    detail: str

    @property
    def signature(self) -> tuple[str, str, str]:
        """What violations of the same cause have in common."""
        return self.kind, self.route, re.sub(r"[0-9'\"`{\[].*", "", self.detail, flags=re.DOTALL)[:60]


@dataclass
class Answer:
    """``body``: that was sent. ``status``: ``None`` if there is no answer; then ``error`` says why."""

    request: Request
    body: bytes = b""
    status: int | None = None
    content_type: str = ""
    text: str = ""
    error: str = "no answer"


@dataclass
class _Ids:
    """What placeholders of an example stand for."""

    run: int
    root: str
    batch: str = "none"
    group: str = "none"
    trajectory: str = "none:0"

    def fill(self, text: str) -> str:
        for name in ("batch", "group", "trajectory", "run", "root"):
            text = text.replace(f"${name}", str(getattr(self, name)))
        return text

    def learn(self, text: str) -> None:
        for found in BATCH_ID.findall(text)[-1:]:
            self.batch = found
        for found in TRAJECTORY_ID.findall(text)[-1:]:
            self.trajectory = found


@dataclass
class Session:
    """Sends to one running server. ``state``: a saved one, to restore and to mutate. ``root``: --weights-root."""

    server: Server
    root: Path
    state: bytes = b""
    answers: list[list[Answer]] = field(default_factory=list)
    _runs: Iterator[int] = field(default_factory=lambda: itertools.count(time.time_ns()))

    async def __aenter__(self) -> "Session":
        # A kept connection would sometimes be closed by the server while a request is sent on it.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(base_url=self.server.url, timeout=None, limits=limits, verify=False)
        self._policy = {
            name: value for name, value in (await self._client.get(POLICY)).json().items() if name != "policies"
        }
        if not self.state:
            self.state = await self._learned_state()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def run(self, examples: Sequence[Example]) -> list[Violation]:
        """Send examples at the same time, wait for all answers, undo what was changed, and return what is wrong.

        ``answers`` has the answers then: for each example a list in the order of its requests.
        """
        self.answers = [[Answer(request) for request in example] for example in examples]
        violations: list[Violation] = []
        pauses = any(request.route in ("/pause", "/sleep") for request in chain(*examples))
        sent = (self._send_all(answers, pauses) for answers in self.answers)
        for outcome in await asyncio.gather(*sent, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
            violations += outcome
        violations += await self._restore({request.route for request in chain(*examples) if request.method != "GET"})
        is_disrupted = any(map(disrupts, examples))
        for answer in chain.from_iterable(self.answers):
            violations += check_answer(answer, is_disrupted)
        return violations

    async def check_idle(self) -> list[Violation]:
        """Wait until nothing runs; check the counters, and that a plain group is served soon."""
        outcome = Outcome()
        await check_idle(self.server, outcome)
        violations = [Violation("unbalanced", "", violation) for violation in outcome.violations]
        if not (await self._serves_soon() or await self._serves_soon()):  # the machine may be busy once
            violations.append(Violation("not served", "", f"a plain group within {SERVED_SECONDS:.0f} s"))
        return violations

    async def _serves_soon(self) -> bool:
        took = Stopwatch(processes(self.server.process.pid))
        return await get_group(self._client, self.server) and took.seconds() < SERVED_SECONDS

    async def _send_all(self, answers: Sequence[Answer], pauses: bool) -> list[Violation]:
        """Send the requests of an example, and wait for all answers. ``pauses``: any example may pause the engine."""
        ids = _Ids(next(self._runs), str(self.root))
        tasks: list[asyncio.Task[None]] = []
        for answer in answers:
            await asyncio.sleep(answer.request.after)
            tasks.append(asyncio.create_task(self._send(answer, ids)))
            if not answer.request.background:
                await asyncio.wait(tasks[-1:], timeout=STEP_SECONDS)
        return await self._settle(tasks, {answer.request.route for answer in answers}, pauses)

    async def _send(self, answer: Answer, ids: _Ids) -> None:
        request = answer.request
        answer.body = self._content(request, ids)
        try:
            async with asyncio.timeout(request.leaves_after):
                await self._receive(answer, ids)
        except TimeoutError:
            answer.status, answer.error = None, LEFT
        except httpx.TransportError as error:
            answer.status, answer.error = None, f"dropped: {error!r}"

    async def _receive(self, answer: Answer, ids: _Ids) -> None:
        sent = answer.request
        url = httpx.URL(self.server.url).copy_with(raw_path=ids.fill(sent.path).encode("latin-1"))
        headers = [(name.encode(), ids.fill(value).encode("latin-1").strip()) for name, value in sent.headers]
        async with self._client.stream(sent.method, url, headers=headers, content=answer.body) as received:
            answer.status, answer.content_type = received.status_code, received.headers.get("Content-Type", "")
            ids.group = received.headers.get(GROUP_HEADER, ids.group)
            parts: list[str] = []
            async for part in received.aiter_text():
                parts.append(part)
                ids.learn(part)
            answer.text = "".join(parts)

    def _content(self, request: Request, ids: _Ids) -> bytes:
        if isinstance(request.body, Upload):
            return content(request.body, self.state)
        return ids.fill(request.body.decode("latin-1")).encode("latin-1")

    async def _settle(self, tasks: Sequence[asyncio.Task[None]], routes: Set[str], pauses: bool) -> list[Violation]:
        """End what an example left paused, and wait for its answers."""
        if routes & {"/pause", "/sleep", "/resume", "/wake_up"}:
            await self._resume()
        if "/start_weight_update" in routes:
            await self._client.post("/finish_weight_update", json={}, timeout=ANSWER_SECONDS)
            await self._client.post("/resume", timeout=ANSWER_SECONDS)
        pending: Set[asyncio.Task[None]] = set(tasks)
        deadline = time.monotonic() + ANSWER_SECONDS
        while pending and time.monotonic() < deadline:
            _, pending = await asyncio.wait(pending, timeout=RESUME_SECONDS if pauses else ANSWER_SECONDS)
            if pending and pauses:  # a pause may wait for an update, and come after all examples have resumed
                await self._resume()
        violations: list[Violation] = []
        for task in (late := [task for task in tasks if not task.done()]):
            task.cancel()
        if late:
            paused = (await self._client.get("/is_paused", timeout=ANSWER_SECONDS)).text
            detail = f"{len(late)} requests have none after {ANSWER_SECONDS:.0f} s; /is_paused: {paused[:MAX_DETAIL]}"
            violations.append(Violation("no answer", "", detail))
            await asyncio.wait(late)
        for task in set(tasks) - set(late):
            task.result()  # raises what is wrong here, not in the server
        return violations

    async def _restore(self, routes: Set[str]) -> list[Violation]:
        """Undo what examples changed with requests to these routes."""
        violations: list[Violation] = []
        if is_updated := bool(routes & set(WEIGHT_UPDATES)):
            violations += await self._wait_for_updates()
        if routes & {"/pause", "/sleep"}:
            await self._resume()  # one whose caller left may have waited for an update, and come after the first
        if is_updated and not violations:
            await self._restore_weights()
        if POLICY in routes:
            await self._expect("PATCH", POLICY, json=self._policy)
        if STATES in routes:
            if not await get_group(self._client, self.server):
                violations.append(Violation("not served", f"PUT {STATES}", "a group after the state was restored"))
            await self._expect("PUT", STATES, content=self.state)
        return violations

    async def _resume(self) -> None:
        began = time.monotonic()
        while (await self._client.post("/wake_up", timeout=ANSWER_SECONDS)).status_code == httpx.codes.CONFLICT:
            if time.monotonic() - began > SETTLE_SECONDS:  # an update refuses it, but each ends after a second or two
                break
            await asyncio.sleep(0.05)
        await self._client.post("/resume", timeout=ANSWER_SECONDS)

    async def _wait_for_updates(self) -> list[Violation]:
        began = time.monotonic()
        while (state := (await self._served())["state"]) != "serving":
            if time.monotonic() - began > SETTLE_SECONDS:
                return [Violation("unbalanced", WEIGHTS, f"the state of the weights is still {state}")]
            await asyncio.sleep(0.05)
        return []

    async def _restore_weights(self) -> None:
        if not (await self._served())["intact"]:
            await self._expect("PUT", WEIGHTS, content=content(Upload(FULL), b""))

    async def _served(self) -> dict[str, Any]:
        answer: dict[str, Any] = (await self._client.get(WEIGHTS, timeout=ANSWER_SECONDS)).json()
        return answer

    async def _learned_state(self) -> bytes:
        """Let the server learn something of each kind, and return its state."""
        await get_group(self._client, self.server)
        vote = {"prompt": "7a-5b*4>", "n": 2, "sampling": {"max_tokens": 20}, "pattern": "([0-9])"}
        voted = await self._expect("POST", "/darts/v1/vote", json={**vote, "weights": "log_odds", "score": "logprob"})
        ids = [{"trajectory_id": each["trajectory_id"], "reward": 1.0} for each in voted.json()["trajectories"]]
        await self._expect("POST", "/darts/v1/rewards", json={"rewards": ids})
        return (await self._expect("GET", STATES)).content

    async def _expect(self, method: str, path: str, **body: Any) -> httpx.Response:
        answer = await self._client.request(method, path, timeout=ANSWER_SECONDS, **body)
        return answer.raise_for_status()


def disrupts(example: Example) -> bool:
    """Return whether other requests at the same time may end with a 503 for an example."""
    return any(request.method == "DELETE" or request.route in DISRUPTIVE for request in example)


def check_answer(answer: Answer, is_disrupted: bool) -> Iterator[Violation]:
    """Check one answer. ``is_disrupted``: whether another request may have ended this one with a 503."""
    request = answer.request
    where = request.name
    if answer.status is None:
        if answer.error.startswith("dropped"):
            yield Violation("dropped", where, answer.error)
        return
    detail = answer.text[:MAX_DETAIL]
    codes = {answer.status, *(int(code) for code in SERVER_ERROR.findall(answer.text))}
    for code in sorted(codes):
        is_documented = code == NOT_SUPPORTED or (code == UNAVAILABLE and is_disrupted) or request.route in VLLMS_ERRORS
        if code >= httpx.codes.INTERNAL_SERVER_ERROR and not is_documented:
            yield Violation(f"status {code}", where, _message(answer.text) or _before_code(answer.text) or detail)
            return
    if answer.content_type.startswith("application/json"):
        try:
            parsed = json.loads(answer.text, parse_constant=_reject)
        except ValueError as error:
            yield Violation("not JSON", where, f"{error}: {detail}")
            return
        if (
            answer.status >= httpx.codes.BAD_REQUEST
            and request.route.startswith("/darts/v1/")
            and not _message(answer.text)
        ):
            yield Violation("no error object", where, str(parsed)[:MAX_DETAIL])


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])[:MAX_DETAIL]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def _before_code(text: str) -> str:
    """Return the end of a stream up to the code of its error."""
    found = SERVER_ERROR.search(text)
    return "" if found is None else text[max(0, found.end() - MAX_DETAIL) : found.end()]


def _reject(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
