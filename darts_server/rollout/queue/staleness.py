"""How many groups of a job may be started, and which may be handed out, so that none becomes too old.

Let v be the weight version, G how many groups the consumers take under each version (``groups_per_version``), S the
``max_staleness``, and r = max(0, G - those taken under v) how many they still take under v. *Open* groups run or are
ready. A group whose first token has version f must be handed out under f + S at the latest, so for each f there must
be enough hand-outs left for all open groups that are that old:

    for each f:  open groups of version f or older  <=  r + (f + S - v) G                                        (1)

(1) is kept by everything that can happen, so no group is ever too old:

* A group starts under v only if there are fewer than r + S G open groups: (1) for f = v. The other lines do not count
  it.
* A group of version g is handed out only if (1) holds afterwards, with r - 1 in place of r: for f >= g it has one
  group less on the left too, and the others, those of older groups, are checked.
* With an update that the consumers make after they took G, r = 0 becomes r = G and v becomes v + 1: the right side
  stays the same.
* At f = v - S the right side is r, and 0 at an update: all groups of that version have been handed out by then.

With S = 0 it says that r groups are open at most: what has started under a version is handed out under it, and training
is on-policy. What breaks (1) is a consumer that takes fewer than G under a version or that dies, `groups_ahead`, and a
version that is left out. Then groups that would be too old start again, and never are handed out.
"""

from collections.abc import Mapping
from math import inf

from darts_server.rollout.queue.entries import JobOptions


def startable(options: JobOptions, open_groups: int, taken: int) -> float:
    """Return how many more groups may be started under the present version."""
    size = options.groups_per_version
    if size is None:
        return inf
    return max(0, size - taken) + options.max_staleness * size + options.groups_ahead - open_groups


def may_hand_out(options: JobOptions, open_by_version: Mapping[int, int], taken: int, version: int, first: int) -> bool:
    """Return whether a group of version ``first`` may be handed out before those that are older."""
    size = options.groups_per_version
    if size is None:
        return True
    rest = max(0, size - taken) - 1
    older = 0
    for each in sorted(each for each in open_by_version if each < first):
        older += open_by_version[each]
        if older > rest + (each + options.max_staleness - version) * size + options.groups_ahead:
            return False
    return True


def is_stale(options: JobOptions, first: int, version: int) -> bool:
    """Return whether a group of version ``first`` is too old to be handed out."""
    return version - first > options.max_staleness
