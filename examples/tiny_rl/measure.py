"""Measure a policy: how often it is right, and the distribution of its lengths.

Run from the repository root::

    python -m examples.tiny_rl.measure --model darts_server/offline/demo/model

Samples with real vLLM at temperature 1, and prints a Markdown table. Lengths are in tokens with the end of sequence. A
truncated response has MAX_RESPONSE_TOKENS.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from random import Random
from statistics import mean, median, pstdev, quantiles

from darts_server.offline.demo.problems import MAX_RESPONSE_TOKENS, STEP_COUNTS, Problem, reward, sample_problem

# Fixed, so that two models get the same prompts.
PROMPT_SEED = 20_240
LONG_TAIL = 3.0
"""A prompt with a larger ratio of longest to median length has a long tail."""


@dataclass(frozen=True)
class Response:
    """One sampled answer."""

    length: int
    right: bool
    truncated: bool


@dataclass(frozen=True)
class Group:
    """All answers to one prompt."""

    problem: Problem
    responses: tuple[Response, ...]

    @property
    def lengths(self) -> list[int]:
        """Response lengths in tokens."""
        return [response.length for response in self.responses]

    @property
    def tail_ratio(self) -> float:
        """Longest over median length."""
        return max(self.lengths) / median(self.lengths)

    @property
    def right_minus_wrong(self) -> float:
        """Mean length of correct answers minus mean length of wrong answers, or 0 if there are none of either."""
        right = [response.length for response in self.responses if response.right]
        wrong = [response.length for response in self.responses if not response.right]
        if not right or not wrong:
            return 0.0
        return mean(right) - mean(wrong)


def sample_groups(model: Path, problems: Sequence[Problem], samples: int, seed: int) -> list[Group]:
    """Sample every problem at temperature 1 with vLLM and grade the answers."""
    # vLLM reads its environment while it is imported.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=320,
        seed=seed,
    )
    sampling = SamplingParams(n=samples, temperature=1.0, max_tokens=MAX_RESPONSE_TOKENS)
    outputs = engine.generate([problem.prompt for problem in problems], sampling)
    # Stopped here and not at exit, so that the engine's last log lines do not follow the table.
    engine.llm_engine.engine_core.shutdown()
    return [
        Group(
            problem,
            tuple(
                Response(
                    len(choice.token_ids),
                    reward(problem, choice.text) == 1.0,
                    choice.finish_reason == "length",
                )
                for choice in output.outputs
            ),
        )
        for problem, output in zip(problems, outputs, strict=True)
    ]


def share(groups: Sequence[Group], condition: Callable[[Group], bool]) -> str:
    """Return the percentage of prompts that meet the condition."""
    return f"{mean(condition(group) for group in groups):.0%}".replace("%", " %")


def column(groups: Sequence[Group]) -> dict[str, str]:
    """Return one column of the table."""
    responses = [response for group in groups for response in group.responses]
    lengths = [response.length for response in responses]
    spread = mean(pstdev(group.lengths) for group in groups)
    tail = median(group.tail_ratio for group in groups)
    truncated = mean(response.truncated for response in responses)
    p95 = quantiles(lengths, n=20, method="inclusive")[-1]
    return {
        "right": f"{mean(response.right for response in responses):.2f}",
        "length mean / median": f"{mean(lengths):.0f} / {median(lengths):.0f}",
        "length p95 / max": f"{p95:.0f} / {max(lengths)}",
        "std within a prompt (mean over prompts)": f"{spread:.1f}",
        "max/median within a prompt (median over prompts)": f"{tail:.1f}",
        f"prompts with max/median above {LONG_TAIL:.0f}": share(groups, lambda group: group.tail_ratio > LONG_TAIL),
        "prompts with right shorter than wrong": share(groups, lambda group: group.right_minus_wrong < 0),
        "prompts with right longer than wrong": share(groups, lambda group: group.right_minus_wrong > 0),
        "responses truncated": f"{100 * truncated:.1f} %",
    }


def table(groups: Sequence[Group]) -> str:
    """Return the Markdown table with a column for all prompts and a column for each difficulty."""
    difficulties = sorted({group.problem.difficulty for group in groups})
    columns = {"all": column(groups)} | {
        name: column([group for group in groups if group.problem.difficulty == name]) for name in difficulties
    }
    lines = [f"| | {' | '.join(columns)} |", "|" + "---|" * (len(columns) + 1)]
    for row in columns["all"]:
        lines.append(f"| {row} | {' | '.join(values[row] for values in columns.values())} |")
    return "\n".join(lines)


def main() -> None:
    """Measure one model and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument(
        "--difficulties",
        nargs="+",
        choices=list(STEP_COUNTS),
        default=[None],
        help="of the prompts, in turns (default: easy or hard)",
    )
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the engine; the prompts are fixed",
    )
    arguments = parser.parse_args()
    rng = Random(PROMPT_SEED)
    difficulties = islice(cycle(arguments.difficulties), arguments.prompts)
    problems = [sample_problem(rng, difficulty) for difficulty in difficulties]
    groups = sample_groups(arguments.model, problems, arguments.samples, arguments.seed)
    print(table(groups))


if __name__ == "__main__":
    main()
