"""Merge metrics of several servers, in Prometheus' text format, with a label that says whose they are."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(slots=True)
class _Family:
    """A metric: the lines that describe it, and its samples."""

    described: dict[str, str] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)


def merge_metrics(texts: Mapping[str, str], own: str = "") -> str:
    """Merge the metrics of replicas, by their names, and add ``own`` as they are."""
    families: dict[str, _Family] = {}
    for replica, text in texts.items():
        family = families.setdefault("", _Family())
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                _, kind, name, _ = (*line.split(" ", 3), "")[:4]
                family = families.setdefault(name, _Family())
                family.described.setdefault(kind, line)
            elif line and not line.startswith("#"):
                family.samples.append(_labelled(line, replica))
    return "".join(_lines(families.values())) + own


def _lines(families: Iterable[_Family]) -> Iterable[str]:
    for family in families:
        for line in (*family.described.values(), *family.samples):
            yield line + "\n"


def _labelled(sample: str, replica: str) -> str:
    name = sample.split("{", 1)[0].split(" ", 1)[0]
    label, rest = f'replica="{replica}"', sample[len(name) :]
    if not rest.startswith("{"):
        return f"{name}{{{label}}}{rest}"
    return f"{name}{{{label}{'' if rest.startswith('{}') else ','}{rest[1:]}"
