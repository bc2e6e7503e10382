"""Sequences of requests that depend on each other: batches, votes, rewards, state, weights and pauses in any order."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from faults.case import PROMPT
from faults.fuzz.request import Example, Request, Upload
from faults.fuzz.routes import JSON, Operation, json_request, requests
from faults.fuzz.uploads import STATE
from faults.fuzz.values import MUTATIONS

KEYS = ("key-$run", "other-$run")
MAX_STEPS = 14
MAX_AT_ONCE = 16


def _batch(tokens: int, stream: str | bool, group_size: int = 2, **more: Any) -> dict[str, Any]:
    sampling = {"max_tokens": tokens, "ignore_eos": True}
    prompts = [{"text": PROMPT, "key": "a"}, {"token_ids": [5, 6, 7]}]
    return {"prompts": prompts, "group_size": group_size, "sampling": sampling, "stream": stream, **more}


def _completion(tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, **more}


JOINED = (("X-Darts-Group", "id=$run;size=2"),)
ROLLOUTS, BATCH, COMPLETIONS = "/darts/v1/rollouts", "/darts/v1/rollouts/$batch", "/v1/completions"
VOTE = {"prompt": PROMPT, "n": 3, "sampling": {"max_tokens": 60}, "pattern": "([0-9])", "weights": "rank"}
CREATE: Sequence[Request] = [
    json_request("POST", ROLLOUTS, body, headers=headers, background=True)
    for body in (_batch(20, False), _batch(60, "tokens", chunk_tokens=5), _batch(60, "groups", num_groups=1))
    for headers in ((), *((("Idempotency-Key", key),) for key in KEYS))
] + [
    json_request("POST", ROLLOUTS, _batch(60, stream, 4, num_groups=1, carry=carry, **more), background=True)
    for stream in (False, "tokens")
    for carry, more in (("drop", {}), ("restart", {"carried": True}), ("resume", {"carried": True}))
]
GENERATE: Sequence[Request] = [
    json_request("POST", COMPLETIONS, _completion(60, n=3), background=True),
    json_request("POST", COMPLETIONS, _completion(60, n=3, stream=True), background=True),
    json_request("POST", COMPLETIONS, _completion(60, model="tiny:raw", n=2, request_id="r-$run"), background=True),
    json_request("POST", COMPLETIONS, _completion(20, n=2), headers=(("X-Darts-Policy", "darts"),)),
    *[json_request("POST", COMPLETIONS, _completion(20), headers=JOINED, background=True)] * 2,
    json_request(
        "POST", "/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "n": 2}
    ),
    json_request("POST", "/darts/v1/vote", VOTE, background=True),
]
FOLLOW: Sequence[Request] = [
    Request("GET", ROLLOUTS + "/{batch_id}", BATCH, background=True),
    Request("GET", ROLLOUTS + "/{batch_id}", BATCH, (("Last-Event-ID", "2"),), background=True),
    Request("DELETE", ROLLOUTS + "/{batch_id}", BATCH),
    Request("GET", "/darts/v1/groups/{group_id}", "/darts/v1/groups/$group"),
    Request("GET", "/darts/v1/groups/{group_id}", "/darts/v1/groups/$batch"),
    *(
        Request("POST", "/darts/v1/trajectories/{trajectory_id}:abort", f"/darts/v1/trajectories/{name}:abort")
        for name in ("$trajectory", "$batch-0:0", "$batch-0:1", "$batch-1:2", "$group:1")
    ),
    Request("GET", "/darts/v1/prompts/{prompt_key}", "/darts/v1/prompts/a"),
    Request("GET", "/darts/v1/live", "/darts/v1/live"),
    Request("GET", "/darts/v1/live", "/darts/v1/live", (("Accept", "text/event-stream"),), leaves_after=0.3),
    json_request("POST", "/darts/v1/rewards", {"rewards": [{"trajectory_id": "$trajectory", "reward": 1.0}] * 2}),
    json_request("POST", "/darts/v1/rewards", {"rewards": [{"trajectory_id": "$group:0", "reward": -1}]}),
]
STATES = "/darts/v1/state"
WEIGHTS = "/darts/v1/weights"
CHANGE: Sequence[Request] = [
    Request("GET", STATES, STATES),
    Request("PUT", STATES, STATES, body=Upload(STATE)),
    *(
        Request("PUT", WEIGHTS, f"{WEIGHTS}?rule={rule}&partial=true", body=Upload(name), background=True)
        for rule in ("finish", "keep", "restart")
        for name in ("scaled", "partial", "cut off")
    ),
    json_request("POST", WEIGHTS, {"path": "full.safetensors", "rule": "keep"}, background=True),
    json_request("PATCH", "/darts/v1/policy", {"policy": "darts_cut", "redundancy": 2.0}),
    json_request("PATCH", "/darts/v1/policy", {"policy": "off"}),
    json_request("PATCH", "/darts/v1/policy", {"group_size": 2}),
    # vLLM's routes, with VLLM_SERVER_DEV_MODE=1; elsewhere they are 404.
    *(Request("POST", "/pause", f"/pause?mode={mode}", background=True) for mode in ("abort", "wait", "keep")),
    *[Request("POST", "/resume", "/resume")] * 3,
    json_request("POST", "/abort_requests", {}),
    json_request("POST", "/abort_requests", {"request_ids": ["r-$run", "$group", "none"]}),
    Request("POST", "/sleep", "/sleep?level=1"),
    Request("POST", "/wake_up", "/wake_up"),
    Request("POST", "/reset_prefix_cache", "/reset_prefix_cache"),
    Request("POST", "/start_weight_update", "/start_weight_update", (JSON,), b"{}", background=True),
    json_request(
        "POST",
        "/update_weights",
        {"update_info": {"path": "$root/full.safetensors", "names": ["model.norm.weight"]}},
        background=True,
    ),
    Request("POST", "/finish_weight_update", "/finish_weight_update", (JSON,), b"{}", background=True),
]
BROKEN_STATE = st.builds(
    lambda mutations: Request("PUT", STATES, STATES, body=Upload(STATE, tuple(mutations))),
    st.lists(MUTATIONS, min_size=1, max_size=3),
)


def examples(choices: Sequence[Operation], changes: bool) -> st.SearchStrategy[Example]:
    """Draw requests that are sent at the same time, or a sequence.

    ``changes``: whether they may change the server: its policy, state and weights.
    """
    allowed = [each for each in choices if changes or not each.is_admin]
    single = requests(allowed)
    at_once = st.lists(single, min_size=1, max_size=MAX_AT_ONCE).map(tuple)
    follow = [st.sampled_from(CREATE), st.sampled_from(GENERATE), st.sampled_from(FOLLOW), single]
    if changes:
        follow += [st.sampled_from(CHANGE), BROKEN_STATE]
    step = st.builds(_timed, st.one_of(follow), st.sampled_from([0.0, 0.0, 0.01, 0.05]), LEAVES)
    sequence = st.lists(step, min_size=2, max_size=MAX_STEPS).map(tuple)
    return st.one_of(at_once, at_once, at_once, sequence)


LEAVES = st.sampled_from([None, None, None, None, 0.0, 0.05, 0.3])


def _timed(request: Request, after: float, leaves_after: float | None) -> Request:
    leaves = request.leaves_after if leaves_after is None else leaves_after
    return replace(request, after=after, leaves_after=leaves)
