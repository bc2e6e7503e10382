"""Both clients against the server's own routes, over a socket, on the scripted engine."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from darts_client import (
    AsyncClient,
    BadRequest,
    Client,
    Delta,
    Discard,
    Done,
    Event,
    Group,
    GroupEvent,
    NotFound,
    Overloaded,
    PromptSpec,
    RolloutPrompt,
    TrajectoryEvent,
)
from darts_client.integrations._ahead import GroupRequests
from darts_client.integrations._server import Server
from darts_server.engine.scripted import Script
from darts_server.exceptions import CandidateFailed

from .servers import RunningServer, serving

pytestmark = pytest.mark.usefixtures("no_delays")
ENDLESS = 1_000_000
SIZE = 4
SIZES: dict[str, Any] = {"group_size": SIZE, "max_tokens": 100}


def script(prompt: str, index: int) -> Script:
    """Prompt ``"20"`` has lengths from 20 up, each 7 longer; ``"endless"`` never finishes, ``"broken"`` fails.

    Of ``"stragglers"`` all candidates beyond the group's size are long.
    """
    if prompt == "broken":
        return Script(3, error=CandidateFailed("broken"))
    if prompt == "stragglers":
        return Script(9 if index < SIZE else 2_000)
    return Script(ENDLESS if "endless" in prompt else int(prompt) + 7 * (index % 6))


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(script) as served:
        yield served


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


def lengths(groups: list[Group]) -> dict[int, tuple[int, ...]]:
    return {group.number: group.lengths for group in groups}


def test_groups_are_yielded_as_they_complete(client: Client) -> None:
    prompts: list[RolloutPrompt] = [PromptSpec("60", key="long", metadata={"place": 0}), [5]]
    with client.rollouts(prompts, policy="uniform", **SIZES) as rollouts:
        groups = list(rollouts)
        assert rollouts.policy == "uniform"
        assert rollouts.usage is not None
        assert rollouts.usage.returned == sum(sum(group.lengths) for group in groups)
        assert (rollouts.unfinished, rollouts.failed) == ((), ())
    assert [group.number for group in groups] == [1, 0]
    assert [group.prompt_token_ids for group in groups] == [(5,), None]
    assert (groups[1].prompt_key, groups[1].metadata) == ("long", {"place": 0})
    for group in groups:
        assert len(group.trajectories) == SIZE
        assert [t.index for t in group.trajectories] == list(range(SIZE))
        assert sorted(t.rank or 0 for t in group.trajectories) == list(range(SIZE))
        assert all(t.logprobs == tuple(-k / 8 for k in t.token_ids) for t in group.trajectories)
        assert len(group.discarded) + SIZE == group.candidates


@pytest.mark.parametrize("policy", ["uniform", "darts_cut"])
def test_a_token_stream_yields_deltas_early_and_the_same_groups(client: Client, policy: str) -> None:
    prompts = ["12", "40"]
    whole = list(client.rollouts(prompts, policy=policy, **SIZES))
    events = list(client.stream_tokens(prompts, chunk_tokens=5, policy=policy, **SIZES))
    groups = [event.group for event in events if isinstance(event, GroupEvent)]
    assert lengths(groups) == lengths(whole)
    streamed = {e.trajectory_id: (e.token_ids, e.logprobs) for e in events if isinstance(e, TrajectoryEvent)}
    assert streamed == {t.trajectory_id: (t.token_ids, t.logprobs) for group in groups for t in group.trajectories}
    discards = {e.trajectory_id for e in events if isinstance(e, Discard)}
    assert discards == {d.trajectory_id for group in groups for d in group.discarded}
    first_group = next(index for index, event in enumerate(events) if isinstance(event, GroupEvent))
    assert any(isinstance(event, Delta) for event in events[:first_group])
    assert isinstance(events[-1], Done)


def test_a_token_stream_survives_lost_connections(server: RunningServer, client: Client) -> None:
    prompts = ["20", "50", "90"]
    whole = lengths(list(client.rollouts(prompts, **SIZES)))
    events: list[Event] = []
    for event in client.stream_tokens(prompts, chunk_tokens=8, **SIZES):
        events.append(event)
        if len(events) in (3, 10):
            server.drop_connections()
    assert lengths([event.group for event in events if isinstance(event, GroupEvent)]) == whole


@pytest.mark.parametrize("durable", [True, False])
def test_leaving_early_stops_the_engine(server: RunningServer, client: Client, durable: bool) -> None:
    with client.rollouts(["5", "endless"], durable=durable, **SIZES) as rollouts:
        assert next(rollouts).number == 0
        assert server.engine.running
    server.wait_idle()


@pytest.mark.parametrize("durable", [True, False])
def test_cancellation_stops_the_engine(server: RunningServer, durable: bool) -> None:
    async def scenario() -> None:
        async with AsyncClient(server.url) as client:
            started = asyncio.Event()

            async def read() -> None:
                async for _ in client.stream_tokens("endless", chunk_tokens=1, durable=durable, **SIZES):
                    started.set()

            task = asyncio.create_task(read())
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(scenario())
    server.wait_idle()


def test_cancellation_stops_the_engine_before_the_id_is_received(server: RunningServer) -> None:
    async def scenario() -> None:
        async with AsyncClient(server.url) as client, client.rollouts("slow endless", **SIZES) as rollouts:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.15):
                    await anext(rollouts)
            assert rollouts.id is not None

    asyncio.run(scenario())
    server.wait_idle()


def test_a_batch_is_cancelled_by_its_id(server: RunningServer, client: Client) -> None:
    with client.rollouts(["5", "endless"], **SIZES) as rollouts:
        next(rollouts)
        assert rollouts.id is not None
        assert client.cancel(rollouts.id) is True
        server.wait_idle()
        with pytest.raises(Overloaded, match="cancelled"):
            next(rollouts)
        assert client.cancel(rollouts.id) is False
    with pytest.raises(NotFound):
        client.cancel("roll-unknown")


def test_unfinished_prompts_run_in_a_later_batch(server: RunningServer, client: Client) -> None:
    prompts = [PromptSpec("4", key="four"), PromptSpec("300", key="long", metadata={"answer": 8})]
    with client.rollouts(prompts, num_groups=1, carry="resume", **SIZES) as rollouts:
        assert [group.prompt_key for group in rollouts] == ["four"]
        assert rollouts.carried is not None
    assert [(one.prompt_key, one.carry) for one in rollouts.unfinished] == [("long", "resume")]
    assert rollouts.carried == 1
    with client.rollouts([], carry="resume", carried=True, **SIZES) as rollouts:
        [group] = list(rollouts)
    assert (group.prompt_key, group.metadata, group.prompt_token_ids) == ("long", {"answer": 8}, None)
    assert all(sum(n for _, n in t.version_spans) == t.length for t in group.trajectories)
    assert rollouts.carried == 0
    with client.stream_tokens(["5"], carry="restart", carried=True, **SIZES) as events:
        assert [event.group.number for event in events if isinstance(event, GroupEvent)] == [0]


def test_rewards_are_matched_to_their_trajectories(client: Client) -> None:
    [group] = client.rollouts(PromptSpec("5", key="rewarded"), **SIZES)
    values = [1.0, 0.0, 0.0, 1.0]
    counts = client.rewards(group, values)
    assert (counts.matched, counts.repeated, counts.unknown) == (SIZE, 0, 0)
    first = group.trajectories[0]
    again = client.rewards({first.trajectory_id or "": 1.0, "unknown:0": 1.0})
    assert (again.repeated, again.unknown_indices) == (1, (1,))
    assert group.group_id is not None
    [record] = client.groups.get(group.group_id)
    reported = {c.trajectory_id: c.reward for c in record.candidates if c.selected_as is not None}
    assert reported == {t.trajectory_id: value for t, value in zip(group.trajectories, values, strict=True)}
    assert record.zero_variance is False
    statistics = client.prompts.get("rewarded").rewards
    assert statistics is not None
    assert (statistics.rewarded, statistics.right) == (SIZE, 2)
    weights = [t.weight or 0.0 for t in group.trajectories]
    assert sum(weights) == group.candidates == group.num_eligible == record.num_eligible
    assert [c.weight for c in record.candidates if c.selected_as is not None] == weights
    assert record.num_shortest == group.num_shortest == SIZE - 1
    assert statistics.pass_rate == pytest.approx((weights[0] + weights[3]) / sum(weights))
    assert (group.earlier_pass_rate, record.earlier_pass_rate) == (None, None)
    [later] = client.rollouts(PromptSpec("5", key="rewarded"), **SIZES)
    assert later.earlier_pass_rate == statistics.pass_rate


def test_settings_and_state_are_read_changed_saved_and_restored(client: Client, tmp_path: Path) -> None:
    list(client.rollouts(PromptSpec("5", key="kept"), **SIZES))
    (tmp_path / "state").write_bytes(b"of before")
    client.state.save(tmp_path / "state")
    assert list(tmp_path.iterdir()) == [tmp_path / "state"]
    groups = client.prompts.get("kept").groups
    list(client.rollouts(PromptSpec("5", key="kept"), **SIZES))
    assert client.prompts.get("kept").groups == groups + 1
    assert client.state.load(tmp_path / "state") >= 1
    assert client.prompts.get("kept").groups == groups

    before = client.policy.get()["redundancy"]
    assert client.policy.change(redundancy=1.25)["redundancy"] == 1.25
    assert client.policy.change(redundancy=before)["redundancy"] == before
    with pytest.raises(BadRequest, match="redundancy"):
        client.policy.change(redundancy="much")


def test_a_stream_yields_the_group_of_each_prompt_and_failed_groups(client: Client) -> None:
    texts = ["20", "30", "broken", "25", "20", "40", "20"]
    prompts = [PromptSpec(text, metadata={"place": i}) for i, text in enumerate(texts)]
    groups = list(client.stream(iter(prompts), ahead=6, **SIZES))
    assert sorted(group.metadata["place"] for group in groups if group.metadata) == list(range(7))
    assert [group.metadata for group in groups if group.error is not None] == [{"place": 2}]
    assert all(len(group.trajectories) == SIZE for group in groups if group.error is None)


@pytest.mark.parametrize("ahead", [2, 8])
def test_a_stream_goes_on_after_a_batch_whose_groups_have_all_failed(client: Client, ahead: int) -> None:
    groups = list(client.stream(["20", "30", "broken", "broken", "25", "broken"], ahead=ahead, **SIZES))
    assert sum(group.error is not None for group in groups) == 3
    assert sum(len(group.trajectories) == SIZE for group in groups) == 3


def test_a_stream_ends_with_the_error_of_a_batch_that_the_server_refuses(client: Client) -> None:
    with pytest.raises(BadRequest, match="group_size"):
        list(client.stream(["20"], group_size=10_000, max_tokens=200))


def test_the_prompts_of_a_trainer_survive_lost_connections(server: RunningServer) -> None:
    requests = GroupRequests(Server(server.url), SIZE, {"max_tokens": SIZES["max_tokens"]})
    with ThreadPoolExecutor(1) as threads:
        groups = threads.submit(requests.request, [PromptSpec("150"), PromptSpec("160")], 2)
        while not server.engine.running:
            time.sleep(0.01)
        server.drop_connections()
        assert [len(group.trajectories) for group in groups.result(60)] == [SIZE, SIZE]


def test_a_stream_draws_prompts_up_to_its_limit_ahead_while_the_server_works_on_them(
    client: Client, server: RunningServer
) -> None:
    drawn = 0

    def endless() -> Iterator[str]:
        nonlocal drawn
        while True:
            drawn += 1
            yield "20"

    with closing(client.stream(endless(), ahead=8, **SIZES)) as groups:
        next(groups)
        assert drawn == 8
        server.wait_idle()  # all eight are generated, whoever reads
        assert len([next(groups) for _ in range(9)]) == 9
        assert drawn <= 16
    server.wait_idle()
    with pytest.raises(ValueError, match="ahead"):
        next(client.stream(["20"], ahead=0, **SIZES))


def test_leaving_a_stream_cancels_its_running_batches(client: Client, server: RunningServer) -> None:
    with closing(client.stream(["20", "endless", "endless", "endless"], ahead=8, **SIZES)) as groups:
        assert next(groups).lengths
        assert server.engine.running
    server.wait_idle()
