"""Policies that are compared, and their names on the command line."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil

from darts_server.exceptions import InvalidSetting
from darts_server.policy.auto import AutoLimits
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import REDUNDANCY, BudgetKind, Shaping, Tail, build_policies
from darts_server.types import AUTO, OFF

NAMES = (OFF, *build_policies(Shaping(), Deadline()), AUTO)
DEFERRING = ("start", "carry", "rounds", "order")
OPTIONS = ("redundancy", "max_redundancy", "longest", "tail", "adaptive", "quantile", *DEFERRING)
AUTO_OPTIONS = ("start", "stale")
DEFAULT = (
    "uniform",
    "uniform,tail=longest",
    "uniform,longest=0",
    "darts",
    "darts,longest=0",
    "darts_cut",
    "darts_cut,adaptive=no",
    "darts_cut,adaptive=no,quantile=0.8",
    "cap",
    "off,order=long",
    "off,start=1.5",
    "off,start=1.25,rounds=long",
    "off,start=1.5,carry=resume",
    "cap,start=1.5,carry=resume",
    "auto",
)


@dataclass(frozen=True, slots=True)
class Policy:
    name: str
    shaping: Shaping | None = None
    """None starts and returns as many candidates as a group has."""
    start: float = 1.0
    """Prompts that are started, over the prompts that are returned. For `auto`, the maximum."""
    resumes: bool = False
    """Whether prompts that are not complete continue in the next step. Otherwise they start again."""
    long_rounds: bool = False
    """Whether prompts that are not complete wait until they fill a step, which then waits for all of them."""
    long_first: bool = False
    """Whether prompts with the longest earlier groups are submitted first."""
    most_stale: float | None = None
    """Maximum share of tokens of older weights under `auto`, or None."""

    @property
    def steps_per_long_round(self) -> int:
        if not self.long_rounds:
            return 1
        # Each step leaves `start` - 1 of its prompts unfinished. When they fill a step, a long round finishes them.
        return 1 + ceil(1 / (self.start - 1))

    def max_candidates(self, size: int) -> int:
        if self.shaping is None:
            return size
        return max(self.shaping.candidate_limits(size)[1], self.shaping.candidates(size))


def split_policies(texts: Iterable[str]) -> list[str]:
    # A part without `=` begins another policy.
    return [policy for text in texts for policy in re.split(r",(?=[^,=]*(?:,|$))", text)]


def parse_policy(text: str, size: int) -> Policy:
    """Parse ``NAME[,OPTION=VALUE…]``, or raise `InvalidSetting`."""
    name, *pairs = text.split(",")
    if name not in NAMES:
        raise InvalidSetting(f"--policies: there is no {name!r}; choose from {', '.join(NAMES)}")
    allowed = AUTO_OPTIONS if name == AUTO else OPTIONS
    options = {}
    for pair in pairs:
        option, _, value = pair.partition("=")
        if option not in allowed:
            raise InvalidSetting(
                f"--policies: {text} has an unknown option {option!r}; choose from {', '.join(allowed)}"
            )
        options[option] = value

    def parse_number(
        option: str,
        default: float,
        least: float,
        most: float,
    ) -> float:
        try:
            value = float(options.get(option, default))
        except ValueError:
            value = float("nan")
        # Also false for NaN.
        if not least <= value <= most:
            or_auto = ", or auto" if option == "redundancy" else ""
            raise InvalidSetting(f"--policies: {text}: {option} must be a number from {least:g} to {most:g}{or_auto}")
        return value

    def is_set_to(option: str, value: str, default: str) -> bool:
        given = options.get(option, default)
        if given not in (default, value):
            raise InvalidSetting(f"--policies: {text}: {option} must be {default} or {value}")
        return given == value

    if name == AUTO:
        most_stale = parse_number("stale", AutoLimits().most_stale, 0.0, 1.0)
        start = parse_number("start", 1.5, 1.0, 4.0)
        return Policy(
            text,
            None,
            start,
            resumes=True,
            long_first=True,
            most_stale=most_stale,
        )

    policy = Policy(
        text,
        start=parse_number("start", 1.0, 1.0, 4.0),
        resumes=is_set_to("carry", "resume", default="restart"),
        long_rounds=is_set_to("rounds", "long", default="all"),
        long_first=is_set_to("order", "long", default="given"),
    )
    if policy.long_rounds and policy.start < 1.01:
        raise InvalidSetting(f"--policies: {text}: rounds=long needs start=1.01 or more, else no prompt is left over")
    if name == OFF:
        if set(options) - set(DEFERRING):
            raise InvalidSetting(f"--policies: {text}: off has only the options {', '.join(DEFERRING)}")
        return policy

    budget = BudgetKind.FIXED
    if options.get("redundancy") == "auto":
        budget = BudgetKind.CV_LOG
        del options["redundancy"]
    redundancy = parse_number("redundancy", REDUNDANCY, 1.0, 8.0)
    has_longest_tail = is_set_to("tail", Tail.LONGEST, default=Tail.SAMPLED)
    base = Shaping(
        redundancy=redundancy,
        num_longest=int(parse_number("longest", 1, 0, size - 1)),
        max_redundancy=parse_number("max_redundancy", max(2.0, redundancy), redundancy, 8.0),
        budget=budget,
        tail=Tail.LONGEST if has_longest_tail else Tail.SAMPLED,
    )
    deadline = Deadline(parse_number("quantile", 0.9, 0.01, 1.0), exploration=0.0)
    shaping = build_policies(base, deadline)[name]
    # Without the option, the policy decides.
    if "adaptive" in options:
        shaping = replace(shaping, adaptive=not is_set_to("adaptive", "no", default="yes"))
    return replace(policy, shaping=shaping)
