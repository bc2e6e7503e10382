"""GRPO in the trainer: advantages, log-probs, loss and step, on the committed model."""

import math
from dataclasses import replace

import pytest
import torch

from darts_server.offline.demo.server import MODEL
from examples.tiny_rl.batches import Sample, collate
from examples.tiny_rl.grpo import MAX_RATIO, Learner, StaleWeights, Trained, importance, log_probs, policy_loss
from examples.tiny_rl.tokenizer import EOS_ID, build_tokenizer


@pytest.fixture
def learner(one_thread: None) -> Learner:
    return Learner(MODEL)


def sample(prompt: str, response: str) -> Sample:
    tokenizer = build_tokenizer()
    ids = tokenizer.encode(prompt)
    return Sample([*ids, *tokenizer.encode(response), EOS_ID], len(ids))


def trained(learner: Learner, one: Sample, advantage: float, off_by: float = 0.0) -> Trained:
    """Return the sample with the log-probs that a server with the learner's weights returns."""
    with torch.no_grad():
        logits = learner.model(input_ids=torch.tensor([one.tokens])).logits[0]
    sampled = torch.log_softmax(logits, -1)[range(len(one.tokens) - 1), one.tokens[1:]]
    return Trained(one.tokens, one.prompt_length, (sampled[one.prompt_length - 1 :] + off_by).tolist(), advantage)


def total(learner: Learner, one: Sample) -> float:
    with torch.no_grad():
        return float(log_probs(learner.model, *collate([one])).sum())


def test_log_probs_cover_the_response_alone_and_do_not_depend_on_padding(learner: Learner) -> None:
    short, long = sample("7a-5>", "#2"), sample("7a-5b*4c-8d+7>", "a-5=2b*4=8c-8=0d+7=7#7")
    with torch.no_grad():
        together = log_probs(learner.model, *collate([short, long]))
    alone = trained(learner, short, 0.0).logprobs
    at = short.prompt_length - 1
    assert together[0, at : at + 3].tolist() == pytest.approx(alone, abs=1e-5)
    assert not together[0, :at].any()
    assert not together[0, at + 3 :].any()


def test_the_loss_weighs_every_token_with_the_advantage_of_its_trajectory() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, 0.0], [-0.5, 0.0, 0.0]], requires_grad=True)
    ratios = torch.tensor([[1.0, 0.5, 1.0], [1.0, 1.0, 1.0]])
    loss = policy_loss(logprobs, torch.tensor([2.0, -4.0]), ratios)
    torch.autograd.backward(loss)
    assert loss.item() == pytest.approx(2 * (1 + 0.5 * 2) - 4 * 0.5)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-2.0, -1.0, -2.0], [4.0, 4.0, 4.0]]


def test_stale_tokens_have_their_importance_ratio_up_to_a_maximum() -> None:
    now = torch.tensor([[0.0, -1.0, -2.0, -0.5, -3.0], [-1.0, -2.0, 0.0, 0.0, 0.0]])
    resumed = Trained([7, 8, 20, 21, 22, 1], 2, [-2.0, -1.5, -9.0, -9.0], 1.0, stale=2)
    fresh = Trained([7, 20, 1], 1, [-9.0, -9.0], 1.0)
    ratios = importance([resumed, fresh], now)
    assert ratios[0].tolist() == pytest.approx([1.0, MAX_RATIO, math.exp(-0.5), 1.0, 1.0])
    assert ratios[1].tolist() == [1.0] * 5


def test_stale_tokens_are_trained_on_with_their_ratio_and_do_not_count_in_the_gap(learner: Learner) -> None:
    one = sample("7a-5b*4>", "#3")
    halved = trained(learner, one, 1.0, off_by=math.log(2))
    stale = Learner(MODEL).update([replace(halved, stale=len(halved.logprobs))])
    fresh = Learner(MODEL).update([trained(learner, one, 1.0)])
    assert stale.gap == 0.0
    assert stale.loss == pytest.approx(fresh.loss / 2, rel=1e-4)
    with pytest.raises(StaleWeights):  # of the last token alone
        learner.update([replace(halved, stale=len(halved.logprobs) - 1)])


def test_a_step_raises_the_probability_of_tokens_with_positive_advantages_and_lowers_it_with_negative_advantages(
    learner: Learner,
) -> None:
    good, bad = sample("7a-5b*4>", "a-5=2b*4=8#8"), sample("7a-5b*4>", "#3")
    before = [total(learner, one) for one in (good, bad)]
    update = learner.update([trained(learner, good, 1.0), trained(learner, bad, -1.0)])
    after = [total(learner, one) for one in (good, bad)]
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert update.gap < 2e-5
    assert update.gradient_norm > 0


def test_samples_of_other_weights_are_rejected_and_change_nothing(learner: Learner) -> None:
    fine, stale = sample("7a-5b*4>", "#3"), sample("7a-5b*4>", "#8")
    before = learner.weights()
    with pytest.raises(StaleWeights, match=r"by up to 0\.001 nats .* Did the last push arrive"):
        learner.update([trained(learner, fine, 1.0), trained(learner, stale, -1.0, off_by=1e-3)])
    assert learner.weights() == before
    assert learner.update([trained(learner, fine, 1.0)]).gap < 2e-5, "and the next step has its own gradient"


def test_tokens_that_a_tool_wrote_have_no_loss_and_no_gap(learner: Learner) -> None:
    one = sample("7a-5b*4>", "a-5=2#3")
    whole = trained(learner, one, 1.0)
    given = frozenset({one.prompt_length + 4})
    logprobs = list(whole.logprobs)
    logprobs[4] = 0.0
    masked = replace(whole, logprobs=logprobs, given=given)
    assert masked.num_targets == whole.num_targets - 1
    loss = Learner(MODEL).update([masked]).loss
    others = [value for place, value in enumerate(whole.logprobs) if place != 4]
    assert loss == pytest.approx(-sum(others) / len(others), abs=1e-4)
    with pytest.raises(StaleWeights):
        learner.update([replace(whole, given=given)])
