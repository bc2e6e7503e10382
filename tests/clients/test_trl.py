"""TRL's trainer and client with the integration, against a fake server."""

import logging
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig  # type: ignore[attr-defined, unused-ignore]  # exported lazily

from darts_client import NotFound, ServerFault, TimedOut
from darts_client._records import CandidateRecord, GroupRecord
from darts_client.integrations.trl import DartsGRPOTrainer, PushingVLLMClient, WeightTransfer, report_rewards
from darts_server.offline.demo.server import MODEL
from examples.tiny_rl.tokenizer import build_tokenizer

from .fake_vllm import ANSWER, EOS, STATE, FakeVllm, fake_vllm

# The warnings are TRL's and its dependencies'.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("one_thread", "small_heap")]
PROMPTS = ["7a-5b*4>", "1a+5b*4c-3>"]
GROUP = 4
SHAPED = {"darts_policy": "darts_cut", "other": 1}


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    with fake_vllm() as running:
        yield running


def reward_by_index(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Reward each completion by its index in its group, so that there is something to learn."""
    return [float(ids[0] - ANSWER) for ids in completion_ids]


def build_trainer(
    server: FakeVllm,
    out: Path,
    function: Callable[..., Any] = reward_by_index,
    more: dict[str, Any] | None = None,
    **changes: Any,
) -> DartsGRPOTrainer:
    settings: dict[str, Any] = {
        "output_dir": str(out),
        "max_steps": 2,
        "per_device_train_batch_size": len(PROMPTS) * GROUP,
        "num_generations": GROUP,
        "per_device_eval_batch_size": len(PROMPTS) * 2,
        "num_generations_eval": 2,
        "max_completion_length": 8,
        "learning_rate": 1e-3,
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": server.url,
        "generation_kwargs": {"vllm_xargs": SHAPED},
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
    }
    dataset = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
    args = GRPOConfig(**settings | changes)
    return DartsGRPOTrainer(deepcopy(model()), [function], args, dataset, dataset, build_tokenizer(), **more or {})


@cache
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def copy_weights(trainer: DartsGRPOTrainer) -> dict[str, torch.Tensor]:
    model: Any = trainer.model
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@dataclass
class Trained:
    """An evaluation, then a training of two steps. ``before``: first weights. ``seen``: the reporters' logs."""

    server: FakeVllm
    trainer: DartsGRPOTrainer
    before: dict[str, torch.Tensor]
    seen: list[dict[str, Any]]


@pytest.fixture(scope="module")
def trained(one_thread: None, small_heap: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    function = report_rewards(reward_by_index, correct_above=1.0)
    saving = {"save_strategy": "steps", "save_steps": 2}
    with fake_vllm() as server:
        trainer = build_trainer(server, tmp_path_factory.mktemp("trained"), function, {"api_key": "k"}, **saving)
        run = Trained(server, trainer, copy_weights(trainer), [])
        trainer.callback_handler.callbacks.append(Reporter(run.seen))
        trainer.evaluate()
        assert server.rewards == []
        trainer.train()
        trainer.vllm_generation.sync_weights()
        yield run


def test_all_weights_are_pushed_before_each_step_samples(trained: Trained) -> None:
    server = trained.server
    first, second, last = server.pushed
    assert equal(first, trained.before)
    assert not equal(second, first)
    assert equal(last, copy_weights(trained.trainer))
    order = [each.path for each in server.requests if each.method == "PUT" or each in server.completions]
    weights = "/darts/v1/weights"
    sampled = "/v1/completions"
    assert order == [weights, sampled, sampled, weights, sampled, weights], "the first step has those of the evaluation"
    assert not server.of("POST", "/reset_prefix_cache")


def test_training_is_shaped_and_evaluation_is_not(trained: Trained) -> None:
    evaluation, *training = trained.server.completions
    assert (evaluation.headers["x-darts-policy"], evaluation.body["vllm_xargs"]) == ("off", {"other": 1})
    assert [each.body["vllm_xargs"] for each in training] == [SHAPED] * 2
    assert not any("x-darts-policy" in each.headers for each in training)


def test_rewards_of_training_are_reported_by_tokens(trained: Trained) -> None:
    rewards = trained.server.rewards
    tokenizer = build_tokenizer()
    assert len(rewards) == 2 * len(PROMPTS) * GROUP
    reported = {(tuple(each["prompt_token_ids"]), tuple(each["completion_token_ids"])) for each in rewards}
    assert reported == {(tuple(tokenizer.encode(p)), (ANSWER + k, EOS)) for p in PROMPTS for k in range(GROUP)}
    assert all(each["reward"] == each["completion_token_ids"][0] - ANSWER for each in rewards)
    assert all(each["correct"] == (each["reward"] > 1.0) for each in rewards)
    (report,) = trained.trainer.reward_reports
    assert (report.matched, report.unreported) == (2 * len(PROMPTS) * GROUP, 0)


def test_the_servers_metrics_are_in_the_logs_of_training_steps(trained: Trained) -> None:
    steps = [line for line in trained.trainer.state.log_history if "loss" in line]
    assert [line["darts/candidates_started"] for line in steps] == [12.0, 12.0]
    assert [line["darts/weight_version"] for line in steps] == [3.0, 3.0]
    assert [line["darts/candidates_started"] for line in trained.seen if "loss" in line] == [12.0, 12.0]
    assert not any("darts/candidates_started" in line for line in trained.seen if "loss" not in line)
    assert "darts/tokens_generated" not in steps[0]  # the server has no such metric
    assert "rewards/reward_by_index/mean" in steps[0]


def test_the_api_key_is_sent_with_every_request(trained: Trained) -> None:
    without = {each.path for each in trained.server.requests if each.headers.get("authorization") != "Bearer k"}
    assert without == {"/health"}


def test_rewards_of_async_functions_are_reported_except_none(server: FakeVllm, tmp_path: Path) -> None:
    async def some(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        return [None if value == 0.0 else value for value in reward_by_index(completion_ids)]

    score(build_trainer(server, tmp_path, report_rewards(some)))
    assert len(server.rewards) == len(PROMPTS) * (GROUP - 1)


def group_record(number: int, weight: float | None = 2.0, policy: str = "uniform", **changes: Any) -> dict[str, Any]:
    """A group of `GROUP` returned candidates and a discarded candidate. The last is sampled, and has the weight."""
    weights = {"short": 1.0, "long": weight, None: None}
    empty: dict[str, Any] = {**dict.fromkeys(CandidateRecord.model_fields), "cut": False, "survival": 1.0}
    candidates = [
        empty | {"index": k, "length": 2, "selected_as": place, "weight": weights[place]}
        for k, place in enumerate(["short", "short", None, "short", "long"])
    ]
    record: dict[str, Any] = {**dict.fromkeys(GroupRecord.model_fields), "outcome": "completed", "duration": 0.5}
    record |= {
        "mixed_versions": False,
        "decided_early": False,
        "explored": False,
        "members": [],
        "generated": 10,
        "returned": 8,
    }
    record |= {"group_id": f"cmpl-1-{number}", "policy": policy, "group_size": GROUP}
    return record | {"num_eligible": GROUP + 1, "num_shortest": 3, "candidates": candidates} | changes


INPUTS = [{"prompt": prompt} for prompt in PROMPTS for _ in range(GROUP)]
UNBIASED = {"advantages": "unbiased"}
# n / N = 4 / 5. The rewards are 0, 1, 2, 3; the two shortest others have the means 1.5, 1, 0.5 and 0.5.
EXPECTED = [0.8 * weight * advantage for weight, advantage in ((1, -1.5), (1, 0.0), (1, 1.5), (2, 2.5))]


def score(trainer: DartsGRPOTrainer) -> dict[str, Any]:
    """Sample and score a training batch."""
    model: Any = trainer.model
    model.train()
    return trainer._generate_and_score_completions(INPUTS)


def test_unbiased_advantages_replace_trls_advantages_in_training(server: FakeVllm, tmp_path: Path) -> None:
    server.groups = [group_record(0), group_record(1)]
    trainer = build_trainer(server, tmp_path, more=UNBIASED, scale_rewards="none")
    batch = score(trainer)
    assert batch["advantages"].tolist() == pytest.approx(EXPECTED * 2)
    assert list(trainer._logs["advantages"]) == pytest.approx(EXPECTED * 2)
    before = copy_weights(trainer)
    trainer.train()
    assert not equal(before, copy_weights(trainer))


def test_unbiased_advantages_have_one_scale_for_the_batch_and_are_zero_without_rewards(
    server: FakeVllm, tmp_path: Path
) -> None:
    def second_prompt(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        pairs = zip(prompts, reward_by_index(completion_ids), strict=True)
        return [None if prompt == PROMPTS[0] else value for prompt, value in pairs]

    server.groups = [group_record(0), group_record(1)]
    batch = score(build_trainer(server, tmp_path, second_prompt, UNBIASED))
    size = (sum(value**2 for value in EXPECTED) / len(INPUTS)) ** 0.5
    assert batch["advantages"].tolist() == pytest.approx([0.0] * GROUP + [value / size for value in EXPECTED])


def test_unbiased_advantages_may_have_the_pass_rate_of_earlier_groups_as_their_baseline(
    server: FakeVllm, tmp_path: Path
) -> None:
    server.groups = [group_record(0, earlier_pass_rate=0.5), group_record(1)]
    more = {**UNBIASED, "baseline": "pass_rate"}
    batch = score(build_trainer(server, tmp_path, more=more, scale_rewards="none"))
    by_pass_rate = [0.8 * weight * (reward - 0.5) for reward, weight in enumerate((1, 1, 1, 2))]
    assert batch["advantages"].tolist() == pytest.approx(by_pass_rate + EXPECTED)


def test_unbiased_advantages_are_zero_for_equal_rewards_and_an_evaluation_has_trls_advantages(
    server: FakeVllm, tmp_path: Path
) -> None:
    trainer = build_trainer(server, tmp_path, lambda completions, **_: [1.0] * len(completions), UNBIASED)
    trainer.evaluate()
    assert not [each for each in server.requests if "/groups/" in each.path]
    server.groups = [group_record(0), group_record(1)]
    assert score(trainer)["advantages"].tolist() == [0.0] * len(INPUTS)


def test_groups_without_weights_or_some_rewards_end_the_training(server: FakeVllm, tmp_path: Path) -> None:
    def some(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        return [None if value == 0.0 and is_some else value for value in reward_by_index(completion_ids)]

    is_some = False
    trainer = build_trainer(server, tmp_path, some, UNBIASED)
    for groups, message in (
        ([group_record(0), group_record(1, None, "darts")], "cmpl-1-1 have no weights.*not 'darts'"),
        ([group_record(0)], "have 4 trajectories, which are not its 8 choices"),
        (None, "no groups of answer cmpl-1"),
        ([group_record(0), group_record(1)], "1 of 4 completions of group cmpl-1-0 have no reward"),
    ):
        server.groups = groups
        is_some = "reward" in message
        with pytest.raises((ValueError, NotFound), match=message):
            score(trainer)


@pytest.mark.parametrize(
    ("more", "changes", "message"),
    [
        (UNBIASED, {"mask_truncated_completions": True}, "mask_truncated_completions=False"),
        (UNBIASED, {"multi_objective_aggregation": "normalize_then_sum"}, "sum_then_normalize"),
        ({"advantages": "grpo"}, {}, "'group', 'unbiased' or 'server', got 'grpo'"),
        ({**UNBIASED, "baseline": "prompt"}, {}, "'group' or 'pass_rate', got 'prompt'"),
        ({"baseline": "pass_rate"}, {}, "needs advantages='unbiased'"),
        ({"weight_sync": "carrier pigeon"}, {}, "'http' or 'nccl'"),
        ({}, {"use_vllm": False}, "vllm_mode='server'"),
        ({}, {"vllm_mode": "colocate"}, "vllm_mode='server'"),
    ],
)
def test_invalid_arguments_are_refused_before_any_request(
    more: dict[str, Any], changes: dict[str, Any], message: str, server: FakeVllm, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        build_trainer(server, tmp_path, more=more, **changes)
    assert server.requests == []


def test_training_continues_while_only_generation_and_weights_work(
    server: FakeVllm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.failing = ("/darts/v1/rewards", "/darts/v1/state", "/metrics")
    trainer = build_trainer(server, tmp_path, report_rewards(reward_by_index), save_strategy="steps", save_steps=1)
    with caplog.at_level(logging.WARNING, "darts_client"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert trainer.reward_reports[0].unreported == 2 * len(PROMPTS) * GROUP
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("darts_client")]
    assert len(warnings) == 2
    assert all("on fire" in each for each in warnings)


def test_a_wrapped_function_in_another_trainer_warns_that_it_reports_nothing(caplog: pytest.LogCaptureFixture) -> None:
    function: Any = report_rewards(reward_by_index)
    assert function(completion_ids=[[ANSWER + 2, EOS]]) == [2.0]
    assert function.report.unreported == 1
    assert "not a DartsGRPOTrainer" in caplog.text
    for model in ("org/reward-model", torch.nn.Linear(1, 1)):
        with pytest.raises(TypeError, match="takes a function"):
            report_rewards(model)  # type: ignore[arg-type]  # what must not work


def test_rewards_of_completions_outside_the_last_batch_are_not_reported(server: FakeVllm, tmp_path: Path) -> None:
    def reward_half(completion_ids: list[list[int]], **named: Any) -> Any:
        half = len(completion_ids) // 2
        return [*inner(completion_ids=completion_ids[:half], **named), *[0.0] * (len(completion_ids) - half)]

    inner: Any = report_rewards(reward_by_index)
    setattr(reward_half, "report", inner.report)  # noqa: B010  # functions have no such attribute for mypy
    score(build_trainer(server, tmp_path, reward_half))
    assert inner.report.unreported == len(PROMPTS) * GROUP // 2
    assert server.rewards == []


def test_the_state_is_saved_with_checkpoints_and_restored(server: FakeVllm, tmp_path: Path) -> None:
    build_trainer(server, tmp_path, save_strategy="steps", save_steps=1).train()
    assert {path.parent.name for path in tmp_path.glob("*/darts-state")} == {"checkpoint-1", "checkpoint-2"}
    assert not server.of("PUT", "/darts/v1/state")
    saved = tmp_path / "checkpoint-1" / "darts-state"
    assert saved.read_bytes() == STATE
    saved.write_bytes(b"of step 1")
    build_trainer(server, tmp_path / "other").train(resume_from_checkpoint=str(saved.parent))
    build_trainer(server, tmp_path, max_steps=3).train(resume_from_checkpoint=True)
    assert [each.data for each in server.of("PUT", "/darts/v1/state")] == [b"of step 1", STATE]


class Reporter(TrainerCallback):  # type: ignore[misc, unused-ignore]  # Any without trl
    """Records the logs like the reporters of tensorboard."""

    def __init__(self, seen: list[dict[str, Any]]) -> None:
        self.seen = seen

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.seen.append(dict(logs))


def test_rejected_weights_end_the_training_after_lora_adapters_are_unmerged(server: FakeVllm, tmp_path: Path) -> None:
    client = PushingVLLMClient(base_url=server.url)
    merged = True

    def params() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal merged
        yield "a", torch.zeros(2)
        yield "b", torch.zeros(3)
        merged = False

    specs = [("a", "float32", [2]), ("b", "float32", [3])]
    server.failing = ("/darts/v1/weights",)
    with pytest.raises(ServerFault, match="on fire"):
        client.update_named_params(specs, params())
    assert not merged
    merged = True
    with pytest.raises(ValueError, match="b is uint8"):
        client.update_named_params([specs[0], ("b", "uint8", [3])], params())
    assert not merged
    server.failing = ("/nothing",)
    trainer = build_trainer(server, tmp_path)
    server.failing = ("/darts/v1/weights",)
    with pytest.raises(ServerFault, match="on fire"):
        trainer.train()


def test_a_server_that_accepts_no_weights_is_an_error_before_training(server: FakeVllm, tmp_path: Path) -> None:
    server.missing = ("/darts",)
    with pytest.raises(NotFound, match="is it a darts-server"):
        build_trainer(server, tmp_path)


def test_with_nccl_trl_sends_the_weights(server: FakeVllm, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="VLLM_SERVER_DEV_MODE=1"):  # the message is TRL's
        build_trainer(server, tmp_path, more={"weight_sync": "nccl"})


def test_trl_warns_of_raw_logprobs_without_development_routes(
    server: FakeVllm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("trl").propagate = True
    with caplog.at_level(logging.WARNING, "trl"):
        trainer = build_trainer(server, tmp_path)
    assert "--logprobs-mode raw_logprobs" in caplog.text
    server.first_logprob = 0.0
    assert trainer._client.get_server_info() == {"model_config": {"logprobs_mode": "processed_logprobs"}}


def weights(factor: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((2, 3), factor), "b": torch.full((5,), factor, dtype=torch.bfloat16)}


def test_the_asynchronous_trainers_weights_are_sent_whole_in_each_update(server: FakeVllm) -> None:
    transfer = WeightTransfer(server.url)
    transfer.init_weight_transfer()
    for factor in (1.0, 2.0):
        transfer.pause()
        transfer.send_weights(iter(weights(factor).items()))
        transfer.resume()
    transfer.destroy()
    assert [equal(pushed, weights(factor)) for pushed, factor in zip(server.pushed, (1.0, 2.0), strict=True)]
    puts = server.of("PUT", "/darts/v1/weights")
    assert [each.query for each in puts] == ["rule=keep&partial=false"] * 2
    assert transfer.version == 3


def test_tensors_that_change_when_their_iterator_ends_are_sent_as_they_were(server: FakeVllm) -> None:
    def merged() -> Iterator[tuple[str, torch.Tensor]]:
        tensors = weights(1.0)
        yield from tensors.items()
        for tensor in tensors.values():
            tensor.zero_()

    WeightTransfer(server.url).send_weights(merged())
    assert equal(server.pushed[0], weights(1.0))


def test_a_transfer_waits_until_the_server_is_healthy(server: FakeVllm) -> None:
    server.failing = ("/health",)
    with pytest.raises(TimedOut, match="not healthy after"):
        WeightTransfer(server.url, ready_timeout=0.1).init_weight_transfer()


def test_weights_that_are_refused_are_an_error_and_their_iterator_is_used_up(server: FakeVllm) -> None:
    transfer, left = WeightTransfer(server.url), iter(weights(1.0).items())
    with pytest.raises(ValueError, match="a is int8"):
        transfer.send_weights(iter({"a": torch.zeros(2, dtype=torch.int8)}.items()))
    assert server.pushed == []
    server.failing = ("/darts/v1/weights",)
    with pytest.raises(ServerFault):
        transfer.init_weight_transfer()  # before the training begins
    for _ in range(2):
        with pytest.raises(ServerFault):
            transfer.send_weights(left)
        assert list(left) == []
        left = iter(weights(1.0).items())
