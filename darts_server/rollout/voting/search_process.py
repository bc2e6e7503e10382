"""The process of `answer_search`: ``python -m darts_server.rollout.voting.search_process SECONDS``.

Each line of the input is a JSON object with a pattern, and a text unless only the pattern is to be checked; each line
of the output is the reply. The process ends with its input, so it does not outlive the server.
"""

import json
import signal
import sys
from functools import lru_cache
from typing import Any

from darts_server.exceptions import InvalidRequest
from darts_server.policy.voting.answers import Extractor, create_extractor

KEPT_PATTERNS = 64
"""Each takes up to 2 MiB, compiled and with its automata."""


def main() -> None:
    """Answer requests until the input ends."""
    seconds = float(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the whole group of processes
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process, in the middle of a search too
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        reply = _reply(json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


def _reply(request: dict[str, Any]) -> dict[str, Any]:
    pattern, text = request["pattern"], request.get("text")
    try:
        extractor = _extractor(pattern if isinstance(pattern, str) else tuple(pattern))
    except InvalidRequest as error:
        return {"field": error.field, "message": error.message}
    return {"answer": None if text is None else extractor.extract(text)}


@lru_cache(KEPT_PATTERNS)
def _extractor(pattern: str | tuple[str, ...]) -> Extractor:
    return create_extractor(pattern)


if __name__ == "__main__":
    main()
