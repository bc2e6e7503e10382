"""What `benchmarks.rl` compares: starts, policies, and the controls that plain trainers have instead of a policy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from darts_server.demo.problems import Difficulty
from darts_server.policy.auto.options import RULES
from examples.tiny_rl.method import Method, Policy

BASE = "off"


@dataclass(frozen=True)
class Start:
    """Where training starts: the model is that of the variant with the start's name.

    Args:
        caps: values of ``max_tokens`` that someone could try. With the best of them, found afterwards, a policy is
            compared.
        difficulties: of the training prompts and of the evaluation's, in turns; None for easy or hard.
    """

    caps: tuple[int, ...]
    difficulties: tuple[Difficulty | None, ...] = (None,)


_EASY_ONES: tuple[Difficulty, ...] = ("easy",) * 11

# The longest hard problem takes 48 tokens at least, so no lower cap can be best. In "deep", where a rule that trades
# depth for speed would show, all problems are hard. In "mixed" no cap fits all: 11 of 12 problems take 13 to 23 tokens,
# and the twelfth 203 or 228.
STARTS: Mapping[str, Start] = {
    "wordier": Start(caps=(48, 64, 96)),
    "standard": Start(caps=(48, 64, 96)),
    "deep": Start(caps=(48, 64, 96), difficulties=("hard",)),
    "mixed": Start(caps=(48, 96, 240), difficulties=("looped", *_EASY_ONES)),
}

# Whoever sets a fixed cap accepts that it takes right answers away. These choose the cap themselves, and take a tenth
# of the right answers; or as many as it takes, so that three quarters of the answers to most prompts end before it,
# with twice as many tokens for the other prompts or without.
LOST: Mapping[str, object] = {"deadline_bound": 1.0, "max_lost_share": 0.1}
UNGUARDED: Mapping[str, object] = {"max_lost_share": 1.0, "max_lost_groups": 1.0, "exploration": 0.0}
TIGHT: Mapping[str, object] = {"deadline_bound": 1.0, **UNGUARDED}

POLICIES: Mapping[str, Method] = {
    "uniform": Method("uniform"),
    "uniform, unbiased": Method("uniform", unbiased=True),
    "darts": Method("darts"),
    "darts, longest tail": Method({"name": "darts", "tail": "longest"}),
    "darts_cut": Method("darts_cut"),
    "cap": Method("cap"),
    "cap, lost 0.1": Method({"name": "cap", "redundancy": 2.0, **LOST}),
    "darts_cut, lost 0.1": Method({"name": "darts_cut", **LOST}),
    "cap, unguarded": Method({"name": "cap", **UNGUARDED}),
    "cap, tight": Method({"name": "cap", **TIGHT}),
    "darts_cut, tight": Method({"name": "darts_cut", **TIGHT}),
    "arrol": Method("arrol"),
    "darts+arrol": Method("darts+arrol"),
    "auto": Method("auto"),
    "auto, all rules": Method({"name": "auto", "auto_allow": ",".join(RULES)}),
}
# The best of these with one setting changed; run only if they are named on the command line.
SETTINGS: Mapping[str, Method] = {
    "darts_cut, 1.25": Method({"name": "darts_cut", "redundancy": 1.25}),
    "darts_cut, 2": Method({"name": "darts_cut", "redundancy": 2.0, "max_redundancy": 3.0}),
    "darts_cut, q.75": Method({"name": "darts_cut", "deadline_quantile": 0.75}),
    "darts_cut, L2": Method({"name": "darts_cut", "num_longest": 2}),
}
# Fixed policies know no limit of how much shorter what they return may be than all. `auto` does, by default; this is
# `auto` without it. Run only if it is named, too.
ANY_BIAS: Mapping[str, Method] = {"auto, any bias": Method({"name": "auto", "most_bias": 1.0})}
# `auto` under its default rules, without a limit of bias, and under all rules, with the fixed policies of these rules;
# see `choices`.
AUTOS: Mapping[str, Sequence[str]] = {
    "auto": ("uniform", "darts"),
    "auto, any bias": ("uniform", "darts"),
    "auto, all rules": (
        "uniform",
        "darts",
        "darts_cut",
        "cap",
        "cap, lost 0.1",
        "darts_cut, lost 0.1",
        "cap, unguarded",
        "cap, tight",
        "darts_cut, tight",
        *SETTINGS,
    ),
}
LONG_ROUNDS: Mapping[str, Policy] = {
    "off": "off",
    "uniform": "uniform",
    "darts_cut": "darts_cut",
    "cap": "cap",
    "cap, lost 0.1": POLICIES["cap, lost 0.1"].policy,
    "cap, unguarded": POLICIES["cap, unguarded"].policy,
}
# Tail batching by the server, and tokens of older weights, also under a fixed limit; run only if they are named, too.
CARRY_OVER: Mapping[str, Method] = {
    "off, carry restart": Method("off", started=1.5, carry="restart"),
    "darts_cut, carry restart": Method("darts_cut", started=1.5, carry="restart"),
    "off, carry resume": Method("off", started=1.5, carry="resume"),
    "cap, carry resume": Method("cap", started=1.5, carry="resume"),
    "off, staleness 1": Method("off", staleness=1),
    **{f"{name}, long rounds": Method(policy, started=1.25, long_rounds=True) for name, policy in LONG_ROUNDS.items()},
}
RESUMED: Mapping[str, Method] = {
    f"{BASE}, cap {cap}, carry resume": Method("off", max_tokens=cap, started=1.5, carry="resume")
    for cap in sorted({cap for start in STARTS.values() for cap in start.caps})
}
# `auto` must begin as `off`: what that step teaches, whatever is chosen afterwards. Run only if it is named, too.
BEGUN_AS_OFF: Mapping[str, Method] = {"uniform, begun as off": Method("uniform", first="off")}
NAMED_ONLY: Mapping[str, Method] = {**SETTINGS, **ANY_BIAS, **CARRY_OVER, **RESUMED, **BEGUN_AS_OFF}
PRUNING = ("arrol", "darts+arrol")
# Each has a server of its own: one whose quality head goes on learning between turns, or whose weights no other run
# replaces meanwhile.
OWN_SERVER = (*PRUNING, *(name for name, method in NAMED_ONLY.items() if method.carry == "resume"))


def cap_name(cap: int) -> str:
    return f"{BASE}, cap {cap}"


def controls(start: Start) -> dict[str, Method]:
    """Return plain sampling, and what plain trainers do about long tails.

    "off, unbiased" has weights of 1: it differs from `off` in how advantages are scaled and centred, and from "uniform,
    unbiased" in the policy alone.
    """
    largest = max(start.caps)
    return {
        BASE: Method("off"),
        f"{BASE}, unbiased": Method("off", unbiased=True),
        **{cap_name(cap): Method("off", max_tokens=cap) for cap in start.caps},
        f"{BASE}, overlong": Method("off", max_tokens=largest, overlong=largest // 2),
        f"{BASE}, tail batching": Method("off", started=1.5),
    }


def methods(start: str) -> dict[str, Method]:
    """Return everything that can be run from a start, by name."""
    return {**controls(STARTS[start]), **POLICIES, **NAMED_ONLY}


def caps(start: str) -> list[str]:
    """Return the names of the start's fixed caps."""
    return [cap_name(cap) for cap in STARTS[start].caps]


def choices(auto: str, start: str) -> list[str]:
    """Return the fixed methods that correspond to the rules of `AUTOS`; the rule ``limit`` to fixed caps."""
    return [BASE, *AUTOS[auto], *(caps(start) if auto == "auto, all rules" else ())]


def fixed(start: str) -> list[str]:
    """Return the policies, and caps, that `auto` is compared with: without those that train in another way."""
    policies = {**POLICIES, **SETTINGS}
    return [BASE, *caps(start), *(name for name in policies if name not in AUTOS and not policies[name].unbiased)]


def every_name() -> list[str]:
    """Return the names of all methods of any start; those in `NAMED_ONLY` come last."""
    of_starts = [name for start in STARTS.values() for name in controls(start)]
    return list(dict.fromkeys([*of_starts, *POLICIES, *NAMED_ONLY]))
