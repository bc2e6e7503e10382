"""Tell requests that open a trajectory from those that continue one.

Only the first ones are joined to groups: what the trajectories of a group have in common is the opening prompt alone. A
request continues a trajectory if

* its session had an answer, and its prompt is not the one that opened the session; or
* its tokens begin with a prompt and an answer to it; or
* its chat history has an answer to the messages before it.

All answers count, shaped or not. The newest are kept.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from darts_server.rollout.turns.chat_history import ChatHistory, Message
from darts_server.rollout.turns.token_index import Hashes, TokenIndex, hash_of
from darts_server.types import TurnKind

KEPT_ANSWERS = 65_536
"""Eight steps of 1,024 groups of eight trajectories."""


@dataclass(slots=True)
class Turn:
    """One request, and what shows which trajectory it belongs to.

    ``session``: its trajectory's name, among those of ``caller``. ``opens_session``: whether the caller chose that name
    for us, so that the first request of a session opens a trajectory whatever else it looks like. ``greedy``,
    ``scoring``: whether it samples nothing, or generates nothing to be trained on.
    """

    token_ids: Sequence[int] = ()
    history: ChatHistory | None = None
    session: str | None = None
    caller: str | None = None
    opens_session: bool = False
    greedy: bool = False
    scoring: bool = False
    hashes: Hashes | None = field(default=None, repr=False)
    """Of the prefixes of ``token_ids``, when they were needed once."""


class Turns:
    """Remember the newest ``kept`` answers, and recognise requests that go on from them."""

    def __init__(self, kept: int = KEPT_ANSWERS) -> None:
        self._kept = kept
        self._sequences = TokenIndex(kept)
        self._sessions: OrderedDict[tuple[str | None, str], int] = OrderedDict()  # -> hash of the opening prompt
        self._messages: OrderedDict[bytes, None] = OrderedDict()

    def classify(self, turn: Turn) -> TurnKind:
        """Return whether a request opens a trajectory, or why it does not."""
        if turn.scoring:
            return TurnKind.SCORING
        if turn.greedy:
            return TurnKind.GREEDY
        if turn.session is not None:
            opening = self._sessions.get((turn.caller, turn.session))
            if opening is not None and opening != hash_of(self._hashes(turn)):
                return TurnKind.SESSION
            if turn.opens_session:
                return TurnKind.OPENING
        if self._sequences.holds_prefix(self._hashes(turn)):
            return TurnKind.TOKENS
        if turn.history is not None and any(key in self._messages for key in turn.history.answers):
            return TurnKind.HISTORY
        return TurnKind.OPENING

    def add_answer(self, turn: Turn, token_ids: Sequence[int], text: str = "") -> None:
        """Remember an answer to a request."""
        if turn.scoring:
            return
        if turn.session is not None:
            self._add_session((turn.caller, turn.session), hash_of(self._hashes(turn)))
        if token_ids:
            self._sequences.add(self._hashes(turn), token_ids)
        if turn.history is not None and text:
            self._add_keys(turn.history.keys_of(text))

    def add_messages(self, history: ChatHistory, messages: Iterable[Message]) -> None:
        """Remember answers to a chat as their caller gets them: reasoning and tool calls are parsed."""
        self._add_keys(map(history.key_of, messages))

    def _hashes(self, turn: Turn) -> Hashes:
        if turn.hashes is None:
            turn.hashes = self._sequences.prefix_hashes(turn.token_ids)
        return turn.hashes

    def _add_session(self, session: tuple[str | None, str], opening: int) -> None:
        self._sessions.setdefault(session, opening)
        self._sessions.move_to_end(session)
        if len(self._sessions) > self._kept:
            self._sessions.popitem(last=False)

    def _add_keys(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._messages[key] = None
            self._messages.move_to_end(key)
            if len(self._messages) > self._kept:
                self._messages.popitem(last=False)
