"""Tell requests that open a trajectory from those that continue one.

Only the first ones are joined to groups: what the trajectories of a group have in common is the opening prompt alone. A
request continues a trajectory if

* its session had an answer, and its prompt is not the one that opened the session; or
* its tokens begin with a prompt and an answer to it, but for the answer's last tokens; or
* its tokens begin with a whole prompt that was answered, and its caller names no group. Many trainers render the whole
  chat again for each turn, and the template changes what was generated: it drops the reasoning, or white space.

All answers to the same caller count, shaped or not. The newest are kept.

A request that is sent again because it was aborted before its first token continues its trajectory too, unless all
requests of its group were: then the group is formed again.
"""

import logging
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from darts_server.serving.kept import Kept
from darts_server.types import TurnKind

KEPT_ANSWERS = 65_536
"""Eight steps of 1,024 groups of eight trajectories. As many prompts are kept with them."""
ANSWER_END = 4
"""Last tokens of an answer that a later turn may lack: the end of turn, a stop string, white space."""
SESSION_IDLE_S = 600.0
"""After this time without an answer a session is forgotten. Many trainers make names of numbers of prompts, which come
again with other prompts: in another run, or another data set."""
RESTART_S = 3600.0
"""For how long a request that was aborted without a token is expected again: a step of training takes less, and a data
set that comes again takes longer."""
SUSPICIOUS_ANSWERS = 2000
"""More than the turns of all trajectories of a group."""

BUCKET_BITS = 20
"""With 131,072 known sequences one prefix in 8 shares its bucket with one, and one in 140 with several."""
BUCKET_SHIFT = np.uint64(64 - BUCKET_BITS)
FIRST_WEIGHTS = 4096

Hashes = NDArray[np.uint64]

logger = logging.getLogger(__name__)


class Known(NamedTuple):
    """A sequence of tokens that is known: a prompt with the beginning of its answer, or a prompt alone.

    ``rank``: of the engine that has it, if that is known.
    """

    is_answer: bool
    rank: int | None


class TokenIndex:
    """The newest ``kept`` sequences of tokens of all callers, as hashes.

    A sequence's hash is the sum of its tokens, each times a random number for its position, modulo 2^64. So the hashes
    of all prefixes of a prompt are one cumulative sum. Two given sequences have the same hash with a probability below
    2^-40.
    """

    def __init__(self, kept: int) -> None:
        self._known: Kept[int, Known] = Kept(kept)
        self._counts = np.zeros(1 << BUCKET_BITS, dtype=np.uint32)  # known hashes, by their highest bits
        self._mixed = np.zeros(1 << BUCKET_BITS, dtype=np.uint64)  # these hashes, combined by XOR
        self._rng = np.random.default_rng()
        self._weights: Hashes = np.empty(0, dtype=np.uint64)  # random and odd, by position

    def prefix_hashes(self, tokens: Sequence[int], begin: int = 0, length: int = 0) -> Hashes:
        """Return the hashes of all prefixes of a sequence, from its first token to all of it.

        ``begin``, ``length``: hash and tokens of what it follows.
        """
        end = length + len(tokens)
        while end > len(self._weights):
            count = max(FIRST_WEIGHTS, len(self._weights))
            more = self._rng.integers(1 << 64, size=count, dtype=np.uint64) | np.uint64(1)
            self._weights = np.concatenate([self._weights, more])
        try:
            packed = array("Q", tokens)  # "q" takes three times as long
        except OverflowError:  # what stands for an image may be negative
            packed = array("q", tokens)
        terms = np.frombuffer(packed, dtype=np.uint64)
        terms += np.uint64(1)
        terms *= self._weights[length:end]
        terms[:1] += np.uint64(begin)
        return terms.cumsum(out=terms)

    def add(self, caller: str, key: int, rank: int | None = None, *, is_answer: bool = False) -> None:
        """Add the sequence with this hash. What is known as an answer stays one."""
        earlier = self._known.of(caller).get(key)
        is_answer = is_answer or (earlier is not None and earlier.is_answer)
        dropped = self._known.put(caller, key, Known(is_answer, rank))
        changes = [(old, -1) for old, _ in dropped]
        if earlier is None:
            changes.append((key, 1))
        for changed, change in changes:
            bucket = changed >> (64 - BUCKET_BITS)
            self._counts[bucket] = int(self._counts[bucket]) + change
            self._mixed[bucket] ^= np.uint64(changed)

    def known_prefixes(self, caller: str, hashes: Hashes) -> Iterator[tuple[int, Known]]:
        """Yield the prefixes among these that are known for a caller, the longest first, each with its length."""
        if not (known := self._known.of(caller)):
            return
        buckets = hashes >> BUCKET_SHIFT
        near = np.flatnonzero(self._counts[buckets])
        few, buckets = hashes[near], buckets[near]
        # The one hash of a bucket is compared here: looking up thousands in the dictionary would take longest.
        likely = near[(self._mixed[buckets] == few) | (self._counts[buckets] > 1)]
        for index in reversed(likely.tolist()):
            if (found := known.get(int(hashes[index]))) is not None:
                yield index + 1, found


@dataclass(slots=True)
class Turn:
    """One request, and what shows which trajectory it belongs to.

    ``stable_tokens``: how many of its tokens its later turns begin with; ``None``: all. ``caller``: whose answers
    count. ``session``: its trajectory's name. ``opens_session``: whether the caller chose that name for us, so that the
    first request of a session opens a trajectory whatever else it looks like. ``names_group``: whether it says itself
    which group it is of. ``greedy``, ``scoring``: whether it samples nothing, or generates nothing to be trained on.
    """

    token_ids: Sequence[int] = ()
    stable_tokens: int | None = None
    session: str | None = None
    opens_session: bool = False
    names_group: bool = False
    greedy: bool = False
    scoring: bool = False
    caller: str = ""
    group_size: int | None = None
    """Of the group that it was joined to, or would have been if it did not start again."""
    rank: int | None = None
    """Of the engine that has its prefix, and then of the one that ran it; ``None`` if that is not known."""
    prompt_hash: int | None = field(default=None, repr=False)
    """Of ``token_ids``, when it was needed once."""
    stable_hash: int | None = field(default=None, repr=False)
    """Of those that its later turns begin with."""


@dataclass(slots=True)
class _Session:
    """``opening``: hash of the prompt that had its first answer. ``used_at``, ``rank``: of the newest one."""

    opening: int
    used_at: float
    answers: int = 0
    rank: int | None = None


@dataclass(slots=True)
class _Restarts:
    """Requests with the same prompt that were aborted without a token. ``aborted_at``: time of the newest."""

    group_size: int
    aborted_at: float
    count: int = 0


class Turns:
    """Remember the newest ``kept`` answers, and recognise requests that go on from them.

    ``clock``: monotonic seconds.
    """

    def __init__(self, kept: int = KEPT_ANSWERS, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sequences = TokenIndex(2 * kept)
        self._sessions: Kept[str, _Session] = Kept(kept)  # by name
        self._restarts: Kept[int, _Restarts] = Kept(kept)  # by the prompt's hash

    def classify(self, turn: Turn) -> TurnKind:
        """Return whether a request opens a trajectory, or why it does not."""
        if turn.scoring:
            return TurnKind.SCORING
        if turn.greedy:
            return TurnKind.GREEDY
        hashes, prompt_hash = self._prefix_hashes(turn)
        session = None if turn.session is None else self._find_session(turn.caller, turn.session)
        if session is not None and session.opening != prompt_hash:
            turn.rank = session.rank
            return TurnKind.SESSION
        opens = turn.opens_session and turn.session is not None
        if turn.token_ids and not (opens and session is None):
            # One of the requests with this prompt that are expected again, if they are less than a whole group.
            restarts = self._find_restarts(turn.caller, prompt_hash)
            if restarts is not None and restarts.count % restarts.group_size == 0:
                self._restarts.pop(turn.caller, prompt_hash)
            elif restarts is not None:
                restarts.count -= 1
                if not restarts.count:
                    self._restarts.pop(turn.caller, prompt_hash)
                turn.group_size = restarts.group_size  # it may be aborted once more
                return TurnKind.TOKENS
        if opens:
            return TurnKind.OPENING
        stable_tokens = turn.stable_tokens or 0  # never `None`: see `_prefix_hashes`
        for length, known in self._sequences.known_prefixes(turn.caller, hashes):
            if known.is_answer or (length < stable_tokens and not turn.names_group):
                turn.rank = known.rank
                return TurnKind.TOKENS if known.is_answer else TurnKind.PROMPT
        return TurnKind.OPENING

    def add_answer(self, turn: Turn, token_ids: Sequence[int], *, aborted: bool = False) -> None:
        """Remember an answer to a request. ``aborted``: whether it is the beginning of one, which may be empty."""
        if turn.scoring:
            return
        prompt_hash = self._prefix_hashes(turn)[1] if turn.prompt_hash is None else turn.prompt_hash
        now = self._clock()
        if turn.session is not None:
            session = self._find_session(turn.caller, turn.session) or _Session(prompt_hash, now)
            session.used_at, session.rank, session.answers = now, turn.rank, session.answers + 1
            if session.answers == SUSPICIOUS_ANSWERS:
                logger.warning(
                    "session %r had %d answers; its requests are not put into groups, but for those with its first "
                    "prompt. If the name stands for a worker or a run, do not send it",
                    turn.session,
                    session.answers,
                )
            self._sessions.put(turn.caller, turn.session, session)
        if not turn.token_ids:  # a prompt of embeddings
            return
        if token_ids:
            begun = token_ids[:-ANSWER_END] or token_ids[:1]
            answered = int(self._sequences.prefix_hashes(begun, prompt_hash, len(turn.token_ids))[-1])
            self._sequences.add(turn.caller, answered, turn.rank, is_answer=True)
            if turn.stable_hash is not None:
                self._sequences.add(turn.caller, turn.stable_hash, turn.rank)
        elif aborted and turn.group_size is not None:
            restarts = self._find_restarts(turn.caller, prompt_hash) or _Restarts(turn.group_size, now)
            restarts.aborted_at, restarts.count = now, restarts.count + 1
            self._restarts.put(turn.caller, prompt_hash, restarts)

    def forget_session(self, caller: str, name: str) -> bool:
        """Forget a session that has ended; returns whether it was known. Its answers stay known by their tokens."""
        return self._sessions.pop(caller, name) is not None

    def _prefix_hashes(self, turn: Turn) -> tuple[Hashes, int]:
        """Return the hashes of all prefixes of its prompt, and of the whole.

        Two are kept with the turn: all of a long prompt's are hundreds of kilobytes.
        """
        hashes = self._sequences.prefix_hashes(turn.token_ids)
        turn.prompt_hash = int(hashes[-1]) if len(hashes) else 0
        if turn.stable_tokens is None:
            turn.stable_tokens = len(turn.token_ids)
        # Every prompt may begin with the same single token, so that one says nothing.
        stable = hashes[: turn.stable_tokens] if turn.stable_tokens > 1 else hashes[:0]
        turn.stable_hash = int(stable[-1]) if len(stable) else None
        return hashes, turn.prompt_hash

    def _find_session(self, caller: str, name: str) -> _Session | None:
        session = self._sessions.of(caller).get(name)
        return None if session is None or session.used_at < self._clock() - SESSION_IDLE_S else session

    def _find_restarts(self, caller: str, prompt_hash: int) -> _Restarts | None:
        restarts = self._restarts.of(caller).get(prompt_hash)
        return None if restarts is None or restarts.aborted_at < self._clock() - RESTART_S else restarts
