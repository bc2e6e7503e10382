"""What an owner and its jobs may have."""

from contextlib import suppress

import pytest

from darts_server.exceptions import QuotaReached
from darts_server.rollout.queue.owners import Owners, QueueLimits

LIMIT = 16_000


def test_groups_of_many_small_jobs_stay_within_the_reserve() -> None:
    owners = Owners(QueueLimits(bytes=LIMIT))
    owners.add(("", "large"), prompts=1, prompt_bytes=LIMIT)
    used = LIMIT
    for number in range(200):
        job = ("", str(number))
        with suppress(QuotaReached):
            owners.check_room(job, 1, 900)
            owners.add(job, prompts=1, prompt_bytes=900)
            used += 900
            if not owners.must_take_groups(job):
                owners.add(job, group_bytes=300)
                used += 300
    assert LIMIT < used <= 1.25 * LIMIT + 300


def test_the_reserve_is_free_again_when_the_limit_is_not_reached_any_more() -> None:
    owners = Owners(QueueLimits(bytes=LIMIT))
    owners.add(("", "large"), prompts=1, prompt_bytes=LIMIT)
    for number in range(3):
        owners.add(("", str(number)), prompts=1, prompt_bytes=1_000)
    with pytest.raises(QuotaReached, match="share of 250"):
        owners.check_room(("", "next"), 1, 300)
    for number in range(3):
        owners.add(("", str(number)), prompts=-1, prompt_bytes=-1_000)
    owners.check_room(("", "next"), 1, 1_000)
