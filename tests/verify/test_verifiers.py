"""Verifiers in processes: every answer gets a verdict or none, whatever the user's code does."""

import asyncio
import gc
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import uvloop

from darts_server.exceptions import InvalidSetting
from darts_server.types import PromptSpec, VerifierResult
from darts_server.verify import process
from darts_server.verify.channel import Task
from darts_server.verify.specs import parse_specs
from darts_server.verify.types import NO_VERDICT, Answer, Verdict
from darts_server.verify.verifiers import VerifierLimits, Verifiers

pytestmark = pytest.mark.anyio

CODE = Path(__file__).with_name("user_code.py")
METADATA = b'{"answer": "2", "ground_truth": "2", "data_source": "sums"}'
LIMITS = VerifierLimits(seconds=30, processes=1)
RIGHT = Verdict(1.0, True)


def answer(text: str, metadata: bytes | None = METADATA) -> Answer:
    return Answer(PromptSpec(text="1+1", metadata=metadata), text, list(range(len(text))))


def code(*names: str) -> list[str]:
    return [f"{CODE}:{name}" for name in names]


@asynccontextmanager
async def running(
    texts: Sequence[str],
    limits: VerifierLimits = LIMITS,
    default: float | None = None,
) -> AsyncIterator[tuple[Verifiers, Counter[tuple[str, VerifierResult]]]]:
    """Start verifiers. Also yield the number of calls by name and result."""
    verifiers = Verifiers(parse_specs(texts), limits, default)
    counted: Counter[tuple[str, VerifierResult]] = Counter()
    verifiers.called.add(lambda name, result, _: counted.update([(name, result)]))
    try:
        await verifiers.start()
        yield verifiers, counted
    finally:
        await verifiers.close()


def processes_of(pid: int) -> set[int]:
    """Return the living processes that descend from a process, or are in a group of its descendants."""
    alive = set()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit():
                state, parent, group, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                if state != "Z":
                    alive.add((int(entry.name), int(parent), int(group)))
    found = {pid}
    while more := {each for each, parent, group in alive if {parent, group} & found} - found:
        found |= more
    return found - {pid}


def wait_for_end(pids: Callable[[], Iterable[int]]) -> None:
    """Wait until no process is left."""
    until = time.monotonic() + 60
    while any(map(is_alive, pids())):
        assert time.monotonic() < until, "a process is left"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Check that every process has ended."""
    before = processes_of(os.getpid())
    yield
    wait_for_end(lambda: processes_of(os.getpid()) - before)


# --- rewards ----------------------------------------------------------------


async def test_every_form_of_verifier_gives_rewards() -> None:
    texts = ["boxed", r"regex:= (\d)", *code("compute_score", "async_score", "lengths", "async_lengths")]
    async with running(texts) as (verifiers, counted):
        text = r"= 2 and \boxed{2}"
        verdicts = {name: await verifiers.verify(answer(text), [name]) for name in verifiers.names}
        assert verdicts == {
            "boxed": RIGHT,
            "regex": RIGHT,
            "compute_score": Verdict(0.0, False),
            "async_score": Verdict(0.25, False),
            "lengths": Verdict(float(len(text)), True),
            "async_lengths": Verdict(float(len(text)), True),
        }
        assert counted == Counter({(name, VerifierResult.REWARD): 1 for name in verifiers.names})


async def test_math_verify_runs_in_a_process() -> None:
    async with running(["math-verify"]) as (verifiers, _):
        assert await verifiers.verify(answer(r"so \boxed{\frac{4}{2}}")) == RIGHT
        assert await verifiers.verify(answer(r"so \boxed{3}")) == Verdict(0.0, False)


async def test_the_reward_is_the_weighted_sum() -> None:
    texts = ["2*boxed", f"-0.5*{CODE}:fast", f"none={CODE}:no_verdict"]
    async with running(["2*boxed", f"-0.5*{CODE}:fast"]) as (verifiers, _):
        assert await verifiers.verify(answer(r"\boxed{2}")) == Verdict(1.5, True)
        # The verifier that knows says that the answer is wrong.
        assert await verifiers.verify(answer("3")) == Verdict(-0.5, False)
        assert await verifiers.verify(answer("3"), ["fast"]) == Verdict(-0.5, False)
        assert await verifiers.verify(answer("3"), ["missing"]) == NO_VERDICT
    async with running(texts) as (verifiers, counted):
        assert await verifiers.verify(answer(r"\boxed{2}")) == NO_VERDICT
        assert await verifiers.verify(answer(r"\boxed{2}"), ["boxed", "fast", "boxed"]) == Verdict(1.5, True)
        assert counted["none", VerifierResult.NONE] == 1
    async with running(texts, default=-1) as (verifiers, _):
        assert await verifiers.verify(answer(r"\boxed{2}")) == Verdict(0.5, True)
        assert await verifiers.verify(answer(""), ["none"]) == Verdict(-1.0, False)


async def test_a_sum_that_is_too_large_is_no_verdict() -> None:
    large = "9" * 300
    texts = [f"{large}*boxed", rf"{large}*regex:(2)", rf"infinite={large}{large}*regex:(2)"]
    async with running(texts) as (verifiers, _):
        assert await verifiers.verify(answer(r"\boxed{2}"), ["boxed", "regex"]) == NO_VERDICT
        assert await verifiers.verify(answer("2"), ["infinite"]) == NO_VERDICT
        assert await verifiers.verify(answer("2"), ["regex"]) == Verdict(1e300, True)


async def test_without_verifiers_there_is_no_verdict() -> None:
    async with running([]) as (verifiers, _):
        assert verifiers.names == ()
        assert await verifiers.verify(answer("2")) == NO_VERDICT


async def test_any_text_and_any_prompt_is_verified() -> None:
    async with running(["boxed", *code("lengths")]) as (verifiers, _):
        for text in ("\ud800", "\0", "é" * 300_000, ""):
            assert await verifiers.verify(answer(text), ["boxed"]) == Verdict(0.0, False)
        for prompt in (PromptSpec(token_ids=[1, 2]), PromptSpec(messages=b'[{"role": "user", "content": "\xc3\xa9"}]')):
            assert (await verifiers.verify(Answer(prompt, "abc", (1, 2, 3)), ["lengths"])).reward in (1.0, 3.0)


# --- failures ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "result", "logged"),
    [
        ("raise", VerifierResult.ERROR, "it raised ValueError: a"),
        ("exit", VerifierResult.ERROR, "it raised SystemExit: 5"),
        ("leave", VerifierResult.CRASH, "it ended its process, which exited with status 5"),
        ("segfault", VerifierResult.CRASH, "it ended its process, which was killed by SIGSEGV"),
        ("hang", VerifierResult.TIMEOUT, "it took longer than 2 seconds"),
        ("hold the lock", VerifierResult.TIMEOUT, "it took longer than 2 seconds"),
        ("close", VerifierResult.CRASH, "exited with status 1"),
        ("program", VerifierResult.CRASH, "exited with status 0"),
        ("recursion", VerifierResult.ERROR, "it raised RecursionError"),
        ("raising object", VerifierResult.INVALID, "it returned a value that raises RuntimeError"),
    ],
)
async def test_a_failure_is_no_verdict_and_the_next_answer_is_served(
    text: str, result: VerifierResult, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    # Only a call that never ends has a short limit, so that no other call is late on a busy machine.
    seconds = 2 if result == VerifierResult.TIMEOUT else 60
    limits = VerifierLimits(seconds=seconds, processes=1)
    async with running(code("misbehave"), limits) as (verifiers, counted):
        for _ in range(2):
            assert await verifiers.verify(answer(text)) == NO_VERDICT
            assert await verifiers.verify(answer("")) == RIGHT
        assert counted == {("misbehave", result): 2, ("misbehave", VerifierResult.REWARD): 2}
    [line] = caplog.messages
    assert f"the verifier misbehave gave no reward ({result}): " in line
    assert logged in line
    assert len(line) < 800


@pytest.mark.parametrize("text", ["flood", "fork", "fork and stay"])
async def test_output_and_forks_of_the_users_code_do_no_harm(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    async with running(code("misbehave")) as (verifiers, _):
        verdict = await verifiers.verify(answer(text))
        assert verdict == (Verdict(0.0, False) if text == "fork" else RIGHT)
        assert await verifiers.verify(answer("")) == RIGHT
    assert capfd.readouterr() == ("", "")


async def test_memory_is_limited() -> None:
    limits = VerifierLimits(processes=1, memory=1 << 30)
    async with running(code("misbehave"), limits) as (verifiers, counted):
        assert await verifiers.verify(answer("memory")) == NO_VERDICT
        assert counted == {("misbehave", VerifierResult.ERROR): 1}
        assert await verifiers.verify(answer("")) == RIGHT


@pytest.mark.parametrize("returned", ["nan", "inf", "string", "list", "huge", "empty", "object", "function", "array"])
async def test_a_value_that_is_no_number_is_no_verdict(returned: str) -> None:
    async with running([f"verl:{CODE}:returning"]) as (verifiers, counted):
        assert await verifiers.verify(answer(returned)) == NO_VERDICT
        assert await verifiers.verify(answer("numpy")) == Verdict(0.5, True)
        assert counted["returning", VerifierResult.INVALID] == 1


async def test_a_failure_of_each_kind_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with running(code("misbehave")) as (verifiers, counted):
        await asyncio.gather(*(verifiers.verify(answer(text)) for text in ["raise", "raising object"] * 20))
        assert counted.total() == 40
    assert len(caplog.messages) == 2


async def test_a_process_that_always_dies_is_started_again_after_short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MAX_DELAY", 0.1)
    async with running(code("misbehave")) as (verifiers, counted):
        assert await asyncio.gather(*(verifiers.verify(answer("leave")) for _ in range(8))) == [NO_VERDICT] * 8
        assert counted == {("misbehave", VerifierResult.CRASH): 8}
        assert await verifiers.verify(answer("")) == RIGHT


async def test_a_process_that_has_died_thousands_of_times_is_still_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "MAX_DELAY", 0.01)
    [spec] = parse_specs(["boxed"])
    dying = process.Process(Task(spec.kind, spec.target, spec.function, 0), 30)
    dying._starts_since_last_batch = 5_000
    try:
        await dying.start()
        assert dying.is_started
    finally:
        await dying.close()


async def test_a_process_that_was_killed_between_answers_is_replaced() -> None:
    async with running(code("process")) as (verifiers, counted):
        for _ in range(3):
            pid = (await verifiers.verify(answer(""))).reward
            assert pid is not None
            os.kill(int(pid), 9)
        assert counted == {("process", VerifierResult.REWARD): 3}


async def test_code_that_can_no_longer_be_loaded_ends_the_answers_that_wait(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("import os\ndef score(solution_str, **_):\n    os._exit(1)\n")
    async with running([f"{file}:score"]) as (verifiers, counted):
        file.write_text("broken")
        verdicts = await asyncio.gather(*(verifiers.verify(answer("")) for _ in range(3)))
        assert verdicts == [NO_VERDICT] * 3
        assert counted == {("score", VerifierResult.CRASH): 3}


async def test_an_event_loop_that_was_busy_makes_no_call_late() -> None:
    async with running(code("misbehave"), VerifierLimits(seconds=1, processes=1)) as (verifiers, _):
        task = asyncio.create_task(verifiers.verify(answer("short")))
        # The answer is sent, and then the loop is blocked.
        await asyncio.sleep(0.1)
        time.sleep(2)
        assert await task == RIGHT


def test_the_event_loop_of_the_server_runs_verifiers() -> None:
    async def verify_all() -> list[Verdict]:
        async with running(code("misbehave"), VerifierLimits(seconds=3, processes=1)) as (verifiers, _):
            return [await verifiers.verify(answer(text)) for text in ("", "hang", "leave", "")]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(verify_all()) == [RIGHT, NO_VERDICT, NO_VERDICT, RIGHT]


# --- many answers -----------------------------------------------------------


async def test_waiting_answers_share_a_call_of_a_function_of_trls_form() -> None:
    async with running(code("batch_size")) as (verifiers, _):
        verdicts = await asyncio.gather(*(verifiers.verify(answer("")) for _ in range(100)))
        sizes = [verdict.reward or 0.0 for verdict in verdicts]
        assert max(sizes) == process.TRL_ANSWERS
        others = [b"{}", METADATA, None]
        mixed = await asyncio.gather(*(verifiers.verify(answer("", others[i % 3])) for i in range(60)))
        assert all(verdict.reward for verdict in mixed)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("raise", VerifierResult.ERROR),
        ("leave", VerifierResult.CRASH),
        ("hang", VerifierResult.TIMEOUT),
        ("count", VerifierResult.INVALID),
    ],
)
async def test_an_answer_that_fails_a_shared_call_costs_no_other_answer_its_reward(
    text: str, result: VerifierResult
) -> None:
    async with running(code("poisoned"), VerifierLimits(seconds=4, processes=1)) as (verifiers, counted):
        texts = ["good"] * 40
        texts[25] = text
        verdicts = await asyncio.gather(*(verifiers.verify(answer(each)) for each in texts))
        assert verdicts.pop(25) == NO_VERDICT
        assert verdicts == [RIGHT] * 39
        assert counted == {("poisoned", VerifierResult.REWARD): 39, ("poisoned", result): 1}


async def test_the_wait_for_verdicts_is_limited_and_a_slow_call_and_a_long_wait_are_each_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("darts_server.verify.verifiers.MIN_WAIT", 0.0)
    limits = VerifierLimits(seconds=0.1, processes=1)
    async with running(["boxed", *code("misbehave")], limits) as (verifiers, counted):
        names = ["misbehave"]
        began = time.monotonic()
        hanging = [asyncio.create_task(verifiers.verify(answer("hang"), names)) for _ in range(200)]
        other = await verifiers.verify(answer(r"\boxed{2}"), ["boxed"])
        assert other == RIGHT, "another verifier does not wait"
        assert await asyncio.gather(*hanging) == [NO_VERDICT] * 200
        # Without the limit, 200 calls of .1 s would take 20 s, and the process would be started 200 times.
        assert time.monotonic() - began < 10
        assert counted == {("boxed", VerifierResult.REWARD): 1, ("misbehave", VerifierResult.TIMEOUT): 200}
    [call, wait] = caplog.messages
    assert "(timeout): it took longer than 0.1 seconds" in call
    assert "(timeout): it gave no verdict within 2 seconds, as too many answers wait: raise" in wait


async def test_books_are_balanced_with_a_verifier_that_fails_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MAX_DELAY", 0.1)
    count = 10_000
    limits = VerifierLimits(seconds=30, processes=2)
    async with running([f"verl:{CODE}:fail_at_random", "boxed"], limits) as (verifiers, counted):
        names = ["fail_at_random"]

        async def verify(number: int) -> Verdict:
            await asyncio.sleep(number % 100 / 1000)
            return await verifiers.verify(answer(f"{number}"), names)

        verdicts = await asyncio.gather(*(verify(number) for number in range(count)))
        for number, verdict in enumerate(verdicts):
            dice = random.Random(f"{number}").random()
            assert verdict == (NO_VERDICT if dice < 0.05 else Verdict(dice, True))
        by_result = {result: n for (_, result), n in counted.items()}
        assert sum(by_result.values()) == count
        assert by_result[VerifierResult.REWARD] == sum(verdict.reward is not None for verdict in verdicts)
        assert by_result.keys() == {
            VerifierResult.REWARD,
            VerifierResult.CRASH,
            VerifierResult.ERROR,
            VerifierResult.INVALID,
            VerifierResult.NONE,
        }


async def test_a_slow_verifier_does_not_delay_another_verifier() -> None:
    async with running(code("slow", "fast")) as (verifiers, _):
        slow = [asyncio.create_task(verifiers.verify(answer(""), ["slow"])) for _ in range(3)]
        for _ in range(10):
            assert await verifiers.verify(answer(""), ["fast"]) == RIGHT
        assert not slow[-1].done(), "it takes six seconds"
        assert await asyncio.gather(*slow) == [RIGHT] * 3


async def test_processes_are_started_when_they_are_needed() -> None:
    async with running(code("process", "batch_size"), VerifierLimits(processes=3)) as (verifiers, _):
        alone = {(await verifiers.verify(answer(""), ["process"])).reward for _ in range(5)}
        assert len(alone) == 1
        async with asyncio.timeout(60):
            pids: set[float | None] = set()
            while len(pids) < 3:
                many = await asyncio.gather(*(verifiers.verify(answer(""), ["process"]) for _ in range(50)))
                pids |= {verdict.reward for verdict in many}


async def test_answers_of_cancelled_groups_are_not_verified() -> None:
    async with running(code("slow")) as (verifiers, counted):
        tasks = [asyncio.create_task(verifiers.verify(answer(""))) for _ in range(5)]
        await asyncio.sleep(0.5)
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert counted == {("slow", VerifierResult.REWARD): 1}


# --- start and end ----------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("def other(): pass", ".*/rewards.py has no function score; its functions are other"),
        ("def score(a): pass", "score has neither veRL's parameters"),
        ("def score(", r"its code cannot be loaded: SyntaxError: '\(' was never closed \(rewards.py, line 1\)"),
        ("import no_such_module", "its code cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit(3)", "its code cannot be loaded: SystemExit: 3"),
        ("import os; os._exit(3)", "its process, which exited with status 3"),
    ],
)
async def test_code_that_cannot_be_loaded_is_an_error_at_start(tmp_path: Path, source: str, complaint: str) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(source)
    with pytest.raises(InvalidSetting, match=rf"^--verifier {file}:score: {complaint}"):
        async with running(["boxed", f"{file}:score"]):
            pass


async def test_all_files_are_closed() -> None:
    async def run_once() -> None:
        async with running(code("misbehave")) as (verifiers, _):
            await verifiers.verify(answer("leave"))
            assert await verifiers.verify(answer("")) == RIGHT

    await run_once()
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await run_once()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files


async def test_closing_ends_calls_without_a_verdict() -> None:
    async with running(code("misbehave"), VerifierLimits(processes=1, seconds=600)) as (verifiers, _):
        tasks = [asyncio.create_task(verifiers.verify(answer("hang"))) for _ in range(5)]
        await asyncio.sleep(0.3)
        async with asyncio.timeout(20):
            await verifiers.close()
            assert await asyncio.gather(*tasks) == [NO_VERDICT] * 5
            assert await verifiers.verify(answer("")) == NO_VERDICT


@pytest.mark.parametrize("text", ["hang", "hold the lock", "program and hang"])
def test_processes_end_with_a_server_that_is_killed(text: str) -> None:
    source = f"""
import asyncio
from tests.verify.test_verifiers import *
async def main():
    async with running(code("misbehave"), VerifierLimits(seconds=600, processes=1)) as (verifiers, _):
        asyncio.ensure_future(verifiers.verify(answer({text!r})))
        await asyncio.sleep(0.5)
        print(*processes_of(os.getpid()), flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""
    server = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    pids = [int(pid) for pid in server.stdout.readline().split()]
    assert len(pids) >= 2
    server.kill()
    server.wait()
    server.stdout.close()
    wait_for_end(lambda: pids)
