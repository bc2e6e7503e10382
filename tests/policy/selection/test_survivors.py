"""The rules that return candidates that were not pruned, whatever their lengths."""

from darts_server.policy.candidate import Candidate, State
from darts_server.policy.selection.survivors import AllSurvivors, SampledSurvivors
from darts_server.types import DiscardReason, FinishReason, SelectedAs
from tests.policy.selection.certain import assess


def ended(index: int, valid: bool = True, tail_draw: float = 0.5) -> Candidate:
    reason = FinishReason.STOP if valid else FinishReason.LENGTH
    return Candidate(index, tail_draw, State.FINISHED, 5, reason)


def test_all_survivors_are_selected_and_none_is_settled_before_the_last() -> None:
    finished = [ended(0), ended(1), ended(2, valid=False)]
    everyone = dict.fromkeys(range(3), SelectedAs.SURVIVOR)
    assert AllSurvivors(2).select(finished) == everyone
    assert assess(AllSurvivors(2), [], finished, deliver_early=True).settled == everyone.keys()
    going = Candidate(3, tail_draw=0.5, state=State.RUNNING, tokens=3)
    assert not assess(AllSurvivors(2), [going], finished, deliver_early=True).settled


def test_sampled_survivors_are_those_of_the_lowest_draws() -> None:
    finished = [ended(0, tail_draw=0.9), ended(1, tail_draw=0.1), ended(2, valid=False, tail_draw=0.2)]
    assert SampledSurvivors(2).select(finished) == {1: SelectedAs.SURVIVOR, 2: SelectedAs.SURVIVOR}
    assert SampledSurvivors(2).discard_reason(ended(0)) is DiscardReason.MIDDLE
    assert SampledSurvivors(2).num_shortest == 2
