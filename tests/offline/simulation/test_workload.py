import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from darts_server.exceptions import InvalidSetting
from darts_server.offline.simulation import presets
from darts_server.offline.simulation.model.batch import Ints
from darts_server.offline.simulation.model.sessions import Session, Turn
from darts_server.offline.simulation.presets import PRESETS
from darts_server.offline.simulation.workload import Format, TracedPrompt, TracedWorkload, describe_trace, read_traces

SEEN = np.random.default_rng(5)


def traced(prompts: list[list[int]], max_tokens: int = 10_000) -> TracedWorkload:
    return TracedWorkload([TracedPrompt(10 + i, tuple(lengths)) for i, lengths in enumerate(prompts)], max_tokens, 0)


def draw(workload: TracedWorkload, number: int, count: int, attempt: int = 0) -> Ints:
    return workload.lengths(number, count, np.random.default_rng(number), attempt)


def test_the_first_candidates_have_the_lengths_of_the_trace() -> None:
    workload = traced([[5, 6], [7, 8], [9, 1]])
    rows = [draw(workload, number, 4)[:2].tolist() for number in range(3)]
    assert sorted(rows) == [[5, 6], [7, 8], [9, 1]]
    assert sorted(workload.prompt_tokens(number) for number in range(3)) == [10, 11, 12]
    assert draw(workload, 0, 1).tolist() == rows[0][:1]


def test_a_prompt_that_is_repeated_or_started_again_is_resampled() -> None:
    workload = traced([[100, 200, 400]])
    assert draw(workload, 1, 3).tolist() != [100, 200, 400]
    assert draw(workload, 0, 3, attempt=1).tolist() != [100, 200, 400]


def test_resampled_candidates_keep_mean_and_spread_if_neighbours_are_similar() -> None:
    prompts = np.exp(np.log(500) + 0.5 * SEEN.standard_normal((40, 8)))
    workload = traced([[int(x) for x in row] for row in prompts])
    drawn = np.log([draw(workload, number, 64, attempt=1) for number in range(40)])
    seen = np.log(prompts)
    assert drawn.mean() == pytest.approx(seen.mean(), abs=0.02)
    assert drawn.std(axis=1).mean() == pytest.approx(np.sqrt(seen.var(axis=1, ddof=1).mean()), rel=0.1)
    long_share = (drawn > np.log(1_200)).mean(), (seen > np.log(1_200)).mean()
    assert long_share[0] == pytest.approx(long_share[1], rel=0.35)


def test_a_single_prompt_is_resampled_from_its_own_samples_with_their_variance() -> None:
    lengths = [100, 150, 220, 330, 500, 800]
    drawn = np.log(draw(traced([lengths]), 1, 20_000))
    assert drawn.mean() == pytest.approx(np.log(lengths).mean(), abs=0.02)
    assert drawn.var() == pytest.approx(np.log(lengths).var(ddof=1), rel=0.05)
    assert draw(traced([[300]]), 1, 5).tolist() == [300] * 5


def test_resampling_keeps_the_share_of_truncated_samples() -> None:
    prompts = np.minimum(np.exp(np.log(700) + 0.4 * SEEN.standard_normal((40, 8))), 1_000).astype(int)
    workload = traced(prompts.tolist(), max_tokens=1_000)
    drawn = np.asarray([draw(workload, number, 64, attempt=1) for number in range(40)])
    assert drawn.max() == 1_000
    assert (drawn == 1_000).mean() == pytest.approx((prompts == 1_000).mean(), abs=0.03)


@pytest.mark.parametrize(
    ("name", "mean", "median", "truncated"),
    [("dapo-32b", 580, 463, 0.0), ("deepcoder-14b-16k", 9_800, 11_100, 0.15), ("search-r1-7b", 205, 152, 0.0)],
)
def test_presets_have_the_lengths_of_the_traces_that_they_were_fitted_to(
    name: str, mean: float, median: float, truncated: float
) -> None:
    workload = PRESETS[name].workload
    lengths = np.asarray([workload.lengths(i, 8, np.random.default_rng(i)) for i in range(1_500)])
    assert lengths.mean() == pytest.approx(mean, rel=0.08)
    assert np.median(lengths) == pytest.approx(median, rel=0.08)
    assert (lengths >= workload.max_tokens).mean() == pytest.approx(truncated, abs=0.03)
    assert workload.prompt_tokens(3) == workload.prompt_tokens(3) != workload.prompt_tokens(4)


# --- machines, computed from public figures ----------------------------------


def test_a_decode_step_of_an_8b_model_on_an_h200_takes_about_as_long_as_reading_its_weights() -> None:
    machine = presets.build_machine(presets.QWEN_8B, presets.H200, 1, 1, 0.0)
    assert 0.004 < machine.step_time.decode.step_seconds(1) < 0.007


def test_decode_steps_of_a_gpu_with_few_flops_become_slower_at_fewer_sequences() -> None:
    slow, fast = (presets.build_machine(presets.QWEN_32B, gpu, 8, 1, 0.0) for gpu in (presets.H20, presets.H200))
    assert slow.step_time.decode.batches[1] < fast.step_time.decode.batches[1] / 4
    assert slow.step_time.decode.step_seconds(256) > 2 * fast.step_time.decode.step_seconds(256)


def test_twice_the_engines_train_twice_as_fast() -> None:
    one = presets.build_machine(presets.QWEN_7B, presets.H100, 1, 4, 1.0)
    two = presets.with_engines(one, 8)
    assert (two.replicas, two.training_per_token, two.between_rollouts) == (8, one.training_per_token / 2, 1.0)


def test_kv_blocks_fill_the_memory_that_the_weights_leave() -> None:
    machine = presets.build_machine(presets.QWEN_32B, presets.H100, 4, 1, 0.0)
    assert machine.kv_blocks is not None
    bytes_used = machine.kv_blocks * 16 * (2 * 64 * 8 * 128 * 2) + 32.8e9 * 2
    assert bytes_used == pytest.approx(0.9 * 80e9 * 4, rel=0.01)


# --- traces -----------------------------------------------------------------

LINE = {"step": 0, "prompt_tokens": 5, "lengths": [7, 9], "cap": 20}


def write(folder: Path, *lines: Any, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_a_line_is_a_prompt(tmp_path: Path) -> None:
    one = write(tmp_path, LINE, "")
    two = write(tmp_path, LINE | {"lengths": [30], "cap": 30}, name="more.jsonl")
    assert read_traces([one, two], Format.JSONL) == ([TracedPrompt(5, (7, 9)), TracedPrompt(5, (30,))], 30)


UNCAPPED = {"prompt_tokens": 5, "lengths": [7, 30]}
TRUNCATED = LINE | {"lengths": [20, 3]}
LONGER = LINE | {"lengths": [25, 40], "cap": 40}


@pytest.mark.parametrize(
    ("lines", "limit"),
    [
        # The longest trajectory is the limit.
        ([UNCAPPED], 30),
        # Nobody knows how long the truncated sample would have become.
        ([LONGER, TRUNCATED], 20),
        # A cap that no sample reaches truncates nothing.
        ([LINE, LINE | {"cap": 25}, UNCAPPED], 30),
        ([LINE, LINE | {"cap": 50}], 50),
    ],
)
def test_the_limit_is_the_smallest_cap_that_a_sample_reaches(lines: list[Any], limit: int, tmp_path: Path) -> None:
    path = write(tmp_path, *lines)
    assert read_traces([path], Format.JSONL)[1] == limit
    assert read_traces([path], Format.JSONL, 15)[1] == 15


def test_a_limit_above_the_truncation_of_samples_is_refused(tmp_path: Path) -> None:
    assert read_traces([write(tmp_path, LINE, UNCAPPED)], Format.JSONL, 60)[1] == 60
    with pytest.raises(InvalidSetting, match="--max-tokens: samples are truncated at 20 tokens"):
        read_traces([write(tmp_path, TRUNCATED, LONGER)], Format.JSONL, 21)


def test_a_trace_is_described_at_the_limit_of_the_simulation() -> None:
    said = "The trace has 3 lengths of 2 prompts: mean 12.3 tokens, longest 20, 33% at the limit"
    assert describe_trace([TracedPrompt(5, (7, 20)), TracedPrompt(5, (10,))], 20) == said
    said += ". 33% were longer than the limit, which is --max-tokens or the smallest cap that a sample reaches:"
    assert describe_trace([TracedPrompt(5, (7, 30)), TracedPrompt(5, (10,))], 20).startswith(said)


SAMPLE = {
    "step": 0,
    "group": 3,
    "sample": 0,
    "prompt_tokens": 100,
    "turns": [{"prompt_tokens": 100, "generated": 40, "end": "tool_calls"}, {"prompt_tokens": 640, "generated": 60}],
    "tools": [{"turn": 0, "seconds": 0.1, "tokens": 500}],
}


def test_a_line_with_turns_is_a_session(tmp_path: Path) -> None:
    tools = [{"seconds": 0.5, "tokens": 7}, {"turn": 0, "seconds": 2, "tokens": 3}, {"turn": 2, "tokens": 9}]
    turns = [{"generated": 40}, {"generated": 0}, {"generated": 5, "end": "tool_calls"}]
    path = write(tmp_path, SAMPLE, SAMPLE | {"turns": turns, "tools": tools})
    found = read_traces([path], Format.JSONL)[0][0].sessions
    # Two tools of a turn run one after the other. Nobody reads the result of the last.
    assert found == (
        Session((Turn(100, 40), Turn(500, 60, 0.1))),
        Session((Turn(100, 40), Turn(10, 1, 2.5), Turn(0, 5)), valid=False),
    )


def test_the_samples_of_a_group_are_a_prompt(tmp_path: Path) -> None:
    short = SAMPLE | {"sample": 1, "turns": [{"prompt_tokens": 100, "generated": 8, "end": "stop"}], "tools": []}
    alone = {key: value for key, value in short.items() if key != "tools"} | {"group": 4, "cap": 9}
    path = write(tmp_path, SAMPLE, LINE, short, alone, SAMPLE | {"step": 1})
    prompts, limit = read_traces([path], Format.JSONL)
    assert [prompt[:2] for prompt in prompts] == [(5, (7, 9)), (350, (100, 8)), (100, (8,)), (600, (100,))]
    assert [len(prompt.sessions) for prompt in prompts] == [0, 2, 1, 1]
    assert limit == 100


def test_samples_of_a_group_end_at_their_smallest_cap(tmp_path: Path) -> None:
    path = write(tmp_path, SAMPLE | {"cap": 120}, SAMPLE | {"sample": 1, "cap": 100})
    prompts, limit = read_traces([path], Format.JSONL)
    assert (prompts[0][:2], limit) == ((600, (100, 100)), 100)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is no JSON"),
        ([1], "line 2 is no JSON object"),
        (LINE | {"prompt_tokens": "5"}, "prompt_tokens must be a whole number of at least 1 in"),
        (LINE | {"lengths": [7, 21]}, "lengths must be at most the cap, 20, in .*line 2; got 21"),
        (LINE | {"lengths": []}, "lengths must be a list of token counts in"),
        (SAMPLE | {"turns": [{"generated": -1}]}, "generated must be a whole number of at least 0"),
        (SAMPLE | {"turns": 3}, "turns must be a list of objects"),
        (SAMPLE | {"turns": []}, "generated must be a whole number of at least 0"),
        (SAMPLE | {"tools": [{"tokens": 3, "seconds": "2"}]}, "seconds must be numbers of at least 0"),
        (SAMPLE | {"tools": [{"tokens": 3, "seconds": -1}]}, "seconds must be numbers of at least 0"),
    ],
)
def test_the_error_of_an_invalid_line_names_the_line(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        read_traces([write(tmp_path, LINE, line)], Format.JSONL)


def test_the_error_of_a_file_without_prompts_names_the_file(tmp_path: Path) -> None:
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
    assert [prompt[:2] for prompt in read_traces([path], Format.POLYTRACE)[0]] == [(350, (100, 8))]
