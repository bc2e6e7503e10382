"""Callers of single requests on the scripted engine, and a clock that only the test advances."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from darts_server.engine.port import NO_TOKENS, TokenSlice
from darts_server.engine.scripted import Script, ScriptedCandidate, ScriptedEngine, settle
from darts_server.policy.shaping import Shaping, Tail
from darts_server.records import GroupRecord
from darts_server.rollout.learned.statistics import Statistics
from darts_server.rollout.plan import Limits, Planner
from darts_server.rollout.rollouts import Intervals, Rollouts
from darts_server.rollout.run import GroupRun
from darts_server.rollout.spec import GroupSpec, JoinRequest
from darts_server.serving.admission import Ticket
from darts_server.types import RequestOptions
from tests.group.oracle import Fate
from tests.rollout.helpers import Documents, Recorder

WAIT, NAMED_WAIT = 5.0, 60.0
"""Seconds without a further request after which a group is closed short, and one with a name."""
SHORTEST = Shaping(redundancy=1.5, num_longest=0)
SAMPLED = Shaping(redundancy=1.5, num_longest=1)
POLICIES = {
    "shortest": SHORTEST,
    "sampled": SAMPLED,
    "longest": Shaping(redundancy=1.5, num_longest=1, tail=Tail.LONGEST),
    "adaptive": Shaping(redundancy=1.5, adaptive=True),
    "adaptive shortest": Shaping(redundancy=1.5, num_longest=0, adaptive=True),
    "three tails": Shaping(redundancy=1.5, num_longest=3),
}


class SteppedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still until a test advances it."""

    now = 0.0

    def time(self) -> float:
        return self.now


@dataclass(frozen=True)
class SignedOutput:
    """A trajectory with its origin: candidate ``index`` of ``request``."""

    request: str
    index: int
    tokens: int

    @property
    def prompt(self) -> str:
        return self.request.partition(":")[0]


class SignedTokens(list[int]):
    origin: tuple[str, int] = ("", 0)


def signed(request: str, index: int, tokens: int) -> SignedTokens:
    output = SignedTokens(range(tokens))
    output.origin = request, index
    return output


class SigningCandidate(ScriptedCandidate):
    def output(self) -> list[int]:
        return signed(self.request, self.index, self.generated)


class SigningEngine(ScriptedEngine):
    """The scripted engine with outputs that name their origin."""

    candidate_type = SigningCandidate

    def truncate(self, request: str, output: list[int], tokens: int) -> list[int]:
        assert isinstance(output, SignedTokens)
        assert len(output) >= tokens
        return signed(*output.origin, tokens)

    def aborted_output(self, request: str, prefix: TokenSlice = NO_TOKENS) -> list[int]:
        return signed(request, 0, 0)


@dataclass
class Caller:
    """One request for one trajectory."""

    name: str
    prompt: str
    task: asyncio.Task[list[int]] = field(init=False)
    group_id: str = ""

    def disconnect(self) -> None:
        self.task.cancel()

    @property
    def is_answered(self) -> bool:
        return self.task.done() and not self.task.cancelled() and self.task.exception() is None

    @property
    def result(self) -> SignedOutput:
        output = self.task.result()
        assert isinstance(output, SignedTokens)
        return SignedOutput(*output.origin, len(output))


class JoiningHarness:
    """The rollout room on a scripted engine, with callers. Groups have ``size`` trajectories."""

    def __init__(
        self,
        script: Callable[[str, int], Script],
        shaping: Shaping,
        size: int = 4,
        wait: float = WAIT,
        window: float = 0,
        tail_seed: int = 0,
    ) -> None:
        self.script = script
        self.size = size
        self.engine = SigningEngine(script)
        self.store = Documents()
        self.callers: list[Caller] = []
        self._others = asyncio.all_tasks()
        self.runs: dict[str, GroupRun[str, list[int]]] = {}
        """All groups that were started."""
        self.rollouts: Rollouts[str, list[int]] = Rollouts(
            self.engine,
            Planner({"shaped": shaping}, "shaped", Limits(64)),
            Statistics(self.store, self.engine.capacity),
            Intervals(poll=0, allocation=window, join=wait, join_named=NAMED_WAIT),
            clock=lambda: self.engine.now,
        )
        self.recorder = Recorder(self.rollouts.observers)

        def create_run(spec: GroupSpec[str], on_end: Callable[[], None], ticket: Ticket) -> GroupRun[str, list[int]]:
            spec = replace(spec, tail_seed=(tail_seed, len(self.runs)))  # reproducible
            run = self.runs[spec.group_id] = self.rollouts.create_run(spec, on_end, ticket)
            return run

        self.rollouts.joiner.create_run = create_run

    def send(self, caller: str, prompt: str = "p", name: str | None = None) -> Caller:
        """Send a caller's request. ``name``: its name for the group."""
        new = Caller(caller, prompt)
        plan = self.rollouts.plan(1, RequestOptions(group_id=name, group_size=self.size))
        assert plan is not None
        ticket = self.rollouts.admission.admit(1)
        joining = JoinRequest(f"{prompt}:{caller}", caller, plan, prompt, f"{name}/{prompt}", ticket, name)
        new.task = asyncio.create_task(
            self.rollouts.joiner.join(joining, lambda group_id: setattr(new, "group_id", group_id))
        )
        self.callers.append(new)
        return new

    async def send_all(self, count: int | None = None, prompt: str = "p") -> list[Caller]:
        first = len(self.callers)
        callers = [self.send(f"c{first + i}", prompt) for i in range(self.size if count is None else count)]
        await settle()
        return callers

    async def advance_clock(self, seconds: float = WAIT) -> None:
        """Advance the event loop's clock."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SteppedLoop)
        loop.now += seconds
        await settle()

    async def steps(self, count: int) -> None:
        for _ in range(count):
            await self.engine.step()

    def record(self, group_id: str) -> GroupRecord:
        [record] = [r for r in self.recorder.records if r.group_id == group_id]
        return record

    def fates(self, group_id: str) -> dict[int, Fate]:
        """How every candidate of a group would end if it were not stopped."""
        run = self.runs[group_id]
        fates = {}
        for candidate in run._group.candidates:
            script = self.script(*self.origin(group_id, candidate.index))
            fates[candidate.index] = Fate(script.length, script.finish_reason == "stop", candidate.tail_draw)
        return fates

    def origin(self, group_id: str, index: int) -> tuple[str, int]:
        """Request of a candidate, and its number among that request's."""
        candidate = self.runs[group_id].runner.candidates[index]
        return candidate.request, candidate.number

    async def assert_empty(self) -> None:
        """Check that nothing runs and no group or task is left."""
        await settle()
        assert self.engine.running == []
        assert not self.rollouts.runs
        assert self.rollouts.joiner.groups == {}
        assert asyncio.all_tasks() == self._others


def by_caller(*each: int) -> JoiningHarness:
    """A harness of groups of 4 shortest. The i-th caller's own candidate has the i-th length; all others the last."""

    def script(request: str, index: int) -> Script:
        number = int(request.partition(":c")[2])
        return Script(each[number] if index == 0 and number < len(each) - 1 else each[-1])

    return JoiningHarness(script, SHORTEST)


def same_group(callers: list[Caller]) -> bool:
    return len({c.group_id for c in callers}) == 1


async def finish(harness: JoiningHarness, callers: list[Caller]) -> list[object]:
    await harness.engine.run()
    results = await asyncio.gather(*(c.task for c in callers), return_exceptions=True)
    await harness.assert_empty()
    return list(results)
