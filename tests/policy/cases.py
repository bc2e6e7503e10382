"""Strategies: rules, truths and whole worlds, small enough for ties to be frequent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
from hypothesis import strategies as st

from darts_server.policy.group import Group
from darts_server.policy.sampled_tail import CutTail, SampledTail
from darts_server.policy.selection import DualEnd, InOrder
from tests.policy.oracle import Rule
from tests.policy.world import Ending, Peek, Truth, World

WITHOUT_FAILURES = [Ending.STOP, Ending.STOP, Ending.STOP, Ending.LENGTH]
MANY_TRUNCATED = [Ending.LENGTH] * 4
WITH_FAILURES = [*WITHOUT_FAILURES, Ending.FAILED, Ending.REFUSED, Ending.LOST]
WITH_THE_END_OF_THE_ENGINE = [*WITH_FAILURES, Ending.BROKEN]


@dataclass(frozen=True)
class Case:
    """Parameters of a world. ``seed`` determines the group's random numbers, ``order`` the order of events."""

    rule: Rule
    candidates: int
    truths: Sequence[Truth]
    early: bool
    seed: int
    order: int
    peek: Peek = Peek.CHECKS
    replacements: int = 0
    at_once: bool = False
    limits: Mapping[int, int] = field(default_factory=dict)
    slack: int | None = None
    additions: Sequence[int] = ()
    opening: int = 0

    def world(self) -> World:
        return World(
            group=Group(
                rng=np.random.default_rng(self.seed), max_replacements=self.replacements, deliver_early=self.early
            ),
            rule=self.rule,
            candidates=self.candidates,
            truths=self.truths,
            order=Random(self.order),
            peek=self.peek,
            at_once=self.at_once,
            limits=self.limits,
            slack=self.slack,
            additions=self.additions,
            opening=self.opening,
        )


PLACES = [(short, tail) for short in range(4) for tail in range(3) if short + tail]
SAMPLED_TAILS = st.sampled_from(PLACES).map(lambda places: SampledTail(*places))
LONGEST_TAILS = st.sampled_from(PLACES).map(lambda places: DualEnd(*places))
CUT_TAILS = st.sampled_from([(1, 1), (2, 1), (1, 2), *PLACES]).map(lambda places: CutTail(*places))
CAPS = st.sampled_from([(short, rest) for short, rest in PLACES if short]).map(lambda p: CutTail(*p, last_needed=p[0]))
WITHOUT_TAIL = st.builds(InOrder, st.integers(1, 4)) | st.builds(DualEnd, st.integers(1, 4))
WITH_DEADLINE = CUT_TAILS | CAPS
WITHOUT_DEADLINE: st.SearchStrategy[Rule] = WITHOUT_TAIL | LONGEST_TAILS | SAMPLED_TAILS
RULES = WITHOUT_DEADLINE | WITH_DEADLINE | CUT_TAILS


def truths(endings: Sequence[Ending], max_length: int = 8) -> st.SearchStrategy[Truth]:
    return st.builds(
        Truth,
        length=st.integers(1, max_length),
        ending=st.sampled_from(endings),
        delay=st.integers(0, 4),
        speed=st.integers(1, 3),
    )


@st.composite
def cases(
    draw: st.DrawFn,
    endings: Sequence[Ending],
    *,
    of: st.SearchStrategy[Rule] = RULES,
    most: int = 9,
    surplus: int = 0,
    max_length: int = 8,
    max_replacements: int = 0,
    cut: bool = False,
) -> Case:
    """``most``: the greatest number of candidates at first; ``surplus``: at least so many more than the size.

    ``cut``: set limits on the way.
    """
    rule = draw(of)
    candidates = draw(st.integers(rule.size + surplus, max(rule.size + surplus, most)))
    replacements = draw(st.integers(0, max_replacements))
    opening = draw(st.just(0) | st.integers(1, 5))
    additions = draw(st.lists(st.integers(0, opening), max_size=candidates)) if opening else []
    in_all = candidates + len(additions) + replacements
    if Ending.LENGTH in endings and draw(st.booleans()):
        endings = [*endings, *MANY_TRUNCATED]
    limits = st.dictionaries(st.integers(0, 6), st.integers(1, max_length), min_size=1, max_size=3)
    return Case(
        rule=rule,
        candidates=candidates,
        truths=draw(st.lists(truths(endings, max_length), min_size=in_all, max_size=in_all)),
        early=draw(st.booleans()),
        seed=draw(st.integers(0, 10_000)),
        order=draw(st.integers(0, 10_000)),
        peek=draw(st.sampled_from(Peek)),
        replacements=replacements,
        limits=draw(limits) if cut else {},
        slack=draw(st.none() | st.integers(0, max_length)) if cut else None,
        additions=additions,
        opening=opening,
    )
