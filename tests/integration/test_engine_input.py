"""What the engine cannot decode or survive is a 400 that names the field, on every route; other callers are served."""

import json
import re
import time
from contextlib import suppress
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from vllm import SamplingParams

from darts_server.offline.demo.server import DARTS, Server
from darts_server.vllm.requests.sampling import RESERVED
from tests.integration.backdoor import HEADER
from tests.integration.fork_server import Serve
from tests.integration.waiting import wait_idle

pytestmark = pytest.mark.engine
PROMPT = "7a-5b*4>"
COMPLETIONS = "/v1/completions"
ROLLOUTS = "/darts/v1/rollouts"
TOKENS = "/inference/v1/generate"
VOTE = "/darts/v1/vote"
VOCAB_SIZE = 64
Sampling = dict[str, Any]


def post(server: Server, path: str, sampling: Sampling, **more: Any) -> httpx.Response:
    """Send a small request with these sampling parameters, as the route takes them."""
    short = {"max_tokens": 8} | sampling
    bodies: dict[str, dict[str, Any]] = {
        COMPLETIONS: {"model": "tiny", "prompt": PROMPT, "n": 2} | short,
        ROLLOUTS: {"prompts": [{"text": PROMPT}], "group_size": 2, "sampling": short},
        TOKENS: {"token_ids": [5, 6, 7], "sampling_params": {"n": 2} | short},
        VOTE: {"prompt": PROMPT, "n": 2, "pattern": "([0-9])", "sampling": short},
    }
    content = json.dumps(bodies[path] | more)  # with Infinity, which httpx would refuse
    headers = {"Content-Type": "application/json"}
    send = partial(httpx.post, f"{server.url}{path}", content=content, headers=headers, timeout=240)
    while (answer := send()).status_code == 429:  # on a busy machine the check of a grammar takes longer than it may
        time.sleep(1)
    return answer


def check_refused(server: Server, answer: httpx.Response, param: str) -> None:
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text
    check_serves(server)


def check_serves(server: Server) -> None:
    assert post(server, COMPLETIONS, {}).status_code == 200


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"stop": ["a", 3]}, "stop[1]"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"structured_outputs": {"choices": ["a"]}}, "structured_outputs.choices"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"repetition_detection": {"max_pattern_size": 2**64, "min_count": 2}}, "repetition_detection"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
        ({"max_tokens": 320}, "max_tokens"),
        ({"min_tokens": 320, "max_tokens": None}, "min_tokens"),
    ],
)
def test_a_sampling_parameter_that_the_engine_cannot_take_is_named(
    server: Server, sampling: Sampling, param: str
) -> None:
    """Others are in tests/vllm/requests/test_validation.py."""
    started = server.metric("darts_candidates_started_total")
    answers = [post(server, path, sampling) for path in (ROLLOUTS, VOTE)]
    assert server.metric("darts_candidates_started_total") == started
    for answer in answers:
        check_refused(server, answer, f"sampling.{param}")


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        (COMPLETIONS, {"prompt": [5, VOCAB_SIZE]}, "prompt"),
        (COMPLETIONS, {"prompt": [5, VOCAB_SIZE], "model": "tiny:raw", "n": 1, "stream": True}, "prompt"),
        (COMPLETIONS, {"prompt": [[5, 6], [5, VOCAB_SIZE]]}, "prompt"),
        (TOKENS, {"token_ids": [5, VOCAB_SIZE], "stream": True}, "prompt"),
        (ROLLOUTS, {"prompts": [{"token_ids": [5, VOCAB_SIZE]}]}, "prompts[0].token_ids"),
        (VOTE, {"prompt": [5, VOCAB_SIZE]}, "prompt"),
    ],
)
def test_a_token_id_of_the_vocabularys_size_is_refused(
    server: Server, path: str, more: dict[str, Any], param: str
) -> None:
    answer = post(server, path, {}, **more)
    assert f"token id {VOCAB_SIZE} is out of vocabulary" in answer.text
    check_refused(server, answer, param)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{}], "messages[0].role"),
        ([{"role": "user", "content": "7a>"}, {"role": 3}], "messages[1].role"),
        ([{"role": "assistant", "tool_calls": [7]}], "messages"),
    ],
)
def test_a_message_that_cannot_be_rendered_is_named(server: Server, messages: list[Any], param: str) -> None:
    batch = {"prompts": [{"messages": messages}], "group_size": 2}
    check_refused(server, httpx.post(f"{server.url}{ROLLOUTS}", json=batch), f"prompts[0].{param}")
    vote = {"messages": messages, "n": 2, "pattern": "([0-9])"}
    check_refused(server, httpx.post(f"{server.url}{VOTE}", json=vote), param)


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"choice": ["7a", "5b*4"]}, r"7a|5b\*4"),
        ({"json": {"type": "integer", "minimum": 10, "maximum": 99}}, "[0-9]{2}"),
    ],
)
def test_structured_outputs_constrain_every_trajectory(server: Server, constraint: Sampling, pattern: str) -> None:
    sampling = {"structured_outputs": constraint, "max_tokens": 50}
    (group,) = post(server, ROLLOUTS, sampling).json()["groups"]
    vote = post(server, VOTE, sampling).json()
    for trajectory in [*group["trajectories"], *vote["trajectories"]]:
        assert re.fullmatch(pattern, trajectory["text"]), trajectory


@pytest.mark.parametrize("path", [ROLLOUTS, VOTE, COMPLETIONS])
def test_structured_outputs_that_no_token_can_begin_are_refused(server: Server, path: str) -> None:
    answer = post(server, path, {"structured_outputs": {"json": {"$ref": "#"}}})
    assert "no token can begin it" in answer.text
    assert answer.status_code == 400
    check_serves(server)


@pytest.mark.parametrize("policy", ["uniform", "off"])
def test_the_token_route_streams_all_choices(server: Server, policy: str) -> None:
    body = {"token_ids": [5, 6, 7], "stream": True, "sampling_params": {"n": 6, "max_tokens": 60, "ignore_eos": True}}
    answer = httpx.post(f"{server.url}{TOKENS}", json=body, headers={"X-Darts-Policy": policy}, timeout=240)
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]", answer.text
    tokens = dict.fromkeys(range(6), 0)
    for event in events:
        assert "error" not in event, event
        (choice,) = json.loads(event)["choices"]
        tokens[choice["index"]] += len(choice["token_ids"])
    assert tokens == dict.fromkeys(range(6), 60)


# --- any value ------------------------------------------------------------------

NUMBERS = st.sampled_from([0, -1, 1, 2, 63, 64, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400, 0.5, 1e308])
SCALARS = st.none() | st.booleans() | NUMBERS | st.integers() | st.floats() | st.text(max_size=8)
KEYS = st.sampled_from(["json", "regex", "choice", "grammar", "type", "5", "x", "max_pattern_size", "min_count"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted(set(signature(SamplingParams.from_optional).parameters) - RESERVED)


@pytest.mark.parametrize("path", [ROLLOUTS, VOTE, COMPLETIONS, TOKENS])
def test_any_value_is_served_or_refused_and_the_next_caller_is_served(server: Server, path: str) -> None:
    @given(sampling=st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=2))
    @example(sampling={"structured_outputs": {"json": {"type": 5}}})
    @example(sampling={"structured_outputs": {"grammar": "root ::="}})
    def check(sampling: Sampling) -> None:
        answer = post(server, path, sampling)
        assert answer.status_code in (200, 400), f"{sampling}: {answer.text}"

    check()
    check_serves(server)
    wait_idle(server)


# --- what no request can do -----------------------------------------------------


@pytest.mark.nightly
def test_an_engine_that_receives_nothing_any_more_ends_the_server_at_once(serve_one: Serve, tmp_path: Path) -> None:
    with serve_one(DARTS, tmp_path / "log", "--middleware", "tests.integration.backdoor.backdoor") as server:
        kept = httpx.get(f"{server.url}/health", headers={HEADER: "unsendable"})
        assert (kept.status_code, kept.json()) == (200, [])
        check_serves(server)
        with suppress(httpx.TransportError):  # the server has ended already
            httpx.get(f"{server.url}/health", headers={HEADER: "undecodable"})
        assert server.process.wait(180) == 1, server.log_tail()
    log = server.log.read_text()
    assert "ValidationError: Expected `array`, got `str`" in log
    [last] = [line for line in log.splitlines() if " CRITICAL " in line]
    assert "the engine died" in last
