"""Whether groups of single requests are often sealed short."""

import logging
from collections import deque

logger = logging.getLogger(__name__)

WINDOW = 64
"""Groups of which the log says how many were sealed short."""
OFTEN, SELDOM = 0.25, 0.1
"""Shares of these from which it is said, and below which it may be said once more."""


class ShortGroups:
    """Log once when groups are often sealed with fewer requests than planned."""

    def __init__(self) -> None:
        self._newest: deque[bool] = deque(maxlen=WINDOW)
        self._is_logged = False

    def add(self, *, full: bool, planned: int) -> None:
        self._newest.append(not full)
        count = sum(self._newest)
        if len(self._newest) == WINDOW and count >= OFTEN * WINDOW and not self._is_logged:
            self._is_logged = True
            logger.warning(
                "%d of the last %d groups of single requests were sealed with fewer than %d, after --group-wait, or "
                "--group-name-wait for those with names: send all requests of a prompt at once, name groups "
                "(X-Darts-Group: id=NAME, or sessions that match --group-pattern), raise these, or lower --group-size",
                count,
                WINDOW,
                planned,
            )
        elif count < SELDOM * WINDOW:
            self._is_logged = False
