"""How many prompts `auto` starts ahead of a step, where they go on in the next one from what they have generated.

Nothing that is generated is lost then, and the more run at once the fewer steps wait for a long one. What it costs are
tokens of older weights among those that are returned. Of the prompts that the caller offers beyond those whose groups
it needs, a share is started: all at first, and so many that the share of older tokens stays below the user's limit, on
average over batches.
"""

LEAST, MOST = 0.5, 1.25
"""By which factor the share that is started may change from one batch to the next."""
FEWEST = 1 / 64
"""Of the prompts that are offered: with none nothing would be learned any more."""


def begin_with(needed: int, offered: int, ahead: float) -> int:
    """Return how many of the ``offered`` prompts are started for ``needed`` groups; ``ahead``: by `next_ahead`."""
    return min(offered, needed + round(ahead * max(0, offered - needed)))


def next_ahead(ahead: float, stale: float, most_stale: float) -> float:
    """Return the share to start of what the next batch offers, 0 to 1, from that of a batch that has ended.

    ``stale``: share of its returned tokens that older weights have generated. ``most_stale``: the limit.
    """
    if most_stale <= 0:
        return 0.0
    factor = MOST if stale <= 0 else min(max(most_stale / stale, LEAST), MOST)
    return min(max(ahead * factor, FEWEST), 1.0)
