"""Learn what a sequence costs when it starts, besides its decode steps.

A step in which sequences get their first token takes longer than one that only decodes as many: they are prefilled, and
the API process hands them to the engine one after the other. On a real engine 64 to 128 sequences that were submitted
together got their first tokens within two to four steps, which took the longer the more started in them; and about as
much was added for each where one took the place of another. So the cost is a number of seconds for each, by which it
lengthens the step in which it starts, as a prefill does. It is not a delay that passes beside the decoding of others.

The decode curve is learned from other steps, and is known here. What a step takes beyond it is then due to the n
sequences that start in it, and the cost is the slope of a line through the origin. Least absolute deviations fit it,
which is the median of (seconds beyond the curve) / n, weighted by n. Least squares would follow the largest stall. So
would a median if the step that stalled had most of the starts, as after a pause in which requests arrived; therefore no
step has more than `MAX_WEIGHT` of all weight. The whole duration of batches would need no steps, but it cannot tell
this cost from an error of the curve, as batches with more sequences also decode more.

It is one number: what prefills take is in it as an average over those that start. Where prompts are long, the first
sequence of a prompt costs more than the others, which find it in the prefix cache. A prefill that is split over several
steps counts only as far as the last of them, and the first step of an engine that was idle does not count, since
nothing says when it began.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from darts_server.policy.latency.curve import LatencyCurve

MAX_STARTS = 128
"""Steps with starts that are kept. A batch has a few to some dozen, more where sequences start one by one."""
MIN_STARTS = 12
"""Steps with starts before the cost is known: if one in five is hit by other work, the median of so many rarely is."""
MAX_WEIGHT = 0.125
"""Of all starts, as which those of one step count at most."""

Start = tuple[int, int, float]
"""A step: how many sequences got a token in it, for how many of these it was the first, and its seconds."""


def start_seconds(steps: Sequence[Start], curve: LatencyCurve) -> float | None:
    """Return the seconds by which each sequence that starts lengthens its step; ``None`` before `MIN_STARTS` steps."""
    if len(steps) < MIN_STARTS:
        return None
    most = MAX_WEIGHT * sum(started for _, started, _ in steps)
    costs = sorted(
        ((seconds - curve.step_seconds(batch)) / started, min(started, most)) for batch, started, seconds in steps
    )
    passed = list(accumulate(weight for _, weight in costs))
    return max(0.0, costs[bisect_left(passed, passed[-1] / 2)][0])
