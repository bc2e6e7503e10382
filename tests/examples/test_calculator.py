"""The task with a calculator, its demonstrations, and the agent on a scripted policy."""

import asyncio
from collections.abc import Sequence
from random import Random
from statistics import median

import pytest
import torch
from transformers import Qwen3ForCausalLM

from examples.calculator.agent import Episode, SessionOver, Turn, fast_tool, play
from examples.calculator.demonstrations import CLEAN, STANDARD, Habits, demonstration, demonstration_sample, draw_batch
from examples.calculator.task import (
    MAX_TOKENS,
    MAX_TOOL_SECONDS,
    MEDIAN_TOOL_SECONDS,
    Problem,
    Step,
    calculator,
    reward,
    sample_problem,
    tool_seconds,
)
from examples.calculator.train import MODEL
from examples.tiny_rl.batches import IGNORED, collate
from examples.tiny_rl.tokenizer import EOS_ID, build_tokenizer

EXAMPLE = Problem(47, (Step("a", "+", 38), Step("b", "-", 12), Step("c", "*", 95)))
TOKENIZER = build_tokenizer()


def test_a_prompt_is_worked_out_by_calling_the_calculator_for_every_step() -> None:
    assert EXAMPLE.prompt == "47a+38b-12c*95>"
    assert EXAMPLE.answer == 35
    parts = demonstration(EXAMPLE, Random(0))
    assert [part.text for part in parts] == ["47a+38=", "85>", "85b-12=", "73>", "73c*95=", "35>", "#35"]
    assert [part.given for part in parts] == [False, True, False, True, False, True, False]


def test_the_calculator_answers_a_call_at_the_end_of_a_turn_and_nothing_else() -> None:
    assert calculator("47a+38=") == "85>"
    assert calculator("?05b-12=") == "93>"
    assert calculator("73c*95=") == "35>"
    for text in ("", "#35", "47a+=", "7a+38=", "47+38=", "47a+38=8"):
        assert calculator(text) == "@@>"


def test_only_the_right_number_after_the_last_mark_is_rewarded() -> None:
    assert reward(EXAMPLE, "#35") == reward(EXAMPLE, "#12#35") == 1.0
    for text in ("", "35", "#53", "#035", "#35#", "#3"):
        assert reward(EXAMPLE, text) == 0.0


def test_clean_demonstrations_are_right_and_a_wrong_digit_is_carried_on() -> None:
    rng = Random(1)
    for _ in range(100):
        problem = sample_problem(rng)
        parts = demonstration(problem, rng, CLEAN)
        assert reward(problem, parts[-1].text) == 1.0
        assert len(parts) == 2 * len(problem.steps) + 1
    wrong = demonstration(EXAMPLE, rng, Habits(error=1.0))
    calls = [part.text for part in wrong if not part.given][:-1]
    assert calls[0] != "47a+38="
    assert all(calculator(call) == part.text for call, part in zip(calls, wrong[1::2], strict=True))


def test_demonstrations_guess_and_check_again() -> None:
    [guess] = demonstration(EXAMPLE, Random(2), Habits(guess=1.0))
    assert len(guess.text) == 3
    parts = demonstration(EXAMPLE, Random(2), Habits(ramble=1.0))
    text = "".join(part.text for part in parts)
    assert text == "47a+38=85>85b-12=73>73c*95=35>?47a+38=85>85b-12=73>73c*95=35>#35"


def test_tokens_of_the_calculator_have_no_loss() -> None:
    sample = demonstration_sample(TOKENIZER, EXAMPLE, Random(0))
    assert TOKENIZER.decode(sample.tokens[:-1]) == "47a+38b-12c*95>47a+38=85>85b-12=73>73c*95=35>#35"
    _, labels = collate([sample])
    learned = [token for token in labels[0].tolist() if token != IGNORED]
    assert TOKENIZER.decode(learned[:-1]) == "47a+38=85b-12=73c*95=#35"
    assert learned[-1] == EOS_ID
    assert len(learned) == sample.num_targets


def test_batches_fit_the_positions_of_the_policy_whatever_the_habits() -> None:
    samples = draw_batch(Random(3), TOKENIZER, Habits(ramble=1.0, loop=1.0), batch_tokens=2000)
    assert {len(sample.tokens) for sample in samples} == {MAX_TOKENS}
    assert all(max(sample.given) < MAX_TOKENS for sample in samples)
    lengths = [len(sample.tokens) for sample in draw_batch(Random(3), TOKENIZER, STANDARD, batch_tokens=2000)]
    assert lengths == sorted(lengths)


def test_tool_times_have_a_heavy_tail_and_a_limit() -> None:
    seconds = [tool_seconds(Random(f"{number}")) for number in range(4000)]
    assert median(seconds) == pytest.approx(MEDIAN_TOOL_SECONDS, rel=0.1)
    assert sum(each > 5 * MEDIAN_TOOL_SECONDS for each in seconds) / 4000 == pytest.approx(1 / 14, abs=0.02)
    assert max(seconds) == MAX_TOOL_SECONDS
    assert tool_seconds(Random("1")) == tool_seconds(Random("1"))


class Scripted:
    """A policy that writes these turns, one after another, and records its prompts."""

    def __init__(self, *turns: str | Turn | SessionOver) -> None:
        self._turns = list(turns)
        self.prompts: list[str] = []

    async def complete(self, tokens: Sequence[int], _: int) -> Turn:
        self.prompts.append(str(TOKENIZER.decode(list(tokens))))
        turn = self._turns.pop(0)
        if isinstance(turn, SessionOver):
            raise turn
        if isinstance(turn, Turn):
            return turn
        token_ids = TOKENIZER.encode(turn)
        if turn.startswith("#"):
            token_ids.append(EOS_ID)
        return Turn(token_ids)


def played(*turns: str | Turn | SessionOver) -> tuple[Episode, Scripted]:
    episode = Episode(EXAMPLE, TOKENIZER)
    policy = Scripted(*turns)
    asyncio.run(play(episode, policy.complete, fast_tool))
    return episode, policy


def test_each_prompt_begins_with_all_tokens_before_it_and_ends_with_the_calculators_answer() -> None:
    episode, policy = played("47a+38=", "85b-12=", "73c*95=", "#35")
    assert policy.prompts == [
        "47a+38b-12c*95>",
        "47a+38b-12c*95>47a+38=85>",
        "47a+38b-12c*95>47a+38=85>85b-12=73>",
        "47a+38b-12c*95>47a+38=85>85b-12=73>73c*95=35>",
    ]
    assert (episode.end, episode.reward, episode.turns, episode.calls) == ("answered", 1.0, 4, 3)


def test_an_answer_without_an_end_earns_nothing() -> None:
    episode, _ = played("47a+38=", Turn(TOKENIZER.encode("#35")))
    assert (episode.end, episode.reward) == ("truncated", 0.0)
    full, policy = played(*["47a+38="] * 31)
    assert (full.end, full.reward) == ("truncated", 0.0)
    assert max(map(len, policy.prompts)) < MAX_TOKENS


def test_an_agent_stops_at_an_aborted_turn_and_at_a_refused_request() -> None:
    aborted, policy = played("47a+38=", Turn(TOKENIZER.encode("85b"), is_aborted=True))
    assert (aborted.end, aborted.reward, aborted.refused, len(policy.prompts)) == ("stopped", 0.0, 0, 2)
    assert TOKENIZER.decode(aborted.tokens) == "47a+38b-12c*95>47a+38=85>"
    refused, policy = played("47a+38=", SessionOver())
    assert (refused.end, refused.refused, len(policy.prompts)) == ("stopped", 1, 2)


def test_a_session_that_was_cancelled_in_a_call_goes_on_with_the_calls_answer() -> None:
    episode = Episode(EXAMPLE, TOKENIZER)

    async def scenario() -> None:
        async def endless(_: int) -> None:
            await asyncio.Event().wait()

        task = asyncio.create_task(play(episode, Scripted("47a+38=").complete, endless))
        while not episode.is_calling:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        rest = Scripted("85b-12=", "73c*95=", "#35")
        await play(episode, rest.complete, fast_tool)
        assert rest.prompts[0] == "47a+38b-12c*95>47a+38=85>"

    asyncio.run(scenario())
    assert (episode.end, episode.reward, episode.calls) == ("answered", 1.0, 3)


def test_the_committed_model_calls_the_calculator_and_copies_its_answer(one_thread: None) -> None:
    model = Qwen3ForCausalLM.from_pretrained(MODEL)
    sample = demonstration_sample(TOKENIZER, EXAMPLE, Random(0))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([sample.tokens])).logits[0]
    likeliest = logits[:-1].argmax(-1).tolist()
    places = [place for place in range(sample.prompt_length, len(sample.tokens)) if place not in sample.given]
    assert [likeliest[place - 1] for place in places] == [sample.tokens[place] for place in places]
