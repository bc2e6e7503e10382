"""``darts-server trace export``, from a saved state and from a server that answers with one."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from darts_server.cli import USAGE_ERROR, main
from darts_server.policy.length_profile import LengthProfile
from darts_server.store.archive import pack
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


def export(folder: Path, data: bytes, *flags: str) -> list[dict[str, object]]:
    (folder / "state").write_bytes(data)
    output = folder / "out" / "lengths.jsonl"
    assert main(["trace", "export", "--state", str(folder / "state"), "--output", str(output), *flags]) == 0
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_the_lengths_of_each_prompt_have_its_mean_and_end_at_the_cap(tmp_path: Path) -> None:
    flags = ["--samples", "2000", "--prompt-tokens", "77", "--cap", "2000"]
    lines = export(tmp_path, state(), *flags)
    means = [float(np.mean(np.asarray(line["lengths"]))) for line in lines]
    assert means == pytest.approx(list(MEANS.values()), rel=0.06)
    assert {(line["step"], line["prompt_tokens"], line["cap"]) for line in lines} == {(3, 77, 2000)}
    assert max(np.asarray(lines[1]["lengths"])) == 2000
    assert export(tmp_path, state(), *flags) == lines


def test_the_trace_can_be_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export(tmp_path, state(), "--cap", "2000")
    flags = ["--prompts", "4", "--steps", "1", "--policies", "cap"]
    assert main(["simulate", "--trace", str(tmp_path / "out" / "lengths.jsonl"), "--preset", "h200-8b", *flags]) == 0
    assert "cap" in capsys.readouterr().out


def test_lengths_are_unlimited_without_a_cap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cap" not in export(tmp_path, state())[0]
    assert "--cap N" in capsys.readouterr().out
    lines = export(tmp_path, state(), "--cap", "50")
    assert {line["cap"] for line in lines} == {50}
    assert max(max(np.asarray(line["lengths"])) for line in lines) == 50


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"nothing", "is not a saved state"),
        (state(means={}), "has no lengths"),
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
    assert main(["trace", "export", "--url", url + "/", "--output", str(output)]) == 0
    assert len(output.read_text().splitlines()) == len(MEANS)


def test_a_server_that_does_not_answer_with_a_state_is_an_error(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DARTS_API_KEY", raising=False)
    for address, message in ((url, "set DARTS_API_KEY"), (url + "/x", "404"), ("http://127.0.0.1:1", "not answer")):
        assert main(["trace", "export", "--url", address, "--output", str(tmp_path / "out")]) == USAGE_ERROR
        assert message in capsys.readouterr().err
