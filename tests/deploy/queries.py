"""What a PromQL expression names."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import promql_parser

from tests.deploy.names import OF_TARGETS

VARIABLES = {"$__rate_interval": "5m", "$__interval": "1m", "$model_name": "m", "$instance": ".*"}
"""Grafana's, and ours of the dashboard, with a value each."""


@dataclass(slots=True)
class Named:
    """Names of time series with the labels that they are asked for, and the labels that sums are made by."""

    selectors: list[tuple[str, frozenset[str]]] = field(default_factory=list)
    groupings: set[str] = field(default_factory=set)


def named(expression: str) -> Named:
    """What an expression names.

    Raises:
        ValueError: it is no PromQL.
    """
    found = Named()

    def visit(node: promql_parser.Expr) -> None:
        match node:
            case promql_parser.VectorSelector():
                asked = (matcher.name for matcher in node.matchers.matchers)
                found.selectors.append((node.name or "", frozenset(asked) - OF_TARGETS - {"model_name"}))
            case promql_parser.AggregateExpr() if node.modifier is not None:
                found.groupings |= set(node.modifier.labels)

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


def filled_in(expression: str) -> str:
    """A dashboard's expression, as Grafana would send it."""
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    assert not re.search(r"\$", expression), f"unknown variable in {expression}"
    return expression


def texts(tree: object, key: str) -> Iterator[str]:
    """All strings under ``key`` in nested JSON."""
    if isinstance(tree, dict):
        if isinstance(tree.get(key), str):
            yield tree[key]
        for value in tree.values():
            yield from texts(value, key)
    elif isinstance(tree, list):
        for value in tree:
            yield from texts(value, key)
