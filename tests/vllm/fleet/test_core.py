"""Requests, calls and weight updates while scripted engines join and are lost."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind

from benchmarks.fleet.bench import ARGV, ready
from benchmarks.fleet.hosts import TOKEN, Scripted, ScriptedHost
from darts_server.exceptions import EngineBusy, InvalidSetting
from darts_server.offline.demo.server import ENVIRONMENT
from darts_server.vllm import flags
from darts_server.vllm.api.launch import start_fleet
from darts_server.vllm.api.llm import ShapingLLM
from darts_server.vllm.fleet.core import MAX_MOVES, FleetCore, rpc_arguments
from darts_server.vllm.fleet.host import Start
from darts_server.vllm.requests.prompt_request import PromptRequest

pytestmark = pytest.mark.anyio
PROMPT = {"type": "token", "prompt_token_ids": [6, 22, 7, 25]}
RATE = 4000.0
SECONDS = 10.0
FILES: Any = [(SimpleNamespace(path="/weights", stamp=(1, 2)), ["a"])]
"""Weights as `VllmModel.load` takes them."""


class Places:
    """Runs hosts in this event loop."""

    failure: InvalidSetting | None = None

    def __init__(self) -> None:
        self.hosts: dict[int, ScriptedHost] = {}
        self.restarts = False
        """Whether lost engines are started again."""
        self._tasks: dict[int, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def place(self, starts: Sequence[bytes], _: int) -> AsyncIterator["Places"]:
        self._starts = [msgspec.json.decode(start, type=Start) for start in starts]
        for rank in range(len(starts)):
            self.start(rank)
        yield self
        for rank in self.hosts:
            self.kill(rank)

    def start(self, rank: int) -> None:
        start = self._starts[rank]
        script = Scripted(start.host, start.port, start.token, [rank], rate=RATE, ready=ready())
        self.hosts[rank] = ScriptedHost(script, rank)
        self._tasks[rank] = asyncio.create_task(self.hosts[rank].run())

    def restart(self, rank: int) -> None:
        self.kill(rank)
        if self.restarts:
            self.start(rank)

    def kill(self, rank: int) -> None:
        self._tasks[rank].cancel()
        self.hosts[rank].close()


class Running:
    def __init__(self, llm: ShapingLLM, places: Places, running: Any) -> None:
        self.llm = llm
        self.places = places
        self.running = running
        assert isinstance(llm.engine_core, FleetCore)
        self.core = llm.engine_core
        self._number = 0

    @property
    def running_requests(self) -> list[int]:
        return [len(host.running) for _, host in sorted(self.places.hosts.items())]

    async def generate(self, **params: Any) -> list[Any]:
        """Generate 400 tokens; return the outputs."""
        self._number += 1
        sampling = SamplingParams(**{"max_tokens": 400, "ignore_eos": True, "logprobs": 0, **params})
        outputs = self.llm.generate(PROMPT, sampling, f"request-{self._number}")
        return [output.outputs[0] async for output in outputs]

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition():
                await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@asynccontextmanager
async def fleet_of(count: int, watchdog: float = 0.0) -> AsyncIterator[Running]:
    places = Places()
    async with start_fleet(flags.parse(ARGV), ARGV, count, places.place, "127.0.0.1", watchdog) as running:
        yield Running(running.llm, places, running)


FINAL: dict[str, Any] = {"output_kind": RequestOutputKind.FINAL_ONLY}
STREAM: dict[str, Any] = {"output_kind": RequestOutputKind.DELTA}


async def test_requests_resume_on_another_engine_when_theirs_is_lost_or_end_if_they_cannot() -> None:
    async with fleet_of(2) as fleet:
        kinds = [FINAL, STREAM, FINAL | {"presence_penalty": 1.0}, STREAM | {"presence_penalty": 1.0}]
        # One request of each kind on each engine.
        requests = [kind for kind in kinds for _ in range(2)]
        tasks = [asyncio.create_task(fleet.generate(**params)) for params in requests]
        await fleet.until(lambda: sum(fleet.running_requests) == 8)
        assert fleet.running_requests == [4, 4]
        await fleet.until(lambda: fleet.places.hosts[0].tokens > 400)
        fleet.places.kill(0)
        answers = await asyncio.gather(*tasks)
        assert (fleet.core.num_lost, fleet.running.num_up) == (1, 1)
    ended = [answer[-1].finish_reason for answer in answers]
    assert sorted(ended) == ["abort"] + ["length"] * 7
    for params, answer in zip(requests, answers, strict=True):
        tokens = [token for output in answer for token in output.token_ids]
        logprobs = [one for output in answer for one in output.logprobs or ()]
        assert len(tokens) == len(logprobs)
        if answer[-1].finish_reason == "abort":
            assert params == kinds[3]
        else:
            assert tokens == [TOKEN] * 400


async def test_candidates_are_lost_with_their_engine_and_only_with_it() -> None:
    async with fleet_of(2) as fleet:
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        port = fleet.running.port
        started = [await port.start(PromptRequest(PROMPT, params, f"group-{i}"), 0) for i in range(4)]
        await fleet.until(lambda: fleet.running_requests == [2, 2])
        await fleet.until(lambda: all(candidate.count_tokens() for candidate in started))
        fleet.places.kill(1)
        results = await asyncio.gather(*(candidate.result() for candidate in started))
        assert sorted(result.finish_reason is None for result in results) == [False, False, True, True]
        assert port.unfinished_requests == 0


async def test_an_aborted_request_ends_even_if_its_engine_is_lost() -> None:
    async with fleet_of(2) as fleet:
        task = asyncio.create_task(fleet.generate(**FINAL))
        await fleet.until(lambda: sum(fleet.running_requests))
        rank = fleet.running_requests.index(1)
        fleet.places.hosts[rank].is_deaf = True
        await fleet.llm.abort("request-1")
        fleet.places.kill(rank)
        [output] = await task
        assert output.finish_reason == "abort"


async def test_requests_are_refused_while_no_engine_is_up_and_served_afterwards() -> None:
    async with fleet_of(1) as fleet:
        task = asyncio.create_task(fleet.generate(**FINAL))
        await fleet.until(lambda: sum(fleet.running_requests))
        fleet.places.kill(0)
        for refused in (task, asyncio.create_task(fleet.generate(**FINAL))):
            with pytest.raises(EngineBusy, match="no engine is up"):
                await refused
        assert await fleet.llm.collective_rpc("anything") == []
        assert fleet.running.port.unfinished_requests == 0
        fleet.places.start(0)
        await fleet.until(lambda: fleet.running.num_up)
        assert (await fleet.generate(**FINAL))[-1].finish_reason == "length"


async def test_an_aborted_stream_leaves_no_state() -> None:
    async with fleet_of(1) as fleet:
        task = asyncio.create_task(fleet.generate(**STREAM))
        await fleet.until(lambda: sum(fleet.running_requests))
        await fleet.llm.abort("request-1")
        assert (await task)[-1].finish_reason == "abort"
        [engine] = fleet.core.engines.values()
        assert not engine.requests
        assert not engine.aborted_ids


async def test_a_request_that_loses_its_engine_too_often_fails() -> None:
    async with fleet_of(2) as fleet:
        fleet.places.restarts = True
        task = asyncio.create_task(fleet.generate(**STREAM, max_tokens=4000))

        async def lose_engine() -> tuple[int, int]:
            """Return the tokens of the request's prompt, and the limit of its answer."""
            await fleet.until(lambda: sum(fleet.running_requests) and fleet.running.num_up == 2)
            lost = fleet.core.num_lost
            rank = fleet.running_requests.index(1)
            host = fleet.places.hosts[rank]
            [request] = host.running.values()
            assert request.prompt_token_ids is not None
            assert request.sampling_params is not None
            await fleet.until(lambda: host.tokens > 20)
            fleet.places.kill(rank)
            await fleet.until(lambda: fleet.core.num_lost > lost)
            return len(request.prompt_token_ids), request.sampling_params.max_tokens or 0

        sent = [await lose_engine() for _ in range(MAX_MOVES + 1)]
        with pytest.raises(EngineBusy, match="4 times"):
            await task
        await fleet.until(lambda: fleet.running.num_up == 2)
        assert {length + left for length, left in sent} == {4 + 4000}
        assert sorted(set(sent)) == sent
        assert not fleet.core.moves


async def test_an_engine_that_sends_nothing_is_lost() -> None:
    async with fleet_of(2, watchdog=0.4) as fleet:
        fleet.places.restarts = True
        tasks = [asyncio.create_task(fleet.generate(**FINAL)) for _ in range(2)]
        await fleet.until(lambda: fleet.running_requests == [1, 1])
        hung = fleet.places.hosts[1]
        hung.is_stopped = True
        answers = await asyncio.gather(*tasks)
        assert [answer[-1].finish_reason for answer in answers] == ["length"] * 2
        await fleet.until(lambda: fleet.running.num_up == 2)
        assert fleet.places.hosts[1] is not hung


async def test_calls_reach_all_engines_and_lost_engines_do_not_count() -> None:
    async with fleet_of(3) as fleet:
        assert await fleet.llm.collective_rpc("anything") == [None] * 3
        fleet.places.hosts[2].is_deaf = True
        call = asyncio.create_task(fleet.llm.collective_rpc("anything"))
        await asyncio.sleep(0.05)
        fleet.places.kill(2)
        assert await call == [None] * 2


async def test_an_engine_that_joins_gets_weights_and_pause_before_requests_even_if_none_was_up() -> None:
    async with fleet_of(1) as fleet:
        fleet.places.kill(0)
        await fleet.until(lambda: fleet.core.num_lost)
        await fleet.running.model.load(FILES)
        await fleet.running.model.set_version(7)
        await fleet.running.model.pause()
        fleet.places.start(0)
        await fleet.until(lambda: fleet.running.num_up)
        calls = [(method, args[0] if args else None) for method, args in fleet.places.hosts[0].calls]
        assert calls == [
            ("collective_rpc", "darts_install_probe"),
            ("collective_rpc", "darts_load_weights"),
            ("set_weight_version", "7"),
            ("collective_rpc", "darts_speculate"),
            ("pause_scheduler", "keep"),
        ]
        await fleet.running.model.resume()


async def test_an_engine_that_does_not_accept_a_lora_adapter_gets_no_requests() -> None:
    async with fleet_of(1) as fleet:
        fleet.places.kill(0)
        await fleet.until(lambda: fleet.core.num_lost)
        adapter = LoRARequest("a", 1, "/adapter")
        fleet.running.model.loras = SimpleNamespace(pushed={"a": adapter}, changes=1)
        fleet.places.start(0)
        fleet.places.hosts[0].answers["add_lora"] = False
        await fleet.until(lambda: fleet.core.num_lost == 2)
        assert fleet.running.num_up == 0
        fleet.places.start(0)
        fleet.places.hosts[0].answers["add_lora"] = True
        await fleet.until(lambda: fleet.running.num_up)


async def test_an_error_of_an_engine_that_gets_a_probe_is_raised_unless_it_was_lost() -> None:
    async with fleet_of(2) as fleet:
        fleet.places.hosts[1].failures["collective_rpc"] = "out of memory"
        with pytest.raises(Exception, match="out of memory"):
            await fleet.core.install_probes(lambda parts: None)
        fleet.places.hosts[1].is_deaf = True
        installing = asyncio.create_task(fleet.core.install_probes(lambda parts: None))
        await fleet.until(lambda: fleet.core.engines[b"\x01\x00"].unanswered_calls)
        fleet.places.kill(1)
        assert await installing == ["no probe"]


async def test_an_engine_waits_while_weights_change_and_when_they_are_in_no_file() -> None:
    async with fleet_of(2) as fleet:
        fleet.places.restarts = True
        settled = SimpleNamespace(is_settled=False)
        fleet.llm.updates = SimpleNamespace(coordinator=settled)  # type: ignore[assignment]
        fleet.llm.written_by_trainer = True
        fleet.places.kill(0)
        await asyncio.sleep(0.3)
        assert fleet.running.num_up == 1
        settled.is_settled = True
        await asyncio.sleep(0.3)
        assert fleet.running.num_up == 1
        await fleet.running.model.load(FILES)
        await fleet.until(lambda: fleet.running.num_up == 2)
        assert ("collective_rpc", "darts_load_weights") in [
            (method, args[0]) for method, args in fleet.places.hosts[0].calls if args
        ]


def test_each_engine_gets_ranks_of_its_own_for_transfers_of_weights() -> None:
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=2), weight_transfer_config=SimpleNamespace(backend="nccl")
    )
    info = {"rank_offset": 1, "world_size": 7}
    sent = [
        rpc_arguments(config, rank, "init_weight_transfer_engine", None, (), {"init_info": info}) for rank in range(3)
    ]
    assert [args[3]["init_info"]["rank_offset"] for args in sent] == [1, 3, 5]
    parts = rpc_arguments(config, 1, "update_weights", None, (), {"update_info": [*"abcdef"]})
    assert parts[3]["update_info"] == ["c", "d"]
    assert rpc_arguments(config, 1, "start_weight_update", None, (), None) == ("start_weight_update", None, (), None)
    assert info["rank_offset"] == 1
