"""Traces: what is read, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from darts_server.exceptions import InvalidSetting
from darts_server.simulation.traces import Format, read_traces
from darts_server.simulation.workload import TracedPrompt

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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is no JSON"),
        ([1], "line 2 is no JSON object"),
        (LINE | {"prompt_tokens": "5"}, "prompt_tokens must be a whole number of at least 1 in"),
        (LINE | {"lengths": []}, "lengths must be a list of token counts in"),
        (LINE | {"lengths": [0]}, "lengths must be a whole number of at least 1"),
        (LINE | {"cap": 1.5}, "cap must be a whole number"),
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
