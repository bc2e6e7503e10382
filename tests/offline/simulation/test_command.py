import json
import subprocess
import sys
from pathlib import Path

import pytest

from darts_server.cli import USAGE_ERROR, main
from darts_server.drafts.lengths import MAX_DRAFT_TOKENS

SMALL = ["--prompts", "8", "--group-size", "4", "--steps", "1"]
BLOCKED = """
import sys
# Python then takes them for missing.
sys.modules.update(dict.fromkeys(["torch", "vllm", "matplotlib"]))
from darts_server.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_simulate_needs_neither_vllm_nor_torch_nor_matplotlib() -> None:
    command = [sys.executable, "-c", BLOCKED, "simulate", "--preset", "tiny", "--policies", "uniform", "auto", *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("hindsight")


def test_the_table_comes_last_and_the_file_has_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "lengths.jsonl"
    found = tmp_path / "out" / "found.json"
    lines = [{"step": 0, "prompt_tokens": 20, "lengths": [30 + i, 50, 90, 10], "cap": 300} for i in range(10)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    flags = ["--trace", str(trace), "--preset", "tiny", "--replicas", "2", "--json", str(found)]
    assert main(["simulate", *flags, "--policies", "off", "uniform", "darts_cut", *SMALL]) == 0
    table = capsys.readouterr().out.rpartition("\n\n")[2].splitlines()
    written = json.loads(found.read_text())
    names = [row["policy"] for row in written["policies"]]
    assert [line.split("  ")[0] for line in table[1:]] == names
    assert names[:3] == ["off", "uniform", "darts_cut"]
    assert {name.split()[0].rstrip(",") for name in names[3:]} == {"hindsight", "async"}
    assert written["policies"][0]["step_speedup"] == written["policies"][0]["rollout_speedup"] == 1
    assert (written["replicas"], written["prompts"], written["group_size"]) == (2, 8, 4)
    assert written["workload"] == "lengths.jsonl on the machine of tiny"


def test_each_policy_has_a_line_with_speculation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tmp_path / "found.json"
    flags = ["--preset", "h200-8b", "--policies", "uniform", "auto", "--json", str(found), *SMALL]
    assert main(["simulate", *flags, "--speculate", "0.9,0.5"]) == 0
    said = capsys.readouterr().out
    assert "+ drafts                     with --speculate" in said
    written = json.loads(found.read_text())
    assert written["speculate"][:3] == [0.9, 0.45, 0.225]
    assert len(written["speculate"]) == MAX_DRAFT_TOKENS
    names = [row["policy"] for row in written["policies"]][:6]
    assert names == ["off", "off + drafts", "uniform", "uniform + drafts", "auto", "auto + drafts"]
    speeds = [row["rollout_speedup"] for row in written["policies"]]
    for without, with_drafts in zip(speeds[:6:2], speeds[1:6:2], strict=True):
        assert 1.3 < with_drafts / without < 2.8, "at most 1 + .9 + .45 + ... tokens a step"

    main(["simulate", *flags, "--speculate", "0"])
    rows = json.loads(found.read_text())["policies"]
    for without, with_drafts in zip(rows[:6:2], rows[1:6:2], strict=True):
        assert with_drafts == without | {"policy": with_drafts["policy"]}
    main(["simulate", *flags])
    assert "drafts" not in capsys.readouterr().out.rpartition("\n\n")[2]
    assert json.loads(found.read_text())["speculate"] is None


def test_output_describes_the_trace_and_says_that_carry_over_gains_nothing_if_it_is_truncated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "lengths.jsonl"
    lines = [{"prompt_tokens": 20, "lengths": [96, 96, 40, 96], "cap": 96} for _ in range(16)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    flags = ["--trace", str(trace), "--preset", "tiny", "--policies", "off,start=1.5,carry=resume", "auto", *SMALL]
    assert main(["simulate", *flags]) == 0
    said = capsys.readouterr().out
    assert "The trace has 64 lengths of 16 prompts: mean 82.0 tokens, longest 96, 75% at the limit" in said
    assert "Carry-over gains next to nothing on these lengths: it is at best 1.0" in said
    assert main(["simulate", "--preset", "search-r1-7b", "--policies", "auto", *SMALL]) == 0
    said = capsys.readouterr().out
    assert "Carry-over is at best 1." in said
    assert "The trace" not in said


def test_a_picture_shows_one_step_under_each_policy(tmp_path: Path) -> None:
    picture = tmp_path / "steps.png"
    flags = ["--preset", "tiny", "--picture", str(picture), "--policies", "uniform", "off,start=1.5"]
    assert main(["simulate", *flags, *SMALL]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--preset or --trace is needed"),
        (["--preset", "tiny", "--prompts", "0"], "--prompts must be at least 1"),
        (["--preset", "tiny", "--group-size", "1"], "--group-size must be at least 2"),
        (["--preset", "tiny", "--speculate", "1.5"], "'1.5' is neither a number from 0 to 1 nor a list"),
        (["--preset", "tiny", "--speculate", "0.5,"], "'0.5,' is neither"),
        (["--preset", "tiny", "--speculate", ",".join(["0.5"] * 13)], "nor a list of up to 12"),
    ],
)
def test_invalid_flags_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", *flags])
    assert message in capsys.readouterr().err


def test_an_invalid_policy_or_trace_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--preset", "tiny", "--policies", "fast"]) == USAGE_ERROR
    assert "there is no 'fast'" in capsys.readouterr().err
    assert main(["simulate", "--trace", str(tmp_path / "none.jsonl")]) == USAGE_ERROR
    assert "cannot be read" in capsys.readouterr().err
    trace = tmp_path / "long.jsonl"
    trace.write_text(json.dumps({"prompt_tokens": 10, "lengths": [9_000_000]}))
    assert main(["simulate", "--trace", str(trace), "--policies", "off", *SMALL]) == USAGE_ERROR
    assert "the machine is too small for this workload" in capsys.readouterr().err
