"""Updates in two steps: staged first and switched later, so that several servers can switch together or not at all."""

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

from darts_server.exceptions import Conflict, InvalidRequest, NotFound, UpdateRunning
from darts_server.records import UpdateRecord
from darts_server.types import UpdateOutcome
from darts_server.weights.coordinator import Coordinator
from darts_server.weights.port import StageableTransaction, StagedFileChanged
from darts_server.weights.rules import Rule, Update

logger = logging.getLogger(__name__)

EXPIRE_SECONDS = 1800.0
"""Enough to send a large model to other servers too; a trainer that died occupies the disk for no longer."""
MAX_ENDED = 16
"""Staged updates that have ended and whose ends are remembered, so that a late caller learns why."""
PREVIOUS = "previous"
"""Source of an update back to the weights that were served before a switch."""
AGAIN = "stage the weights again"
PUSH_THEM = "to serve the weights before the switch, send them as an update"


@dataclass(slots=True, eq=False)
class StagedUpdate:
    """Weights that are transferred and checked, and not served.

    ``version``: that they get unless the switch names another. ``expires_at``: in Unix seconds.
    """

    id: str
    version: int
    update: Update
    transaction: StageableTransaction
    expires_after: float
    expires_at: float = 0.0
    timer: asyncio.TimerHandle | None = None

    @property
    def is_previous(self) -> bool:
        """Whether they were served before the last switch."""
        return self.update.source == PREVIOUS


class StagedUpdates:
    """At most one staged update. It ends by a switch, a drop, another update, or time. Observes all updates."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.current: StagedUpdate | None = None
        self._coordinator = coordinator
        self.is_switching = False
        self._ended: dict[str, InvalidRequest] = {}
        coordinator.observers.add(self)

    @property
    def files(self) -> set[Path]:
        """Paths that must not be removed."""
        return set() if self.current is None else self.current.transaction.files

    async def stage(
        self, update: Update, version: int | None, transaction: StageableTransaction, expires_after: float
    ) -> None:
        """Fetch and check new weights, and keep them. ``version``: as for an update; ``None`` for the next one.

        Raises:
            Conflict: others are staged, or another update runs; nothing was changed.
            InvalidRequest, UpdateError, WeightsLost: nothing was changed.
        """
        self._coordinator.check_free()
        if self.current is not None and not self.current.is_previous:
            raise Conflict(
                "stage",
                f"is refused: weights are staged already, as {self.current.id} for version {self.current.version}; "
                f"switch them, or DELETE /darts/v1/weights/staged/{self.current.id}",
            )
        self._coordinator.begin(update, version, is_applied=False)
        await self._coordinator.stage(update, transaction)
        target = self._coordinator.target
        self._coordinator.set_aside()
        self.drop_previous()
        self.keep(update, target, transaction, expires_after)

    async def switch(
        self, staged_id: str, rule: Rule | None = None, version: int | None = None, *, keep_previous: bool = False
    ) -> UpdateRecord:
        """Serve staged weights. If that fails, the old ones are served and these stay staged.

        They do not if a file of theirs was changed, or if the model's weights are lost.

        ``rule``, ``version``: ``None`` for those given when they were staged. ``keep_previous``: stage the weights
        that are served now, to switch back to them.

        Raises:
            NotFound: nothing is staged under this id.
            Conflict: the staged weights cannot be switched any more, or the served ones cannot be kept.
            InvalidRequest: of the version, or of ``keep_previous``.
            UpdateError: the old version is served.
            WeightsLost
        """
        self._coordinator.check_not_lost()
        staged = self._find(staged_id)
        given = staged.update
        update = replace(given, rule=rule or given.rule, seconds=dict(given.seconds))
        previous = Update(PREVIOUS, self._coordinator.settings.rule, timeout=given.timeout)
        transaction = _Switch(self, staged, previous if keep_previous else None, self._coordinator.version)
        return await self._coordinator.run(update, staged.version if version is None else version, transaction)

    def drop(self, staged_id: str) -> None:
        """Remove staged weights.

        Raises:
            NotFound: nothing is staged under this id.
            Conflict: it was switched, or another update has replaced it.
            UpdateRunning: they are being switched.
            WeightsLost
        """
        self._coordinator.check_not_lost()
        staged = self._find(staged_id)
        if self.is_switching:
            raise UpdateRunning(f"the weights {staged_id} are being switched; try again when that has ended")
        self.end(staged, NotFound("id", f"the weights {staged_id} were dropped; {AGAIN}"))

    def drop_previous(self) -> None:
        """Remove the weights that were kept by the last switch: the disk needs their room for other ones."""
        if (staged := self.current) is not None and staged.is_previous:
            self.end(staged, Conflict("id", f"the weights {staged.id} were dropped when other ones were sent"))

    # --- as an observer of updates --------------------------------------------

    def update_announced(self, version: int) -> None:
        """Do nothing: the update may fail."""

    def update_ended(self, record: UpdateRecord) -> None:
        """Drop weights that were staged before another update: what a partial set lacks, and its version, may be
        other ones now."""
        staged = self.current
        if staged is None:
            return
        if record.outcome is UpdateOutcome.LOST:
            self.end(
                staged, Conflict("id", f"the weights {staged.id} were dropped: the served ones were lost; {AGAIN}")
            )
            return
        if record.outcome is not UpdateOutcome.COMPLETED or self.is_switching:
            return
        why = f"another update, by {record.source}, made version {record.version}"
        self.end(staged, Conflict("id", f"the weights {staged.id} were dropped: {why}; {AGAIN}"))

    # --- helpers, also of a switch ---------------------------------------------

    def end(self, staged: StagedUpdate, error: InvalidRequest) -> None:
        """Remove staged weights, and answer later calls with ``error``."""
        self.remember(staged, error)
        _stop_timer(staged)
        self.current = None
        staged.transaction.discard()

    def keep(self, update: Update, version: int, transaction: StageableTransaction, expires_after: float) -> None:
        staged = StagedUpdate(uuid.uuid4().hex, version, update, transaction, expires_after)
        self.current = staged
        self.start_timer(staged)
        logger.info("weights for version %d are staged as %s for %g s", version, staged.id, expires_after)

    def _find(self, staged_id: str) -> StagedUpdate:
        if self.current is not None and self.current.id == staged_id:
            return self.current
        if (error := self._ended.get(staged_id)) is not None:
            raise type(error)(error.field, error.message)  # not the same object: it would keep what raised it before
        raise NotFound(
            "id",
            f"no weights are staged as {staged_id!r}; GET /darts/v1/weights shows what is, and a restart of the server "
            f"drops it; {AGAIN}",
        )

    def start_timer(self, staged: StagedUpdate) -> None:
        staged.expires_at = time.time() + staged.expires_after
        staged.timer = asyncio.get_running_loop().call_later(staged.expires_after, self._expire, staged)

    def _expire(self, staged: StagedUpdate) -> None:
        if self.current is not staged:
            return
        if not staged.is_previous:
            logger.warning("the weights %s were staged and not switched for %g s", staged.id, staged.expires_after)
        why = f"the weights {staged.id} expired after {staged.expires_after:g} s; "
        why += PUSH_THEM if staged.is_previous else f"{AGAIN}, with a larger expires_after"
        self.end(staged, NotFound("id", why))

    def remember(self, staged: StagedUpdate, error: InvalidRequest) -> None:
        self._ended[staged.id] = error
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]


class _Switch:
    """Implements :class:`darts_server.weights.port.Transaction`: applies what another one has staged.

    ``previous``: the update back to what is served now, with ``version_before``; ``None`` if that is not kept.
    """

    def __init__(
        self, owner: StagedUpdates, staged: StagedUpdate, previous: Update | None, version_before: int
    ) -> None:
        self._owner = owner
        self._staged = staged
        self._inner = staged.transaction
        self.apply, self.roll_back = self._inner.apply, self._inner.roll_back
        self._previous = previous
        self._version_before = version_before
        self._reversal: StageableTransaction | None = None

    async def stage(self, update: Update) -> None:
        self._owner.is_switching = True
        _stop_timer(self._staged)
        try:
            await update.run_phase("check", self._inner.check_again)
        except StagedFileChanged as error:
            remedy = PUSH_THEM if self._staged.is_previous else f"{AGAIN}, from files of another name"
            ended = Conflict("id", f"{error.message}; {remedy}")
            self._owner.end(self._staged, ended)
            raise ended from error
        if self._previous is not None:
            self._reversal = await update.run_phase("check", self._inner.reversal)

    def commit(self) -> None:
        self._inner.commit()
        owner, staged = self._owner, self._staged
        owner.remember(staged, Conflict("id", f"the weights {staged.id} were switched already; nothing is left to do"))
        owner.current = None
        if self._previous is not None and self._reversal is not None:
            owner.keep(self._previous, self._version_before, self._reversal, staged.expires_after)

    def clean_up(self) -> None:
        self._owner.is_switching = False
        if self._owner.current is self._staged:  # it has failed: the weights stay for the whole time again
            self._staged.update.seconds.clear()  # they are in the record of the switch that failed
            self._owner.start_timer(self._staged)
        self._inner.clean_up()


def _stop_timer(staged: StagedUpdate) -> None:
    if staged.timer is not None:
        staged.timer.cancel()
        staged.timer = None
