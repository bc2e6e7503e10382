"""The rollouts route on real vLLM."""

import json
from random import Random
from typing import Any

import httpx
import pytest
import safetensors.numpy

from darts_server.offline.demo.problems import sample_problem
from darts_server.offline.demo.server import Server
from tests.integration.events import assemble_groups, read_events

pytestmark = pytest.mark.engine
SIZE = 8


def prompts(count: int, seed: int = 5) -> list[str]:
    rng = Random(seed)
    return [sample_problem(rng).prompt for _ in range(count)]


def post(server: Server, body: object) -> httpx.Response:
    return httpx.post(f"{server.url}/darts/v1/rollouts", json=body, timeout=240)


def test_the_groups_of_a_batch_are_in_the_order_of_its_prompts(server: Server) -> None:
    texts = prompts(12)
    requested = [{"text": text, "metadata": {"answer": i}} for i, text in enumerate(texts)]
    sampling = {"max_tokens": 200, "seed": 3, "logprobs": True}
    answer = post(server, {"prompts": requested, "group_size": SIZE, "sampling": sampling, "policy": {"name": "darts"}})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["policy"] == "darts"
    assert [group["metadata"]["answer"] for group in body["groups"]] == list(range(12))
    for group in body["groups"]:
        assert group["error"] is None
        assert len(group["trajectories"]) == SIZE
        assert len(group["trajectories"]) + len(group["discarded"]) == group["candidates"]
        ranks = sorted((t["length"], t["rank"]) for t in group["trajectories"])
        assert [rank for _, rank in ranks] == list(range(SIZE))
        for trajectory in group["trajectories"]:
            assert trajectory["length"] == len(trajectory["token_ids"]) == len(trajectory["logprobs"])
            assert trajectory["finish_reason"] in ("stop", "length")
        record = httpx.get(f"{server.url}/darts/v1/groups/{group['group_id']}").json()["groups"][0]
        assert record["generated"] == sum(t["length"] for t in group["trajectories"] + group["discarded"])
    everything = httpx.get(f"{server.url}/darts/v1/groups/{body['id']}").json()["groups"]
    assert len(everything) == 12
    returned = sum(t["length"] for group in body["groups"] for t in group["trajectories"])
    assert body["usage"]["returned"] == returned
    assert sum(group["candidates"] for group in body["groups"]) == 12 * 12


def test_auto_says_how_many_prompts_of_a_batch_have_run(server: Server) -> None:
    requested = [{"text": text} for text in prompts(10, seed=6)]
    body = {"prompts": requested, "group_size": 5, "sampling": {"max_tokens": 50}, "policy": {"name": "auto"}}
    # Other tests on this server may have left prompts behind.
    post(server, {**body, "prompts": [], "carried": True, "carry": "resume"})
    whole = post(server, body)
    part = post(server, {**body, "num_groups": 6, "carry": "resume"})
    for answer, reasons in (
        (whole, {None}),
        (part, {"10 of 10 prompts run, and the first 6 groups are returned"}),
    ):
        assert answer.status_code == 200, answer.text
        records = httpx.get(f"{server.url}/darts/v1/groups/{answer.json()['id']}").json()["groups"]
        assert {record["policy"] for record in records} == {"auto"}
        assert {record["auto_choice"] for record in records} == reasons
        assert {len(record["candidates"]) for record in records} == {5}
    rest = post(server, {**body, "prompts": [], "carried": True, "carry": "resume"}).json()
    assert (len(rest["groups"]), rest["carried"]) == (4, 0)


def test_a_seeded_unshaped_batch_is_the_answer_of_vllms_route_in_each_form(server: Server) -> None:
    """As JSON, as tensors and token by token."""
    texts = prompts(6)
    sampling = {"max_tokens": 150, "seed": 9, "temperature": 1.0}
    body = {"prompts": [{"text": text} for text in texts], "group_size": 4, "policy": {"name": "off"}}
    body["sampling"] = sampling | {"logprobs": True}
    headers, url = {"Idempotency-Key": "both forms"}, f"{server.url}/darts/v1/rollouts"
    answer = httpx.post(url, json=body, headers=headers, timeout=240).json()

    raw = {"model": "tiny:raw", "prompt": texts[0], "n": 4, "return_token_ids": True, **sampling}
    choices = httpx.post(f"{server.url}/v1/completions", json=raw, timeout=240).json()["choices"]
    first = answer["groups"][0]["trajectories"]
    assert [(t["token_ids"], t["text"]) for t in first] == [(c["token_ids"], c["text"]) for c in choices]

    again = httpx.post(url, json=body, headers={**headers, "Accept": "application/vnd.safetensors"}, timeout=240)
    tensors = safetensors.numpy.load(again.content)
    rest = json.loads(tensors["answer"].tobytes())
    for trajectory in (trajectory for group in rest["groups"] for trajectory in group["trajectories"]):
        row = trajectory["token_ids"]
        assert trajectory["logprobs"] == row
        place = slice(*tensors["offsets"][row : row + 2])
        trajectory |= {name: tensors[name][place].tolist() for name in ("token_ids", "logprobs")}
    assert rest == answer

    with httpx.stream("POST", url, json=body | {"stream": "tokens", "chunk_tokens": 8}, timeout=240) as events:
        streamed = assemble_groups(list(read_events(events)))
    for ours, theirs in zip(streamed, answer["groups"], strict=True):
        assert [_content(t) for t in ours["trajectories"]] == [_content(t) for t in theirs["trajectories"]]


def _content(trajectory: dict[str, Any]) -> tuple[Any, ...]:
    logprobs = [round(value, 4) for value in trajectory["logprobs"]]
    return trajectory["token_ids"], logprobs, trajectory["text"], trajectory["finish_reason"]


def test_a_batch_takes_chats_token_ids_keys_a_budget_and_policy_overrides(server: Server) -> None:
    requested = [
        {"messages": [{"role": "user", "content": "7a-5b*4>"}], "key": "a/chat"},
        {"token_ids": [5, 6, 7], "key": "tokens"},
    ]
    body = {"prompts": requested, "group_size": 4, "sampling": {"max_tokens": 40}}
    policy = {"name": "darts", "num_longest": 0, "max_redundancy": 3.0}
    answer = post(server, body | {"policy": policy, "budget": 11}).json()
    assert [group["prompt_key"] for group in answer["groups"]] == ["a/chat", "tokens"]
    assert sum(group["candidates"] for group in answer["groups"]) == 11
    assert {t["selected_as"] for group in answer["groups"] for t in group["trajectories"]} <= {"short", "fill"}
    assert httpx.get(f"{server.url}/darts/v1/prompts/a/chat").json()["groups"] >= 1
    assert httpx.get(f"{server.url}/darts/v1/policy").json()["num_longest"] == 1, "the server's own is as it was"


def test_a_prompt_has_the_same_key_as_text_as_a_chat_and_as_tokens(server: Server) -> None:
    [text] = prompts(1)
    messages = [{"role": "user", "content": text}]  # the tiny model's template adds no tokens
    tokens = httpx.post(f"{server.url}/tokenize", json={"model": "tiny", "prompt": text}).json()["tokens"]
    requested = [{"text": text}, {"token_ids": tokens}, {"messages": messages}, {"token_ids": tokens[1:]}]
    batch = post(server, {"prompts": requested, "group_size": 2, "sampling": {"max_tokens": 5}}).json()
    *keys, other = [group["prompt_key"] for group in batch["groups"]]
    for path, form in (
        ("completions", {"prompt": text}),
        ("completions", {"prompt": tokens}),
        ("chat/completions", {"messages": messages}),
    ):
        body = {"model": "tiny", "n": 2, "max_tokens": 5} | form
        name = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=240).headers["X-Darts-Group-Id"]
        [group] = httpx.get(f"{server.url}/darts/v1/groups/{name}").json()["groups"]
        keys.append(group["prompt_key"])
    assert keys == [keys[0]] * 6
    assert other != keys[0]


def test_groups_that_end_in_one_step_are_returned_by_the_batches_that_want_them(server: Server) -> None:
    """All answers have the same length: in every step of the engine all groups that run may be complete."""
    requested = [{"text": text, "key": f"together/{i}"} for i, text in enumerate(prompts(8, seed=7))]
    sampling = {"max_tokens": 30, "ignore_eos": True, "temperature": 0, "logprobs": True}
    body: dict[str, Any] = {"group_size": 1, "sampling": sampling, "policy": {"name": "off"}}
    expected = {
        group["prompt_key"]: [_content(t) for t in group["trajectories"]]
        for group in post(server, body | {"prompts": requested}).json()["groups"]
    }
    body |= {"carry": "resume", "carried": True, "num_groups": 3}
    returned: dict[str, Any] = {}
    for number in range(3):
        answer = post(server, body | {"prompts": requested if number == 0 else []}).json()
        if number == 1:
            body["num_groups"] = 2
        keys = [group["prompt_key"] for group in answer["groups"]]
        assert (len(keys), answer["carried"]) == [(3, 5), (3, 2), (2, 0)][number]
        assert not returned.keys() & keys
        returned |= {group["prompt_key"]: [_content(t) for t in group["trajectories"]] for group in answer["groups"]}
    assert returned == expected


@pytest.mark.parametrize(
    ("prompt", "sampling", "most"),
    [
        ({"token_ids": [5] * 320}, {"max_tokens": 1}, 319),
        ({"token_ids": [5] * 320}, {"max_tokens": None}, 319),
        ({"text": "7" * 310}, {"max_tokens": 100}, 220),
        ({"messages": [{"role": "user", "content": "7" * 310}]}, {}, 304),
        ({"token_ids": [5] * 316}, {"max_tokens": None, "min_tokens": 5}, 315),
    ],
)
def test_a_prompt_without_room_for_its_answer_is_named_with_its_length(
    server: Server, prompt: dict[str, Any], sampling: dict[str, object], most: int
) -> None:
    """Never with a value that the caller has not sent, nor by a shorter answer than the one that was asked for."""
    [(field, content)] = prompt.items()
    length = len(content) if field != "messages" else len(content[0]["content"])
    answer = post(server, {"prompts": [{"text": "7"}, prompt], "group_size": 2, "sampling": sampling})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == f"prompts[1].{field}"
    assert f"has {length} tokens, and may have at most {most}:" in answer.text
    if field != "messages":
        vote = {"prompt": content, "n": 2, "pattern": "(7)", "sampling": sampling}
        answer = httpx.post(f"{server.url}/darts/v1/vote", json=vote, timeout=240)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "prompt"
    if sampling.get("max_tokens", 0) is not None and field != "messages":
        completion = {"model": "tiny", "prompt": content} | sampling
        assert httpx.post(f"{server.url}/v1/completions", json=completion, timeout=240).status_code == 400


@pytest.mark.parametrize(
    "prompt",
    [{"token_ids": [5] * 321}, {"text": "7" * 400}, {"messages": [{"role": "user", "content": "7" * 400}]}],
)
def test_a_prompt_that_is_longer_than_the_model_is_named_with_the_models_length(
    server: Server, prompt: dict[str, Any]
) -> None:
    answer = post(server, {"prompts": [{"text": "7"}, prompt], "group_size": 2, "sampling": {"max_tokens": 16}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"prompts[1].{next(iter(prompt))}")
    assert "has more than 319 tokens, and an answer needs one or more: the model's length is 320;" in answer.text


def test_an_answer_may_take_all_that_its_prompt_leaves(server: Server) -> None:
    body = {"prompts": [{"token_ids": [5] * 310}], "group_size": 2, "policy": {"name": "off"}}
    for max_tokens in (10, None):
        sampling = {"max_tokens": max_tokens, "ignore_eos": True}
        answer = post(server, body | {"sampling": sampling}).json()
        assert answer["sampling"].get("max_tokens") == max_tokens, "what was asked for, or nothing"
        assert [t["length"] for t in answer["groups"][0]["trajectories"]] == [10, 10]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompts": [{}]}, "prompts[0]"),
        ({"prompts": [{"text": "7"}, {"text": "7", "token_ids": [1]}]}, "prompts[1]"),
        ({"prompts": [{"text": "7"}, {"text": "7" * 1000}]}, "prompts[1].text"),
        ({"prompts": [{"token_ids": [5, 10**6]}]}, "prompts[0].token_ids"),
        ({"prompts": [{"messages": [{"role": "user"}, 3]}]}, "prompts[0].messages[1]"),
        ({"group_size": 0}, "group_size"),
        ({"group_size": "8"}, "group_size"),
        ({"sampling": {"temprature": 1}}, "sampling.temprature"),
        ({"sampling": {"temperature": "hot"}}, "sampling.temperature"),
        ({"sampling": {"n": 3}}, "sampling.n"),
        ({"policy": {"redundancy": 99}}, "redundancy"),
        ({"stream": "words"}, "stream"),
        ({"chunk_tokens": 100}, "chunk_tokens"),
        ({"stream": "tokens", "chunk_tokens": 0}, "chunk_tokens"),
        ({"strean": True}, "strean"),
    ],
)
def test_invalid_input_is_named_and_starts_nothing(server: Server, change: dict[str, object], param: str) -> None:
    started = server.metric("darts_candidates_started_total")
    body = {"prompts": [{"text": "7a-5b*4>"}], "group_size": 8, "sampling": {"max_tokens": 50}}
    answer = post(server, body | change)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param), answer.text
    assert server.metric("darts_candidates_started_total") == started
