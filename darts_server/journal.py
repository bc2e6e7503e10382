"""What runs, in the log: a line for each group at debug, for each batch and update of the weights at info.

No text of a prompt, no token and no key is in it.
"""

import logging
from collections.abc import Mapping

from darts_server.observers import GroupObserver
from darts_server.types import CohortRecord, GroupRecord, UpdateOutcome, UpdateRecord

logger = logging.getLogger(__name__)


class Journal(GroupObserver):
    """Implements the observer protocols of the rollout and the weights room."""

    def group_ended(self, record: GroupRecord) -> None:
        if not logger.isEnabledFor(logging.DEBUG):
            return
        about = {
            "group_id": record.group_id,
            "prompt_key": record.prompt_key,
            "policy": record.policy,
            "outcome": str(record.outcome),
            "candidates": len(record.candidates),
            "returned": len(record.selected),
            "generated_tokens": record.generated_tokens,
            "returned_tokens": record.returned_tokens,
            "seconds": round(record.ended_at - record.started_at, 3),
            "deadline": record.deadline,
        }
        logger.debug("group %s", _words(about), extra=about)

    def cohort_ended(self, record: CohortRecord) -> None:
        about = {
            "policy": record.policy,
            "prompts": record.groups,
            "candidates": round(record.groups * record.mean_candidates),
            "generated_tokens": record.generated_tokens,
            "returned_tokens": record.returned_tokens,
            "seconds": round(record.measured_seconds, 3),
            "deadline": record.deadline,
            "explored": record.explored,
        }
        logger.info("batch %s", _words(about), extra=about)

    def update_announced(self, version: int) -> None:
        logger.info("weights version=%d are coming", version, extra={"version": version})

    def update_ended(self, record: UpdateRecord) -> None:
        about = {
            "version": record.version,
            "outcome": str(record.outcome),
            "source": record.source,
            "seconds": round(sum(record.seconds.values()), 3),
        }
        if record.outcome is UpdateOutcome.COMPLETED:  # what failed is said where it failed
            logger.info("weights %s", _words(about), extra=about)


def _words(about: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in about.items() if value is not None)
