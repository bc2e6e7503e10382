"""Log lines for groups (DEBUG), cohorts and weight updates (INFO).

They contain no prompt text, tokens or keys.
"""

import logging
from collections.abc import Mapping

from darts_server.records import CohortRecord, GroupRecord, UpdateRecord
from darts_server.types import UpdateOutcome

logger = logging.getLogger(__name__)


def log_group(record: GroupRecord) -> None:
    if not logger.isEnabledFor(logging.DEBUG):
        return
    fields = {
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
    logger.debug("group %s", _join(fields), extra=fields)


def log_cohort(record: CohortRecord) -> None:
    fields = {
        "policy": record.policy,
        "prompts": record.groups,
        "candidates": round(record.groups * record.mean_candidates),
        "generated_tokens": record.generated_tokens,
        "returned_tokens": record.returned_tokens,
        "seconds": round(record.measured_seconds, 3),
        "deadline": record.deadline,
        "explored": record.explored,
        "chosen": None if record.chosen is None else record.chosen.option,
        "reason": None if record.chosen is None else record.chosen.reason,
    }
    logger.info("cohort %s", _join(fields), extra=fields)


def log_announced_update(version: int) -> None:
    logger.info("weight update announced version=%d", version, extra={"version": version})


def log_update(record: UpdateRecord) -> None:
    fields = {
        "version": record.version,
        "outcome": str(record.outcome),
        "source": record.source,
        "seconds": round(sum(record.seconds.values()), 3),
    }
    if record.outcome is UpdateOutcome.COMPLETED:  # failures are logged where they happen
        logger.info("weight update %s", _join(fields), extra=fields)


def _join(fields: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
