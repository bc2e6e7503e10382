"""Tell requests that open a trajectory from those that continue one.

Only the first ones are joined to groups: what the trajectories of a group have in common is the opening prompt alone. A
request continues a trajectory if

* its session had an answer, and its prompt is not the one that opened the session; or
* its tokens begin with a prompt and an answer to it; or
* its chat history has an answer to the messages before it.

All answers to the same caller count, shaped or not. The newest are kept.

A request that is sent again because it was aborted before its first token continues its trajectory too, unless all
requests of its group were: then the group is formed again.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from darts_server.rollout.turns.chat_history import ChatHistory, Message
from darts_server.rollout.turns.token_index import Hashes, TokenIndex, hash_of
from darts_server.types import TurnKind

KEPT_ANSWERS = 65_536
"""Eight steps of 1,024 groups of eight trajectories."""
SESSION_IDLE_S = 600.0
"""After this time without an answer a session is forgotten. Many trainers make names of numbers of prompts, which come
again with other prompts: in another run, or another data set."""
RESTART_S = 3600.0
"""For how long a request that was aborted without a token is expected again: a step of training takes less, and a data
set that comes again takes longer."""
SUSPICIOUS_ANSWERS = 2000
"""More than the turns of all trajectories of a group."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Turn:
    """One request, and what shows which trajectory it belongs to.

    ``caller``: whose answers count. ``session``: its trajectory's name. ``opens_session``: whether the caller chose
    that name for us, so that the first request of a session opens a trajectory whatever else it looks like. ``greedy``,
    ``scoring``: whether it samples nothing, or generates nothing to be trained on.
    """

    token_ids: Sequence[int] = ()
    history: ChatHistory | None = None
    session: str | None = None
    opens_session: bool = False
    greedy: bool = False
    scoring: bool = False
    caller: str = ""
    group_size: int | None = None
    """Of the group that it was joined to, or would have been if it did not start again."""
    rank: int | None = None
    """Of the engine that has its prefix, and then of the one that ran it; ``None`` if that is not known."""
    prompt_hash: int | None = field(default=None, repr=False)
    """Of ``token_ids``, when it was needed once."""


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
        self._kept = kept
        self._clock = clock
        self._sequences = TokenIndex(kept)
        self._sessions: OrderedDict[tuple[str, str], _Session] = OrderedDict()  # by caller and name; oldest use first
        self._messages: OrderedDict[int, int | None] = OrderedDict()  # the ranks of their engines
        self._restarts: OrderedDict[int, _Restarts] = OrderedDict()  # by the prompt's hash; oldest first

    def classify(self, turn: Turn) -> TurnKind:
        """Return whether a request opens a trajectory, or why it does not."""
        if turn.scoring:
            return TurnKind.SCORING
        if turn.greedy:
            return TurnKind.GREEDY
        hashes = self._prefix_hashes(turn)
        session = None if turn.session is None else self._find_session(turn.caller, turn.session)
        if session is not None and session.opening != hash_of(hashes):
            turn.rank = session.rank
            return TurnKind.SESSION
        is_new = turn.opens_session and turn.session is not None and session is None
        if not is_new and self._starts_again(turn):
            return TurnKind.TOKENS
        if turn.opens_session and turn.session is not None:
            return TurnKind.OPENING
        if (prefix := self._sequences.longest_prefix(hashes)) is not None:
            turn.rank = self._sequences.rank_of(prefix)
            return TurnKind.TOKENS
        if turn.history is not None and self._goes_on(turn.history):
            turn.rank = turn.history.rank
            return TurnKind.HISTORY
        return TurnKind.OPENING

    def add_answer(self, turn: Turn, token_ids: Sequence[int], text: str = "", *, aborted: bool = False) -> None:
        """Remember an answer to a request. ``aborted``: whether it is the beginning of one, which may be empty."""
        if turn.scoring:
            return
        prompt_hash = hash_of(self._prefix_hashes(turn)) if turn.prompt_hash is None else turn.prompt_hash
        if turn.session is not None:
            self._add_session(turn, turn.session, prompt_hash)
        if turn.token_ids:  # a prompt of embeddings has none
            if token_ids:
                self._sequences.add(prompt_hash, len(turn.token_ids), token_ids, turn.rank)
            elif aborted and turn.group_size is not None:
                self._add_restart(prompt_hash, turn.group_size)
        if turn.history is not None:
            turn.history.rank = turn.rank
            self._add_keys(turn.history.keys_of(text) if text else (), turn.rank)

    def forget_session(self, caller: str, name: str) -> bool:
        """Forget a session that has ended; returns whether it was known. Its answers stay known by their tokens."""
        return self._sessions.pop((caller, name), None) is not None

    def add_messages(self, history: ChatHistory, messages: Iterable[Message]) -> None:
        """Remember answers to a chat as their caller gets them: reasoning and tool calls are parsed."""
        self._add_keys(map(history.key_of, messages), history.rank)

    def _prefix_hashes(self, turn: Turn) -> Hashes:
        """Only the last one is kept with the turn: all of a long prompt's are hundreds of kilobytes."""
        salt = int.from_bytes(blake2b(turn.caller.encode(), digest_size=8).digest())
        hashes = self._sequences.prefix_hashes(turn.token_ids)
        hashes += np.uint64(salt)
        turn.prompt_hash = hash_of(hashes)
        return hashes

    def _goes_on(self, history: ChatHistory) -> bool:
        """Whether a chat has an answer of ours. Its rank is then that of the newest one."""
        newest = next((key for key in reversed(history.answers) if key in self._messages), None)
        if newest is not None:
            history.rank = self._messages[newest]
        return newest is not None or history.follows

    def _find_session(self, caller: str, name: str) -> _Session | None:
        self._drop_idle_sessions()
        return self._sessions.get((caller, name))

    def _add_session(self, turn: Turn, name: str, opening: int) -> None:
        self._drop_idle_sessions()
        session = self._sessions.setdefault((turn.caller, name), _Session(opening, 0))
        session.used_at, session.rank = self._clock(), turn.rank
        session.answers += 1
        if session.answers == SUSPICIOUS_ANSWERS:
            logger.warning(
                "session %r had %d answers; its requests are not put into groups, but for those with its first prompt. "
                "If the name stands for a worker or a run, do not send it",
                name,
                session.answers,
            )
        self._sessions.move_to_end((turn.caller, name))
        if len(self._sessions) > self._kept:
            self._sessions.popitem(last=False)

    def _drop_idle_sessions(self) -> None:
        limit = self._clock() - SESSION_IDLE_S
        while self._sessions and next(iter(self._sessions.values())).used_at < limit:
            self._sessions.popitem(last=False)

    def _starts_again(self, turn: Turn) -> bool:
        """Take one of the requests with this prompt that are expected again, if they are less than a whole group."""
        self._drop_old_restarts()
        if not turn.token_ids or turn.prompt_hash is None or (restarts := self._restarts.get(turn.prompt_hash)) is None:
            return False
        if restarts.count % restarts.group_size == 0:
            del self._restarts[turn.prompt_hash]
            return False
        restarts.count -= 1
        if not restarts.count:
            del self._restarts[turn.prompt_hash]
        turn.group_size = restarts.group_size  # it may be aborted once more
        return True

    def _add_restart(self, prompt_hash: int, group_size: int) -> None:
        self._drop_old_restarts()
        restarts = self._restarts.setdefault(prompt_hash, _Restarts(group_size, 0))
        restarts.aborted_at = self._clock()
        restarts.count += 1
        self._restarts.move_to_end(prompt_hash)
        if len(self._restarts) > self._kept:
            self._restarts.popitem(last=False)

    def _drop_old_restarts(self) -> None:
        limit = self._clock() - RESTART_S
        while self._restarts and next(iter(self._restarts.values())).aborted_at < limit:
            self._restarts.popitem(last=False)

    def _add_keys(self, keys: Iterable[int], rank: int | None) -> None:
        for key in keys:
            self._messages[key] = rank
            self._messages.move_to_end(key)
            if len(self._messages) > self._kept:
                self._messages.popitem(last=False)
