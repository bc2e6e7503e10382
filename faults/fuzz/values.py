"""Values that a field does not expect, and mutations that put them into JSON."""

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hypothesis import strategies as st

MAX_NODES = 500
"""Nodes of a body that mutations choose from."""
DEPTH = 100_000
"""Far beyond the recursion limit of any parser."""


@dataclass(frozen=True)
class Raw:
    """JSON text that is sent as it is: Python cannot represent the value, or takes long to write it."""

    text: str


HOSTILE: Sequence[Any] = [
    # Other types.
    None,
    True,
    False,
    0,
    "",
    [],
    {},
    1.5,
    [None],
    [[]],
    {"a": {}},
    [[1]],
    "1",
    # Numbers: limits of the types that they are decoded to.
    1,
    2,
    64,
    -1,
    1.0,
    Raw("-0.0"),
    127,
    1024,
    2**31 - 1,
    2**31,
    2**53,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    -(2**63) - 1,
    10**30,
    10**400,
    1e-320,
    1e308,
    Raw("1e400"),
    Raw("NaN"),
    Raw("-Infinity"),
    Raw("01"),
    # Text.
    "a",
    "\n",
    "\0",
    "\ud800",
    "日本",
    "a/b",
    "../..",
    "a b;c=d",
    "<script>alert(1)</script>",
    "x" * 300,
    Raw('"' + "x" * 100_000 + '"'),
    # Lists and objects.
    [-5],
    [64],
    [2**31],
    [2**64],
    [1.5],
    ["a"],
    ["\ud800"],
    [""],
    [None, 1],
    Raw("[" + "5," * 20_000 + "5]"),
    Raw("[" + '"x",' * 20_000 + '"x"]'),
    Raw("[" + '{"a":1},' * 5_000 + '{"a":1}]'),
    Raw("{" + ",".join(f'"{number}":1' for number in range(5_000)) + "}"),
    Raw("[" * DEPTH + "]" * DEPTH),
    Raw('{"a":' * DEPTH + "1" + "}" * DEPTH),
    Raw('{"a":1,"a":2}'),
    # What some fields take.
    {"role": "user"},
    [{"role": "user"}],
    [{"role": "user", "content": None}],
    [{"role": "system", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}]}],
    [{"content": "x"}],
    {"5": 100},
    {"64": 1},
    {"-1": 1},
    {"x": 1},
    {"5": "x"},
    {"5": Raw("1e400")},
    {"choice": []},
    {"choice": ["1", "2"]},
    {"choice": [1]},
    {"regex": "[0-9]+"},
    {"regex": "(("},
    {"regex": "(a{1000}){1000}"},
    {"json": {"type": "object"}},
    {"json": {"type": "wrong"}},
    {"json": {"$ref": "#"}},
    {"json": "{"},
    {"json_object": True},
    {"grammar": "root ::= "},
    {"grammar": 'root ::= "a" root'},
    {"structural_tag": "x"},
    {"regex": "a", "json": {}},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "a"}},
    {"type": "structural_tag", "structures": [], "triggers": []},
    {"type": "function", "function": {"name": "f"}},
    {"choices": ["a", "a"]},
    {"include_usage": True},
    {"darts_policy": "off"},
    {"darts_group_id": "a", "darts_group_size": 2},
    {"darts_group_size": 10**30},
    "tokens",
    "groups",
    "rank",
    "log_odds",
    "logprob",
    "head",
    "boxed",
    "(",
    "()",
    "((a+)+)$",
    "([ab])(?:[ab]*a[ab]{300}c)?",
    "(.{0,1000}){0,1000}",
    "darts",
    "arrol",
    "darts_cut",
    "tiny:off",
    "tiny:raw",
    "tiny:darts_cut",
]
SIMPLE = 35
"""The first ones, other types and numbers, are drawn more often."""
NAMES: Sequence[str] = [
    "seed",
    "temperature",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "n",
    "stop",
    "stop_token_ids",
    "logprobs",
    "prompt_logprobs",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
    "skip_special_tokens",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "include_stop_str_in_output",
    "detokenize",
    "output_kind",
    "extra_args",
    "vllm_xargs",
    "request_id",
    "stream",
    "stream_options",
    "name",
    "redundancy",
    "group_size",
    "key",
    "metadata",
    "unknown",
    "",
    "\ud800",
    "__proto__",
    "a" * 10_000,
]
"""Names of fields: those of objects that no schema describes, and some that no object has."""


class How(Enum):
    """``REPLACE`` a value, ``ADD`` or ``DELETE`` a field, ``WRAP`` a value in a list, ``REPEAT`` an item of a list;
    ``CUT`` off the end of the text, ``FLIP`` a byte of it.
    """

    REPLACE = "replace"
    ADD = "add"
    DELETE = "delete"
    WRAP = "wrap"
    REPEAT = "repeat"
    CUT = "cut"
    FLIP = "flip"


@dataclass(frozen=True)
class Mutation:
    """One change of a body. Numbers choose a node, a name and a value; they count from the beginning again."""

    how: How
    node: int
    name: int
    value: int


LIKELY = [How.REPLACE] * 6 + [How.ADD] * 4 + [How.DELETE, How.WRAP, How.REPEAT, How.CUT, How.FLIP]
MUTATIONS = st.builds(
    Mutation,
    st.sampled_from(LIKELY),
    st.integers(0, 40),
    st.integers(0, 200),
    st.one_of(st.integers(0, SIMPLE - 1), st.integers(0, len(HOSTILE) - 1)),
)


def mutated(body: Any, mutations: Sequence[Mutation], names: Sequence[str] = ()) -> bytes:
    """Return a JSON text of the body with these mutations. ``names``: of fields that its schema describes."""
    tree = {"": copy.deepcopy(body)}
    for mutation in mutations:
        _mutate(tree, mutation, [*names, *NAMES])
    text = encode(tree[""]).encode("utf-8", "surrogatepass")
    for mutation in mutations:
        if mutation.how is How.CUT:
            text = text[: mutation.node % (len(text) + 1)]
        elif mutation.how is How.FLIP and text:
            place = (mutation.node * 7) % len(text)
            text = text[:place] + bytes([mutation.value * 37 % 256]) + text[place + 1 :]
    return text


def encode(value: Any) -> str:
    """Write JSON. Surrogates are escaped, and `Raw` text is written as it is."""
    match value:
        case Raw():
            return value.text
        case dict():
            return "{" + ",".join(f"{json.dumps(name)}:{encode(each)}" for name, each in value.items()) + "}"
        case list():
            return "[" + ",".join(map(encode, value)) + "]"
    return json.dumps(value)


def _mutate(tree: dict[str, Any], mutation: Mutation, names: Sequence[str]) -> None:
    nodes = [node for node, _ in zip(_nodes(tree), range(MAX_NODES), strict=False)]
    value = copy.deepcopy(HOSTILE[mutation.value % len(HOSTILE)])
    match mutation.how:
        case How.ADD:
            objects = [container[place] for container, place in nodes if isinstance(container[place], dict)]
            if objects:
                objects[mutation.node % len(objects)][names[mutation.name % len(names)]] = value
            return
        case How.CUT | How.FLIP:
            return
    container, place = nodes[mutation.node % len(nodes)]
    match mutation.how:
        case How.REPLACE:
            container[place] = value
        case How.DELETE if container is not tree:
            del container[place]
        case How.WRAP:
            container[place] = [container[place]]
        case How.REPEAT if isinstance(container, list):
            container[place:place] = [container[place]] * (1 + mutation.value)


def _nodes(container: Any) -> Iterator[tuple[Any, Any]]:
    """Yield container and place of each value in it, at any depth."""
    places: list[Any] = list(container) if isinstance(container, dict) else list(range(len(container)))
    for place in places:
        yield container, place
        if isinstance(container[place], dict | list):
            yield from _nodes(container[place])
