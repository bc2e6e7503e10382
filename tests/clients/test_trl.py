"""TRL's trainer and client with the integration, against a server without an engine."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl.trainer.grpo_config import GRPOConfig

from darts_client import NotFound, ServerFault
from darts_client.integrations._callback import total
from darts_client.integrations.trl import DartsGRPOTrainer, PushingClient, report_rewards, unshaped
from darts_server.demo.server import MODEL
from examples.tiny_rl.tokenizer import build_tokenizer

from .vllm_like import ANSWER, EOS, STATE, VllmLike, vllm_like

pytestmark = pytest.mark.filterwarnings("default")  # TRL's and those of what it imports
PROMPTS = ["7a-5b*4>", "1a+5b*4c-3>"]
GROUP = 4
SHAPED = {"darts_policy": "darts_cut", "other": 1}


@pytest.fixture
def server() -> Iterator[VllmLike]:
    with vllm_like() as running:
        yield running


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So small a model gains nothing from more, and they wait for each other where cores are scarce."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def number(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Which of its group's completions each is; so there is something to learn."""
    return [float(ids[0] - ANSWER) for ids in completion_ids]


def trainer(
    server: VllmLike,
    out: Path,
    function: Callable[..., Any] = number,
    more: dict[str, Any] | None = None,
    **changes: Any,
) -> DartsGRPOTrainer:
    dataset = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
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
    return DartsGRPOTrainer(
        AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        [function],
        GRPOConfig(**settings | changes),
        dataset,
        dataset,
        build_tokenizer(),
        **more or {},
    )


def held(of: DartsGRPOTrainer) -> dict[str, torch.Tensor]:
    model: Any = of.model
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def equal(these: dict[str, torch.Tensor], those: dict[str, torch.Tensor]) -> bool:
    return these.keys() == those.keys() and all(torch.equal(these[name], those[name]) for name in these)


def test_each_steps_weights_are_pushed_whole_before_it_samples(server: VllmLike, tmp_path: Path) -> None:
    of = trainer(server, tmp_path)
    before = held(of)
    of.train()
    of.vllm_generation.sync_weights()  # type: ignore[no-untyped-call, unused-ignore]
    first, second, last = server.pushed
    assert equal(first, before)
    assert not equal(second, first)
    assert equal(last, held(of))
    order = [each.path for each in server.asked if each.method == "PUT" or each in server.completions]
    assert order == ["/darts/v1/weights", "/v1/completions"] * 2 + ["/darts/v1/weights"]
    assert not server.of("POST", "/reset_prefix_cache")


def test_training_is_shaped_as_asked_and_evaluation_is_not(server: VllmLike, tmp_path: Path) -> None:
    of = trainer(server, tmp_path)
    of.evaluate()
    of.train()
    evaluation, *training = server.completions
    assert (evaluation.headers["x-darts-policy"], evaluation.body["vllm_xargs"]) == ("off", {"other": 1})
    assert [each.body["vllm_xargs"] for each in training] == [SHAPED] * 2
    assert not any("x-darts-policy" in each.headers for each in training)


def test_rewards_of_training_are_reported_by_tokens(server: VllmLike, tmp_path: Path) -> None:
    of = trainer(server, tmp_path, report_rewards(number, correct_above=1.0))
    of.evaluate()
    assert server.rewards == []
    of.train()
    assert len(server.rewards) == 2 * len(PROMPTS) * GROUP
    tokenizer = build_tokenizer()
    told = {(tuple(each["prompt_token_ids"]), tuple(each["completion_token_ids"])) for each in server.rewards}
    assert told == {(tuple(tokenizer.encode(p)), (ANSWER + k, EOS)) for p in PROMPTS for k in range(GROUP)}
    assert all(each["reward"] == each["completion_token_ids"][0] - ANSWER for each in server.rewards)
    assert all(each["correct"] == (each["reward"] > 1.0) for each in server.rewards)
    (report,) = of.reward_reports
    assert (report.matched, report.unreported) == (2 * len(PROMPTS) * GROUP, 0)
    assert "rewards/number/mean" in of.state.log_history[0]


def test_rewards_of_async_functions_are_reported_and_none_is_no_reward(server: VllmLike, tmp_path: Path) -> None:
    async def some(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        return [None if value == 0.0 else value for value in number(completion_ids)]

    of = trainer(server, tmp_path, report_rewards(some), max_steps=1)
    of.train()
    assert len(server.rewards) == len(PROMPTS) * (GROUP - 1)


def test_training_goes_on_when_nothing_but_generation_and_weights_works(
    server: VllmLike, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.away = ("/darts/v1/rewards", "/darts/v1/state", "/metrics")
    of = trainer(server, tmp_path, report_rewards(number), save_strategy="steps", save_steps=1)
    with caplog.at_level(logging.WARNING, "darts_client"):
        of.train()
    assert of.state.global_step == 2
    assert of.reward_reports[0].unreported == 2 * len(PROMPTS) * GROUP
    said = [record.getMessage() for record in caplog.records if record.name.startswith("darts_client")]
    assert len(said) == 2
    assert all("on fire" in each for each in said)


def test_a_reward_function_of_another_trainer_works_and_says_that_it_reports_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    function: Any = report_rewards(number)
    assert function(completion_ids=[[ANSWER + 2, EOS]]) == [2.0]
    assert function.report.unreported == 1
    assert "not a DartsGRPOTrainer" in caplog.text


def test_rewards_of_other_completions_than_the_batchs_are_not_reported(server: VllmLike, tmp_path: Path) -> None:
    def of_some(completion_ids: list[list[int]], **named: Any) -> Any:
        half = len(completion_ids) // 2
        return [*inner(completion_ids=completion_ids[:half], **named), *[0.0] * (len(completion_ids) - half)]

    inner: Any = report_rewards(number)
    setattr(of_some, "report", inner.report)  # noqa: B010
    trainer(server, tmp_path, of_some, max_steps=1).train()
    assert inner.report.unreported == len(PROMPTS) * GROUP // 2
    assert server.rewards == []


def test_a_reward_model_cannot_be_wrapped() -> None:
    for model in ("org/reward-model", torch.nn.Linear(1, 1)):
        with pytest.raises(TypeError, match="takes a function"):
            report_rewards(model)  # type: ignore[arg-type]


def test_state_is_saved_with_checkpoints_and_restored_from_them(server: VllmLike, tmp_path: Path) -> None:
    trainer(server, tmp_path, save_strategy="steps", save_steps=1).train()
    assert {path.parent.name for path in tmp_path.glob("*/darts-state")} == {"checkpoint-1", "checkpoint-2"}
    assert not server.of("PUT", "/darts/v1/state")
    saved = tmp_path / "checkpoint-1" / "darts-state"
    assert saved.read_bytes() == STATE
    saved.write_bytes(b"of step 1")
    trainer(server, tmp_path / "elsewhere").train(resume_from_checkpoint=str(saved.parent))
    trainer(server, tmp_path, max_steps=3).train(resume_from_checkpoint=True)
    assert [each.data for each in server.of("PUT", "/darts/v1/state")] == [b"of step 1", STATE]


def test_the_servers_metrics_are_in_the_logs_of_training_steps(server: VllmLike, tmp_path: Path) -> None:
    of = trainer(server, tmp_path)
    seen: list[dict[str, Any]] = []
    of.callback_handler.callbacks.append(Reporter(seen))
    of.train()
    steps = [line for line in of.state.log_history if "loss" in line]
    assert [line["darts/candidates_started"] for line in steps] == [12.0, 12.0]
    assert [line["darts/weight_version"] for line in steps] == [3.0, 3.0]
    assert [line.get("darts/candidates_started") for line in seen] == [12.0, 12.0, None]
    assert "darts/tokens_generated" not in steps[0]  # the server has no such metric


class Reporter:
    """As those of tensorboard and others: it takes what is logged, when it is its turn."""

    def __init__(self, seen: list[dict[str, Any]]) -> None:
        self.seen = seen

    def __getattr__(self, name: str) -> Callable[..., None]:
        def event(args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if name == "on_log":
                self.seen.append(dict(logs))

        if not name.startswith("on_"):
            raise AttributeError(name)
        return event


def test_weights_that_are_refused_end_the_training_with_the_adapters_out_again(
    server: VllmLike, tmp_path: Path
) -> None:
    client = PushingClient(base_url=server.url)
    merged = True

    def params() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal merged
        yield "a", torch.zeros(2)
        yield "b", torch.zeros(3)
        merged = False

    announced = [("a", "float32", [2]), ("b", "float32", [3])]
    server.away = ("/darts/v1/weights",)
    with pytest.raises(ServerFault, match="on fire"):
        client.update_named_params(announced, params())
    assert not merged
    merged = True
    with pytest.raises(ValueError, match="b is uint8"):
        client.update_named_params([announced[0], ("b", "uint8", [3])], params())
    assert not merged
    server.away = ("/nothing",)
    of = trainer(server, tmp_path)
    server.away = ("/darts/v1/weights",)
    with pytest.raises(ServerFault, match="on fire"):
        of.train()


def test_a_server_that_takes_no_weights_is_told_before_training(server: VllmLike, tmp_path: Path) -> None:
    server.absent = ("/darts",)
    with pytest.raises(NotFound, match="is it a darts-server"):
        trainer(server, tmp_path)


def test_with_nccl_weights_go_trls_way(server: VllmLike, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="VLLM_SERVER_DEV_MODE=1"):  # TRL's own words
        trainer(server, tmp_path, more={"weight_sync": "nccl"})
    with pytest.raises(ValueError, match="'http' or 'nccl'"):
        trainer(server, tmp_path, more={"weight_sync": "carrier pigeon"})


def test_vllm_in_the_trainers_process_is_refused(server: VllmLike, tmp_path: Path) -> None:
    for changes in ({"use_vllm": False}, {"vllm_mode": "colocate"}):
        with pytest.raises(ValueError, match="vllm_mode='server'"):
            trainer(server, tmp_path, **changes)
    assert server.asked == []


def test_the_api_key_goes_with_every_request(server: VllmLike, tmp_path: Path) -> None:
    trainer(server, tmp_path, report_rewards(number), {"api_key": "k"}, save_strategy="steps", save_steps=2).train()
    without = {each.path for each in server.asked if each.headers.get("authorization") != "Bearer k"}
    assert without == {"/health"}


@pytest.mark.parametrize(("logprob", "warned"), [(-0.5, True), (0.0, False)])
def test_trl_warns_of_unprocessed_logprobs_though_the_server_has_no_development_routes(
    server: VllmLike, tmp_path: Path, caplog: pytest.LogCaptureFixture, logprob: float, warned: bool
) -> None:
    server.first_logprob = logprob
    logging.getLogger("trl").propagate = True
    with caplog.at_level(logging.WARNING, "trl"):
        trainer(server, tmp_path)
    assert ("--logprobs-mode raw_logprobs" in caplog.text) == warned


def test_an_unshaped_request_asks_nothing_of_shaping() -> None:
    asked = {"json": {"prompt": [[1]], "vllm_xargs": {"darts_group_size": 4}}, "headers": {"X-Other": "1"}}
    assert unshaped(asked) == {
        "json": {"prompt": [[1]], "vllm_xargs": {}},
        "headers": {"X-Other": "1", "X-Darts-Policy": "off"},
    }
    assert unshaped({}) == {"headers": {"X-Darts-Policy": "off"}}


def test_a_metric_is_summed_over_the_samples_with_its_label() -> None:
    text = '# HELP a_total b\na_total{kind="x",m="1"} 1.0\na_total{kind="y",m="1"} 2.0\na_total_more 5.0\nplain 4e2'
    assert total(text, "a_total") == 3.0
    assert total(text, 'a_total kind="y"') == 2.0
    assert total(text, "plain") == 400.0
    assert total(text, "absent") is None
