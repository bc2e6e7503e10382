"""TRL's trainer with prompts that are started ahead, against a fake server."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from darts_client.integrations.trl import DartsGRPOTrainer, report_rewards

from .fake_vllm import FakeVllm, fake_vllm
from .test_trl import GROUP, build_trainer, reward_by_index

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("one_thread", "small_heap")]
EIGHT = [f"{k}a-5b*4c-{k}>" if k % 3 == 0 else f"{k}a-5>" for k in range(8)]
AHEAD = {"prompts_ahead": 0.5}
STALE = {"max_staleness": 1}
ITERATIONS = {"num_iterations": 2}
ACCUMULATION = {"gradient_accumulation_steps": 2, "max_steps": 3}
POLICY = {"vllm_xargs": {"darts_policy": "darts_cut"}}


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    with fake_vllm() as running:
        yield running


def trainer_of(
    server: FakeVllm, out: Path, more: dict[str, Any], trained: list[list[str]] | None = None, **changes: Any
) -> DartsGRPOTrainer:
    """Trains on two prompts a batch, of eight in the data set, each with the answer in its row."""
    seen = [] if trained is None else trained

    def reward(prompts: list[str], answer: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        assert prompts == answer, "a row has come apart from its prompt"
        model: Any = trainer.model
        if model.training:
            seen.append(prompts[::GROUP])
        return reward_by_index(completion_ids)

    settings = {"max_steps": 4, "generation_kwargs": POLICY} | changes
    trainer = build_trainer(server, out, report_rewards(reward), more, **settings)
    trainer.train_dataset = Dataset.from_list([{"prompt": prompt, "answer": prompt} for prompt in EIGHT])
    return trainer


def prompts_of(trained: list[list[str]]) -> Counter[str]:
    return Counter(prompt for batch in trained for prompt in batch)


@pytest.mark.parametrize(
    ("more", "changes"),
    [
        (AHEAD, ITERATIONS),
        pytest.param(AHEAD | STALE, ACCUMULATION, marks=pytest.mark.nightly),
        pytest.param(STALE, ITERATIONS, marks=pytest.mark.nightly),
        pytest.param(AHEAD | STALE, ITERATIONS, marks=pytest.mark.nightly),
        pytest.param(AHEAD, ACCUMULATION, marks=pytest.mark.nightly),
        pytest.param(STALE, ACCUMULATION, marks=pytest.mark.nightly),
    ],
)
def test_the_same_prompts_are_trained_on_as_without_prompts_ahead(
    server: FakeVllm, tmp_path: Path, more: dict[str, Any], changes: dict[str, Any]
) -> None:
    trained: list[list[str]] = []
    plain: list[list[str]] = []
    trainer = trainer_of(server, tmp_path, more, trained, **changes)
    trainer.train()
    trainer_of(server, tmp_path, {}, plain, **changes).train()
    assert prompts_of(trained) == prompts_of(plain)
    (report,) = trainer.reward_reports
    assert report.unreported == 0


def order_of(server: FakeVllm) -> list[str]:
    """The updates and batches, one after the other."""
    paths = ("/darts/v1/weights", "/darts/v1/rollouts")
    return [each.path for each in server.requests if each.path in paths and each.method != "GET"]


def test_tail_batching_starts_more_prompts_and_the_unfinished_prompts_first(server: FakeVllm, tmp_path: Path) -> None:
    resume_training(server, tmp_path, AHEAD)
    requests = [each.body for each in server.of("POST", "/darts/v1/rollouts")]
    assert [len(body["prompts"]) for body in requests] == [3, 3, 3, 2, 3, 2]
    assert [body.get("num_groups") for body in requests] == [2, 2, 2, None, 2, None]
    assert all(
        (body["carry"], body["group_size"], body["policy"]) == ("restart", GROUP, {"name": "darts_cut"})
        for body in requests
    )
    assert all(body["sampling"]["max_tokens"] == 8 and "vllm_xargs" not in body["sampling"] for body in requests)
    assert server.completions == []
    assert order_of(server) == ["/darts/v1/weights", "/darts/v1/rollouts"] * 6


def test_no_prompt_is_started_in_vain_if_the_last_step_of_an_epoch_has_fewer_passes(
    server: FakeVllm, tmp_path: Path
) -> None:
    trained: list[list[str]] = []
    # Four batches an epoch: a step of three passes, and one of a single pass.
    steps = {"gradient_accumulation_steps": 3, "steps_per_generation": 1, "max_steps": -1, "num_train_epochs": 2}
    trainer_of(server, tmp_path, AHEAD, trained, **steps).train()
    assert set(prompts_of(trained).values()) == {2}
    requests = [each.body for each in server.of("POST", "/darts/v1/rollouts")]
    assert [len(body["prompts"]) for body in requests] == [3] * 7 + [2]


def test_auto_resumes_unfinished_prompts_under_the_policy_auto(server: FakeVllm, tmp_path: Path) -> None:
    trainer_of(server, tmp_path, {"rollouts": "auto"}, max_steps=2, generation_kwargs=None).train()
    requests = [each.body for each in server.of("POST", "/darts/v1/rollouts")]
    assert [len(body["prompts"]) for body in requests] == [3, 2]
    assert all((body["carry"], body["policy"]) == ("resume", {"name": "auto"}) for body in requests)


def test_training_with_the_servers_advantages(server: FakeVllm, tmp_path: Path) -> None:
    more = {"advantages": "server"}
    trainer = trainer_of(server, tmp_path, more, max_steps=2, generation_kwargs=None, scale_rewards="none")
    seen: list[Any] = []
    compute: Any = trainer._compute_loss

    def see_advantages(model: Any, inputs: Any) -> Any:
        seen.append(inputs["advantages"])
        return compute(model, inputs)

    trainer._compute_loss = see_advantages  # type: ignore[method-assign]  # to look in between
    trainer.train()
    requests = [each.body for each in server.of("POST", "/darts/v1/rollouts")]
    assert [body["policy"] for body in requests] == [{"name": "informative", "advantage_std": False}] * 2
    assert {len(body["prompts"]) for body in requests} == {2}
    for body in requests:
        assert all(set(prompt["metadata"]) == {"answer"} for prompt in body["prompts"])
    # Weight 2, and four returned of eight with rewards.
    expected = [index - 1.5 for index in range(GROUP)] * 2
    assert sorted(float(value) for each in seen for value in each) == sorted(expected * 2)
    assert list(trainer._logs["advantages"])[-2 * GROUP :] == expected


def test_dynamic_sampling_fills_a_batch_with_groups_of_equal_rewards_only_if_it_must(
    server: FakeVllm, tmp_path: Path
) -> None:
    trained: list[list[str]] = []
    trainer = trainer_of(server, tmp_path, AHEAD | {"dynamic_sampling": True}, trained, max_steps=1)
    trainer.train()
    (body,) = [each.body for each in server.of("POST", "/darts/v1/rollouts")]
    assert (body["only"], body["return_zero_variance"]) == ("informative", True)
    assert body["prompts"][0]["metadata"]


def test_a_long_round_has_the_unfinished_prompts_and_waits_for_all_of_them(server: FakeVllm, tmp_path: Path) -> None:
    trainer_of(server, tmp_path, {"prompts_ahead": 1.0, "long_rounds": True}, max_steps=2).train()
    requests = [each.body for each in server.of("POST", "/darts/v1/rollouts")]
    assert [(len(body["prompts"]), body.get("num_groups")) for body in requests] == [(4, 2), (2, None)]
    long, usual = ([tuple(prompt["token_ids"]) for prompt in body["prompts"]] for body in (requests[1], requests[0]))
    assert set(long) < set(usual)


def test_one_step_off_samples_the_next_batch_before_training_on_this_one(server: FakeVllm, tmp_path: Path) -> None:
    at_reward: list[int] = []
    trained: list[list[str]] = []
    trainer = trainer_of(server, tmp_path, STALE, trained)
    inner = trainer._calculate_rewards

    def counted(*inputs: Any) -> Any:
        prompts: Any = trainer._positions.prompts
        prompts._batches._prefetched and prompts._batches._prefetched.result()
        at_reward.append(len(server.of("POST", "/darts/v1/rollouts")))
        return inner(*inputs)

    trainer._calculate_rewards = counted  # type: ignore[method-assign]  # to look in between
    trainer.train()
    assert at_reward == [2, 3, 4, 4]
    assert prompts_of(trained) == Counter(EIGHT)
    weights = "/darts/v1/weights"
    rollouts = "/darts/v1/rollouts"
    assert order_of(server) == [weights, rollouts, rollouts, weights, rollouts, weights, rollouts, weights]


@pytest.mark.nightly
def test_a_resumed_training_that_samples_ahead_trains_on_the_prompts_that_are_left(
    server: FakeVllm, tmp_path: Path
) -> None:
    resume_training(server, tmp_path, AHEAD | STALE)


def resume_training(server: FakeVllm, tmp_path: Path, more: dict[str, Any]) -> None:
    """Train four steps, then again from the checkpoint of the second step, on the remaining prompts."""
    trained: list[list[str]] = []
    saving = {"save_strategy": "steps", "save_steps": 2}
    trainer_of(server, tmp_path, more, trained, **saving).train()
    assert prompts_of(trained) == Counter(EIGHT)
    saved = json.loads((tmp_path / "checkpoint-2" / "darts-prompts.json").read_text())
    assert (saved["drawn"], len(saved["pending"])) == (5, 1)
    rest: list[list[str]] = []
    checkpoint = str(tmp_path / "checkpoint-2")
    trainer_of(server, tmp_path / "other", more, rest).train(resume_from_checkpoint=checkpoint)
    assert prompts_of(trained[:2] + rest) == Counter(EIGHT)


def test_an_evaluation_is_sampled_without_prompts_ahead(server: FakeVllm, tmp_path: Path) -> None:
    trainer = trainer_of(server, tmp_path, AHEAD)
    trainer.eval_dataset = trainer.train_dataset
    trainer.evaluate()
    assert server.completions
    assert not server.of("POST", "/darts/v1/rollouts")


@pytest.mark.parametrize(
    ("more", "changes", "message"),
    [
        ({"prompts_ahead": -0.1}, {}, "prompts_ahead must be at least 0"),
        ({"long_rounds": True}, {}, "long_rounds=True needs prompts_ahead"),
        ({"max_staleness": 2}, {}, "max_staleness must be 0 or 1, got 2"),
        ({"carry": "resume"}, {}, "carry='resume' needs prompts_ahead"),
        (AHEAD | {"carry": "drop"}, {}, "carry must be 'restart' or 'resume'"),
        ({"rollouts": "off"}, {}, "rollouts must be 'auto'"),
        (AHEAD | {"rollouts": "auto"}, {}, "rollouts='auto' chooses prompts_ahead"),
        (AHEAD | {"advantages": "unbiased"}, {}, "does not work with prompts_ahead"),
        ({"advantages": "server", "rollouts": "auto"}, {}, "leave rollouts='auto' out"),
        (
            {"advantages": "server"},
            {"generation_kwargs": {"vllm_xargs": {"darts_policy": "cap"}}},
            "has darts_policy = 'cap'; leave darts_policy out",
        ),
        (
            {"advantages": "server"},
            {"generation_kwargs": None, "scale_rewards": "batch"},
            "scale_rewards 'group' or 'none'",
        ),
        ({"advantages": "server", "baseline": "pass_rate"}, {}, "baseline='pass_rate' needs advantages='unbiased'"),
        ({"advantages": "server"}, {"mask_truncated_completions": True}, "needs mask_truncated_completions=False"),
        ({"dynamic_sampling": True}, {}, "dynamic_sampling=True needs prompts_ahead"),
        ({"max_staleness": 1}, {"vllm_importance_sampling_correction": False}, "needs vllm_importance_sampling_corr"),
        (AHEAD, {"generation_kwargs": {"vllm_xargs": {"other": 1}}}, "vllm_xargs has other"),
    ],
)
def test_conflicting_arguments_are_refused_before_training(
    server: FakeVllm, tmp_path: Path, more: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_trainer(server, tmp_path, more=more, **changes)
    assert server.requests == []


def test_a_rollout_function_is_refused(server: FakeVllm, tmp_path: Path) -> None:
    def function(prompts: Any, trainer: Any) -> dict[str, Any]:
        return {}

    with pytest.raises(ValueError, match="do not work with rollout_func"):
        build_trainer(server, tmp_path, more=AHEAD | {"rollout_func": function}, generation_kwargs=POLICY)
    build_trainer(server, tmp_path, more={"rollout_func": function})


def test_a_data_set_without_a_length_or_with_images_is_refused(server: FakeVllm, tmp_path: Path) -> None:
    trainer = trainer_of(server, tmp_path, AHEAD)
    model: Any = trainer.model
    model.train()
    for rows, message in (
        ([{"prompt": "a", "answer": "a"}], "1 prompts, less than the 2"),
        ([{"prompt": "a", "image": "b"}] * 4, "images"),
    ):
        trainer.train_dataset = Dataset.from_list(rows)
        with pytest.raises(ValueError, match=message):
            trainer._generate_and_score_completions([])
