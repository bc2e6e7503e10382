"""What our routes tell of a candidate's score."""

from darts_server.http.resources.groups import GroupAnswer
from darts_server.http.resources.rollouts_models import GroupOut
from darts_server.records import CandidateRecord
from darts_server.rollout.batches.events import GroupResult
from darts_server.rollout.observers.reward_matching import GroupRewards
from darts_server.types import DiscardReason, FinishReason, Sample, SelectedAs
from tests.rollout.learned.test_prompts import record

CHOSEN = CandidateRecord(0, 2, FinishReason.STOP, SelectedAs.SURVIVOR, None, False, 0.0, 1.0, 3, 3, 0.25, 0.5)
PRUNED = CandidateRecord(1, 4, None, None, DiscardReason.PRUNED, False, 0.0, 1.0, 3, 3, 0.75, 0.1)
UNSCORED = CandidateRecord(2, 1, FinishReason.STOP, SelectedAs.SURVIVOR, None, False, 0.0, 1.0, 3, 3)
RECORD = record(CHOSEN, PRUNED, UNSCORED)


def test_a_groups_record_has_the_score_of_every_candidate_and_what_it_was_kept_with() -> None:
    candidates = GroupAnswer.of(RECORD, GroupRewards()).candidates
    assert [(c.quality, c.survival) for c in candidates] == [(0.25, 0.5), (0.75, 0.1), (None, 1.0)]
    assert [(c.selected_as, c.reason) for c in candidates] == [("survivor", None), (None, "pruned"), ("survivor", None)]


def test_a_returned_trajectory_has_its_score() -> None:
    samples = {0: Sample((5, 6), None, "a", FinishReason.STOP), 2: Sample((5,), None, "b", FinishReason.STOP)}
    group = GroupOut.of(GroupResult(0, "g", "p", samples, RECORD))
    assert [(t.quality, t.selected_as) for t in group.trajectories] == [(0.25, "survivor"), (None, "survivor")]
    assert [(d.trajectory_id, d.reason) for d in group.discarded] == [("g:1", "pruned")]
    assert group.mask == [True, False, True]
