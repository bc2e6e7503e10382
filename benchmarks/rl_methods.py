"""What `benchmarks.rl` compares: starts, policies, and the controls that plain trainers have instead of a policy."""

from collections.abc import Mapping
from dataclasses import dataclass

from darts_server.offline.demo.problems import Difficulty
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

# A cap that chooses itself: as many right answers are lost as it takes, so that three quarters of the answers to most
# prompts end before it, with twice as many tokens for the other prompts.
UNGUARDED: Mapping[str, object] = {"max_lost_share": 1.0, "exploration": 0.0}

POLICIES: Mapping[str, Method] = {
    "uniform": Method("uniform"),
    "uniform, unbiased": Method("uniform", unbiased=True),
    "darts": Method("darts"),
    "darts, longest tail": Method({"name": "darts", "tail": "longest"}),
    "darts_cut": Method("darts_cut"),
    "cap": Method("cap"),
    "cap, unguarded": Method({"name": "cap", **UNGUARDED}),
    "arrol": Method("arrol"),
    "darts+arrol": Method("darts+arrol"),
    "auto": Method("auto", started=1.5, carry="resume"),
}
LONG_ROUNDS: Mapping[str, Policy] = {
    "off": "off",
    "darts_cut": "darts_cut",
    "cap": "cap",
    "cap, unguarded": POLICIES["cap, unguarded"].policy,
}
# Tail batching by the server, tokens of older weights, and long rounds; run only if they are named.
CARRY_OVER: Mapping[str, Method] = {
    "off, carry restart": Method("off", started=1.5, carry="restart"),
    "off, carry resume": Method("off", started=1.5, carry="resume"),
    "cap, carry resume": Method("cap", started=1.5, carry="resume"),
    "off, staleness 1": Method("off", staleness=1),
    **{f"{name}, long rounds": Method(policy, started=1.25, long_rounds=True) for name, policy in LONG_ROUNDS.items()},
}
PRUNING = ("arrol", "darts+arrol")
# Each has a server of its own: one whose quality head goes on learning between turns, or whose weights no other run
# replaces meanwhile.
RESUMING = [name for name, method in {**POLICIES, **CARRY_OVER}.items() if method.carry == "resume"]
OWN_SERVER = (*PRUNING, *RESUMING)


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
    return {**controls(STARTS[start]), **POLICIES, **CARRY_OVER}


def caps(start: str) -> list[str]:
    """Return the names of the start's fixed caps."""
    return [cap_name(cap) for cap in STARTS[start].caps]


def every_name() -> list[str]:
    """Return the names of all methods of any start; those in `CARRY_OVER` come last."""
    of_starts = [name for start in STARTS.values() for name in controls(start)]
    return list(dict.fromkeys([*of_starts, *POLICIES, *CARRY_OVER]))
