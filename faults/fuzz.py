"""Fuzz a server with the tiny model: callers send, at the same time, what hypothesis and schemathesis draw.

python -m faults.fuzz --requests 10000

An example is a few callers, each with a sequence of requests: those that schemathesis draws from the server's OpenAPI
description, valid bodies with hostile values in them, and requests that depend on each other. After each example every
answer must be as documented, the engine idle, and a plain group served. What fails is printed as curl commands.
"""

import argparse
import asyncio
import copy
import itertools
import json
import re
import shlex
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn
from urllib.parse import urlsplit

import httpx
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, Verbosity, assume, given, seed, settings
from hypothesis import strategies as st
from safetensors.torch import save
from schemathesis.core.result import Ok
from schemathesis.specs.openapi import checks
from tqdm import tqdm

from darts_server.offline.demo.server import DARTS, Launch, Server, launch, serving
from darts_server.store.archive import LIMIT_BYTES, pack, unpack
from faults import rude
from faults.rude import FLOOD, FLOODING_KEY, KEY, RUDE
from faults.stopwatch import Stopwatch, processes
from tests.integration.fork_server import Forks, ForkServer, can_fork
from tests.integration.waiting import wait_idle
from tests.integration.weights import ORIGINAL

FLAGS = (
    *("--enable-scale-out", "--group-wait", "0.2", "--group-name-wait", "1"),
    *("--weights-timeout", "1"),  # a sequence may leave an update unfinished
    *("--max-model-len", "160"),  # the longest request takes that many steps of the engine, and others wait for it
    *("--worker-extension-cls", "tests.integration.backend.Extension"),
    *("--weight-transfer-config", '{"backend": "file"}'),
    *("--api-key", KEY, FLOODING_KEY, "--max-candidates-per-key", "600"),
)
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}
CALLERS, MAX_STEPS, ROUND = 8, 10, 20
"""Of an example, of a caller, and examples of a round. The seed of a round repeats what is sent."""
ANSWER_SECONDS, IDLE_SECONDS, SERVED_SECONDS, HEALTH_SECONDS = 30.0, 90.0, 2.0, 1.0
"""For the answers of an example, until the server is idle, for a plain group then, and for /health at any time. A batch
whose caller has left may run for a minute."""
MAX_GROWTH_MIB = 400
"""Of the server's memory in an example. A text of `RAW` that is tokenized takes 500."""
EXIT_SECONDS, SHRINK_SECONDS = 20.0, 90.0
"""In which a server whose engine is dead exits, and for which smaller examples of a failure are tried."""

OURS, ROLLOUTS, BATCH = "/darts/v1/", "/darts/v1/rollouts", "/darts/v1/rollouts/{batch_id}"
STATE, WEIGHTS, POLICY, LIVE = "/darts/v1/state", "/darts/v1/weights", "/darts/v1/policy", "/darts/v1/live"
COMPLETIONS, CHAT, TOKENS = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
SHAPED = (COMPLETIONS, CHAT, TOKENS, "/v1/responses", "/v1/messages")
TEXTS = (
    *("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/chat/completions/batch"),
    *("/v1/completions/render", "/v1/chat/completions/render"),
)
"""Other routes that take text."""
VLLMS_ERRORS = ("/start_weight_update", "/update_weights", "/finish_weight_update", "/pause", "/sleep", "/wake_up")
"""Where vLLM itself answers 500, and logs why, to calls in the wrong order, or that took too long."""
DISRUPTIVE = (*VLLMS_ERRORS, "/abort_requests", WEIGHTS, BATCH)
"""Routes that may end or fail other requests with a 503, as their documentation says."""
CHECKS = [
    *(checks.status_code_conformance, checks.content_type_conformance, checks.negative_data_rejection),
    *(checks.response_headers_conformance, checks.response_schema_conformance),
]

PROMPT = "7a-5b*4>"
SHORT, LONG = {"max_tokens": 4}, {"max_tokens": 60, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": PROMPT}]
LONG_CHAT = [{"role": "user", "content": "$text"}]
PROMPTS = [{"text": PROMPT, "key": "a", "metadata": {"answer": 8}}, {"token_ids": [5, 6, 7]}]
GROUPS = {"prompts": PROMPTS, "group_size": 2, "sampling": SHORT}
ROW = {"prompts": PROMPTS * 2, "group_size": 4, "sampling": {"max_tokens": 100}, "num_groups": 2, "carried": True}
"""A batch of a row: it goes on with what those before it carried over, and carries over some itself."""
SAMPLED = {"seed": 1, "logprobs": True, "stop": ["#"], **SHORT}
TINY = {"model": "tiny", "prompt": PROMPT, "n": 3, **LONG}
TINY_CHAT = {"model": "tiny", "messages": MESSAGES, **SHORT}
TINY_TOKENS = {"model": "tiny", "token_ids": [5, 6, 7], "sampling_params": {"n": 2, "seed": 1, **SHORT}}
REWARD = {"trajectory_id": "$trajectory", "reward": 1.0, "correct": True}
SENT: list[tuple[str, str, Any]] = [
    ("POST", ROLLOUTS, GROUPS),
    ("POST", ROLLOUTS, {**GROUPS, "prompts": [{"messages": MESSAGES}], "sampling": SAMPLED}),
    ("POST", ROLLOUTS, {**GROUPS, "policy": {"name": "darts_cut", "redundancy": 1.5}, "budget": 8, "stream": "groups"}),
    ("POST", ROLLOUTS, {**GROUPS, "policy": {"name": "auto"}}),
    ("POST", ROLLOUTS, {**GROUPS, "num_groups": 1, "carry": "restart", "survivors": False, "stream": "groups"}),
    ("POST", ROLLOUTS, {**GROUPS, "prompts": [], "carried": True, "carry": "restart"}),
    ("POST", ROLLOUTS, {**GROUPS, "sampling": LONG, "stream": "tokens", "chunk_tokens": 5}),
    ("POST", ROLLOUTS, {**ROW, "carried": False, "carry": "drop"}),
    *(("POST", ROLLOUTS, {**ROW, "carry": carry, "stream": "tokens"}) for carry in ("restart", "resume")),
    *(("POST", ROLLOUTS, {**ROW, "carry": "resume", "policy": {"name": name}}) for name in ("uniform", "darts_cut")),
    ("POST", "/darts/v1/vote", {"prompt": PROMPT, "n": 2, "sampling": SHORT, "pattern": "#([0-9])", "key": "a"}),
    (
        "POST",
        "/darts/v1/vote",
        {"prompt": [5], "n": 3, "sampling": LONG, "pattern": {"choices": ["1"]}, "weights": "rank"},
    ),
    (
        "POST",
        "/darts/v1/vote",
        {"messages": MESSAGES, "n": 3, "sampling": SAMPLED, "pattern": "boxed", "score": "head"},
    ),
    ("POST", "/darts/v1/rewards", {"rewards": [REWARD, REWARD, {"trajectory_id": "$group:0", "reward": -1}]}),
    ("POST", "/darts/v1/rewards", {"rewards": [{"prompt_token_ids": [5], "completion_token_ids": [7], "reward": 0.5}]}),
    ("PATCH", POLICY, {"policy": "darts_cut", "redundancy": 1.25, "num_longest": 1}),
    ("PATCH", POLICY, {"policy": "off"}),
    ("POST", COMPLETIONS, TINY),
    ("POST", COMPLETIONS, {**TINY, "prompt": [[5, 6, 7]], "logprobs": 1, "seed": 3, "stream": True}),
    ("POST", COMPLETIONS, {**TINY, "vllm_xargs": {"darts_policy": "uniform"}, "request_id": "r-$run"}),
    ("POST", COMPLETIONS, {**TINY, "structured_outputs": {"choice": ["1"]}, "stream": True}),
    ("POST", COMPLETIONS, {**TINY, "model": "tiny:raw", "request_id": "r-$run"}),
    *(("POST", CHAT, {**TINY_CHAT, "n": 2, "logprobs": True, "top_logprobs": 2, "stream": on}) for on in (False, True)),
    *(("POST", TOKENS, {**TINY_TOKENS, "stream": on}) for on in (False, True)),
    ("POST", "/v1/responses", {"model": "tiny", "input": PROMPT, "max_output_tokens": 4}),
    ("POST", "/v1/messages", TINY_CHAT),
    # Too long to be tokenized.
    *(("POST", path, {"model": "tiny", "prompt": "$text"}) for path in ("/tokenize", COMPLETIONS)),
    ("POST", COMPLETIONS, {"model": "tiny", "prompt": "$text", "truncate_prompt_tokens": 8, **SHORT}),
    *(
        ("POST", path, {"model": "tiny", "messages": LONG_CHAT, **SHORT})
        for path in ("/tokenize", CHAT, "/v1/messages")
    ),
    ("POST", ROLLOUTS, {**GROUPS, "prompts": [{"messages": LONG_CHAT}]}),
    ("POST", CHAT, {"model": "tiny", "messages": "$chat"}),
    ("POST", "/tokenize", {"model": "tiny", "prompt": PROMPT}),
    ("POST", "/tokenize", {"model": "tiny", "messages": MESSAGES}),
    ("POST", "/detokenize", {"model": "tiny", "tokens": [5, 6, 7]}),
    ("POST", "/v1/messages/count_tokens", {"model": "tiny", "messages": MESSAGES}),
    ("POST", "/v1/chat/completions/batch", {**TINY_CHAT, "messages": [MESSAGES, MESSAGES]}),
    ("POST", "/v1/completions/render", {"model": "tiny", "prompt": PROMPT}),
    ("POST", "/v1/chat/completions/render", TINY_CHAT),
    *(
        ("GET", path, None)
        for path in (BATCH, BATCH, "/darts/v1/groups/{group_id}", "/darts/v1/prompts/a", LIVE, STATE)
    ),
    ("DELETE", BATCH, None),
    ("PUT", STATE, None),
    *(("PUT", f"{WEIGHTS}?rule={rule}", None) for rule in ("finish", "keep", "restart")),
    # vLLM's own routes, with VLLM_SERVER_DEV_MODE=1.
    *(("POST", f"/pause?mode={mode}", None) for mode in ("abort", "wait", "keep")),
    *(("POST", path, None) for path in ("/resume", "/resume", "/sleep?level=1", "/wake_up", "/reset_prefix_cache")),
    *(("POST", "/abort_requests", body) for body in ({}, {"request_ids": ["r-$run", "$group", "none"]})),
    *(("POST", path, {}) for path in ("/start_weight_update", "/finish_weight_update")),
    ("POST", "/update_weights", {"update_info": {"path": "$folder/weights", "names": ["model.norm.weight"]}}),
]
"""Valid requests. ``$batch``, ``$group``, ``$trajectory``: the last such id that the caller was sent. ``$run``: a
number of the caller. ``$folder``: one with weights."""
SENT_IDS = {
    "$batch": re.compile(r'"id": ?"(batch-[0-9a-f]+)"'),
    "$trajectory": re.compile(r'"trajectory_id": ?"([^"\\]+)"'),
}
SERVER_ERROR = re.compile(r'"code": ?"?(5\d\d)')
JSON = ("Content-Type", "application/json")
HEADERS = ["Idempotency-Key", "Last-Event-ID", "X-Darts-Policy", "X-Darts-Prompt-Key", "X-Darts-Group", "X-Request-Id"]
HEADERS += ["X-Darts-Unknown", "X-Data-Parallel-Rank", "Content-Type", "Accept", "Content-Encoding", "Origin", "Host"]
VALUES = ["", "a", "1", "-1", "key-$run", "id=$run;size=2", "id=a/b;size=1", "id=;size=99999", "uniform", "off", "a\tb"]
VALUES += ["9" * 400, "\xff", "\xed\xa0\x80", "x" * 257, "x" * 8_000, "text/event-stream", "gzip", "http://example.com"]
HOSTILE: list[Any] = [
    *(None, True, False, 0, 1, 2, -1, 64, 1.0, 1.5, "", "a", [], {}, [None], [[1]], {"a": {}}, "1", [-5], ["a"]),
    *(2**31 - 1, 2**31, 2**53, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400, 1e-320, 1e308, float("nan")),
    *("\n", "\0", "\ud800", "日本", "../..", "x" * 300, "(", "((a+)+)$", "(.{0,1000}){0,1000}", [2**64], ["\ud800"]),
    *(
        "$number",
        "$octal",
        "$deep",
        "$deeper",
        "$long",
        "$tokens",
        "$texts",
        "$objects",
        "$twice",
        "$text",
        "$text",
        "$chat",
    ),
    *({"5": 100}, {"-1": 1}, {"5": "x"}, {"regex": "(("}, {"regex": "(a{1000}){1000}"}, {"json": {"$ref": "#"}}),
    *({"json": {"type": "wrong"}}, {"grammar": 'root ::= "a" root'}, {"structural_tag": "x"}, {"choice": []}),
    *({"type": "json_schema", "json_schema": {"name": "a"}}, [{"role": "user"}], [{"role": "user", "content": None}]),
    *(
        {"darts_policy": "off"},
        {"darts_group_id": "a", "darts_group_size": 2},
        {"darts_group_size": 10**30},
        "darts_cut",
    ),
]
RAW = {
    "$number": "1e400",
    "$octal": "01",
    "$deep": "[" * 100_000 + "]" * 100_000,
    "$deeper": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "$long": '"' + "x" * 100_000 + '"',
    "$tokens": "[" + "5," * 20_000 + "5]",
    "$texts": "[" + '"x",' * 20_000 + '"x"]',
    "$objects": "[" + '{"a":1},' * 5_000 + '{"a":1}]',
    "$twice": '{"a":1,"a":2}',
    "$text": '"' + PROMPT * 320_000 + '"',
    "$chat": "[" + '{"role":"user","content":"a"},' * 100_000 + '{"role":"user","content":"a"}]',
}
"""JSON that Python cannot write, or that is too long to print. It takes the place of these names when it is sent."""
Mutation = tuple[int, str, Any]
"""The place of a value inside a body, the name of a field if one is to be added there, and the new value."""


@dataclass(frozen=True)
class Step:
    """A request of a caller.

    Attributes:
        route: as the description names it.
        target: path and query.
        mutations: of the body, or for ``PUT /darts/v1/state`` of the saved documents.
        waits: seconds that the caller's next request waits for this one's answer.
        leaves: seconds until the caller disconnects.
        case: that schemathesis has drawn, to check the answer by.
    """

    method: str
    route: str
    target: str
    body: Any = None
    mutations: tuple[Mutation, ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    waits: float = 0.0
    leaves: float | None = None
    case: schemathesis.Case[Any] | None = field(default=None, compare=False)

    @property
    def disrupts(self) -> bool:
        """Whether other requests at the same time may end with a 503 for it."""
        return self.route in DISRUPTIVE and self.method != "GET"


Example = Sequence[Sequence[Step]]
"""The steps of each caller."""


@dataclass
class Answer:
    """What was sent and what came back. ``status``: none if the caller left or the connection ended."""

    step: Step
    url: str = ""
    body: bytes = b""
    status: int | None = None
    error: str = "no answer"
    text: str = ""
    response: httpx.Response | None = None

    @property
    def outcome(self) -> str:
        return str(self.status or self.error.partition(":")[0])

    @property
    def is_overdue(self) -> bool:
        """Whether a rude caller got no answer in time, which a busy machine can cause too."""
        if self.step.route == rude.FLOOD:
            return self.status is None
        return self.step.method == RUDE and self.status == 0

    def curl(self, file: Path) -> str:
        """Return a command that sends the request. ``file``: written with a body that is too long for a command."""
        if self.step.method == RUDE:
            return f"# {self.step.route!r} of faults/rude.py: {self.outcome}"
        command = ["curl", "-sS", "-X", self.step.method, self.url, "-H", f"Authorization: Bearer {KEY}"]
        command += [word for header in self.step.headers for word in ("-H", ": ".join(header))]
        command += [] if self.step.leaves is None else ["-m", f"{self.step.leaves:g}"]
        if len(self.body) < 500 and self.body.isascii() and self.body.decode().isprintable():
            command += ["--data-binary", self.body.decode()] if self.body else []
        else:
            file.write_bytes(self.body)
            command += ["--data-binary", f"@{file}"]
        return shlex.join(command) + f"  # {self.outcome}"


class Failure(Exception):
    """What must not happen. ``kind``: what failures of one cause have in common."""

    def __init__(self, kind: str, detail: object = "", is_sound: bool = False) -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind, self.is_sound = kind, is_sound

    def __str__(self) -> str:
        return "\n".join(self.args)


# --- what is sent -----------------------------------------------------------


def examples(description: dict[str, Any], url: str) -> st.SearchStrategy[Example]:
    """Draw what callers send. ``description``: the server's /openapi.json."""
    fields = sorted(description["components"]["schemas"]["CompletionRequest"]["properties"])
    name = st.sampled_from(["", "", *fields, "name", "key", "unknown", "\ud800", "a" * 10_000])
    mutation = st.tuples(st.integers(0, 40), name, st.sampled_from(HOSTILE))
    mutations = st.one_of(st.just(()), st.lists(mutation, min_size=1, max_size=3).map(tuple))
    header = st.tuples(st.sampled_from(HEADERS), st.sampled_from(VALUES))
    headers = st.one_of(*[st.just(())] * 4, st.lists(header, max_size=2, unique_by=lambda each: each[0]).map(tuple))
    waits, leaves = st.sampled_from([0.0, 0.0, 0.05, 0.5]), st.sampled_from([None, None, None, None, 0.001, 0.05, 0.3])
    steps = [Step(method, path.partition("?")[0], path, body) for method, path, body in SENT]
    impolite = [Step(RUDE, name, name) for name in rude.CALLERS]
    flood = Step(RUDE, FLOOD, FLOOD)
    of_schema = st.one_of(*_drawn(description, url))

    @st.composite
    def any_step(draw: st.DrawFn, is_calm: bool) -> Step:
        kind = draw(st.integers(0, 17))
        if kind >= 15:
            step: Step = draw(of_schema)
            assume(not (is_calm and step.disrupts))
        elif kind == 14:
            # Others may end what is sent during a flood, if the example is not calm.
            return draw(st.sampled_from([*impolite, flood] if is_calm else impolite))
        else:
            step = draw(st.sampled_from([each for each in steps if not (is_calm and each.disrupts)]))
            if step.route.startswith(OURS) or step.route in (*SHAPED, *TEXTS):
                step = replace(step, mutations=draw(mutations), headers=(JSON, *draw(headers)))
        return replace(step, waits=draw(waits), leaves=0.3 if step.route == LIVE else draw(leaves))

    def callers(is_calm: bool) -> st.SearchStrategy[Example]:
        return st.tuples(*[st.lists(any_step(is_calm), max_size=MAX_STEPS)] * CALLERS)

    # Apart, so that only requests which others may end are allowed to fail for it.
    return st.one_of(callers(True), callers(True), callers(False))


def _drawn(description: dict[str, Any], url: str) -> Iterator[st.SearchStrategy[Step]]:
    """Yield for each route what draws valid requests and what draws others."""
    description = copy.deepcopy(description)
    for operation in itertools.chain(*(methods.values() for methods in description["paths"].values())):
        operation.pop("security", None)  # every request is sent with a key
    schema, modes = schemathesis.openapi.from_dict(description), schemathesis.GenerationMode
    for route in (each.ok() for each in schema.get_all_operations() if isinstance(each, Ok)):
        if route.path.startswith(OURS) or route.path in SHAPED:
            yield route.as_strategy(modes.POSITIVE).map(partial(_step_of, url))
            if route.body or route.query or route.headers:  # no id is invalid
                yield route.as_strategy(modes.NEGATIVE).map(partial(_step_of, url))


def _step_of(url: str, case: schemathesis.Case[Any]) -> Step:
    sent = requests.Request(**case.as_transport_kwargs(base_url=url)).prepare()
    parts = urlsplit(str(sent.url))
    headers = tuple((name, str(sent.headers[name])) for name in {*case.headers, "Content-Type"} if name in sent.headers)
    target = parts.path + ("?" + parts.query if parts.query else "")
    return Step(case.method, case.path, target, sent.body or b"", headers=headers, case=case)


def mutated(body: Any, mutations: Sequence[Mutation]) -> str:
    """Return the body, with these values in it, as JSON."""
    tree = [copy.deepcopy(body)]
    for place, name, value in mutations:
        inner = list(_values(tree))
        container, key = inner[place % len(inner)]
        if name and isinstance(container[key], dict):
            container, key = container[key], name
        container[key] = copy.deepcopy(value)
    text = json.dumps(tree[0])
    for name, raw in RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text


def _values(container: Any) -> Iterator[tuple[Any, Any]]:
    """Yield container and key of each value in it, at any depth."""
    for key in list(container) if isinstance(container, dict) else range(len(container)):
        yield container, key
        if isinstance(container[key], dict | list):
            yield from _values(container[key])


# --- sending and checking ---------------------------------------------------


class Fuzzer:
    """Sends examples to a server, and starts another one when that is no longer sound.

    Args:
        start: a server, with its log in this file.
        folder: for logs, weights, and long bodies of a failure.

    Attributes:
        answers: requests by method and route, and by status or why there is none; those that shrink a failure too.
        report: of the smallest example that failed.
    """

    def __init__(self, start: Callable[[Path], AbstractContextManager[Server]], folder: Path) -> None:
        self.answers: Counter[tuple[str, str]] = Counter()
        self.report, self.longest_health = "", 0.0
        self._start, self._folder = start, folder
        self._life, self._runner, self._bar = ExitStack(), asyncio.Runner(), tqdm(unit="request", smoothing=0.05)
        self._runs, self._starts = itertools.count(time.time_ns()), itertools.count()
        whole = save(ORIGINAL)
        scaled = save({name: tensor * 1.001 for name, tensor in ORIGINAL.items()})
        self._weights = [whole, scaled, whole[:-100], (2**63).to_bytes(8, "little") + b"{}", b""]
        (folder / "weights").write_bytes(whole)

    def __enter__(self) -> "Fuzzer":
        self._server = self._connect()
        return self

    def __exit__(self, *_: object) -> None:
        self._life.close()
        self._runner.close()
        self._bar.close()

    def run(self, first_seed: int, count: int) -> bool:
        """Send at least this many requests, in rounds with the seeds ``first_seed``, ``first_seed`` + 1, …

        Return whether all went well; otherwise ``report`` has what did not.
        """
        description = httpx.get(f"{self._server.url}/openapi.json", timeout=ANSWER_SECONDS).json()
        strategy = examples(description, self._server.url)
        found: tuple[Example, Failure] | None = None
        self._bar.reset(count)
        for round_seed in itertools.count(first_seed):

            @seed(round_seed)
            @settings(
                max_examples=ROUND,
                phases=[Phase.generate],
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                verbosity=Verbosity.quiet,
            )
            @given(strategy)
            def run_round(example: Example) -> None:
                nonlocal found
                if found is None and self.answers.total() < count:
                    if (failure := self._failure_of(example)) is not None:
                        found = example, failure
                    self._bar.update(self.answers.total() - self._bar.n)

            run_round()
            if found is not None:
                sent = self.answers.total()
                again = f"after {sent} requests; the whole round: python -m faults.fuzz --seed {round_seed}"
                self.report = f"{again}\n{self._smallest(*found)}"
            if found is not None or self.answers.total() >= count:
                return found is None
        raise AssertionError("rounds do not end")

    def _smallest(self, example: Example, failure: Failure) -> Failure:
        """Leave out requests while the failure stays the same, half of them first.

        Hypothesis would do it too, but an example takes a second, and to get from 40 requests to 4 it took 1,300.
        """
        steps = [(caller, step) for caller, each in enumerate(example) for step in each]
        part, deadline = max(1, len(steps) // 2), time.monotonic() + SHRINK_SECONDS
        while part and time.monotonic() < deadline:
            for first in reversed(range(0, len(steps), part)):
                fewer = steps[:first] + steps[first + part :]
                again = self._failure_of([[s for by, s in fewer if by == caller] for caller in range(CALLERS)])
                if again is not None and again.kind == failure.kind:
                    steps, failure = fewer, again
            part //= 2
        return failure

    def _failure_of(self, example: Example) -> Failure | None:
        """Send an example; return what went wrong, with the commands that repeat it."""
        try:
            self._runner.run(self._run(example))
            return None
        except Failure as error:
            failure = error
        except (AssertionError, httpx.HTTPError) as error:
            failure = Failure("the server hangs", repr(error))
        failure.args += tuple(each.curl(self._folder / f"body-{place}") for place, each in enumerate(self._sent))
        if not failure.is_sound:
            failure.args += (self._cause(),)
            self._life.close()
            self._server = self._connect()
        return failure

    def _cause(self) -> str:
        """Return how the server has exited, or what its log says last. A server whose engine is dead exits soon."""
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = self._server.process.wait(EXIT_SECONDS)
        lines = self._server.log.read_text(errors="replace").splitlines()
        causes = [line for line in lines if " CRITICAL " in line or " ERROR " in line]
        return f"exit code {code}; {(causes or lines or [''])[-1][:300]}"

    def _connect(self) -> Server:
        server = self._life.enter_context(self._start(self._folder / f"server-{next(self._starts)}.log"))
        self._runner.run(self._prepare(server))
        self._threads, self._logged = {server.process.pid, threading.get_native_id()}, server.log.stat().st_size
        return server

    async def _prepare(self, server: Server) -> None:
        """Let the server learn something of each kind, and load what it loads with the first request of a kind."""
        self._sent: list[Answer] = []
        async with _client(server) as client:
            sent = [
                each for each in SENT if each[2] and each[1] != POLICY and not any(name in str(each[2]) for name in RAW)
            ]
            steps = [Step(method, path, path, body) for method, path, body in sent]
            await asyncio.gather(*(self._call(client, [step]) for step in steps if not step.disrupts))
            policy = (await client.get(POLICY)).raise_for_status().json()
            self._policy = {name: value for name, value in policy.items() if name != "policies"}
            self._state = (await client.get(STATE)).raise_for_status().content

    async def _run(self, example: Example) -> None:
        """Send an example, undo what it has changed, and check everything.

        Raises:
            Failure: of the server.
            AssertionError: it does not get idle.
            HTTPError: it does not answer.
        """
        steps, server = list(itertools.chain(*example)), self._server
        before = _peak_mib(server)
        for _ in range(2):  # the machine may be busy once
            self._sent = []
            async with _client(server) as client:
                health = asyncio.create_task(self._watch_health(client))
                try:
                    await self._send_all(client, example)
                    await self._restore(client, {step.route for step in steps if step.method != "GET"})
                    await asyncio.to_thread(wait_idle, server, IDLE_SECONDS)
                    took = Stopwatch(processes(server.process.pid))
                    is_served, served = await _is_served(client), took.seconds()
                finally:
                    health.cancel()
                    await asyncio.gather(health, return_exceptions=True)
            self.answers.update((f"{each.step.method} {each.step.route}", each.outcome) for each in self._sent)
            self.longest_health = max(self.longest_health, self._longest)
            is_fast = self._longest < HEALTH_SECONDS and served < SERVED_SECONDS
            if is_fast and is_served and not any(each.is_overdue for each in self._sent):
                break
        if not (is_fast and is_served):
            raise Failure("slow", f"/health took {self._longest:.1f} s; a plain group {is_served} in {served:.1f} s")
        if (grown := _peak_mib(server) - before) > MAX_GROWTH_MIB:
            raise Failure("memory", f"the server has grown by {grown:.0f} MiB")
        for answer in self._sent:
            check_answer(answer, any(step.disrupts for step in steps))
        with server.log.open(errors="replace") as log:
            log.seek(self._logged)
            written = log.read()
            self._logged = log.tell()
        forbidden = "never retrieved|was never awaited"
        if not any(step.route in VLLMS_ERRORS for step in steps):
            forbidden += r"|^(\(darts-server.*)?Traceback"  # vLLM logs some refusals with one, after its name
        if found := re.search(rf".*({forbidden})(.*\n){{0,40}}", written, re.MULTILINE):
            raise Failure("logged", found[0], is_sound=True)

    async def _send_all(self, client: httpx.AsyncClient, example: Example) -> None:
        """Let the callers send, wait for all answers, and resume what was paused."""
        routes = {step.route for steps in example for step in steps}
        pending = {asyncio.create_task(self._call(client, steps)) for steps in example if steps}
        deadline = time.monotonic() + ANSWER_SECONDS
        pauses = bool(routes & {*VLLMS_ERRORS})
        while pending and time.monotonic() < deadline:
            _, pending = await asyncio.wait(pending, timeout=2.0 if pauses else ANSWER_SECONDS)
            if pauses:
                await self._resume(client, "/start_weight_update" in routes)
        if pending:
            for caller in pending:
                caller.cancel()
            await asyncio.wait(pending)
            raise Failure("no answer", f"after {ANSWER_SECONDS:.0f} s")

    async def _resume(self, client: httpx.AsyncClient, ends_update: bool = False) -> None:
        """End all pauses, and those of requests that are still under way though their callers have left."""
        if ends_update:
            await client.post("/finish_weight_update", json={})
        deadline = time.monotonic() + ANSWER_SECONDS
        while httpx.codes.CONFLICT in [(await client.post(path)).status_code for path in ("/wake_up", "/resume")]:
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.05)

    async def _call(self, client: httpx.AsyncClient, steps: Sequence[Step]) -> None:
        """Send the requests of one caller, and wait for all answers."""
        ids = {"$run": str(next(self._runs)), "$batch": "none", "$group": "none", "$trajectory": "none:0"}
        ids["$folder"] = str(self._folder)
        async with asyncio.TaskGroup() as tasks:
            for step in steps:
                self._sent.append(answer := Answer(step))
                await asyncio.wait([tasks.create_task(self._send(client, answer, ids))], timeout=step.waits)

    async def _send(self, client: httpx.AsyncClient, answer: Answer, ids: dict[str, str]) -> None:
        step = answer.step
        if step.method == RUDE:
            if step.route == FLOOD:
                answer.status = await rude.flood(client, partial(_is_served, client))
            else:
                answer.status = await rude.call(str(client.base_url), step.route)
            return
        ids["{batch_id}"], ids["{group_id}"] = ids["$batch"], ids["$group"]

        def fill(text: str) -> str:
            for name, value in ids.items():
                text = text.replace(name, value)
            return text

        content = self._content(step)
        answer.body = fill(content).encode() if isinstance(content, str) else content
        answer.url = f"{str(client.base_url).rstrip('/')}{fill(step.target)}"
        url = client.base_url.copy_with(raw_path=fill(step.target).encode())
        headers = [(name.encode(), fill(value).encode("latin-1", "replace").strip()) for name, value in step.headers]
        try:
            async with (
                asyncio.timeout(step.leaves),
                client.stream(step.method, url, headers=headers, content=answer.body, timeout=None) as response,
            ):
                answer.status, answer.response = response.status_code, response
                ids["$group"] = response.headers.get("X-Darts-Group-Id", ids["$group"])
                async for part in response.aiter_text():
                    answer.text += part
                    for name, pattern in SENT_IDS.items():
                        ids[name] = (pattern.findall(part) or [ids[name]])[-1]
        except TimeoutError:
            answer.status, answer.error = None, "left"
        except httpx.TransportError as error:
            answer.status, answer.error = None, f"dropped: {error!r}"

    def _content(self, step: Step) -> str | bytes:
        if step.case is not None:
            return step.body if isinstance(step.body, bytes) else step.body.encode()
        if step.method == "PUT" and step.route == WEIGHTS:
            return self._weights[sum(place for place, _, _ in step.mutations) % len(self._weights)]
        if step.method == "PUT" and step.route == STATE:
            rows = list(unpack(self._state, LIMIT_BYTES))
            for mutation in step.mutations:
                row = mutation[0] % len(rows)
                rows[row] = (*rows[row][:2], mutated(json.loads(rows[row][2]), [mutation]))
            return pack(rows)
        return "" if step.body is None else mutated(step.body, step.mutations)

    async def _watch_health(self, client: httpx.AsyncClient) -> None:
        self._longest = 0.0
        while True:
            took = Stopwatch(self._threads)
            try:
                await client.get("/health")
            finally:  # a poll that still waits at the end counts
                self._longest = max(self._longest, took.seconds())
            await asyncio.sleep(0.1)

    async def _restore(self, client: httpx.AsyncClient, routes: Set[str]) -> None:
        """Undo what requests to these routes have changed."""
        if routes & {WEIGHTS, *VLLMS_ERRORS}:
            deadline = time.monotonic() + ANSWER_SECONDS
            while (served := (await client.get(WEIGHTS)).json())["state"] != "serving":
                if time.monotonic() > deadline:
                    raise Failure("weights", f"their state is still {served['state']}")
                await asyncio.sleep(0.05)
            await self._resume(client)
            if not served["intact"]:
                (await client.put(WEIGHTS, content=self._weights[0])).raise_for_status()
        if POLICY in routes:
            (await client.patch(POLICY, json=self._policy)).raise_for_status()
        if STATE in routes:
            if not await _is_served(client):
                raise Failure("no group is served with a restored state")
            (await client.put(STATE, content=self._state)).raise_for_status()


def _client(server: Server) -> httpx.AsyncClient:
    # A kept connection would sometimes be closed by the server while a request is sent on it.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.AsyncClient(base_url=server.url, headers=headers, timeout=ANSWER_SECONDS, limits=limits, verify=False)


async def _is_served(client: httpx.AsyncClient) -> bool:
    """Return whether a plain group comes back whole."""
    answer = await client.post(ROLLOUTS, json={**GROUPS, "group_size": 4})
    return answer.is_success and [len(group["trajectories"]) for group in answer.json()["groups"]] == [4, 4]


def _peak_mib(server: Server) -> float:
    """Return the most memory that the API process has had."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def check_answer(answer: Answer, is_disrupted: bool) -> None:
    """Check one answer. ``is_disrupted``: whether another request may have ended this one with a 503.

    Raises:
        Failure: it is not as documented.
    """
    step, response, text = answer.step, answer.response, answer.text
    where = f"{step.method} {step.route}"
    if step.method == RUDE:
        if step.route == FLOOD and answer.status is None:
            raise Failure("a key is not served while another one floods")
        if step.route != FLOOD and answer.status not in (None, *rude.CALLERS[step.route].expected):
            raise Failure(f"{where} status {answer.status}", is_sound=True)
        return
    if answer.error.startswith("dropped"):
        raise Failure(f"{where} dropped", answer.error)
    if answer.status is None or response is None:
        return
    wrong = {code for code in (answer.status, *map(int, SERVER_ERROR.findall(text))) if code >= 500}
    wrong -= {501, 503} if is_disrupted else {501}
    if wrong and step.route not in VLLMS_ERRORS:
        raise Failure(f"{where} status {wrong}", text[:300] + "…" + text[-300:], is_sound=True)
    is_ours = step.route.startswith(OURS)
    if response.headers.get("Content-Type", "").startswith("application/json"):
        try:
            parsed = json.loads(text, parse_constant=_reject)
        except ValueError as error:
            raise Failure(f"{where} is no JSON", f"{error}: {text[:300]}", is_sound=True) from error
        has_error = isinstance(parsed, dict) and isinstance(parsed.get("error"), dict) and "message" in parsed["error"]
        if is_ours and answer.status >= 400 and not has_error:
            raise Failure(f"{where} without an error object", text[:300], is_sound=True)
    if step.case is not None and is_ours and answer.status < 500:
        response._content = text.encode()  # it was streamed
        try:
            step.case.validate_response(response, CHECKS)
        except AssertionError as error:
            raise Failure(f"{where} contradicts its description", error, is_sound=True) from error


def _reject(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("scripts/fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first round (default: by the clock)")
    parser.add_argument("--folder", type=Path, help="for logs and bodies of failures (default: a temporary one)")
    options = parser.parse_args(argv)
    with ExitStack() as life:
        folder: Path = options.folder or Path(life.enter_context(TemporaryDirectory(prefix="darts-fuzz-")))
        folder.mkdir(parents=True, exist_ok=True)
        forks = life.enter_context(closing(ForkServer())) if can_fork() else None
        start = server_to_fuzz(launch if forks is None else Forks(forks.address).launch)
        fuzzer = life.enter_context(Fuzzer(start, folder))
        survived = fuzzer.run(options.seed, options.requests)
    for route in sorted({route for route, _ in fuzzer.answers}):
        print(f"{route}:", {status: n for (each, status), n in sorted(fuzzer.answers.items()) if each == route})
    print(f"seed {options.seed}, {fuzzer.answers.total()} requests, longest /health {fuzzer.longest_health:.2f} s")
    print("survived" if survived else f"NOT survived\n{fuzzer.report}")
    return 0 if survived else 1


def server_to_fuzz(launch: Launch) -> Callable[[Path], AbstractContextManager[Server]]:
    """Return what starts a server, with its log in a file."""
    return lambda log: serving(DARTS, log, *FLAGS, "--weights-staging", str(log.parent), env=ENVIRONMENT, launch=launch)


if __name__ == "__main__":
    sys.exit(main())
