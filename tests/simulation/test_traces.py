"""Traces: what is read, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from darts_server.exceptions import InvalidSetting
from darts_server.simulation.traces import Format, read_traces
from darts_server.simulation.workload import TracedPrompt, TracedWorkload

LINE = {"step": 0, "prompt_tokens": 5, "lengths": [7, 9], "cap": 20}


def write(folder: Path, *lines: Any, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_a_line_is_a_prompt(tmp_path: Path) -> None:
    one, two = write(tmp_path, LINE, ""), write(tmp_path, LINE | {"lengths": [30], "cap": 30}, name="more.jsonl")
    assert read_traces([one, two], Format.JSONL) == ([TracedPrompt(5, (7, 9)), TracedPrompt(5, (30,))], 30)


def test_without_a_cap_the_longest_trajectory_is_it_unless_a_limit_is_given(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt_tokens": 5, "lengths": [7, 9]})
    assert read_traces([path], Format.JSONL)[1] == 9
    assert read_traces([path], Format.JSONL, 50)[1] == 50


def test_of_several_caps_the_smallest_that_a_sample_reaches_is_the_limit(tmp_path: Path) -> None:
    """What the truncated sample would have become is not known, so that none may become longer."""
    truncated, longer = LINE | {"lengths": [20, 3]}, LINE | {"lengths": [25, 40], "cap": 40}
    prompts, limit = read_traces([write(tmp_path, longer, truncated)], Format.JSONL)
    assert limit == 20
    candidates = TracedWorkload(prompts, limit, seed=0)
    lengths = np.concatenate([candidates.lengths(number, 200, np.random.default_rng(number)) for number in range(2)])
    assert (lengths >= limit).mean() > 0.5
    assert set(lengths[lengths >= limit]) == {20, 25, 40}  # the samples themselves, which end at the limit in a batch


def test_a_cap_that_no_sample_reaches_truncates_nothing(tmp_path: Path) -> None:
    uncapped = {"prompt_tokens": 5, "lengths": [30]}
    path = write(tmp_path, LINE, LINE | {"cap": 25}, uncapped)
    assert read_traces([path], Format.JSONL)[1] == 30
    assert read_traces([write(tmp_path, LINE, LINE | {"cap": 50})], Format.JSONL)[1] == 50


SAMPLE = {
    "step": 0,
    "group": 3,
    "sample": 0,
    "prompt_tokens": 100,
    "turns": [{"prompt_tokens": 100, "generated": 40, "end": "tool_calls"}, {"prompt_tokens": 640, "generated": 60}],
    "tools": [{"turn": 0, "seconds": 0.1, "tokens": 500}],
}


def test_a_line_with_turns_is_a_sample_and_the_samples_of_a_group_are_a_prompt(tmp_path: Path) -> None:
    short = SAMPLE | {"sample": 1, "turns": [{"prompt_tokens": 100, "generated": 8, "end": "stop"}], "tools": []}
    alone = {key: value for key, value in short.items() if key != "tools"} | {"group": 4, "cap": 9}
    path = write(tmp_path, SAMPLE, LINE, short, alone, SAMPLE | {"step": 1})
    assert read_traces([path], Format.JSONL) == (
        [TracedPrompt(5, (7, 9)), TracedPrompt(350, (100, 8)), TracedPrompt(100, (8,)), TracedPrompt(600, (100,))],
        100,
    )


def test_samples_of_a_group_end_at_their_smallest_cap(tmp_path: Path) -> None:
    path = write(tmp_path, SAMPLE | {"cap": 120}, SAMPLE | {"sample": 1, "cap": 100})
    assert read_traces([path], Format.JSONL) == ([TracedPrompt(600, (100, 100))], 100)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is no JSON"),
        ([1], "line 2 is no JSON object"),
        (LINE | {"prompt_tokens": "5"}, "prompt_tokens must be a whole number of at least 1 in"),
        (LINE | {"lengths": []}, "lengths must be a list of token counts in"),
        (LINE | {"lengths": [0]}, "lengths must be a whole number of at least 1"),
        (LINE | {"cap": 1.5}, "cap must be a whole number"),
        (SAMPLE | {"turns": [{"generated": -1}]}, "generated must be a whole number of at least 0"),
        (SAMPLE | {"turns": 3}, "turns must be a list of objects"),
        (SAMPLE | {"tools": [{"tokens": "5"}]}, "tokens must be a whole number"),
        (SAMPLE | {"group": None}, "group must be a whole number"),
    ],
)
def test_a_line_that_is_not_as_it_must_be_is_named(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        read_traces([write(tmp_path, LINE, line)], Format.JSONL)


def test_a_file_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match=r"none.jsonl cannot be read"):
        read_traces([tmp_path / "none.jsonl"], Format.JSONL)
    with pytest.raises(InvalidSetting, match=r"there are no prompts in .*trace.jsonl"):
        read_traces([write(tmp_path, "")], Format.JSONL)


def test_polytrace_has_packed_lengths(tmp_path: Path) -> None:
    line = {"step": 0, "rank": 0, "input": 336, "output": [11, 39], "n_sampling": 2, "validate": False}
    path = write(tmp_path, line, line | {"validate": True})
    assert read_traces([path], Format.POLYTRACE) == ([TracedPrompt(336, (11, 39))], 39)


def test_polytrace_has_samples_with_several_turns(tmp_path: Path) -> None:
    sample = {
        "step": 0,
        "prompt_len": 100,
        "prompt_group_id": 3,
        "turns": [{"completion_tokens": 40}, {"completion_tokens": 60}],
        "tool_calls": [{"append_len": 500}],
    }
    short = sample | {"turns": [{"completion_tokens": 8}], "tool_calls": []}
    path = write(tmp_path, sample, short)
    assert read_traces([path], Format.POLYTRACE)[0] == [TracedPrompt(350, (100, 8))]
    with pytest.raises(InvalidSetting, match="turns must be a list of objects"):
        read_traces([write(tmp_path, sample | {"turns": [1]})], Format.POLYTRACE)
