"""The modules for trainers that send token ids, with calls like those in the trainers' source."""

import asyncio
import json
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from darts_client import BadRequest, ProtocolError
from darts_client.integrations import openrlhf, slime
from darts_client.integrations._sampling import Sampler

pytestmark = pytest.mark.anyio
URL = "http://darts"
PROMPT_TOKENS = 2
"""Tokens of every prompt, as the server counts."""
Choice = dict[str, Any]


def choice(*tokens: int, reason: str = "stop") -> Choice:
    logprobs = {"token_logprobs": [-token / 10 for token in tokens]}
    text = " ".join(map(str, tokens))
    return {"index": 0, "text": text, "token_ids": tokens, "finish_reason": reason, "logprobs": logprobs}


class Served:
    """A server that returns its completions in turn, and records all requests."""

    def __init__(self, *choices: Choice) -> None:
        self.choices = list(choices)
        self.requests: list[tuple[str, Any, dict[str, str]]] = []
        self.transport = httpx.MockTransport(self.answer)
        self.failing: dict[str, httpx.Response] = {}

    async def answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content or b"null")
        self.requests.append((request.url.raw_path.decode(), body, dict(request.headers)))
        if (response := self.failing.get(request.url.path)) is not None:
            return response
        match request.url.path:
            case "/v1/models":
                return httpx.Response(200, json={"data": [{"id": "tiny"}, {"id": "tiny:raw"}]})
            case "/v1/completions":
                answer = {"id": "cmpl-1", "choices": [self.choices.pop(0)]}
                return httpx.Response(200, json=answer | {"usage": {"prompt_tokens": PROMPT_TOKENS}})
        return httpx.Response(200, json={"version": 7})

    @property
    def completions(self) -> list[tuple[Any, dict[str, str]]]:
        return [(body, headers) for path, body, headers in self.requests if path == "/v1/completions"]


def sampling_params(**more: Any) -> Any:
    """vLLM's `SamplingParams` from OpenRLHF."""
    given: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_tokens": 1, "max_tokens": 6, "n": 1}
    given |= {"logprobs": 1, "skip_special_tokens": False, "stop": [], "stop_token_ids": [], "seed": None}
    return SimpleNamespace(**given | {"bad_words": None} | more)


async def test_openrlhf_gets_the_fields_of_vllms_output_that_its_executors_read() -> None:
    served = Served(choice(5, 6, reason="length"))
    engine = openrlhf.HttpEngine(URL, transport=served.transport)
    output = await engine.generate([1, 2], sampling_params(), multi_modal_data=None)
    [completion] = output.outputs
    assert [1, 2, *completion.token_ids] == [1, 2, 5, 6]
    assert completion.finish_reason == "length"
    assert completion.logprobs is not None
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    assert [entry[token].logprob for token, entry in pairs] == [-0.5, -0.6]
    [(body, _)] = served.completions
    assert (body["prompt"], body["min_tokens"], body["skip_special_tokens"]) == ([1, 2], 1, False)
    assert not {"stop", "seed"} & body.keys()


async def test_openrlhf_rejects_an_aborted_answer_and_gets_no_logprobs_without_correction() -> None:
    served = Served(choice(5, reason="abort"), choice(5, reason="error"), {**choice(5), "logprobs": None})
    engine = openrlhf.HttpEngine(URL, transport=served.transport)
    for reason in ("abort", "error"):
        with pytest.raises(ProtocolError, match=f"finish reason '{reason}'"):
            await engine.generate([1], sampling_params())
    output = await engine.generate([1], sampling_params(logprobs=None))
    assert output.outputs[0].logprobs is None
    assert "logprobs" not in served.completions[-1][0]


async def test_unserved_arguments_of_openrlhf_are_named() -> None:
    engine = openrlhf.HttpEngine(URL, transport=Served().transport)
    for params, data, match in (
        (sampling_params(), {"image": ["x"]}, "multi_modal_data"),
        (sampling_params(n=2), None, "n must be 1"),
        (sampling_params(max_tokens=None), None, "needs max_tokens"),
    ):
        with pytest.raises(ValueError, match=match):
            await engine.generate([1], params, multi_modal_data=data)


async def test_openrlhfs_executor_gets_our_engine() -> None:
    class Executor:
        async def execute(self, prompt: str, llm_engine: Any, images: Any = None) -> Any:
            return prompt, llm_engine

    executor = openrlhf.served(Executor, URL)()
    assert isinstance(executor, Executor)
    prompt, engine = await executor.execute(prompt="p", llm_engine="the actor", images=None)
    assert prompt == "p"
    assert isinstance(engine, openrlhf.HttpEngine)
    with pytest.raises(TypeError, match="llm_engine as a keyword"):
        await executor.execute("p", "the actor")


SLIME = {
    "sampling_params": {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 6,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        "sampling_seed": 3,
    },
    "return_logprob": True,
    "input_ids": [1, 2],
}
"""slime's request for one sample."""


FACADE = "http://127.0.0.1:30000"


async def call(served: Served, path: str, body: Any = None, method: str = "POST", **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(slime.Facade(URL, "key", served.transport))
    async with httpx.AsyncClient(transport=transport, base_url=FACADE) as client:
        return await client.request(method, path, json=body, headers=headers)


@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
async def test_slime_and_miles_get_the_fields_that_they_append_to_a_sample(reason: str) -> None:
    served = Served(choice(5, 6, reason=reason))
    answer = (await call(served, "/generate", SLIME, **{"X-SMG-Routing-Key": "s-1"})).json()
    meta = answer["meta_info"]
    assert ([item[1] for item in meta["output_token_logprobs"]], answer["text"]) == ([5, 6], "5 6")
    assert [item[0] for item in meta["output_token_logprobs"]] == [-0.5, -0.6]
    assert (meta["finish_reason"]["type"], meta["prompt_tokens"], meta["completion_tokens"]) == (reason, 2, 2)
    [(body, headers)] = served.completions
    assert (body["prompt"], body["max_tokens"], body["seed"]) == ([1, 2], 6, 3)
    assert body["include_stop_str_in_output"] is True
    assert headers["x-session-id"] == "s-1"
    assert not {"max_new_tokens", "stop"} & body.keys()
    text = {name: value for name, value in SLIME.items() if name != "input_ids"} | {"text": "a much longer text"}
    served.choices.append(choice(reason=reason))  # without tokens it is a sample, too
    meta = (await call(served, "/generate", text)).json()["meta_info"]
    assert (meta["prompt_tokens"], meta["output_token_logprobs"]) == (PROMPT_TOKENS, [])
    assert served.completions[1][0]["prompt"] == "a much longer text"


async def test_slimes_samples_say_which_weights_made_them() -> None:
    """slime's rollout appends the version to `Sample.weight_versions` if the answer has it."""
    served = Served(choice(5), choice(6), choice(5))
    versions = [(await call(served, "/generate", SLIME)).json()["meta_info"]["weight_version"]]
    served.failing["/darts/v1/weights"] = httpx.Response(200, json={"version": 8})
    versions.append((await call(served, "/generate", SLIME)).json()["meta_info"]["weight_version"])
    assert versions == ["7", "8"]
    served.failing["/darts/v1/weights"] = httpx.Response(500, json={"error": {"message": "broken"}})
    answer = (await call(served, "/generate", SLIME)).json()
    assert (answer["output_ids"], "weight_version" in answer["meta_info"]) == ([5], False)


@pytest.mark.parametrize(
    ("method", "path", "body", "sent", "answer"),
    [
        ("POST", "/abort_request", {"abort_all": True}, ("/abort_requests", {}), {"version": 7}),
        ("POST", "/abort_request", {"rid": "a"}, ("/abort_requests", {"request_ids": ["cmpl-a-0"]}), {"version": 7}),
        ("POST", "/pause_generation", {}, ("/pause?mode=abort", {}), {"version": 7}),
        ("POST", "/pause_generation", {"mode": "retract"}, ("/pause?mode=keep", {}), {"version": 7}),
        ("POST", "/continue_generation", {}, ("/resume", {}), {"version": 7}),
        (
            *("POST", "/update_weights_from_disk", {"model_path": "/w/1", "weight_version": "3"}),
            ("/darts/v1/weights", {"path": "/w/1", "rule": "keep", "version": 3}),
            {"version": 7, "success": True},
        ),
        ("GET", "/get_weight_version", None, ("/darts/v1/weights", None), {"weight_version": "7"}),
        ("GET", "/v1/loads?include=core", None, None, {"loads": [{"num_reqs": 0}]}),
        *((method, "/flush_cache", None, None, {"loads": [{"num_reqs": 0}]}) for method in ("GET", "POST")),
        *(
            ("GET", path, None, ("/darts/v1/weights", None), {"weight_version": "7"})
            for path in ("/health", "/health_generate")
        ),
        *(
            ("GET", path, None, None, {"workers": [{"id": "darts", "url": FACADE}], "urls": [FACADE]})
            for path in ("/workers", "/list_workers")
        ),
    ],
)
async def test_slimes_other_calls_reach_the_servers_routes(
    method: str, path: str, body: Any, sent: tuple[str, Any] | None, answer: Any
) -> None:
    served = Served()
    response = await call(served, path, body, method)
    assert (response.status_code, response.json()) == (200, answer)
    assert [(path, body) for path, body, _ in served.requests] == ([] if sent is None else [sent])
    assert all(headers["authorization"] == "Bearer key" for *_, headers in served.requests)
    if sent is not None:
        served.failing[sent[0].partition("?")[0]] = httpx.Response(409, json={"error": {"message": "another update"}})
        refused = await call(served, path, body, method)
        assert (refused.status_code, "another update" in refused.json()["error"]) == (409, True)


@pytest.mark.parametrize(
    ("path", "body", "status", "named"),
    [
        ("/generate", SLIME | {"stream": True}, 400, "stream"),
        ("/generate", SLIME | {"return_routed_experts": True}, 400, "return_routed_experts"),
        ("/generate", {"input_ids": [1]}, 400, "sampling_params"),
        ("/generate", {"sampling_params": {"max_new_tokens": 1}}, 400, "text"),
        ("/generate", {"input_ids": [1], "sampling_params": {"custom_params": {"a": 1}}}, 400, "custom_params"),
        ("/generate", [1], 400, "AttributeError"),
        ("/abort_request", {}, 400, "rid"),
        ("/pause_generation", {"mode": "x"}, 400, "x"),
        ("/update_weights_from_tensor", {}, 404, "/update_weights_from_disk"),
    ],
)
async def test_unserved_arguments_of_slime_are_named_and_nothing_is_sent(
    path: str, body: Any, status: int, named: str
) -> None:
    served = Served()
    response = await call(served, path, body)
    assert response.status_code == status
    assert named in response.json()["error"]
    assert served.requests == []


@pytest.mark.parametrize(
    "header",
    [
        {"Origin": "http://page"},
        {"Sec-Fetch-Site": "cross-site"},
        *({"Host": f"{name}"} for name in ("page.example", "page.example:1", "127.0.0.1.page.example", "[::1", "a b")),
    ],
)
@pytest.mark.parametrize("path", ["/continue_generation", "/get_weight_version"])
async def test_a_web_page_cannot_use_the_facades_key_nor_the_facade_by_a_name_of_its_own(
    path: str, header: dict[str, str]
) -> None:
    served = Served()
    response = await call(served, path, {}, **header)
    assert (response.status_code, "name" in response.json()["error"]) == (403, "Host" in header)
    assert served.requests == []


@pytest.mark.parametrize("host", ["localhost:30000", "10.0.0.7", "[::1]:30000", "trainer-0:30000", "Trainer-0"])
async def test_the_facade_answers_to_addresses_and_its_own_names(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DARTS_URL", URL)
    monkeypatch.setenv("DARTS_FACADE_HOSTS", "trainer-0,trainer-1")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(slime.facade()), base_url="http://x") as client:
        assert (await client.get("/v1/loads", headers={"Host": host})).status_code == 200


CHANGES = ("/generate", "/abort_request", "/pause_generation", "/continue_generation", "/update_weights_from_disk")


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE"])
@pytest.mark.parametrize("path", CHANGES)
async def test_only_a_post_changes_anything(path: str, method: str) -> None:
    served = Served()
    body = SLIME | {"abort_all": True, "model_path": "x"}
    response = await call(served, path, body, method)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert served.requests == []


async def test_running_requests_are_the_facades_load() -> None:
    served, release = Served(choice(5)), asyncio.Event()
    answer: Callable[[httpx.Request], Any] = served.answer

    async def late(request: httpx.Request) -> httpx.Response:
        await release.wait()
        response: httpx.Response = await answer(request)
        return response

    facade = slime.Facade(URL, None, httpx.MockTransport(late))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(facade), base_url="http://localhost") as client:
        running = asyncio.create_task(client.post("/generate", json=SLIME))
        while (load := (await client.get("/v1/loads")).json()) == {"loads": [{"num_reqs": 0}]}:
            await asyncio.sleep(0)
        assert load == {"loads": [{"num_reqs": 1}]}
        release.set()
        assert (await running).status_code == 200
        assert (await client.get("/v1/loads")).json() == {"loads": [{"num_reqs": 0}]}


async def test_answers_that_would_spoil_training_are_refused_and_refusals_reach_the_trainer() -> None:
    for wrong in (choice(5, 6) | {"token_ids": [5]}, choice(5) | {"logprobs": None}, {"text": "5"}):
        with pytest.raises(ProtocolError):
            await Sampler(URL, transport=Served(wrong).transport).sample([1], {"max_tokens": 2})
    served = Served()
    served.failing["/v1/completions"] = httpx.Response(400, json={"error": {"message": "too long"}})
    with pytest.raises(BadRequest, match="too long"):
        await Sampler(URL, transport=served.transport).sample([1], {"max_tokens": 2})


def test_samplers_can_be_sent_to_other_processes() -> None:
    sampler = pickle.loads(pickle.dumps(Sampler(URL, "key", "tiny")))
    assert (sampler.url, sampler.api_key, sampler.model) == (URL, "key", "tiny")


def test_connections_belong_to_the_loop_that_uses_them() -> None:
    served = Served(choice(5), choice(6))
    sampler = Sampler(URL, transport=served.transport)
    for token in (5, 6):
        assert asyncio.run(sampler.sample([1], {"max_tokens": 2})).token_ids == (token,)
    assert len(served.requests) == 3
