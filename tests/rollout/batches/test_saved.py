"""Prompts that are carried over from a server to the next one, on the scripted engine."""

import asyncio
import math
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.engine.port import CandidateResult, TokenSlice
from darts_server.engine.scripted import Script, settle
from darts_server.exceptions import ServerStopping, StateDamaged, StateError
from darts_server.rollout.batches.batch import describe_terms
from darts_server.rollout.batches.carried import (
    SAVE_SECONDS,
    WRITE_BYTES,
    CarriedGroup,
    CarriedPrompt,
    CarriedPrompts,
    Carry,
    OwnedPrompt,
    SavedPrompts,
)
from darts_server.rollout.batches.events import BatchDone, GroupResult
from darts_server.rollout.batches.registry import kept_bytes
from darts_server.rollout.candidates import CarriedCandidate, SavedEnd
from darts_server.rollout.plan import Limits, Planner
from darts_server.store import Store
from darts_server.types import DiscardReason, FinishReason, Outcome, PromptSpec, RequestOptions, Sample
from tests.rollout.batches.streams import (
    GROUPS,
    SHAPINGS,
    STOPPING,
    WHOLE,
    Server,
    begin,
    by_candidate,
    by_text,
    finish,
    key,
    lengths_of,
    new_server,
    random_script,
    read_events,
    request,
    token_stream,
)
from tests.rollout.helpers import Texts

pytestmark = pytest.mark.anyio


class InMemory(Store):
    """Keeps values in memory. ``error``: raised by `take_carried`. ``room``: how often `add_carried` may be called."""

    def __init__(self, error: Exception | None = None, room: float = math.inf) -> None:
        self.values: list[bytes | StateDamaged] = []
        self.error, self.room = error, room

    def add_carried(self, values: Iterable[bytes]) -> None:
        if self.room <= 0:
            raise StateError("the disk is full")
        self.values.extend(values)
        self.room -= 1

    def take_carried(self) -> list[bytes | StateDamaged]:
        if self.error is not None:
            raise self.error
        taken, self.values = self.values, []
        return taken


@pytest.fixture
def file() -> InMemory:
    return InMemory()


@pytest.fixture
def saved(file: InMemory) -> SavedPrompts:
    return SavedPrompts(file, "model")


def carried_prompt(text: str, version: int = 0, *, with_logprobs: bool = True) -> CarriedPrompt:
    finished: CarriedCandidate[list[int]] = CarriedCandidate(
        TokenSlice([0, 1, 2**31 - 1], [0.0, -1e-300, -7.5] if with_logprobs else None),
        ((version, 3),),
        saved_end=SavedEnd(FinishReason.LENGTH, "ab\u00e9"),
    )
    running: CarriedCandidate[list[int]] = CarriedCandidate(
        TokenSlice([5, 6], [-0.1, -2.0] if with_logprobs else None), ((version, 2),)
    )
    group = CarriedGroup("terms", True, (1 << 63, 3), [finished, running, CarriedCandidate()])
    spec = PromptSpec(token_ids=[1, 2], key=text, metadata=b'{"of": "\xc3\xa9"}')
    return CarriedPrompt(spec, (text, "content"), group)


def plain(prompts: Sequence[OwnedPrompt]) -> bytes:
    """Everything that prompts have, in a form that can be compared."""
    return msgspec.json.encode(prompts, enc_hook=array.tolist)


def test_prompts_come_back_once_as_they_were_and_in_their_order(tmp_path: Path) -> None:
    prompts: list[OwnedPrompt] = [("one", carried_prompt(f"p{number}")) for number in range(12)]
    prompts.append((None, CarriedPrompt(PromptSpec(text="x"), ("x", "x"))))
    prompts.append((None, carried_prompt("y", with_logprobs=False)))
    prompts += [(None, CarriedPrompt(PromptSpec(text="a" * WRITE_BYTES), (str(number), ""))) for number in range(2)]
    with Store(tmp_path) as file:
        assert SavedPrompts(file, "model").save(prompts) == len(prompts)
    with Store(tmp_path) as file:
        taken = SavedPrompts(file, "model").take(0)
        assert plain(taken) == plain(prompts)
        assert SavedPrompts(file, "model").take(0) == [], "also if this server is killed"


def test_chat_options_are_kept_and_prompts_of_servers_without_them_still_read(
    file: InMemory, saved: SavedPrompts
) -> None:
    specs = [PromptSpec(messages=b"[{}]"), PromptSpec(messages=b"[{}]", chat_options=b'{"tools":[{}]}')]
    prompts: list[OwnedPrompt] = [(None, CarriedPrompt(spec, ("chat", "content"))) for spec in specs]
    saved.save(prompts)
    documents: list[Any] = [msgspec.msgpack.decode(value) for value in file.values]  # type: ignore[arg-type]
    assert [document[0] for document in documents] == [2, 3], "servers without them refuse the second"
    del documents[0][3]["chat_options"]
    file.values[0] = msgspec.msgpack.encode(documents[0])
    assert plain(saved.take(0)) == plain(prompts)


@pytest.mark.parametrize(("model", "version"), [("other", 0), ("model", 1)])
def test_tokens_of_other_weights_are_not_used(model: str, version: int, file: InMemory, saved: SavedPrompts) -> None:
    saved.save([(None, carried_prompt("a")), (None, carried_prompt("b", 1))])
    taken = [prompt for _, prompt in SavedPrompts(file, model).take(version)]
    assert [prompt.identity[0] for prompt in taken] == ["a", "b"]
    assert [prompt.group is not None for prompt in taken] == [False, model == "model" and version == 1]


@pytest.mark.parametrize(
    "change",
    [
        *((0, 1), (4, None), (3, None), (3, {})),
        b'{"format": 1}',  # of an earlier version
        b"\x96\x02\xa5model\xc0\x80\x92\xa0\xa0" + b"\x91" * 200_000,  # nested too deeply
        StateDamaged("its checksum is wrong"),
    ],
    ids=lambda change: repr(change)[:20],
)
def test_a_prompt_that_cannot_be_read_is_lost_alone(
    change: Any, file: InMemory, saved: SavedPrompts, caplog: pytest.LogCaptureFixture
) -> None:
    saved.save([(None, carried_prompt(name)) for name in "abc"])
    file.values[1] = changed(file, *change) if isinstance(change, tuple) else change
    assert [prompt.identity[0] for _, prompt in saved.take(0)] == ["a", "c"]
    assert file.values == []
    assert "1 prompts that were carried over are lost" in caplog.text


def changed(file: InMemory, *path_and_value: Any) -> bytes:
    """Return the first document with another value at a path."""
    document: Any = msgspec.msgpack.decode(file.values[0])  # type: ignore[arg-type]  # it is not damaged
    *path, last, value = path_and_value
    place = document
    for step in path:
        place = place[step]
    place[last] = value
    return msgspec.msgpack.encode(document)


GROUP = 5
CANDIDATE = (GROUP, "candidates", 0)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((*CANDIDATE, "version_spans"), [[0, 2]]),
        ((*CANDIDATE, "version_spans"), [[0, 4], [1, -1]]),
        ((*CANDIDATE, "prefix", "logprobs"), [0.0]),
        ((*CANDIDATE, "prefix", "logprobs"), None),
        ((*CANDIDATE, "prefix", "logprobs"), []),
        ((*CANDIDATE, "prefix", "token_ids"), [1, -2, 3]),
        ((*CANDIDATE, "prefix", "token_ids"), [1, 2, 2**31]),
        ((*CANDIDATE, "result"), {}),
        ((*CANDIDATE, "saved_end"), {"finish_reason": "never", "text": ""}),
        ((GROUP, "terms"), None),
        ((GROUP, "tail_seed"), [-1]),
    ],
)
def test_prompts_whose_tokens_are_inconsistent_start_again_and_the_log_says_so_once(
    path: tuple[str | int, ...], value: object, file: InMemory, saved: SavedPrompts, caplog: pytest.LogCaptureFixture
) -> None:
    saved.save([(None, carried_prompt(name)) for name in "ab"])
    wrong = changed(file, *path, value)
    file.values = [wrong, file.values[1], wrong]
    taken = [prompt for _, prompt in saved.take(0)]
    assert [(prompt.identity[0], prompt.group is None) for prompt in taken] == [("a", True), ("b", False), ("a", True)]
    [message] = caplog.messages
    assert message.startswith("2 prompts that were carried over start again")


PATHS: list[tuple[str | int, ...]] = [
    *((place,) for place in range(6)),
    *((3, name) for name in ("token_ids", "text", "messages", "metadata")),
    *((4, place) for place in (0, 1)),
    *((GROUP, name) for name in ("terms", "saturated", "tail_seed", "candidates")),
    (GROUP, "tail_seed", 0),
    *((*CANDIDATE, name) for name in ("prefix", "version_spans", "result", "saved_end")),
    *((*CANDIDATE, "prefix", name) for name in ("token_ids", "logprobs")),
    *((*CANDIDATE, "version_spans", 0, place) for place in (0, 1)),
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**64 - 1) | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
    lambda each: st.lists(each, max_size=2) | st.dictionaries(st.text(max_size=2), each, max_size=2),
    max_leaves=4,
)


@given(path=st.sampled_from(PATHS), value=VALUES)
def test_a_damaged_prompt_neither_stops_the_start_nor_loses_other_prompts(
    path: tuple[str | int, ...], value: object
) -> None:
    """Whoever wrote it knew how to make a checksum."""
    file = InMemory()
    saved = SavedPrompts(file, "model")
    saved.save([(None, carried_prompt("a")), (None, carried_prompt("b"))])
    file.values[0] = changed(file, *path, value)
    taken = saved.take(0)
    assert [prompt.identity[0] for _, prompt in taken][-1] == "b"
    kept = CarriedPrompts()
    for owner, prompt in taken:
        kept.put(owner, [prompt])
    assert saved.save(kept) == len(taken)


def test_prompts_that_cannot_be_removed_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    file = InMemory(StateError("it is read-only"))
    saved = SavedPrompts(file, "model")
    saved.save([(None, carried_prompt("a"))])
    assert saved.take(0) == []
    assert "cannot be read or removed: it is read-only" in caplog.text
    file.error = None
    assert len(saved.take(0)) == 1


def test_prompts_that_are_not_saved_in_time_are_lost_and_counted_in_the_log(
    file: InMemory, saved: SavedPrompts, caplog: pytest.LogCaptureFixture
) -> None:
    assert saved.save([(None, carried_prompt("a"))], seconds=0) == 0

    class Slow(SavedPrompts):
        def save(self, prompts: Iterable[OwnedPrompt], seconds: float = 0.0) -> int:
            assert seconds == SAVE_SECONDS
            return super().save(list(prompts)[:2])

    prompts: list[OwnedPrompt] = [(None, carried_prompt(name)) for name in "abc"]
    assert asyncio.run(Slow(file, "model").save_in_time(prompts, Texts(), with_tokens=True)) == 1
    assert [prompt.identity[0] for _, prompt in saved.take(0)] == ["a", "b"]
    assert "1 prompts that were carried over are lost" in caplog.text


def test_prompts_that_were_written_before_an_error_count_as_saved(
    file: InMemory, saved: SavedPrompts, caplog: pytest.LogCaptureFixture
) -> None:
    large = "a" * (WRITE_BYTES // 2)
    file.room = 1
    prompts = [(None, CarriedPrompt(PromptSpec(text=large + str(number)), (str(number), ""))) for number in range(3)]
    assert saved.save(prompts) == 2
    assert "cannot be saved: " in caplog.text
    assert [prompt.identity[0] for _, prompt in saved.take(0)] == ["0", "1"]


def finished(name: str, tokens: int) -> CarriedPrompt:
    prompt = carried_prompt(name)
    assert prompt.group is not None
    candidate: CarriedCandidate[list[int]] = CarriedCandidate(
        TokenSlice([1] * tokens, None),
        ((0, tokens),),
        CandidateResult(tokens, FinishReason.STOP, list(range(tokens))),
    )
    return replace(prompt, group=replace(prompt.group, candidates=[candidate]))


class BadTexts(Texts):
    """Of outputs of two tokens, of which no text can be made, or not in time."""

    def __init__(self, *, slow: bool) -> None:
        self._slow = slow

    async def to_sample(self, output: list[int]) -> Sample:
        if len(output) == 2:
            await asyncio.sleep(100 if self._slow else 0)
            raise RuntimeError("no such token")
        return await super().to_sample(output)


@pytest.mark.parametrize(
    ("slow", "kept", "message"),
    [
        (True, [True, False, False], "2 prompts that were carried over start again"),
        (False, [True, False, True], "no such token"),
    ],
)
def test_prompts_without_their_texts_in_time_start_again(
    slow: bool,
    kept: list[bool],
    message: str,
    saved: SavedPrompts,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("darts_server.rollout.batches.carried.PORTABLE_SECONDS", 0.05)
    prompts: list[OwnedPrompt] = [(None, finished(name, 1 + (name == "b"))) for name in "abc"]
    asyncio.run(saved.save_in_time(prompts, BadTexts(slow=slow), with_tokens=True))
    assert [prompt.group is not None for _, prompt in saved.take(0)] == kept
    assert message in caplog.text


def test_terms_are_equal_in_every_process() -> None:
    for name, shaping in SHAPINGS.items():
        plan = Planner({name: shaping}, name, Limits(64)).plan(4, RequestOptions())
        assert plan is not None
        assert " at 0x" not in describe_terms(plan, {"b": 1, "a": [0.5]})
        assert describe_terms(plan, {"b": 1, "a": [0.5]}) == describe_terms(plan, {"a": [0.5], "b": 1})


@asynccontextmanager
async def serving(
    file: InMemory | None,
    script: Callable[[str, int], Script] = by_text,
    policy: str = "shortest",
    texts: Texts | None = None,
    *,
    has_initial_weights: bool = True,
) -> AsyncIterator[Server]:
    """Run one server after the other on the same file, with the same scripts."""
    saved = None if file is None else SavedPrompts(file, "model")
    server = new_server(script, policy, texts=texts, saved=saved, has_initial_weights=lambda: has_initial_weights)
    server.registry.restore_carried()
    yield server


@pytest.mark.parametrize("carry", Carry)
async def test_without_a_folder_tokens_are_handed_back_to_callers(carry: Carry) -> None:
    async with serving(None) as server:
        batch = await server.begin(15, "10", "30", "40", carry=carry)
        await server.stop()
        done = await batch.wait()
        assert (done.unfinished, done.carried) == ([], 0)
        assert [(key(r), len(r.samples)) for r in done.results if r.error is None] == [("10", 4)]
        handed_back = [result for result in done.results if result.error is not None]
        assert [result.error for result in handed_back] == [STOPPING, STOPPING]
        assert [lengths_of(result) for result in handed_back] == [dict.fromkeys(range(6), 15)] * 2
        assert {r.record.error for r in handed_back if r.record is not None} == {"the server is stopping"}
        assert done.generated == sum(r.generated_tokens for r in server.harness.recorder.records)


class OtherTexts(Texts):
    """Render prompts with another template."""

    def prompt_key(self, request: str) -> str:
        return f"other key of {request}"


@pytest.mark.parametrize(("texts", "size"), [(OtherTexts(), 4), (None, 5)])
async def test_a_prompt_starts_again_if_its_tokens_are_of_another_prompt_or_of_too_few_candidates(
    texts: Texts | None, size: int, file: InMemory
) -> None:
    async with serving(file) as server:
        await server.begin(15, "30", "40", carry=Carry.RESUME)
        await server.stop()
    async with serving(file, texts=texts) as server:
        assert server.registry.carried.count(None) == 2
        asked = replace(request(carry=Carry.RESUME, carried=True), group_size=size)
        done = await finish(server.harness, await begin(server.harness, server.registry, asked, 0))
        assert [result.error for result in done.results] == [None, None]
        assert server.engine.now == 40 + size - 1
        assert all(result.prompt_key.startswith("other") == (texts is not None) for result in done.results)


async def test_a_batch_that_waits_for_the_engine_fails_and_gives_back_what_it_took(file: InMemory) -> None:
    async with serving(file) as server:
        await finish(server.harness, await server.begin(0, "30", "10", carry=Carry.RESUME, num_groups=1))
        server.harness.rollouts.gate.close()
        batch = await server.begin(3, "12", carry=Carry.RESUME, carried=True)
        await server.stop()
        with pytest.raises(ServerStopping):
            await batch.wait()
    async with serving(file) as server:
        assert [prompt.prompt.text for _, prompt in server.registry.carried] == ["30"]
        assert all(prompt.group is not None for _, prompt in server.registry.carried)


async def test_a_group_that_ended_with_the_last_needed_group_is_returned_by_the_next_server(file: InMemory) -> None:
    async with serving(file) as server:
        done = await finish(server.harness, await server.begin(0, "10", "10", "10", carry=Carry.RESUME, num_groups=1))
        assert len(done.results) == 1
        await server.stop()
    async with serving(file) as server:
        done = await finish(server.harness, await server.begin(0, "50", carry=Carry.RESUME, num_groups=2, carried=True))
        assert [(key(result), len(result.samples)) for result in done.results] == [("10", 4)] * 2
        assert server.engine.now < 10, "nothing is generated again"


async def test_resumed_candidates_are_handed_back_with_their_earlier_tokens() -> None:
    """Before they have reached the engine again, and those that had finished."""
    async with serving(None) as server:
        await finish(server.harness, await server.begin(0, "12", "16", "10", carry=Carry.RESUME, num_groups=1))
        server.engine.weight_version = 1
        batch = await server.registry.start_or_find(request(carry=Carry.RESUME, carried=True), WHOLE)
        batch.listeners += 1
        await asyncio.sleep(0)
        await server.stop()
        done = await batch.wait()
        assert [result.error for result in done.results] == [STOPPING] * 2
        for result in done.results:
            assert set(lengths_of(result).values()) == {12, 13} if key(result) == "12" else {13}
            assert result.aborted is not None
            for aborted in result.aborted.values():
                assert aborted.version_spans == ((0, len(aborted.sample.token_ids)),)


async def test_streams_end_in_order() -> None:
    async with serving(None) as server:
        batch = await server.registry.start_or_find(request("30"), token_stream(1))
        listening = asyncio.create_task(read_events(batch))
        await settle()
        await server.harness.steps(9)
        await server.stop()
        by_candidate(await listening)
        assert isinstance(batch.end, BatchDone)
        assert lengths_of(batch.end.results[0]) == dict.fromkeys(range(6), 9)


@pytest.mark.parametrize("seed", range(6))
async def test_groups_over_several_servers_equal_groups_of_one_server(seed: int, file: InMemory) -> None:
    """The same trajectories, with every token generated once, however often the servers are restarted."""
    policy = ["shortest", "sampled", "longest", "darts", "off", "cut"][seed]
    rng = Random(seed)
    texts = [str(number) for number in range(8)]
    script = random_script(seed, faults=0.0)
    async with serving(None, script, policy) as server:
        whole = await finish(server.harness, await server.begin(0, *texts, carry=Carry.RESUME))
    expected = {key(r): {i: list(s.token_ids) for i, s in r.samples.items()} for r in whole.results}
    found: dict[str, dict[int, list[int]]] = {}
    names, started, ended = tuple(texts), 0, 0
    while len(found) < len(texts):
        async with serving(file, script, policy) as server:
            batch = await server.begin(rng.randint(0, 9), *names, carry=Carry.RESUME, carried=not names)
            await server.stop()
            done = await batch.wait()
            names = ()
            for result in done.results:
                assert result.error is None
                assert key(result) not in found
                found[key(result)] = {i: list(s.token_ids) for i, s in result.samples.items()}
            records = server.harness.recorder.records
            started += server.harness.recorder.started
            ended += sum(len(record.candidates) for record in records)
            assert {r.outcome for r in records} <= {Outcome.COMPLETED, Outcome.CANCELLED}
            reasons = {c.reason for r in records if r.outcome is Outcome.CANCELLED for c in r.candidates}
            assert reasons <= {DiscardReason.CARRIED}
    assert started == ended
    if policy != "cut":  # its deadline depends on which groups run together
        assert found == expected


@pytest.mark.parametrize(
    ("carry", "has_initial_weights", "tokens_are_kept"),
    [(Carry.RESUME, True, True), (Carry.RESUME, False, False), (Carry.RESTART, True, False)],
)
async def test_tokens_that_the_next_server_cannot_use_are_handed_back_and_prompts_are_kept(
    carry: Carry, has_initial_weights: bool, tokens_are_kept: bool, file: InMemory
) -> None:
    async with serving(file, has_initial_weights=has_initial_weights) as server:
        batch = await server.begin(15, "30", "12", "40", carry=carry)
        await server.stop()
        done = await batch.wait()
        assert ([result.error for result in done.results], done.carried) == ([None], 2)
        assert [(prompt.carry, prompt.error) for prompt in done.unfinished] == [(carry, STOPPING)] * 2
        groups = [prompt.group for prompt in done.unfinished]
        assert [group is None for group in groups] == [tokens_are_kept] * 2
        handed_back = [group for group in groups if group is not None]
        assert [lengths_of(group) for group in handed_back] == [dict.fromkeys(range(6), 15)] * len(handed_back)
        assert [group.error for group in handed_back] == [STOPPING] * len(handed_back)
        assert done.generated == sum(record.generated_tokens for record in server.harness.recorder.records)
    async with serving(file) as server:
        kept = [prompt for _, prompt in server.registry.carried]
        assert sorted(prompt.prompt.text or "" for prompt in kept) == ["30", "40"]
        assert [prompt.group is not None for prompt in kept] == [tokens_are_kept] * 2


async def test_a_group_of_several_weight_versions_is_handed_back_with_all_tokens(file: InMemory) -> None:
    async with serving(file, has_initial_weights=False) as server:
        await finish(server.harness, await server.begin(0, "30", "10", carry=Carry.RESUME, num_groups=1))
        generated = server.engine.now
        server.engine.weight_version = 1
        batch = await server.begin(4, carry=Carry.RESUME, carried=True)
        await server.stop()
        [prompt] = (await batch.wait()).unfinished
        assert prompt.group is not None
        assert lengths_of(prompt.group) == dict.fromkeys(range(6), generated + 4)
        spans = {aborted.version_spans for aborted in (prompt.group.aborted or {}).values()}
        assert spans == {((0, generated), (1, 4))}


async def test_groups_that_have_not_started_are_kept_without_tokens(file: InMemory) -> None:
    """A large batch starts its groups in several turns of the event loop."""
    async with serving(file, has_initial_weights=False) as server:
        asked = request(*map(str, range(100, 400)), carry=Carry.RESUME)
        batch = await server.registry.start_or_find(asked, WHOLE)
        batch.listeners += 1
        for _ in range(4):
            await asyncio.sleep(0)
        await server.stop()
        done = await batch.wait()
        assert (len(done.unfinished), done.carried, done.results) == (300, 300, [])
        groups = [prompt.group for prompt in done.unfinished]
        assert all(isinstance(group, GroupResult) and not group.has_tokens for group in groups)


async def test_handed_back_tokens_count_in_the_size_of_a_kept_batch() -> None:
    sizes = []
    for has_initial_weights in (True, False):
        async with serving(InMemory(), has_initial_weights=has_initial_weights) as server:
            batch = await server.registry.start_or_find(request("3000", carry=Carry.RESUME), GROUPS)
            batch.listeners += 1
            await server.harness.steps(1000)
            await server.stop()
            sizes.append(kept_bytes(batch))
    assert sizes[1] > sizes[0] + 6 * 1000 * 8
