"""Distinguish requests that open a trajectory from requests that continue one.

The trajectories of a group share only their opening prompt, so only opening requests are joined to groups. A request
continues a trajectory if

* its session had an answer, and its prompt is not the prompt that opened the session; or
* its tokens begin with a prompt and its answer, except the answer's last tokens; or
* its tokens begin with a whole prompt that was answered, and it names no group. Many trainers render the chat again for
  each turn, and templates change the answer: they drop the reasoning, or white space; or
* it was aborted before its first token, and is sent again.
"""

import logging
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from darts_server.serving.fair_cache import FairCache
from darts_server.types import TurnKind

KEPT_ANSWERS = 65_536
"""Eight steps of 1,024 groups of eight trajectories."""
ANSWER_END = 4
"""Last tokens of an answer that a later turn may lack: the end of turn, a stop string, white space."""
SESSION_IDLE_S = 600.0
"""Many trainers name sessions after prompt numbers, which mean other prompts in another run."""
RESTART_S = 3600.0
"""A training step takes less, and a data set repeats later."""
SUSPICIOUS_ANSWERS = 2000
"""More than the turns of all trajectories of a group."""

BUCKET_BITS = 20
"""With 131,072 sequences, 12 % of prefixes share a bucket with a sequence, and 0.7 % with several."""
BUCKET_SHIFT = np.uint64(64 - BUCKET_BITS)
FIRST_WEIGHTS = 4096

Hashes = NDArray[np.uint64]

logger = logging.getLogger(__name__)


class StoredSequence(NamedTuple):
    """A prompt with the beginning of its answer, or a prompt alone. ``rank``: engine that has it."""

    is_answer: bool
    rank: int | None


class TokenIndex:
    """The newest ``kept`` sequences of tokens, as hashes.

    A hash is the sum of the tokens, each times a random number for its position, modulo 2^64. So the hashes of all
    prefixes are one cumulative sum. Two given sequences collide with a probability below 2^-40.
    """

    def __init__(self, kept: int) -> None:
        self._stored: FairCache[int, StoredSequence] = FairCache(kept)
        # Number of stored hashes in each bucket, and the XOR of these hashes. The highest bits choose the bucket.
        self._bucket_counts = np.zeros(1 << BUCKET_BITS, dtype=np.uint32)
        self._bucket_xors = np.zeros(1 << BUCKET_BITS, dtype=np.uint64)
        self._rng = np.random.default_rng()
        self._position_weights: Hashes = np.empty(0, dtype=np.uint64)

    def prefix_hashes(self, tokens: Sequence[int], hash_before: int = 0, length_before: int = 0) -> Hashes:
        """Return the hashes of all prefixes. The other arguments are of the tokens before ``tokens``."""
        end = length_before + len(tokens)
        while end > len(self._position_weights):
            count = max(FIRST_WEIGHTS, len(self._position_weights))
            weights = self._rng.integers(1 << 64, size=count, dtype=np.uint64)
            # With an odd weight, different tokens have different products modulo 2^64.
            weights |= np.uint64(1)
            self._position_weights = np.concatenate([self._position_weights, weights])
        try:
            # Type "q" takes three times as long as "Q", but takes negative numbers, which stand for images.
            packed = array("Q", tokens)
        except OverflowError:
            packed = array("q", tokens)
        terms = np.frombuffer(packed, dtype=np.uint64)
        # Without this sum, a token 0 would not change the hash.
        terms += np.uint64(1)
        terms *= self._position_weights[length_before:end]
        terms[:1] += np.uint64(hash_before)
        return terms.cumsum(out=terms)

    def add(
        self,
        caller: str,
        key: int,
        rank: int | None = None,
        *,
        is_answer: bool = False,
    ) -> None:
        """Store a sequence by its hash ``key``. An answer stays an answer."""
        earlier = self._stored.entries_of(caller).get(key)
        is_answer = is_answer or (earlier is not None and earlier.is_answer)
        dropped = self._stored.put(caller, key, StoredSequence(is_answer, rank))
        bucket_changes = [(dropped_key, -1) for dropped_key, _ in dropped]
        if earlier is None:
            bucket_changes.append((key, 1))
        for changed_key, count_change in bucket_changes:
            bucket = changed_key >> (64 - BUCKET_BITS)
            self._bucket_counts[bucket] = int(self._bucket_counts[bucket]) + count_change
            # The XOR adds a hash, and removes a hash that was added before.
            self._bucket_xors[bucket] ^= np.uint64(changed_key)

    def find_prefixes(self, caller: str, hashes: Hashes) -> Iterator[tuple[int, StoredSequence]]:
        """Yield length and entry of each prefix in ``hashes`` that the caller has stored, the longest first."""
        stored = self._stored.entries_of(caller)
        if not stored:
            return
        # Most prefixes are excluded by their buckets, because thousands of dictionary look-ups take longest.
        buckets = hashes >> BUCKET_SHIFT
        possible = np.flatnonzero(self._bucket_counts[buckets])
        possible_buckets = buckets[possible]
        # The XOR of a bucket with a single hash is this hash.
        is_equal = self._bucket_xors[possible_buckets] == hashes[possible]
        has_several = self._bucket_counts[possible_buckets] > 1
        for index in reversed(possible[is_equal | has_several].tolist()):
            sequence = stored.get(int(hashes[index]))
            if sequence is not None:
                yield index + 1, sequence


@dataclass(slots=True)
class Turn:
    """A request, and what it says about its trajectory."""

    token_ids: Sequence[int] = ()
    stable_tokens: int | None = None
    """Number of first tokens that later turns repeat. None means all."""
    session: str | None = None
    opens_session: bool = False
    """Whether the session's name was chosen for us, so that its first request opens a trajectory."""
    names_group: bool = False
    greedy: bool = False
    scoring: bool = False
    """Whether the request generates nothing to train on."""
    caller: str = ""
    group_size: int | None = None
    """Size of the group that the request was joined to, or first tried to join."""
    rank: int | None = None
    """Engine that has the prefix, and then the engine that ran the request."""
    prompt_hash: int | None = field(default=None, repr=False)
    stable_hash: int | None = field(default=None, repr=False)


@dataclass(slots=True)
class _Session:
    opening_hash: int
    used_at: float
    answers: int = 0
    rank: int | None = None


@dataclass(slots=True)
class _AbortedRequests:
    """Requests with a prompt that were aborted before their first token, and not sent again."""

    group_size: int
    aborted_at: float
    count: int = 0


class Turns:
    """Recognises requests that continue the newest ``kept`` answers."""

    def __init__(self, kept: int = KEPT_ANSWERS, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sequences = TokenIndex(2 * kept)
        self._sessions: FairCache[str, _Session] = FairCache(kept)
        # By the hash of the prompt.
        self._aborted: FairCache[int, _AbortedRequests] = FairCache(kept)

    def classify(self, turn: Turn) -> TurnKind:
        """Return whether a request opens a trajectory, or why not. Set the rank of a later turn."""
        if turn.scoring:
            return TurnKind.SCORING
        if turn.greedy:
            return TurnKind.GREEDY

        hashes, prompt_hash = self._hash_prompt(turn)
        session = None if turn.session is None else self._find_recent_session(turn.caller, turn.session)
        is_first_prompt_again = session is not None and session.opening_hash == prompt_hash
        if session is not None and not is_first_prompt_again:
            turn.rank = session.rank
            return TurnKind.SESSION

        # A request that was aborted before its first token is expected again. A new session has aborted none.
        opens_session = turn.opens_session and turn.session is not None
        is_new_session = opens_session and session is None
        if turn.token_ids and not is_new_session:
            aborted = self._find_recently_aborted(turn.caller, prompt_hash)
            if aborted is not None and aborted.count % aborted.group_size == 0:
                # All requests of a group were aborted, so the group is formed again.
                self._aborted.pop(turn.caller, prompt_hash)
            elif aborted is not None:
                aborted.count -= 1
                if not aborted.count:
                    self._aborted.pop(turn.caller, prompt_hash)
                # The request may be aborted once more.
                turn.group_size = aborted.group_size
                return TurnKind.TOKENS
        if opens_session:
            return TurnKind.OPENING

        stable_tokens = turn.stable_tokens or 0
        for length, sequence in self._sequences.find_prefixes(turn.caller, hashes):
            if sequence.is_answer:
                turn.rank = sequence.rank
                return TurnKind.TOKENS
            # A trainer that renders the chat again may change the answer, but not the prompt before it.
            repeats_earlier_prompt = length < stable_tokens
            if repeats_earlier_prompt and not turn.names_group:
                turn.rank = sequence.rank
                return TurnKind.PROMPT
        return TurnKind.OPENING

    def add_answer(self, turn: Turn, token_ids: Sequence[int], *, aborted: bool = False) -> None:
        """Remember an answer. ``aborted``: whether it is partial, and may be empty."""
        if turn.scoring:
            return
        prompt_hash = turn.prompt_hash
        if prompt_hash is None:
            _, prompt_hash = self._hash_prompt(turn)
        now = self._clock()
        if turn.session is not None:
            session = self._find_recent_session(turn.caller, turn.session) or _Session(prompt_hash, now)
            session.used_at = now
            session.rank = turn.rank
            session.answers += 1
            if session.answers == SUSPICIOUS_ANSWERS:
                logger.warning(
                    "session %r had %d answers; only requests with its first prompt are put into groups. If the name "
                    "stands for a worker or a run, do not send it",
                    turn.session,
                    session.answers,
                )
            self._sessions.put(turn.caller, turn.session, session)

        # A prompt of embeddings has no tokens.
        if not turn.token_ids:
            return
        if token_ids:
            beginning = token_ids[:-ANSWER_END] or token_ids[:1]
            hashes = self._sequences.prefix_hashes(beginning, prompt_hash, len(turn.token_ids))
            self._sequences.add(
                turn.caller,
                int(hashes[-1]),
                turn.rank,
                is_answer=True,
            )
            if turn.stable_hash is not None:
                self._sequences.add(turn.caller, turn.stable_hash, turn.rank)
        elif aborted and turn.group_size is not None:
            aborted_requests = self._find_recently_aborted(turn.caller, prompt_hash)
            if aborted_requests is None:
                aborted_requests = _AbortedRequests(turn.group_size, now)
            aborted_requests.aborted_at = now
            aborted_requests.count += 1
            self._aborted.put(turn.caller, prompt_hash, aborted_requests)

    def forget_session(self, caller: str, name: str) -> bool:
        """Return whether the session existed. The tokens of its answers are still recognised."""
        return self._sessions.pop(caller, name) is not None

    def _hash_prompt(self, turn: Turn) -> tuple[Hashes, int]:
        """Return the hashes of all prefixes, and of the prompt."""
        # All hashes of a long prompt take hundreds of kilobytes, so keep two.
        hashes = self._sequences.prefix_hashes(turn.token_ids)
        turn.prompt_hash = int(hashes[-1]) if len(hashes) else 0
        if turn.stable_tokens is None:
            turn.stable_tokens = len(turn.token_ids)
        # Every prompt may begin with the same token.
        turn.stable_hash = None
        stable_hashes = hashes[: turn.stable_tokens]
        if turn.stable_tokens > 1 and len(stable_hashes):
            turn.stable_hash = int(stable_hashes[-1])
        return hashes, turn.prompt_hash

    def _find_recent_session(self, caller: str, name: str) -> _Session | None:
        session = self._sessions.entries_of(caller).get(name)
        if session is None or session.used_at < self._clock() - SESSION_IDLE_S:
            return None
        return session

    def _find_recently_aborted(self, caller: str, prompt_hash: int) -> _AbortedRequests | None:
        aborted = self._aborted.entries_of(caller).get(prompt_hash)
        if aborted is None or aborted.aborted_at < self._clock() - RESTART_S:
            return None
        return aborted
