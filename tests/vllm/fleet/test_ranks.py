from collections.abc import AsyncGenerator
from contextlib import ExitStack
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from darts_server.rollout.turns import Turn
from darts_server.serving.admission import Admission
from darts_server.serving.gate import Gate
from darts_server.vllm.api.llm import ShapingLLM
from darts_server.vllm.api.routes import RouteCall
from darts_server.vllm.api.unshaped import Generation
from darts_server.vllm.fleet.ranks import LEVEL, RANK, Ranks, combine_priority
from darts_server.vllm.requests.prompt_request import PromptRequest


def engines(*ranks: int) -> SimpleNamespace:
    """Return vLLM's client of engines that are up."""
    return SimpleNamespace(core_engines=[rank.to_bytes(2, "little") for rank in ranks])


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=200))
def test_a_group_stays_on_the_engine_that_had_fewest_candidates(moves: list[tuple[int, bool]]) -> None:
    ranks = Ranks(3, engines(0, 1, 2))
    running = dict[str, list[tuple[int, ExitStack]]]()
    first = dict[str, int]()
    for number, starts in moves:
        group = f"g{number}"
        if starts:
            loads = [sum(rank == r for mine in running.values() for rank, _ in mine) for r in range(3)]
            candidate = ExitStack()
            rank = candidate.enter_context(ranks.count_candidate(group))
            assert rank == first.setdefault(group, loads.index(min(loads)))
            running.setdefault(group, []).append((rank, candidate))
        elif running.get(group):
            running[group].pop()[1].close()


def test_single_requests_of_a_group_share_its_engine() -> None:
    ranks = Ranks(2, engines(0, 1))
    with ExitStack() as running:
        assert running.enter_context(ranks.count_candidate("other")) == 0
        with ranks.join_group("request 1", "group"), ranks.join_group("request 2", "group"):
            requests = [f"request {number}" for number in (1, 2, 3)]
            assert [running.enter_context(ranks.count_candidate(request)) for request in requests] == [1, 1, 0]
            assert [ranks.rank_of(request, {}) for request in (*requests, "group")] == [1, 1, 0, 1]
            assert ranks.rank_of("request 1", {RANK: 0}) == 0
        assert ranks.rank_of("request 1", {}) is None
    assert ranks._running_requests == [0, 0]
    assert not ranks._running_candidates


def test_a_new_group_runs_on_an_engine_that_is_up() -> None:
    ranks = Ranks(3, engines(2, 1))
    with ranks.count_candidate("first") as first, ranks.count_candidate("second") as second:
        assert (first, second) == (2, 1)


def test_the_rank_of_a_group_is_known_for_a_while_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("darts_server.vllm.fleet.ranks.KEPT_GROUPS", 2)
    ranks = Ranks(2, engines(0, 1))
    running = ExitStack()
    for number in range(4):
        running.enter_context(ranks.count_candidate("running"))
        with ranks.count_candidate(str(number)) as rank:
            assert (rank, ranks.rank_of(str(number), {})) == (1, 1)
    groups = ("0", "1", "2", "3", "running", "none")
    assert [ranks.rank_of(group, {}) for group in groups] == [None, None, 1, 1, 0, None]
    assert len(ranks._rank_of_ended_group) == 2


class Engines(ShapingLLM):
    """Two data-parallel engines that record the options of their requests."""

    def __init__(self, count: int) -> None:
        self.vllm_config: Any = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=count))
        self.engine_core: Any = SimpleNamespace(core_engines=[rank.to_bytes(2, "little") for rank in range(count)])
        self.gate = Gate()
        self.seen: list[Any] = []

    def shutdown(self, timeout: float | None = None) -> None:
        """Do nothing."""


def generate(llm: Engines, *_: Any, **options: Any) -> AsyncGenerator[Any, None]:
    async def outputs() -> AsyncGenerator[Any, None]:
        llm.seen.append((options.get(RANK), list(llm.ranks._running_requests)))
        yield SimpleNamespace(finished=False)

    return outputs()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("count", "known", "chosen", "expected"),
    [(2, 1, None, 1), (2, None, None, None), (2, 1, 0, 0), (1, 0, None, None), (2, None, 7, 7)],
)
async def test_a_later_turn_runs_on_the_engine_that_has_its_prefix(
    count: int, known: int | None, chosen: int | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless its caller has chosen an engine, right or wrong, or there is only one."""
    monkeypatch.setattr(AsyncLLM, "generate", generate)
    llm = Engines(count)
    turn = Turn([1, 2], rank=known)
    options = {} if chosen is None else {RANK: chosen}
    request = PromptRequest({"prompt_token_ids": [1, 2]}, SamplingParams(), "a", options)
    generation = Generation(request, RouteCall(), Admission(lambda: 0, None).admit(1), turn)
    assert len([output async for output in llm._generate_unshaped(generation)]) == 1
    [(rank, running)] = llm.seen
    assert (rank, turn.rank) == (expected, expected)
    assert running == [int(rank == each) for each in range(count)], "later turns count where they run"
    assert llm.ranks._running_requests == [0] * count


def test_callers_priorities_come_first_and_the_order_decides_among_equal_ones() -> None:
    rng = Random(1)
    requests = [(rng.randint(-3, 3), rng.uniform(-1e6, 1e6)) for _ in range(500)]
    assert sorted(requests, key=lambda each: combine_priority(*each)) == sorted(requests)
    assert combine_priority(0, 1.5) == 1500


def test_priorities_out_of_range_are_first_or_last_and_have_63_bits() -> None:
    assert combine_priority(2**63 - 1, 1e30) == combine_priority(2**40, 1e20) < 2**63
    assert combine_priority(-(2**63), -1e30) >= -(2**63)
    assert combine_priority(0, 1e30) - combine_priority(0, -1e30) < LEVEL
