"""A real language model, with and without drafts: chats, groups, streamed text, and log-probs."""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.smollm2 import NotAvailable, model_folder
from benchmarks.word_problems import batch, word_problems
from darts_server.offline.demo.server import Server, serving

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(1800)]

FLAGS = ("--served-model-name", "smollm2", "--max-model-len", "512")
PROBLEMS = word_problems(0, 4)
"""Few, as a step with 32 sequences takes half a second of a core."""
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Answer in Français. 😀"}, {"role": "user", "content": "日本語?"}],
    [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Red."},
        {"role": "user", "content": "Another!"},
    ],
]
MULTI_BYTE = {"structured_outputs": {"regex": "(😀|é|日|ñ|한){6,12}"}}
"""Each of these characters has two to four bytes, most of which are tokens of their own."""
LARGEST_GAP = 1e-3
"""Difference of log-probs, in nats, that is rounding: float32, 30 layers, and batches of other shapes."""


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return model_folder()
    except NotAvailable as error:
        pytest.skip(str(error))


def smollm2(folder: Path, log: Path, speculate: str) -> AbstractContextManager[Server]:
    """Run a server. Forked servers have a cache for so many tokens that it would take gigabytes for this model."""
    command = ("darts_server", "serve", str(folder))
    return serving(command, log, *FLAGS, "--speculate", speculate)


@pytest.fixture(scope="module", params=["off", "auto"])
def server(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with smollm2(folder, tmp_path_factory.mktemp("smollm2") / "log", request.param) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def post(server: Server, route: str, body: dict[str, Any]) -> Any:
    return httpx.post(f"{server.url}{route}", json=body, timeout=300).raise_for_status().json()


def rollouts(server: Server, prompts: list[dict[str, Any]], policy: str = "off", **more: Any) -> list[Any]:
    """Return the groups of a batch, in the order of their prompts."""
    body = {"prompts": prompts, "policy": {"name": policy}} | more
    return sorted(post(server, "/darts/v1/rollouts", body)["groups"], key=lambda group: group["number"])


def test_batches_answer_chats_as_the_chat_route_does(server: Server, tokenizer: Any) -> None:
    greedy = {"max_tokens": 24, "temperature": 0.0}
    groups = rollouts(server, [{"messages": chat} for chat in CHATS], group_size=1, sampling=greedy)
    assert len(groups) == len(CHATS)
    for chat, group in zip(CHATS, groups, strict=True):
        rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        body = {"model": "smollm2:raw", "messages": chat, "return_token_ids": True} | greedy
        answer = post(server, "/v1/chat/completions", body)
        assert answer["prompt_token_ids"] == tokenizer.encode(rendered)
        [choice] = answer["choices"]
        [trajectory] = group["trajectories"]
        assert trajectory["text"] == choice["message"]["content"]
        assert trajectory["token_ids"] == choice["token_ids"]
        assert trajectory["finish_reason"] == choice["finish_reason"]
    assert "Paris" in groups[0]["trajectories"][0]["text"]


def test_a_shaped_group_returns_exactly_its_size(server: Server) -> None:
    sampling = {"max_tokens": 40, "logprobs": True}
    for group in rollouts(server, batch(PROBLEMS), "uniform", group_size=4, sampling=sampling):
        assert group["error"] is None
        assert len({tuple(trajectory["token_ids"]) for trajectory in group["trajectories"]}) == 4
    body = {"model": "smollm2", "messages": PROBLEMS[0].messages, "n": 3, "max_tokens": 40}
    answer = httpx.post(
        f"{server.url}/v1/chat/completions", json=body, headers={"X-Darts-Policy": "uniform"}, timeout=300
    )
    assert [choice["index"] for choice in answer.raise_for_status().json()["choices"]] == [0, 1, 2]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("sampling", [MULTI_BYTE, {}], ids=["multi-byte", "prose"])
def test_streamed_text_is_the_text(server: Server, tokenizer: Any, count: int, sampling: dict[str, Any]) -> None:
    body = {"model": "smollm2", "messages": CHATS[1], "n": count, "max_tokens": 30, "return_token_ids": True} | sampling
    if count == 1:
        body["temperature"] = 0.0
    texts = [""] * count
    token_ids: list[list[int]] = [[] for _ in range(count)]
    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=300) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
                token_ids[choice["index"]] += choice.get("token_ids") or []
    for text, tokens in zip(texts, token_ids, strict=True):
        # The limit may cut the last character.
        assert text.rstrip("\ufffd") == tokenizer.decode(tokens, skip_special_tokens=True).rstrip("\ufffd")
        if sampling:
            # Prose may have invalid bytes: the model may sample one byte of a character, and then something else.
            assert "\ufffd" not in text[:-1]
            assert len(text.encode()) > len(text) > 3
    if count == 1:
        [whole] = post(server, "/v1/chat/completions", body)["choices"]
        assert [(whole["message"]["content"], whole["token_ids"])] == [(texts[0], token_ids[0])]


@pytest.mark.usefixtures("one_thread")
def test_logprobs_are_those_of_transformers(server: Server, folder: Path, tokenizer: Any) -> None:
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sampling = {"max_tokens": 40, "logprobs": True}
    groups = rollouts(server, batch(PROBLEMS), group_size=2, sampling=sampling)
    for problem, group in zip(PROBLEMS, groups, strict=True):
        rendered = tokenizer.apply_chat_template(problem.messages, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer.encode(rendered)
        for trajectory in group["trajectories"]:
            tokens = torch.tensor([[*prompt, *trajectory["token_ids"]]])
            with torch.no_grad():
                logprobs = model(tokens).logits[0].log_softmax(-1)
            places = torch.arange(len(prompt), tokens.shape[1])
            expected = logprobs[places - 1, tokens[0, places]]
            assert trajectory["logprobs"] == pytest.approx(expected.tolist(), abs=LARGEST_GAP)


def test_greedy_answers_are_the_same_with_drafts(folder: Path, tmp_path: Path) -> None:
    greedy = {"max_tokens": 60, "temperature": 0.0}
    answers = []
    drafted = 0.0
    for speculate in ("off", "auto"):
        with smollm2(folder, tmp_path / speculate, speculate) as running:
            # The second batch has the answers of the first as drafts.
            groups = rollouts(running, batch(PROBLEMS), group_size=1, sampling=greedy)
            groups += rollouts(running, batch(PROBLEMS), group_size=1, sampling=greedy)
            answers.append([[trajectory["token_ids"] for trajectory in group["trajectories"]] for group in groups])
            drafted = running.metric("vllm:spec_decode_num_accepted_tokens_total")
    assert answers[0] == answers[1]
    assert drafted > 0
