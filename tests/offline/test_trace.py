"""``darts-server trace export``, from a saved state and from a server that answers with one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from darts_server.cli import USAGE_ERROR, main
from darts_server.estimates.length_profile import LengthProfile
from darts_server.store.archive import LIMIT_BYTES, pack, unpack
from tests.clients.servers import listening

MEANS = {"a": 100.0, "b": 1000.0, "c": 10.0}


def state(means: dict[str, float] = MEANS) -> bytes:
    profile = LengthProfile()
    ratios = np.random.default_rng(0).gamma(4.0, 0.25, 2000)
    profile.observe([(float(ratio), False) for ratio in ratios])
    rows = [("profile", "all", json.dumps({"value": json.dumps(profile.state)}))]
    for key, mean in means.items():
        stats = {"std_ema": 1.0, "mean_ema": mean, "groups": 1, "candidates": 8, "weight_version": 3}
        rows.append(("prompt", key, json.dumps(stats)))
    return pack(sorted(rows))


def export(folder: Path, data: bytes, *flags: str) -> list[dict[str, Any]]:
    (folder / "state").write_bytes(data)
    output = folder / "out" / "lengths.jsonl"
    assert main(["trace", "export", "--state", str(folder / "state"), "--output", str(output), *flags]) == 0
    return [json.loads(line) for line in output.read_text().splitlines()]


def seen(*prompts: dict[str, Any], profile: bool = False) -> bytes:
    """A state with prompts as they were seen, and with ``profile`` a distribution of lengths around their means."""
    rows = [row for row in unpack(state(means={}), LIMIT_BYTES) if profile]
    for number, fields in enumerate(prompts):
        stats = {"std_ema": 9.0, "mean_ema": 300.0, "groups": 1, "candidates": 4, "weight_version": 3} | fields
        rows.append(("prompt", f"p{number}", json.dumps(stats)))
    return pack(sorted(rows))


TRUNCATED = {"lengths": "96+ 40 96+ 96+", "max_tokens": 96, "prompt_tokens": 7}


def test_observed_lengths_are_exported_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = {"lengths": "20", "max_tokens": 300, "prompt_tokens": 8}
    assert export(tmp_path, seen(TRUNCATED, other)) == [
        {"step": 3, "prompt_tokens": 7, "lengths": [96, 40, 96, 96], "cap": 96},
        {"step": 3, "prompt_tokens": 8, "lengths": [20], "cap": 300},
    ]
    said = capsys.readouterr().out
    assert "5 lengths: mean 69.6 tokens, longest 96." in said
    assert "Limit: 96 to 300 tokens; 60% of the lengths are truncated there." in said
    assert "not known" not in said
    assert "drawn" not in said


def test_an_answer_that_ends_by_itself_at_the_limit_is_not_truncated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(tmp_path, seen(TRUNCATED | {"lengths": "96+ 96 96 50"}))
    assert "25% of the lengths are truncated" in capsys.readouterr().out
    export(tmp_path, seen(TRUNCATED | {"lengths": "96+ 96 96 50"}), "--cap", "60")
    assert "75% of the lengths are truncated" in capsys.readouterr().out


def test_no_length_is_drawn_above_the_limit_of_the_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stopped = {"lengths": " ".join(["40", "96+", *["50+"] * 200]), "max_tokens": 96, "prompt_tokens": 7}
    [line] = export(tmp_path, seen(stopped, profile=True))
    lengths = line["lengths"]
    assert lengths[:2] == [40, 96]
    assert 50 < min(lengths[2:]) < max(lengths) == 96
    assert "200 lengths are drawn from estimates" in capsys.readouterr().out


def test_a_stopped_candidate_is_left_out_without_a_distribution_of_lengths(tmp_path: Path) -> None:
    stopped = {"lengths": "50+ 96+", "max_tokens": 96, "prompt_tokens": 7}
    [line] = export(tmp_path, seen(stopped, {"lengths": "5+", "prompt_tokens": 7}))
    assert line["lengths"] == [96]


def test_a_cap_may_be_lower_than_the_limit_and_never_higher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [line] = export(tmp_path, seen(TRUNCATED), "--cap", "50")
    assert (line["lengths"], line["cap"]) == ([50, 40, 50, 50], 50)
    (tmp_path / "out" / "lengths.jsonl").unlink()
    flags = ["--state", str(tmp_path / "state"), "--output", str(tmp_path / "out" / "lengths.jsonl"), "--cap", "97"]
    assert main(["trace", "export", *flags]) == USAGE_ERROR
    assert "--cap: requests allowed at most 96 tokens" in capsys.readouterr().err
    assert not (tmp_path / "out" / "lengths.jsonl").exists()


def test_prompts_of_an_unknown_length_need_a_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "state").write_bytes(seen(TRUNCATED, {"lengths": "5"}))
    flags = ["--state", str(tmp_path / "state"), "--output", str(tmp_path / "lengths.jsonl")]
    assert main(["trace", "export", *flags]) == USAGE_ERROR
    assert "--prompt-tokens: the state does not say how long 1 of 2 prompts are" in capsys.readouterr().err
    lines = export(tmp_path, seen(TRUNCATED, {"lengths": "5"}), "--prompt-tokens", "77")
    assert [line["prompt_tokens"] for line in lines] == [7, 77]
    assert "The limit of 1 prompts is not known; set it with --cap N." in capsys.readouterr().out


# --- states of earlier versions, which have estimates alone --------------------

OLD = ("--prompt-tokens", "77")


def test_the_lengths_of_each_prompt_have_its_mean_and_end_at_the_cap(tmp_path: Path) -> None:
    lines = export(tmp_path, state(), "--samples", "2000", "--cap", "2000", *OLD)
    means = [float(np.mean(line["lengths"])) for line in lines]
    assert means == pytest.approx(list(MEANS.values()), rel=0.06)
    assert {(line["step"], line["prompt_tokens"], line["cap"]) for line in lines} == {(3, 77, 2000)}
    assert max(lines[1]["lengths"]) == 2000
    assert export(tmp_path, state(), "--samples", "2000", "--cap", "2000", *OLD) == lines


def test_the_trace_can_be_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export(tmp_path, state(), "--cap", "2000", *OLD)
    flags = ["--prompts", "4", "--steps", "1", "--policies", "cap"]
    assert main(["simulate", "--trace", str(tmp_path / "out" / "lengths.jsonl"), "--preset", "h200-8b", *flags]) == 0
    assert "cap" in capsys.readouterr().out


def test_a_flag_sets_a_cap_that_the_state_does_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cap" not in export(tmp_path, state(), *OLD)[0]
    said = capsys.readouterr().out
    assert "The limit of 3 prompts is not known; set it with --cap N." in said
    assert "48 lengths are drawn from estimates" in said
    lines = export(tmp_path, state(), "--cap", "50", *OLD)
    assert {line["cap"] for line in lines} == {50}
    assert max(max(line["lengths"]) for line in lines) == 50


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"nothing", "is not a saved state"),
        (state(means={}), "has no lengths"),
        (seen({"lengths": "5+", "prompt_tokens": 7}), "has no lengths"),
        (seen({"lengths": "97", "max_tokens": 96}), "lengths must be at most max_tokens, 96"),
        (pack([]), "has no lengths"),
        (pack([("prompt", "a", '{"mean_ema":-1}')]), "prompt 'a' cannot be used"),
        (pack([("profile", "all", "{}")]), "profile 'all' cannot be used"),
        (None, "cannot be read"),
    ],
)
def test_a_state_without_lengths_is_an_error(
    data: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if data is not None:
        (tmp_path / "state").write_bytes(data)
    output = tmp_path / "lengths.jsonl"
    flags = ["--state", str(tmp_path / "state"), "--output", str(output)]
    assert main(["trace", "export", *flags]) == USAGE_ERROR
    assert message in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--samples", "0"], "--samples must be at least 1"),
        (["--cap", "0"], "--cap must be at least 1"),
        (["--seed", "-1"], "--seed must be at least 0"),
    ],
)
def test_wrong_flags_are_usage_errors(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["trace", "export", "--state", "x", "--output", "y", *flags])
    assert message in capsys.readouterr().err


# --- from a server ------------------------------------------------------------


@pytest.fixture
def url() -> Iterator[str]:
    """A server with an API key, which answers with a saved state."""

    async def answer(request: Request) -> Response:
        if request.headers.get("Authorization") != "Bearer secret":
            return Response("no", 401)
        return Response(state())

    with listening(Starlette(routes=[Route("/darts/v1/state", answer)])) as listener:
        yield listener.url


def test_a_running_server_is_read_with_its_api_key(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DARTS_API_KEY", "secret")
    output = tmp_path / "lengths.jsonl"
    assert main(["trace", "export", "--url", url + "/", "--output", str(output), *OLD]) == 0
    assert len(output.read_text().splitlines()) == len(MEANS)


def test_a_server_that_does_not_answer_with_a_state_is_an_error(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DARTS_API_KEY", raising=False)
    for address, message in ((url, "set DARTS_API_KEY"), (url + "/x", "404"), ("http://127.0.0.1:1", "not answer")):
        assert main(["trace", "export", "--url", address, "--output", str(tmp_path / "out")]) == USAGE_ERROR
        assert message in capsys.readouterr().err
