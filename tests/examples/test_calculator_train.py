"""The training loop with session groups, on a scripted double of the client, and the comparison's table."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any, cast

import httpx
import openai
import pytest

from darts_client import AsyncClient
from darts_server.offline.demo.problems import EQUALS
from examples.calculator import compare, train
from examples.calculator.agent import SessionOver, openai_complete
from examples.calculator.train import METHODS, Entry, Figures, Group, HeldOut, Method, Recipe, Trainer
from examples.tiny_rl.grpo import Learner, Trained, Update
from examples.tiny_rl.tokenizer import EOS_ID, build_tokenizer
from examples.tiny_rl.train_log import Seconds

TOKENIZER = build_tokenizer()
RECIPE = Recipe(steps=2, prompts=3, group_size=2, pool=6, held_out_prompts=3, held_out_samples=2, held_out_every=1)


def next_turn(text: str, rechecks: int) -> str:
    """Write the next turn of a policy that works the problem out, and once more for each re-check."""
    prompt, _, rest = text.partition(">")
    steps = [prompt[start : start + 4] for start in range(2, len(prompt), 4)]
    done = rest.count(EQUALS)
    if done == len(steps) * (rechecks + 1):
        return f"#{text[-3:-1]}"
    number = done % len(steps)
    if number:
        return f"{text[-3:-1]}{steps[number]}{EQUALS}"
    mark = "?" if done else ""
    return f"{mark}{prompt[:2]}{steps[0]}{EQUALS}"


def completions(rechecks: int, sampled: list[tuple[list[int], list[int]]]) -> Any:
    """Return a double of an OpenAI client. ``sampled`` receives prompt and answer of each request."""

    async def create(prompt: list[int], **_: Any) -> Any:
        turn = next_turn(str(TOKENIZER.decode(prompt)), rechecks)
        token_ids = TOKENIZER.encode(turn)
        if turn.startswith("#"):
            token_ids.append(EOS_ID)
        await asyncio.sleep(0)
        sampled.append((prompt, token_ids))
        choice = SimpleNamespace(finish_reason="stop", model_extra={"token_ids": token_ids})
        return SimpleNamespace(choices=[choice])

    return SimpleNamespace(completions=SimpleNamespace(create=create))


class ScriptedSession:
    """A session whose policy makes as many re-checks as its index says."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.reward: float | None = None
        self.sampled: list[tuple[list[int], list[int]]] = []

    def openai(self, http_client: object) -> Any:
        return completions(self.index, self.sampled)

    async def end(self, *, reward: float, finish_reason: str) -> None:
        assert finish_reason == "stop"
        self.reward = reward

    @property
    def row(self) -> Any:
        token_ids = self.sampled[-1][0] + self.sampled[-1][1]
        mask = [0] * len(token_ids)
        for prompt, answer in self.sampled:
            mask[len(prompt) : len(prompt) + len(answer)] = [1] * len(answer)
        return SimpleNamespace(token_ids=token_ids, mask=mask, logprobs=[-float(sampled) for sampled in mask])


class ScriptedGroup:
    """A group that is over when ``size`` sessions have ended. Then it cancels the tasks of the other sessions."""

    def __init__(self, size: int, extra: int) -> None:
        self._size = size
        self._sessions = [ScriptedSession(index) for index in range(size + extra)]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> ScriptedGroup:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def __aiter__(self) -> AsyncIterator[ScriptedSession]:
        return self._each()

    async def _each(self) -> AsyncIterator[ScriptedSession]:
        for session in self._sessions:
            yield session
        while len(self._ended) < self._size:
            await asyncio.sleep(0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def run(self, _: ScriptedSession, agent: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(agent))

    @property
    def _ended(self) -> list[ScriptedSession]:
        return [session for session in self._sessions if session.reward is not None]

    @property
    def trajectories(self) -> list[Any]:
        return [SimpleNamespace(reward=each.reward, rows=[each.row]) for each in self._ended[: self._size]]


class ScriptedClient:
    """Makes scripted groups, and records their keys and options."""

    def __init__(self) -> None:
        self.weights = self
        self.pushes = 0
        self.groups: list[tuple[str, int, int, str]] = []
        self.decode_steps = 0

    async def push(self, _: bytes) -> None:
        self.pushes += 1

    async def metrics(self) -> str:
        self.decode_steps += 70
        return f"# TYPE darts_decode_steps counter\ndarts_decode_steps_total {self.decode_steps}.0\n"

    def sessions(self, key: str, *, size: int, extra: int, policy: str) -> ScriptedGroup:
        self.groups.append((key, size, extra, policy))
        return ScriptedGroup(size, extra)


class FakeLearner:
    """Records its training batches."""

    def __init__(self) -> None:
        self.batches: list[Sequence[Trained]] = []

    def weights(self) -> bytes:
        return b""

    def update(self, batch: Sequence[Trained]) -> Update:
        self.batches.append(batch)
        return Update(0.0, 0.0, 0.0)


@pytest.fixture(autouse=True)
def _short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait(_: int) -> None:
        await asyncio.sleep(0.001)

    monkeypatch.setattr(train, "slow_tool", lambda _: wait)


def run(method: Method) -> tuple[ScriptedClient, FakeLearner, list[Entry]]:
    client = ScriptedClient()
    learner = FakeLearner()

    async def entries() -> list[Entry]:
        trainer = Trainer(cast(AsyncClient, client), completions(3, []), method, cast(Learner, learner), RECIPE, seed=0)
        return [entry async for entry in trainer.train()]

    return client, learner, asyncio.run(entries())


def test_plain_training_waits_for_all_sessions_and_saves_nothing() -> None:
    client, learner, [before, *after] = run(METHODS["plain"])
    assert before.held_out is not None
    assert before.held_out.right == 1.0
    assert [(size, extra, policy) for _, size, extra, policy in client.groups] == [(2, 0, "off")] * 6
    assert len({key for key, *_ in client.groups}) == 6, "each prompt has its own key"
    for entry in after:
        assert entry.figures is not None
        assert (entry.figures.sessions, entry.figures.stopped, entry.figures.saved_calls) == (6, 0, 0)
        assert (entry.figures.right, entry.figures.decode_steps) == (1.0, 70)
        assert entry.held_out is not None
    assert [len(batch) for batch in learner.batches] == [6, 6]


def test_calls_that_stopped_sessions_did_not_make_are_counted_after_the_step() -> None:
    _, learner, [_, *after] = run(METHODS["groups"])
    for entry in after:
        figures = entry.figures
        assert figures is not None
        assert (figures.sessions, figures.stopped, figures.late_requests) == (18, 12, 0)
        assert figures.saved_calls
        # A session makes a call in each turn but its last, and the twelve stopped sessions have no last turn. A request
        # that was cancelled has no call either.
        assert figures.calls <= figures.turns - 6
    assert [len(batch) for batch in learner.batches] == [6, 6], "stopped sessions are not trained on"


def test_rows_are_trained_on_without_the_calculators_tokens() -> None:
    _, learner, _ = run(METHODS["plain"])
    for trained in learner.batches[0]:
        text = str(TOKENIZER.decode(trained.tokens[: trained.prompt_length]))
        assert text.endswith(">")
        given = str(TOKENIZER.decode([trained.tokens[place] for place in sorted(trained.given)]))
        assert given.count(">") == len(given) / 3
        assert trained.num_targets == -sum(trained.logprobs)
        assert trained.advantage == 0.0, "all answers are right"


def test_stopped_sessions_have_no_end_of_their_own() -> None:
    ends = [None, "answered", "truncated", "stopped"]
    episodes = [SimpleNamespace(end=end) for end in ends]
    stopped = Group(cast(Any, episodes), []).stopped
    assert [episode.end for episode in stopped] == [None, "stopped"]


def answering(status: int, body: object) -> openai.AsyncOpenAI:
    def answer(request: httpx.Request) -> httpx.Response:
        sent = json.loads(request.content)
        assert sent["stop_token_ids"] == TOKENIZER.encode(EQUALS)
        assert (sent["prompt"], sent["max_tokens"], sent["temperature"]) == ([7, 8], 5, 1.0)
        return httpx.Response(status, json=body)

    # Some versions of the package annotate another HTTP library, but use this client alike.
    network: Any = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    return openai.AsyncOpenAI(base_url="http://server/v1", api_key="none", http_client=network, max_retries=0)


@pytest.mark.parametrize("reason", ["stop", "abort"])
def test_a_turn_is_sampled_with_an_openai_client(reason: str) -> None:
    choice = {"index": 0, "text": "", "finish_reason": reason, "token_ids": [9, 10]}
    client = answering(200, {"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]})
    turn = asyncio.run(cast(Any, openai_complete(client)([7, 8], 5)))
    assert (turn.token_ids, turn.is_aborted) == ([9, 10], reason == "abort")


def test_the_refusal_of_a_stopped_session_is_no_error() -> None:
    over = {"error": {"type": "darts_session_over", "code": 410, "message": "the session was stopped"}}
    with pytest.raises(SessionOver, match="the session was stopped"):
        asyncio.run(cast(Any, openai_complete(answering(410, over))([7, 8], 5)))
    with pytest.raises(openai.APIStatusError):
        asyncio.run(cast(Any, openai_complete(answering(400, over))([7, 8], 5)))


def entry(step: int, seconds: float, held_out: float | None = None) -> Entry:
    figures = Figures(0.5, 96, 32, 500, 400, 90, 1, 3000, 320, 1e-5, Seconds(seconds, 0.5, 0.1))
    return Entry(step, figures, None if held_out is None else HeldOut(held_out, 4.0, 50.0))


def test_entries_are_read_as_they_were_written() -> None:
    for each in (Entry(0, held_out=HeldOut(0.5, 4.0, 50.0)), entry(1, 3.0), entry(2, 4.0, 0.75)):
        assert Entry.read(each.line()) == each


def test_the_table_has_means_over_runs_for_each_method() -> None:
    first = [Entry(0, held_out=HeldOut(0.5, 4.0, 50.0)), entry(1, 3.0), entry(2, 5.0, 0.75)]
    second = [Entry(0, held_out=HeldOut(0.5, 4.0, 50.0)), entry(1, 5.0), entry(2, 5.0, 0.85)]
    lines = compare.table({"plain": [first, second], "groups": [first], "other": []}).splitlines()
    assert lines[0] == "| a step | plain | groups |"
    assert "| right after training, other prompts | 0.8 ± 0.071 | 0.75 |" in lines
    assert "| step, seconds, mean | 5.1 ± 0.71 | 4.6 |" in lines
    assert "| tool calls saved | 90 ± 0 | 90 |" in lines
