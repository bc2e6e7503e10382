"""Demonstrations from which the tiny policy learns to call the calculator, with controlled errors and verbosity.

A worked answer calls the calculator for every step. A re-check is ``?`` and all calls again. A guess is ``#`` and a
number without a call.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from transformers import PreTrainedTokenizerFast

from darts_server.offline.demo.problems import ANSWER, EQUALS, RECHECK
from examples.calculator.task import (
    MAX_TOKENS,
    MODULUS,
    SHORT_STEP_COUNTS,
    STEP_COUNTS,
    Problem,
    calculator,
    sample_problem,
)
from examples.tiny_rl.batches import Sample
from examples.tiny_rl.tokenizer import EOS_ID


@dataclass(frozen=True)
class Habits:
    """Probabilities by which demonstrations are written."""

    guess: float = 0.0
    """A guess without a call."""
    ramble: float = 0.0
    """A first re-check follows the worked answer."""
    loop: float = 0.0
    """Another re-check follows a re-check."""
    error: float = 0.0
    """A call of the worked answer has a wrong digit."""
    recheck_error: float = 0.0
    """A call of a re-check has a wrong digit."""


CLEAN = Habits()
"""Worked answers without an error. The curriculum teaches them first."""

STANDARD = Habits(guess=0.25, ramble=0.35, loop=0.65, error=0.05, recheck_error=0.12)
"""Guesses are wrong, and re-checks are worse than the first answer. So a policy can learn to call the calculator, to
copy with care, and to stop in time."""


@dataclass(frozen=True)
class Part:
    """A part of a session's text."""

    text: str
    given: bool
    """Whether the calculator wrote the text."""


def demonstration(problem: Problem, rng: Random, habits: Habits = CLEAN) -> list[Part]:
    """Write one answer to the problem, without the end of sequence.

    No worked answer starts beyond MAX_TOKENS characters, but the text may be longer. Training cuts it there.
    """
    if rng.random() < habits.guess:
        return [Part(f"{ANSWER}{rng.randrange(MODULUS):02}", given=False)]
    parts = _calls(problem, rng, habits.error)
    goes_on = habits.ramble
    while sum(len(part.text) for part in parts) < MAX_TOKENS and rng.random() < goes_on:
        parts.append(Part(RECHECK, given=False))
        parts += _calls(problem, rng, habits.recheck_error)
        goes_on = habits.loop
    result = parts[-1].text[:2]
    return [*parts, Part(ANSWER + result, given=False)]


def _calls(problem: Problem, rng: Random, error: float) -> list[Part]:
    """Write the calls of all steps, and the calculator's answers."""
    parts = []
    value = f"{problem.start:02}"
    for step in problem.steps:
        digits = list(f"{value}{step.number:02}")
        if rng.random() < error:
            place = rng.randrange(len(digits))
            digits[place] = str((int(digits[place]) + rng.randrange(1, 10)) % 10)
        left = "".join(digits[:2])
        right = "".join(digits[2:])
        call = f"{left}{step.letter}{step.operator}{right}{EQUALS}"
        answer = calculator(call)
        parts += [Part(call, given=False), Part(answer, given=True)]
        value = answer[:2]
    return parts


def demonstration_sample(
    tokenizer: PreTrainedTokenizerFast, problem: Problem, rng: Random, habits: Habits = CLEAN
) -> Sample:
    """Return a demonstration as token ids. Tokens of the calculator have no loss."""
    tokens: list[int] = tokenizer.encode(problem.prompt)
    prompt_length = len(tokens)
    given: set[int] = set()
    for part in demonstration(problem, rng, habits):
        start = len(tokens)
        tokens += tokenizer.encode(part.text)
        if part.given:
            given.update(range(start, len(tokens)))
    tokens = [*tokens, EOS_ID][:MAX_TOKENS]
    return Sample(tokens, prompt_length, given=frozenset(place for place in given if place < MAX_TOKENS))


def draw_batch(
    rng: Random,
    tokenizer: PreTrainedTokenizerFast,
    habits: Habits,
    batch_tokens: int,
    *,
    short: bool = False,
    clean: bool = False,
) -> list[Sample]:
    """Draw samples with ``batch_tokens`` tokens in total, sorted from short to long.

    Args:
        short: whether to draw only problems with few steps.
        clean: whether to write worked answers without an error, whatever the habits.
    """
    step_counts = SHORT_STEP_COUNTS if short else STEP_COUNTS
    samples: list[Sample] = []
    drawn = 0
    while drawn < batch_tokens:
        problem = sample_problem(rng, step_counts)
        sample = demonstration_sample(tokenizer, problem, rng, CLEAN if clean else habits)
        samples.append(sample)
        drawn += len(sample.tokens)
    return sorted(samples, key=lambda sample: len(sample.tokens))
