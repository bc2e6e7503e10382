"""Requests on every route of ours and on vLLM's that are shaped, made from the server's OpenAPI description."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from darts_server.http.security.access import RouteAccess
from darts_server.http.security.route_table import access_of
from faults.case import PROMPT
from faults.fuzz.request import Request, Upload
from faults.fuzz.uploads import STATE, WEIGHTS
from faults.fuzz.values import MUTATIONS, mutated

OURS = "/darts/v1/"
SHAPED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate")
METHODS = ("get", "put", "post", "patch", "delete")
MAX_DEPTH = 6
"""Of an example that is made from a schema. vLLM's schemas are recursive."""
MESSAGES = [{"role": "user", "content": PROMPT}]
SHORT = {"max_tokens": 4}
BODIES: Mapping[tuple[str, str], Sequence[dict[str, Any]]] = {
    ("POST", "/darts/v1/rollouts"): [
        {"prompts": [{"text": PROMPT, "key": "a", "metadata": {"answer": 8}}], "group_size": 2, "sampling": SHORT},
        {"prompts": [{"token_ids": [5, 6, 7]}, {"text": PROMPT}], "group_size": 2, "sampling": {"seed": 1, **SHORT}},
        {
            "prompts": [{"messages": MESSAGES}],
            "group_size": 2,
            "sampling": {"logprobs": True, "temperature": 1.0, "stop": ["#"], **SHORT},
            "policy": {"name": "darts_cut", "redundancy": 1.5},
            "budget": 3,
            "num_groups": 1,
            "stream": "tokens",
            "chunk_tokens": 2,
        },
        {"prompts": [{"text": PROMPT}], "group_size": 2, "sampling": SHORT, "stream": "groups", "survivors": False},
        {
            "prompts": [{"text": PROMPT}],
            "group_size": 2,
            "sampling": SHORT,
            "policy": {"name": "cap"},
            "stream": "groups",
            "cohort": {"groups": 24, "leads": True},
        },
        *(
            {"prompts": [{"text": PROMPT}] * 2, "group_size": 2, "sampling": SHORT, "num_groups": 1, "carry": carry}
            for carry in ("drop", "restart", "resume")
        ),
        {"prompts": [{"text": PROMPT}] * 2, "group_size": 2, "sampling": SHORT, "min_groups": 1, "carry": "restart"},
        {"prompts": [], "carried": True, "group_size": 2, "sampling": SHORT, "carry": "restart"},
    ],
    ("POST", "/darts/v1/rollouts/plan"): [
        {
            "prompts": [{"text": PROMPT}, {"token_ids": [5, 6]}],
            "group_size": 2,
            "policy": {"name": "darts"},
            "budget": 6,
        },
    ],
    ("PUT", "/darts/v1/rollouts/{batch_id}/deadline"): [
        {"tokens": 20, "waits_beyond": None, "explored": False, "stretch": 1.5, "bound": 2.0},
    ],
    ("POST", "/darts/v1/observations"): [
        {
            "observations": [
                {
                    "life": "other",
                    "number": 1,
                    "kind": "group",
                    "prompt_key": "a",
                    "policy": "cap",
                    "size": 2,
                    "tokens_needed": 9,
                    "weight_version": 1,
                    "cohort_deadline": 9,
                    "bound": 18,
                    "candidates": [
                        {"tokens": 7, "finish_reason": "stop", "selected": True, "weight": 1.5},
                        {"tokens": 9, "finish_reason": "length", "selected": True, "cut": True},
                    ],
                },
                {
                    "life": "other",
                    "number": 2,
                    "kind": "rewards",
                    "prompts": [{"prompt_key": "a", "right": [1, 7.0, 0, 1, 1], "wrong": [0] * 5, "groups": [1, 1]}],
                },
                {"life": "other", "number": 3, "kind": "exploration", "policy": "cap", "groups": 8},
            ]
        },
    ],
    ("POST", "/darts/v1/vote"): [
        {"prompt": PROMPT, "n": 2, "sampling": SHORT, "pattern": "#([0-9])", "key": "a"},
        {"prompt": [5, 6, 7], "n": 2, "sampling": SHORT, "pattern": "boxed", "weights": "rank", "score": "logprob"},
        {"messages": MESSAGES, "n": 3, "sampling": {"seed": 1, **SHORT}, "pattern": {"choices": ["1", "2"]}},
    ],
    ("POST", "/darts/v1/rewards"): [
        {"rewards": [{"trajectory_id": "$trajectory", "reward": 1.0, "correct": True}]},
        {"rewards": [{"prompt_token_ids": [5, 6], "completion_token_ids": [7], "reward": 0.5}] * 2},
    ],
    ("PATCH", "/darts/v1/policy"): [{"policy": "darts_cut", "redundancy": 1.25, "num_longest": 1}],
    ("POST", "/darts/v1/weights"): [{"path": "full.safetensors", "rule": "keep"}, {"url": "http://127.0.0.1:9/a"}],
    ("POST", "/darts/v1/weights/lora/{name}"): [{"path": "indexed", "rule": "keep", "version": 7}],
    ("POST", "/v1/completions"): [
        {"model": "tiny", "prompt": PROMPT, "n": 2, **SHORT},
        {"model": "tiny", "prompt": [[5, 6, 7]], "n": 2, "logprobs": 1, "seed": 3, "stream": True, **SHORT},
        {"model": "tiny", "prompt": PROMPT, "vllm_xargs": {"darts_policy": "uniform"}, "request_id": "r", **SHORT},
        {"model": "tiny", "prompt": PROMPT, "n": 3, "structured_outputs": {"choice": ["1"]}, "ignore_eos": True},
    ],
    ("POST", "/v1/chat/completions"): [
        {"model": "tiny", "messages": MESSAGES, "n": 2, **SHORT},
        {"model": "tiny", "messages": MESSAGES, "n": 2, "logprobs": True, "top_logprobs": 2, "stream": True, **SHORT},
    ],
    ("POST", "/v1/responses"): [{"model": "tiny", "input": PROMPT, "max_output_tokens": 4}],
    ("POST", "/v1/messages"): [{"model": "tiny", "messages": MESSAGES, "max_tokens": 4}],
    ("POST", "/inference/v1/generate"): [
        {"model": "tiny", "token_ids": [5, 6, 7], "sampling_params": {"n": 2, "seed": 1, **SHORT}},
        {"model": "tiny", "token_ids": [5, 6, 7], "sampling_params": {"n": 2, **SHORT}, "stream": True},
    ],
}
"""Valid bodies to mutate. Routes without one get a body that is made from their schema."""
IDS = [
    "none",
    "$group",
    "$batch",
    "$trajectory",
    "a",
    "a%2Fb",
    "..%2F..",
    "a/b",
    "%00",
    "%0A",
    "%FF",
    "%ED%A0%80",
    "%F0%9F%98%80",
    "%E6%97%A5",
    "%20",
    ".",
    "%3Cscript%3E",
    "x" * 300,
    "x" * 20_000,
]
"""Parameters of paths, percent-encoded."""
QUERIES = [
    "",
    "keep",
    "finish",
    "restart",
    "0",
    "7",
    "-1",
    "1.5",
    "true",
    "NaN",
    "9" * 400,
    "9007199254740992",
    "%00",
    "%FF",
    "%0A",
    "null",
    "%7B%22r%22%3A2%2C%22lora_alpha%22%3A4%7D",
    "%7B%22r%22%3A1e999%7D",
    "%5B" * 2_000,
]
HEADERS = [
    "Idempotency-Key",
    "Last-Event-ID",
    "X-Darts-Policy",
    "X-Darts-Prompt-Key",
    "X-Darts-Group",
    "X-Darts-Unknown",
    "X-Request-Id",
    "X-Data-Parallel-Rank",
    "Content-Type",
    "Accept",
    "Authorization",
    "Origin",
    "Host",
    "Content-Encoding",
    "X-Forwarded-For",
    "Traceparent",
    "Range",
]
HEADER_VALUES = [
    "",
    "a",
    "1",
    "0",
    "-1",
    "1.5",
    "9" * 400,
    "off",
    "uniform",
    "darts_cut",
    "darts",
    "arrol",
    "id=a;size=2",
    "id=a/b;size=1",
    "id=;size=99999",
    "size=2",
    "a\tb",
    "a/b",
    "\xff",
    "\xe6\x97\xa5\xe6\x9c\xac",  # UTF-8, as Latin-1
    "\xed\xa0\x80",  # a surrogate in UTF-8
    "x" * 257,
    "x" * 8_000,
    "Bearer x",
    "text/event-stream",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=a",
    "application/json; charset=utf-16",
    "gzip",
    "http://example.com",
    "127.0.0.1, 10.1.1.1",
    "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
]
JSON = ("Content-Type", "application/json")
LIVE_SECONDS = 0.2
"""How long a stream without an end is read."""


@dataclass(frozen=True)
class Operation:
    """A method of a route. ``body``: a valid one, if it takes JSON. ``fields``: names from its schema."""

    method: str
    path: str
    path_parameters: tuple[str, ...]
    query_parameters: tuple[str, ...]
    header_parameters: tuple[str, ...]
    body: Any
    fields: tuple[str, ...]
    takes_upload: bool

    @property
    def is_admin(self) -> bool:
        """Whether it changes the server."""
        path = self.path
        for name in self.path_parameters:
            path = path.replace(f"{{{name}}}", "a")
        return access_of(self.method, path) is not RouteAccess.USE


def operations(description: Mapping[str, Any]) -> list[Operation]:
    """Return the routes to fuzz, each as often as it has bodies. ``description``: the server's /openapi.json."""
    return [
        operation
        for path, methods in description["paths"].items()
        if path.startswith(OURS) or path in SHAPED
        for method, described in methods.items()
        if method in METHODS
        for operation in _operations(description, method.upper(), path, described)
    ]


def valid_requests(choices: Sequence[Operation]) -> list[Request]:
    """Return a request with each valid body of a route that changes nothing."""
    return [json_request(each.method, each.path, each.body) for each in choices if each.body and not each.is_admin]


def _operations(
    description: Mapping[str, Any], method: str, path: str, described: Mapping[str, Any]
) -> Iterator[Operation]:
    parameters = described.get("parameters", [])
    named = {place: tuple(p["name"] for p in parameters if p["in"] == place) for place in ("path", "query", "header")}
    content = described.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema")
    bodies: Sequence[Any] = [None]
    if schema is not None:
        bodies = BODIES.get((method, path)) or [example_of(schema, description)]
    fields = tuple(dict.fromkeys(_fields(schema, description)))
    takes_upload = "application/octet-stream" in content
    for body in bodies:
        yield Operation(method, path, named["path"], named["query"], named["header"], body, fields, takes_upload)


def example_of(schema: Mapping[str, Any], description: Mapping[str, Any], depth: int = 0) -> Any:
    """Return a small value that fits a JSON schema, or nearly does."""
    schema = _resolved(schema, description)
    for known in ("const", "default", "example"):
        if known in schema:
            return schema[known]
    if "enum" in schema:
        return schema["enum"][0]
    for choice in ("anyOf", "oneOf", "allOf"):
        if choice in schema:
            return example_of(schema[choice][0], description, depth)
    kind = schema.get("type")
    match kind[0] if isinstance(kind, list) else kind:
        case "object" if depth < MAX_DEPTH:
            properties = schema.get("properties", {})
            return {
                name: example_of(properties.get(name, {}), description, depth + 1)
                for name in schema.get("required", [])
            }
        case "array" if depth < MAX_DEPTH:
            return [example_of(schema.get("items", {}), description, depth + 1)] * schema.get("minItems", 1)
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return True
        case "string":
            return "a"
    return None


def _fields(schema: Any, description: Mapping[str, Any], depth: int = 0) -> Iterator[str]:
    """Yield the names of all properties in a schema, those of inner objects too."""
    if depth == MAX_DEPTH or not isinstance(schema, dict):
        return
    schema = _resolved(schema, description)
    for name, each in schema.get("properties", {}).items():
        yield name
        yield from _fields(each, description, depth + 1)
    for inner in ("items", "additionalProperties"):
        yield from _fields(schema.get(inner), description, depth + 1)
    for choice in ("anyOf", "oneOf", "allOf"):
        for each in schema.get(choice, []):
            yield from _fields(each, description, depth + 1)


def _resolved(schema: Mapping[str, Any], description: Mapping[str, Any]) -> Mapping[str, Any]:
    while "$ref" in schema:
        node: Any = description
        for part in schema["$ref"].removeprefix("#/").split("/"):
            node = node[part]
        schema = node
    return schema


SEVERAL = st.one_of(st.just([]), *[st.lists(MUTATIONS, min_size=1, max_size=3)] * 4)
"""Mutations of a body; now and then it is valid."""
UPLOADS = st.one_of(
    st.sampled_from([Upload(name) for name in WEIGHTS]),
    st.builds(Upload, st.just(STATE), st.lists(MUTATIONS, max_size=3).map(tuple)),
)


@st.composite
def requests(draw: st.DrawFn, choices: Sequence[Operation]) -> Request:
    """Draw a request with up to three mutations of its body, and parameters and headers of all kinds."""
    operation = draw(st.sampled_from(choices))
    path = operation.path
    for name in operation.path_parameters:
        path = path.replace(f"{{{name}}}", draw(st.sampled_from(IDS))).replace(f"{{{name}:path}}", "a")
    query = [f"{name}={draw(st.sampled_from(QUERIES))}" for name in _some(draw, operation.query_parameters)]
    headers = dict([JSON])
    names = [*operation.header_parameters, *HEADERS]
    for _ in range(draw(st.sampled_from([0, 0, 0, 0, 1, 2]))):
        headers[draw(st.sampled_from(names))] = draw(st.sampled_from(HEADER_VALUES))
    body: bytes | Upload = b""
    if operation.body is not None:
        body = mutated(operation.body, draw(SEVERAL), operation.fields)
    elif operation.takes_upload:
        body = draw(UPLOADS)
    return Request(
        operation.method,
        operation.path,
        path + ("?" + "&".join(query) if query else ""),
        tuple(headers.items()),
        body,
        background=True,
        leaves_after=LIVE_SECONDS if headers.get("Accept") == "text/event-stream" else None,
    )


def _some(draw: st.DrawFn, names: Sequence[str]) -> Sequence[str]:
    """Draw some of the names: mostly all of them, so that a required one is seldom missing."""
    missing = draw(st.integers(0, 2 * len(names))) if names else 0
    return [name for place, name in enumerate(names) if place != missing - 1]


def json_request(method: str, path: str, body: Any, **options: Any) -> Request:
    """Return a request with a JSON body."""
    headers = (JSON, *options.pop("headers", ()))
    return Request(method, path.partition("?")[0], path, headers, json.dumps(body).encode(), **options)
