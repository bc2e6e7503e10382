"""Weight updates of the GPU benchmark, without an engine: the checkpoint, disk space and time."""

from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.models import CHECKPOINT, SHAPES, STD, TINY, Shape
from benchmarks.gpu.parts import weights

pytestmark = pytest.mark.nightly
GB = 10**9
SMALL, LARGE = SHAPES["0.6B"], SHAPES["8B"]


@pytest.mark.parametrize("shape", [TINY, *SHAPES.values()])
def test_a_checkpoint_has_every_parameter_once(shape: Shape) -> None:
    assert sum(prod(size) for _, size in shape.tensors()) == shape.parameters


def test_a_checkpoint_has_the_names_and_shapes_of_the_published_models(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(TINY.write(tmp_path))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert dict(TINY.tensors()) == {name: tuple(each.shape) for name, each in model.named_parameters()}
    assert [name for name, _ in LARGE.tensors()][-1] == "lm_head.weight"


def test_safetensors_reads_the_checkpoint(tmp_path: Path) -> None:
    TINY.write_checkpoint(tmp_path)
    read = load_file(tmp_path / CHECKPOINT)
    assert {name: tuple(each.shape) for name, each in read.items()} == dict(TINY.tensors())
    assert {each.dtype for each in read.values()} == {torch.float32}
    values = torch.cat([each.flatten() for each in read.values()])
    assert values.std().item() == pytest.approx(STD, rel=0.05)


def test_paths_without_disk_space_are_left_out() -> None:
    result = weights.table()
    assert weights.possible_paths(LARGE, 40 * GB, result) == [weights.DISK, weights.PUSHED]
    assert result.notes == []
    assert weights.possible_paths(LARGE, 20 * GB, result) == [weights.DISK]
    assert result.notes == [
        "Left out for lack of space: pushed, which needs 33.8 GB where --out is; 20.0 GB are free.",
    ]
    assert weights.possible_paths(LARGE, 10 * GB, weights.table()) == []
