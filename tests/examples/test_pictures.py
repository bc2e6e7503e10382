"""The pictures of docs/policies.md, from synthetic lengths."""

from pathlib import Path
from random import Random

import pytest

from darts_server.demo.problems import MAX_RESPONSE_TOKENS
from examples.tiny_rl import pictures

LARGEST = 150 * 1024
ENDS = [(3, "stop")] * 4 + [(9, "stop")] * 4 + [(20, "stop"), (30, "stop"), (90, "stop"), (256, "length")]


def synthetic(prompts: int) -> list[pictures.Prompt]:
    rng = Random(0)
    drawn = [[min(MAX_RESPONSE_TOKENS, int(rng.lognormvariate(3, 1)) + 1) for _ in range(12)] for _ in range(prompts)]
    return pictures.batch_of([[(n, "length" if n == MAX_RESPONSE_TOKENS else "stop") for n in ns] for ns in drawn])


def test_all_pictures_are_small_pngs(tmp_path: Path) -> None:
    paths = pictures.draw(synthetic(24), tmp_path / "new")
    assert [path.name for path in paths] == [
        "policies-timeline.png",
        "policies-lengths.png",
        "policies-waiting.png",
        "allocation.png",
    ]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert 20_000 < path.stat().st_size < LARGEST


def test_each_candidate_ends_as_the_rule_decides() -> None:
    [prompt] = pictures.batch_of([ENDS])
    for candidate in prompt:
        candidate.tail_draw = -candidate.tokens  # the lowest draw wins: that of the longest
    met = {}
    for panel in pictures.panels():
        played = panel.play(prompt, limit=25)
        met[panel.title] = [pictures.fate(c, played, panel, prompt) for c in prompt[: panel.candidates]]
    assert met == {
        "off": ["short"] * 8,
        "uniform, darts": ["short"] * 7 + ["finished", "stopped", "stopped", "stopped", "tail"],
        "--tail longest": ["short"] * 7 + ["finished", "finished", "finished", "tail", "finished"],
        "darts, saturated prompt": ["short"] * 8 + ["stopped"] * 4,
        "cap": ["short"] * 6 + ["tail"] * 2,
        "darts_cut": ["short"] * 7 + ["finished", "stopped", "stopped", "stopped", "cut"],
    }


def test_under_a_deadline_nothing_is_longer_than_the_bound() -> None:
    [prompt] = pictures.batch_of([[(3, "stop")] * 4 + [(70, "stop")] * 8])
    for panel in pictures.panels():
        assert max(panel.play(prompt, limit=25).lengths) == (50 if panel.deadline else 70)


def test_the_deadline_is_that_of_the_prompts_that_have_enough_valid_candidates() -> None:
    few = [(256, "length")] * 6 + [(5, "stop")] * 6
    batch = pictures.batch_of([*([ENDS] * 9), few])
    assert [pictures.needed(prompt) for prompt in batch] == [9] * 9 + [None]
    assert pictures.deadline_of(batch) == 9
    with pytest.raises(ValueError, match="as many valid candidates"):
        pictures.deadline_of(pictures.batch_of([few]))
