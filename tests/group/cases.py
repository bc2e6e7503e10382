"""Strategies: rules, truths and whole worlds, small enough for ties to be frequent."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st

from darts_server.group.sampled_tail import CutTail, SampledTail
from darts_server.group.selection import AllSurvivors, DualEnd, InOrder, SampledSurvivors
from tests.group.oracle import Rule
from tests.group.world import Case, Ending, Peek, Score, Truth

thoroughly = settings(max_examples=3 * settings().max_examples)
"""For properties that few examples violate."""

WITHOUT_FAILURES = [Ending.STOP, Ending.STOP, Ending.STOP, Ending.LENGTH]
MANY_TRUNCATED = [Ending.LENGTH] * 4
WITH_FAILURES = [*WITHOUT_FAILURES, Ending.FAILED, Ending.REFUSED, Ending.LOST]
WITH_THE_END_OF_THE_ENGINE = [*WITH_FAILURES, Ending.BROKEN]


PLACES = [(short, tail) for short in range(4) for tail in range(3) if short + tail]
SAMPLED_TAILS = st.sampled_from(PLACES).map(lambda places: SampledTail(*places))
LONGEST_TAILS = st.sampled_from(PLACES).map(lambda places: DualEnd(*places))
CUT_TAILS = st.sampled_from([(1, 1), (2, 1), (1, 2), *PLACES]).map(lambda places: CutTail(*places))
CAPS = st.sampled_from([(short, rest) for short, rest in PLACES if short]).map(lambda p: CutTail(*p, p[0]))
WITHOUT_TAIL = st.builds(InOrder, st.integers(1, 4)) | st.builds(DualEnd, st.integers(1, 4))
WITH_DEADLINE = CUT_TAILS | CAPS
WITHOUT_DEADLINE: st.SearchStrategy[Rule] = WITHOUT_TAIL | LONGEST_TAILS | SAMPLED_TAILS
RULES = WITHOUT_DEADLINE | WITH_DEADLINE | CUT_TAILS
SURVIVORS = st.builds(AllSurvivors, st.integers(1, 4))
SAMPLED_SURVIVORS = st.builds(SampledSurvivors, st.integers(1, 4))
SCORES = st.builds(
    Score, st.integers(1, 6), st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), st.sampled_from([0.0, 0.3, 0.7, 1.0])
)


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
    """Create cases.

    ``most``: largest number of candidates at first. ``surplus``: smallest number of candidates beyond the size.
    ``cut``: whether deadlines are set while candidates run.
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


@st.composite
def scored(draw: st.DrawFn, of: st.SearchStrategy[Case]) -> Case:
    """Cases whose candidates are scored while they run, so that some are pruned. They have no cut length."""
    case = draw(of)
    count = len(case.truths)
    return replace(
        case,
        slack=None,
        scores=draw(st.lists(st.lists(SCORES, max_size=2), min_size=count, max_size=count)),
        chances=draw(st.integers(0, 1000)),
    )
