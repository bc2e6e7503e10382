"""Names of metrics and labels in PromQL expressions."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import promql_parser

from tests.deploy.names import TARGET_LABELS

VARIABLES = {"$__rate_interval": "5m", "$__interval": "1m", "$model_name": "m", "$instance": ".*"}
"""Variables of Grafana and of our dashboard, with an example value each."""


@dataclass(slots=True)
class Names:
    """Names of time series with the labels that select them, and the labels that aggregations group by."""

    selectors: list[tuple[str, frozenset[str]]] = field(default_factory=list)
    groupings: set[str] = field(default_factory=set)


def parse_names(expression: str) -> Names:
    """Parse an expression and collect its names.

    Raises:
        ValueError: it is not PromQL.
    """
    found = Names()

    def visit(node: promql_parser.Expr) -> None:
        match node:
            case promql_parser.VectorSelector():
                labels = (matcher.name for matcher in node.matchers.matchers)
                found.selectors.append((node.name or "", frozenset(labels) - TARGET_LABELS - {"model_name"}))
            case promql_parser.AggregateExpr() if node.modifier is not None:
                found.groupings |= set(node.modifier.labels)

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


def substitute_variables(expression: str) -> str:
    """Return a dashboard's expression as Grafana would send it."""
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    assert not re.search(r"\$", expression), f"unknown variable in {expression}"
    return expression


def texts(tree: object, key: str) -> Iterator[str]:
    """Yield all strings under ``key`` in nested JSON."""
    if isinstance(tree, dict):
        if isinstance(tree.get(key), str):
            yield tree[key]
        for value in tree.values():
            yield from texts(value, key)
    elif isinstance(tree, list):
        for value in tree:
            yield from texts(value, key)
