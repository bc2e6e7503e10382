"""What `auto` chooses among: rules with their redundancy and deadline, as far as the user allows them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from darts_server.exceptions import InvalidRequest
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import BudgetKind, Shaping, build_policies
from darts_server.types import OFF

RULES = ("uniform", "darts", "cut", "cap", "limit")
"""What may be allowed besides `OFF`. ``cut`` is ``darts_cut`` with the same number of candidates for every prompt;
``limit`` is `OFF` with a smaller length limit, the same for all trajectories of a batch."""
RESTART = "restart"
"""May be allowed beside `RULES`: where the caller of a batch can defer prompts and starts them again, it may end before
all groups are complete, under each of them and `OFF`."""
RESUME = "resume"
"""May be allowed beside them: where deferred prompts go on from what they have, it chooses how many are started."""
AHEAD = "ahead"
"""Name under which batches are measured in which more prompts run than are needed, and the others go on later."""
CUTTING = ("cut", "cap", "limit")
"""Rules that cut trajectories that would have ended."""
DEFERRING = " deferring"
"""Ends the name under which batches are measured that end before all groups are complete."""
REDUNDANCIES = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
"""Candidates over those that are returned, as far as the maximum that the user sets, which is one of them too. Each
adds about as large a share as the one before."""
NEAREST = 1.1
"""By which factor two of them differ at least."""
QUANTILES = (0.8, 0.9)
CUT_SHARES = (0.02, 0.05, 0.1, 0.2)
"""Of the trajectories that would have ended, those that a ``limit`` cuts."""


@dataclass(frozen=True, slots=True)
class AutoLimits:
    """What the user allows.

    ``allow``: of `RULES`, `RESTART` and `RESUME`. ``most_lost``: of the returned trajectories that would have ended,
    the largest share that a rule may cut. ``most_bias``: largest share by which their mean length may be below that of
    all trajectories. ``most_stale``: largest share of returned tokens that older weights have generated.
    ``tokens_price``: how many per cent of a step's time one per cent of tokens is worth: those that are generated and
    not returned, of those that ``off`` generates. ``exploration``: largest share of batches that try
    another option than the one that is expected to be the fastest.
    """

    allow: tuple[str, ...] = (RESUME,)
    most_lost: float = 0.2
    most_bias: float = 0.5
    tokens_price: float = 0.0
    exploration: float = 0.05
    most_stale: float = 0.5


@dataclass(frozen=True, slots=True)
class Option:
    """One thing that `auto` may do with a batch.

    ``shaping``: ``None`` shapes nothing. ``cut_share``: its deadline is the length that this share of the trajectories
    that would have ended are expected to exceed; ``None`` leaves the deadline as it is.
    """

    name: str
    shaping: Shaping | None = None
    cut_share: float | None = None

    def max_candidates(self, size: int) -> int:
        """Return the most candidates that a group of ``size`` may get."""
        return size if self.shaping is None else max(self.shaping.bounds(size)[1], self.shaping.candidates(size))

    def at(self, tokens: int) -> "Option":
        """Return the option with that deadline, before it is stretched."""
        assert self.shaping is not None
        assert self.shaping.deadline is not None
        return replace(self, shaping=replace(self.shaping, deadline=replace(self.shaping.deadline, tokens=tokens)))


UNSHAPED = Option(OFF)


def rule_of(name: str) -> str:
    """Return an option's rule, without its numbers."""
    return name.partition(" ")[0]


def measured_name(option: Option, enough: int | None) -> str:
    """Return the name under which a batch is measured that ends with ``enough`` groups; ``None``: with all.

    What the model gets wrong about deferring must not spoil what is known of the option itself. Both have one rule.
    """
    return option.name if enough is None else option.name + DEFERRING


def kind_of(name: str) -> str:
    """Return for which of what was measured the model is wrong in the same way: a rule, with or without deferring."""
    return rule_of(name) + DEFERRING * name.endswith(DEFERRING)


@dataclass(frozen=True, slots=True)
class Auto:
    """The ``options``, `UNSHAPED` first, and the ``limits`` within which one is chosen."""

    limits: AutoLimits
    options: tuple[Option, ...]

    @property
    def shapes(self) -> bool:
        """Whether there is anything but `OFF`."""
        return len(self.options) > 1

    @property
    def forecasts(self) -> bool:
        """Whether there is anything to choose for a batch whose prompts do not go on later."""
        return self.shapes or RESTART in self.limits.allow

    def of_size(self, size: int) -> list[Option]:
        """Return the options that support groups of ``size``."""
        return [option for option in self.options if option.shaping is None or _supports(option.shaping, size)]

    def with_deadlines(self, rule: Callable[[Shaping, str], Deadline | None]) -> "Auto":
        """Return the same with other deadlines, by the ``rule`` for each shaping and its option's name."""
        options = [
            replace(each, shaping=each.shaping and replace(each.shaping, deadline=rule(each.shaping, each.name)))
            for each in self.options
        ]
        return replace(self, options=tuple(options))

    def max_candidates(self, size: int) -> int:
        """Return the most candidates that a group of ``size`` may get."""
        return max(option.max_candidates(size) for option in self.options)


def build_auto(base: Shaping, deadline: Deadline, limits: AutoLimits) -> Auto:
    """Build the options from ``base``, which is ``uniform``. Its redundancy is that of ``cap`` alone."""
    base, allow, options = replace(base, budget=BudgetKind.FIXED), limits.allow, [UNSHAPED]

    def policy(name: str, redundancy: float, quantile: float = deadline.quantile) -> Shaping:
        return build_policies(replace(base, redundancy=redundancy), replace(deadline, quantile=quantile))[name]

    most = base.max_redundancy
    below = [redundancy for redundancy in REDUNDANCIES if redundancy * NEAREST <= most]
    possible = [*below, float(most)] if most > 1 else []
    if "cap" in allow:
        options += [Option(f"cap at {quantile}", policy("cap", base.redundancy, quantile)) for quantile in QUANTILES]
    if "limit" in allow:
        cap = build_policies(base, replace(deadline, bound=1.0))["cap"]  # every trajectory ends there
        options += [Option(f"limit {share}", cap, share) for share in CUT_SHARES]
    if "cut" in allow:
        options += [
            Option(f"cut {each} at {quantile}", replace(policy("darts_cut", each, quantile), adaptive=False))
            for each in possible
            for quantile in QUANTILES
        ]
    if "uniform" in allow:
        options += [Option(f"uniform {each}", policy("uniform", each)) for each in possible]
    if "darts" in allow:  # with the largest as the mean, all are saturated
        options += [Option(f"darts {each}", policy("darts", each)) for each in possible[:-1]]
    return Auto(limits, tuple(options))


def _supports(shaping: Shaping, size: int) -> bool:
    try:
        shaping.selection_rule(size)
    except InvalidRequest:
        return False
    return True
