"""With ``--sampling coupled`` a seed gives the same tokens in all circumstances, on the real engine in float32."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from benchmarks.speculation_exact import SITUATIONS
from darts_server.offline.demo.problems import sample_problem
from darts_server.offline.demo.server import DARTS, Server
from tests.integration.fork_server import Serve

pytestmark = pytest.mark.engine

COUPLED = ("--sampling", "coupled")
PROMPTS = [sample_problem(Random(number)).prompt for number in range(64)]
SIZE = 8
SEED = 1000
SAMPLING = {name: situation.sampling for name, situation in SITUATIONS.items() if situation.sampling}
"""Sampling parameters by name."""
Tokens = tuple[int, ...]

few_and_all = pytest.mark.parametrize("prompts", [4, pytest.param(64, marks=pytest.mark.nightly)])
"""32 answers on a push, and 512 at night."""


@pytest.fixture(scope="module")
def plain(serve_one: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve_one(DARTS, tmp_path_factory.mktemp("plain") / "log", *COUPLED) as running:
        yield running


@pytest.fixture(scope="module")
def fast(serve_one: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve_one(DARTS, tmp_path_factory.mktemp("fast") / "log", *COUPLED, "--speculate", "auto") as running:
        yield running


def draw(
    server: Server, prompts: Sequence[str], sampling: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    body: dict[str, Any] = {"group_size": SIZE, "policy": {"name": "off"}}
    body["prompts"] = [{"text": prompt, "metadata": {"text": prompt}} for prompt in prompts]
    body["sampling"] = {"max_tokens": 200, "seed": SEED, "logprobs": True} | (sampling or {})
    answer = httpx.post(f"{server.url}/darts/v1/rollouts", json=body | options, timeout=900)
    result: dict[str, Any] = answer.raise_for_status().json()
    for group in result["groups"]:
        assert group["error"] is None
    return result


def tokens_of(answer: dict[str, Any]) -> list[list[Tokens]]:
    """Return the token ids of all trajectories, by prompt."""
    groups = sorted(answer["groups"], key=lambda group: int(group["number"]))
    return [[tuple(each["token_ids"]) for each in group["trajectories"]] for group in groups]


def draw_alone(server: Server, prompt: str, index: int, temperature: float = 1.0) -> Tokens:
    """Return candidate ``index`` of a prompt, as a request of its own through vLLM's route."""
    body = {"model": "tiny:raw", "prompt": prompt, "seed": SEED + index, "max_tokens": 200, "return_token_ids": True}
    body |= {"temperature": temperature}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).raise_for_status().json()
    return tuple(answer["choices"][0]["token_ids"])


@few_and_all
def test_answers_are_the_same_alone_beside_others_with_drafts_and_on_another_engine(
    plain: Server, fast: Server, prompts: int
) -> None:
    base = tokens_of(draw(plain, PROMPTS[:prompts]))
    different = {answer for group in base for answer in group}
    assert len(different) > prompts * SIZE / 3

    for server in (plain, fast):
        alone = [[draw_alone(server, prompt, index) for index in range(SIZE)] for prompt in PROMPTS[:prompts]]
        assert alone == base
        with ThreadPoolExecutor(1) as pool:
            others = pool.submit(draw, server, PROMPTS[-8:], {"seed": None})
            beside = draw(server, PROMPTS[:prompts][::-1])
            others.result()
        assert tokens_of(beside)[::-1] == base


def resumed_tokens(server: Server) -> float:
    for line in httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines():
        if line.startswith("darts_resumed_tokens_total{"):
            return float(line.split()[-1])
    raise LookupError("darts_resumed_tokens_total")


@few_and_all
def test_resumed_answers_are_the_same_on_this_engine_and_on_the_next(
    serve_one: Serve, plain: Server, tmp_path: Path, prompts: int
) -> None:
    texts = PROMPTS[:prompts]
    base = dict(zip(texts, tokens_of(draw(plain, texts)), strict=True))
    resuming: dict[str, Any] = {"carry": "resume", "carried": True}
    some = resuming | {"num_groups": prompts // 4}
    state = ("--state-dir", str(tmp_path / "state"))
    groups = []
    with serve_one(DARTS, tmp_path / "first", *COUPLED, *state) as first:
        groups += draw(first, texts, **some)["groups"]
        groups += draw(first, [], **some)["groups"]
        assert resumed_tokens(first) > 0
    with serve_one(DARTS, tmp_path / "next", *COUPLED, *state, "--speculate", "auto") as following:
        groups += draw(following, [], **some)["groups"]
        groups += draw(following, [], **resuming)["groups"]
        assert resumed_tokens(following) > 0
    seen = {group["metadata"]["text"]: [tuple(each["token_ids"]) for each in group["trajectories"]] for group in groups}
    assert seen == base


@pytest.mark.parametrize("policy", ["uniform", "darts", "darts_cut", "auto"])
def test_candidates_of_shaped_groups_have_the_tokens_of_their_number(plain: Server, fast: Server, policy: str) -> None:
    base = tokens_of(draw(plain, PROMPTS[:4], group_size=2 * SIZE))
    for server in (plain, fast):
        answer = draw(server, PROMPTS[:4], policy={"name": policy})
        for group in answer["groups"]:
            candidates = iter(base[group["number"]])
            for trajectory in group["trajectories"]:
                tokens = tuple(trajectory["token_ids"])
                # Candidates are in order, and some are left out.
                assert any(candidate[: len(tokens)] == tokens for candidate in candidates)


@pytest.mark.parametrize("name", [*SAMPLING, "one allowed token"])
def test_drafts_change_no_token_under_any_sampling(plain: Server, fast: Server, name: str) -> None:
    one = {"allowed_token_ids": [7], "max_tokens": 9}
    sampling = dict(SAMPLING.get(name, one))
    answers = [draw(server, PROMPTS[:4], sampling) for server in (plain, fast, fast)]
    assert tokens_of(answers[0]) == tokens_of(answers[1]) == tokens_of(answers[2])
    for groups in zip(*(answer["groups"] for answer in answers), strict=True):
        for ours, *others in zip(*(group["trajectories"] for group in groups), strict=True):
            for other in others:
                assert other["logprobs"] == pytest.approx(ours["logprobs"], abs=1e-4)


def test_greedy_requests_stay_greedy(serve_one: Serve, plain: Server, fast: Server, tmp_path: Path) -> None:
    def greedy(server: Server) -> list[Tokens]:
        # Random requests run in the same steps.
        with ThreadPoolExecutor(1) as pool:
            others = pool.submit(draw, server, PROMPTS[-8:])
            answers = [draw_alone(server, prompt, 0, temperature=0.0) for prompt in PROMPTS[:16]]
            others.result()
        return answers

    with serve_one(DARTS, tmp_path / "log") as vllms:
        expected = greedy(vllms)
    assert greedy(plain) == greedy(fast) == expected


def test_answers_without_a_seed_differ(fast: Server) -> None:
    answers = [tokens_of(draw(fast, PROMPTS[:4], {"seed": None})) for _ in range(2)]
    assert all(first != second for first, second in zip(*answers, strict=True))


def test_children_of_vllms_own_requests_have_the_streams_of_candidates(fast: Server) -> None:
    (base,) = tokens_of(draw(fast, PROMPTS[:1]))
    body = {"model": "tiny:raw", "prompt": PROMPTS[0], "seed": SEED, "max_tokens": 200, "n": SIZE}
    body |= {"temperature": 1.0, "return_token_ids": True}
    answer = httpx.post(f"{fast.url}/v1/completions", json=body, timeout=120).raise_for_status().json()
    assert [tuple(choice["token_ids"]) for choice in answer["choices"]] == base


# --- reused streams -----------------------------------------------------------------


def test_a_prompt_keeps_its_streams_from_batch_to_batch(serve_one: Serve, fast: Server, tmp_path: Path) -> None:
    flags = (*COUPLED, "--speculate", "auto", "--reuse-streams")
    fresh = {"seed": None}
    twice = [prompt for prompt in PROMPTS[:4] for _ in range(2)]
    state = ("--state-dir", str(tmp_path / "state"))
    with serve_one(DARTS, tmp_path / "log", *flags, *state) as reusing:
        first, second = (tokens_of(draw(reusing, PROMPTS[:4], fresh)) for _ in range(2))
        assert first == second
        # Two groups of a prompt in a batch have different streams.
        pairs = tokens_of(draw(reusing, twice, fresh))
        assert pairs[::2] == first
        assert all(one != other for one, other in zip(pairs[::2], pairs[1::2], strict=True))
        # A seed comes before the streams of a prompt.
        assert tokens_of(draw(reusing, PROMPTS[:4])) == tokens_of(draw(fast, PROMPTS[:4]))
        assert len({answer for group in first for answer in group}) > 4 * SIZE / 3

        kept = []
        for texts, limit in ((PROMPTS[:4], {"num_groups": 1}), ([], {"num_groups": 1}), ([], {})):
            kept += draw(reusing, texts, fresh, carry="resume", carried=True, **limit)["groups"]
        assert resumed_tokens(reusing) > 0
        resumed = {g["metadata"]["text"]: [tuple(each["token_ids"]) for each in g["trajectories"]] for g in kept}
        assert resumed == dict(zip(PROMPTS, first, strict=False))
    with serve_one(DARTS, tmp_path / "next", *flags, *state) as restarted:
        assert tokens_of(draw(restarted, PROMPTS[:4], fresh)) != first
