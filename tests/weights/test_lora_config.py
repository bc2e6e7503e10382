import json
import math
from dataclasses import replace
from typing import Any

import pytest

from darts_server.exceptions import InvalidRequest
from darts_server.weights.lora_config import LoraConfig, check_lora, dump_config, parse_config
from darts_server.weights.tensors import TensorSet
from tests.weights.lora_sets import LAYERS, tensors_of

GOOD: dict[str, Any] = {"r": 2, "lora_alpha": 6}


def test_a_configuration_as_peft_writes_it_is_accepted() -> None:
    more = {
        "peft_type": "LORA",
        "bias": "none",
        "init_lora_weights": True,
        "target_modules": ["q_proj"],
        "lora_dropout": 0.1,
        "qalora_group_size": 16,
        "use_dora": False,
        "alpha_pattern": {},
        "modules_to_save": None,
    }
    assert parse_config(json.dumps(GOOD | more), "config") == LoraConfig(2, 6)
    assert parse_config(json.dumps(GOOD), "config").scale == 3
    assert parse_config(json.dumps(GOOD | {"use_rslora": True}), "config").scale == pytest.approx(6 / math.sqrt(2))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "must be an object"),
        ({"lora_alpha": 1}, "r must be"),
        (GOOD | {"r": 0}, "r must be"),
        (GOOD | {"r": True}, "r must be"),
        ({"r": 2}, "lora_alpha must be"),
        (GOOD | {"lora_alpha": math.nan}, "lora_alpha must be"),
        (GOOD | {"lora_alpha": 10**400}, "lora_alpha must be"),
        (GOOD | {"use_rslora": 1}, "use_rslora must be"),
        (GOOD | {"peft_type": "IA3"}, "peft_type is 'IA3'"),
        (GOOD | {"bias": "all"}, "bias is 'all'"),
        (GOOD | {"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        (GOOD | {"init_lora_weights": 1}, "init_lora_weights is '1'"),
        (GOOD | {"use_dora": True}, "'use_dora' is set"),
        (GOOD | {"alpha_pattern": {"q_proj": 4}}, "'alpha_pattern' is set"),
        (GOOD | {"of_tomorrow": 1}, "'of_tomorrow' is set"),
    ],
)
def test_unsupported_configurations_are_refused_with_their_key(given: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        parse_config(given if isinstance(given, str) else json.dumps(given), "config")
    assert caught.value.field == "config"


def test_only_checked_keys_are_written_for_the_engine() -> None:
    given = tensors_of("layers.0", "layers.1")
    check_lora(LAYERS, LoraConfig(2, 6), given, "body")
    assert json.loads(dump_config(LoraConfig(2, 6), given)) == {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 6,
        "use_rslora": False,
        "target_modules": ["layers.0", "layers.1"],
        "bias": "none",
    }


ONE = tensors_of("layers.0")
DOWN, UP = ONE


def named(name: str) -> TensorSet:
    """A tensor of layer 0 under another name."""
    file = ONE[DOWN]
    return {name: replace(file, tensors={name: file.tensors[DOWN]})}


@pytest.mark.parametrize(
    ("config", "given", "words"),
    [
        (LoraConfig(5, 1), ONE, "r is 5, and the server takes 4"),
        (LoraConfig(2, 1), {}, "has no tensor"),
        (LoraConfig(2, 1), tensors_of("layers.2"), "layers.2.lora_A.weight is of no layer"),
        (LoraConfig(3, 1), ONE, r"layers.0.lora_A.weight is F32 of shape \[2, 2\]"),
        (LoraConfig(2, 1), tensors_of("layers.0", dtype="I32"), "must have floats"),
        (LoraConfig(2, 1), {UP: ONE[UP]}, r"lora_A\.weight is missing"),
        (LoraConfig(2, 1), named("layers.0.lora_A.weight"), "is not of a LoRA adapter"),
        (LoraConfig(2, 1), named("base_model.model.layers.0.lora_magnitude_vector"), "is not of a LoRA adapter"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_with_the_reason(
    config: LoraConfig, given: TensorSet, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        check_lora(LAYERS, config, given, "body")
