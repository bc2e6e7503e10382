"""The named policies: which combination of rules each one is."""

from dataclasses import replace

from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping, Tail

SHAPED = ("uniform", "darts", "darts_deadline", "darts_cut", "first_finish")
SHADOW = "shadow:"
"""Before the name of a policy: nothing is shaped, but what that policy would have done is recorded."""


def named(base: Shaping, deadline: Deadline) -> dict[str, Shaping]:
    """All policies but ``off``, by name; ``base`` is ``uniform``, which the others differ from."""
    darts = replace(base, adaptive=True)
    shaped = {
        "uniform": base,
        "darts": darts,
        "darts_deadline": replace(darts, tail=Tail.LONGEST, deadline=deadline),
        "darts_cut": replace(darts, tail=Tail.SAMPLED, deadline=deadline),
        "first_finish": replace(darts, tail=Tail.LONGEST, finish_order=True),
    }
    return shaped | {SHADOW + name: replace(shaping, shadow=True) for name, shaping in shaped.items()}
