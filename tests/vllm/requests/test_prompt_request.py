"""Keys of prompts, candidates that resume, and the trajectory that a request continues."""

import importlib.util
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from darts_server.engine.port import RequestTokens
from darts_server.exceptions import InvalidRequest
from darts_server.rollout.turns import Turns
from darts_server.types import RequestOptions, TurnKind
from darts_server.vllm.engine_core.drafter import PROMPT_TOKENS
from darts_server.vllm.engine_core.plugin import SEED
from darts_server.vllm.requests.prompt_request import PromptRequest, check_resumable, count_stable_tokens, make_turn

TRAINING = SamplingParams(temperature=1.0)
RENDERED: dict[str, Any] = {"type": "token", "prompt_token_ids": [5, 6, 7], "arrival_time": 1.5}
IMAGE = {"type": "multimodal", "mm_hashes": {"image": ["a"]}, "mm_kwargs": {}, "mm_placeholders": {}}
_trl = importlib.util.find_spec("trl")
assert _trl is not None
assert _trl.origin is not None
TEMPLATES = sorted((Path(_trl.origin).parent / "chat_templates").glob("*.jinja"))


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ({"prompt_token_ids": [5, 6, 7]}, 3),
        ({"prompt_token_ids": []}, None),
        ({"prompt_embeds": "a tensor"}, None),
        ("a text that is not rendered yet", None),
    ],
)
def test_tokens_of_a_prompt_are_counted_if_it_has_any(prompt: Any, tokens: int | None) -> None:
    assert PromptRequest(prompt, SamplingParams(max_tokens=9), "r").tokens == RequestTokens(tokens, 9)


def key(prompt: Any, **options: Any) -> str:
    return PromptRequest(prompt, SamplingParams(), "r", options).prompt_key


def test_the_same_tokens_have_the_same_key_whether_they_came_as_text_or_not() -> None:
    rendered = {"type": "token", "prompt_token_ids": [5, 6, 7]}
    assert key(rendered | {"prompt": "a text"}) == key(rendered | {"cache_salt": "salt"}) == key(rendered)


@pytest.mark.parametrize(
    ("prompt", "options", "expected"),
    [
        (RENDERED, {}, "2615aba4460de48d34687a4e"),
        (RENDERED, {"lora_request": LoRARequest("a", 1, "/a")}, "bae82c917a2fe27767d04fee"),
        (RENDERED | IMAGE, {}, "092339ff72b8041b7b47b385"),
        ("text", {}, "8cea47dbd908a5a8cd47f0f2"),
    ],
    ids=["tokens", "adapter", "image", "text"],
)
def test_keys_of_plain_prompts_are_those_of_statistics_on_disk(prompt: Any, options: Any, expected: str) -> None:
    assert key(prompt, **options) == expected


def test_prompts_that_differ_in_what_the_model_sees_have_different_keys() -> None:
    tokens = {"prompt_token_ids": [5, 6, 7]}
    ones = torch.ones(3, 4)
    zeros = torch.zeros(3, 4)
    mixed = {"type": "embeds", "prompt_token_ids": [5, 6, 7]}
    encoded = {"type": "enc_dec", "decoder_prompt": tokens}
    keys = [
        key({"type": "embeds", "prompt_embeds": ones}),
        key({"type": "embeds", "prompt_embeds": zeros}),
        key({"type": "embeds", "prompt_embeds": zeros.to(torch.bfloat16)}),
        key({"type": "embeds", "prompt_embeds": torch.zeros(4, 3)}),
        key({"type": "embeds", "prompt_embeds": torch.zeros(0, 4)}),
        key(mixed | {"prompt_embeds": ones, "is_token_ids": [True, False, False]}),
        key(mixed | {"prompt_embeds": zeros, "is_token_ids": [True, False, False]}),
        key(mixed | {"prompt_embeds": zeros, "is_token_ids": [False, True, False]}),
        key(encoded | {"encoder_prompt": {"prompt_token_ids": [1]}}),
        key(encoded | {"encoder_prompt": {"prompt_token_ids": [2]}}),
        key(encoded | {"encoder_prompt": {"prompt_token_ids": [2], "mm_hashes": {"audio": ["a"]}}}),
        key({"type": "multimodal", "encoder_prompt_token_ids": [1]} | tokens),
        key({"prompt": "a", "multi_modal_data": {"image": "a"}}),
        key({"prompt": "a", "multi_modal_data": {"image": "a"}, "mm_processor_kwargs": {"crops": 4}}),
        key({"prompt": "a", "multi_modal_data": {"image": object()}}),
        key({"prompt": "a", "multi_modal_data": {"image": object()}}),
        key(tokens | {"a field of a later version": 1}),
        key(tokens),
        key({"prompt_token_ids": [5, 6]}),
        key(tokens | {"mm_hashes": {"image": ["a"]}}),
        key(tokens | {"mm_hashes": {"image": ["b"]}}),
        key(tokens, lora_request=LoRARequest("a", 1, "/a")),
        key(tokens, lora_request=LoRARequest("b", 2, "/b")),
        key("a text that is not rendered yet"),
        key("another"),
    ]
    assert len({*keys}) == len(keys)


def test_equal_embeddings_have_the_same_key() -> None:
    for rows in (torch.ones(3, 4), torch.ones(3, 4, dtype=torch.bfloat16), torch.ones(4, 3).T):
        once, twice = ({"type": "embeds", "prompt_embeds": rows.clone(), "arrival_time": now} for now in (1.0, 2.0))
        assert key(once) == key(twice)


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ({"cache_salt": "b"}, {}),
        ({"type": "enc_dec", "decoder_prompt": {"cache_salt": "b"}}, {}),
        ({"prompt_embeds": torch.ones(3, 4)}, {}),
        ({}, {"lora_request": LoRARequest("a", 2, "/a")}),
        ({}, {"reasoning_ended": False}),
        ({}, {"tokenization_kwargs": {"truncation": True}}),
    ],
    ids=lambda each: next(iter(each), ""),
)
def test_requests_that_differ_in_a_part_of_the_prompt_are_never_joined(prompt: Any, options: Any) -> None:
    common: Any = {"lora_request": LoRARequest("a", 1, "/a"), "reasoning_ended": True}
    for other in (True, False):
        same = PromptRequest(RENDERED | prompt, TRAINING, "a", common | options | {"priority": 1}).join_key
        changed = PromptRequest(
            RENDERED | (prompt if other else {}), TRAINING, "b", common | (options if other else {})
        )
        assert (same == changed.join_key) is other


def test_the_tokens_beside_embeddings_do_not_show_a_later_turn() -> None:
    turns = Turns()
    prompts = [{"prompt_token_ids": [5, 6, 7], "prompt_embeds": torch.full((3, 4), each)} for each in (1.0, 2.0)]
    first, second = (PromptRequest(each, TRAINING, "r") for each in prompts)
    turns.add_answer(make_turn(first, RequestOptions(), None, None), [8, 9])
    second.prompt["prompt_token_ids"] += [8, 9, 10]
    assert turns.classify(make_turn(second, RequestOptions(), None, None)) is TurnKind.OPENING


@pytest.mark.parametrize("values", [{"logprobs": 1}, {"stop": "whole words"}, {"stop": ["a", "bcd"]}])
def test_log_probs_of_generated_tokens_are_kept_and_stop_strings_of_any_length_work(values: dict[str, Any]) -> None:
    check_resumable(SamplingParams(**values))
    for logprobs in (2, 20, -1):
        with pytest.raises(InvalidRequest) as refused:
            check_resumable(SamplingParams(**values | {"logprobs": logprobs}))
        assert refused.value.field == "sampling.logprobs"


# --- the trajectory that a request continues


@pytest.mark.parametrize(
    ("params", "policy"), [(SamplingParams(temperature=0), None), (SamplingParams(temperature=1.0), "off")]
)
def test_training_may_use_the_names_of_evaluations_sessions(params: SamplingParams, policy: str | None) -> None:
    turns = Turns()
    evaluated = PromptRequest({"prompt_token_ids": [1, 2]}, params, "a")
    turns.add_answer(make_turn(evaluated, RequestOptions(policy=policy), "0_0", None), [3])
    trained = PromptRequest({"prompt_token_ids": [5, 6]}, TRAINING, "b")
    opening = make_turn(trained, RequestOptions(), "0_0", None)
    assert turns.classify(opening) is TurnKind.OPENING
    turns.add_answer(opening, [7])
    later = PromptRequest({"prompt_token_ids": [8]}, TRAINING, "c")
    assert turns.classify(make_turn(later, RequestOptions(), "0_0", None)) is TurnKind.SESSION


class Characters:
    """A tokenizer whose tokens are characters."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


def tokens_of(text: str) -> list[int]:
    return list(map(ord, text))


@pytest.mark.parametrize(
    ("prompt", "stable"),
    [
        ("2 + 2?", "2 + 2?"),
        ("<|user|>2 + 2?<|assistant|>\n", "<|user|>2 + 2?<|assistant|>"),
        ("<|assistant|>\n<think>\n", "<|assistant|>"),
        ("<|assistant|><think>\n\n</think>\n\n", "<|assistant|>"),
        ("<think>\nhm</think>", "<think>\nhm</think>"),
        ("", ""),
    ],
)
def test_text_that_a_template_puts_only_before_an_answer_is_no_part_of_later_turns(prompt: str, stable: str) -> None:
    assert count_stable_tokens(Characters(), tokens_of(prompt)) == len(stable)


def test_numbers_that_stand_for_an_image_are_not_decoded() -> None:
    assert count_stable_tokens(Characters(), [5, -1]) == 2


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ANSWERS: list[dict[str, Any]] = [
    {"content": "It is 4."},
    {"content": "<think>\nhm\n</think>\n\nIt is 4."},
    {"content": "It is 4.", "reasoning_content": "hm"},
]
FOLLOWING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"role": "user", "content": "And 3 + 3?"}),
    ({"tool_calls": [CALL]}, {"role": "tool", "name": "add", "content": "4"}),
]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_later_turns_begin_with_the_opening_prompt_of_every_template_that_trl_has(path: Path) -> None:
    template = path.read_text(encoding="utf-8")
    rendered = 0
    opening = [{"role": "user", "content": "2 + 2?"}]
    for thinks, answer, (calls, following) in itertools.product((True, False), ANSWERS, FOLLOWING):
        try:
            first, later = (
                render_jinja_template(
                    [messages],
                    chat_template=template,
                    add_generation_prompt=True,
                    enable_thinking=thinks,
                    bos_token="<bos>",
                    eos_token="<eos>",
                )[0][0]
                for messages in (opening, [*opening, {"role": "assistant", **answer, **calls}, following])
            )
        except (TemplateError, TypeError):
            # The template has no tools, or needs images.
            continue
        rendered += 1
        stable = count_stable_tokens(Characters(), tokens_of(first))
        assert later.startswith(first[:stable])
        assert count_stable_tokens(Characters(), tokens_of(later)) > stable
    assert rendered or path.stem.startswith("llava")


# --- seeds ---------------------------------------------------------------------------


def test_a_resumed_candidate_has_another_seed_and_keeps_its_first_seed_for_coupled_sampling() -> None:
    request = PromptRequest(RENDERED, SamplingParams(seed=40, max_tokens=9), "r")
    assert request.make_params(2).seed == 42
    prompt, params = request.make_resumed(2, [8, 9])
    assert prompt["prompt_token_ids"] == [5, 6, 7, 8, 9]
    assert params.seed != 42
    assert params.extra_args == {PROMPT_TOKENS: 3, SEED: 42}
    assert request.make_params(2).extra_args is None


def test_candidates_with_reused_streams_have_consecutive_seeds_also_after_a_resumption() -> None:
    request = PromptRequest(RENDERED, SamplingParams(max_tokens=9), "r")
    request.reused_seed = 700
    first, second = (request.make_params(index) for index in range(2))
    assert (first.extra_args, second.extra_args) == ({SEED: 700}, {SEED: 701})
    assert first.seed is second.seed is None
    _, params = request.make_resumed(1, [8])
    assert params.extra_args == {PROMPT_TOKENS: 3, SEED: 701}
