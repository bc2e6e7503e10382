"""What overlap refuses, and the events it takes."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from darts_client._events import Delta, Discard, Done, Event, GroupEvent, TrajectoryEvent
from darts_client._models import Group, Unfinished, Usage
from darts_client.overlap import Overlap
from tests.clients.causal_lms import SIZES, VOCABULARY, assert_equal, causal_lm, small, whole


def test_a_model_in_training_mode_is_refused_before_anything_is_computed() -> None:
    overlap = Overlap(causal_lm("llama", SIZES).train())
    overlap.prompt(0, [1, 2])
    with pytest.raises(ValueError, match=r"model\.eval"):
        overlap.step()
    assert overlap.waiting == 1


ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
UNSUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "DynamicSlidingWindowLayer": ("mistral", SIZES | {"sliding_window": 8}),
    "rotary": ("llama", SIZES | {"rope_parameters": ROPE}),
    "position_ids": ("bloom", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 1, "n_head": 4}),
    "ALiBi": (
        "falcon",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "alibi": True},
    ),
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_a_model_whose_prefixes_cannot_be_kept_is_refused_by_name(reason: str) -> None:
    model = causal_lm(*UNSUPPORTED[reason])
    with pytest.raises(ValueError, match=f"{type(model).__name__}.*{reason}"):
        Overlap(model)


def test_an_encoder_decoder_is_refused() -> None:
    model: Any = T5ForConditionalGeneration
    config = T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match="encoder-decoder"):
        Overlap(model(config))


def begun() -> Overlap:
    """Prompt 0 with `a` (2 tokens), `ended` (finished) and `gone` (dropped); prompt 1; prompt 2, closed."""
    overlap = Overlap(small())
    for number in range(3):
        overlap.prompt(number, [1, 2, 3])
    for name in ("a", "ended", "gone"):
        overlap.add(name, 0, [4, 5])
    overlap.finish("ended")
    overlap.drop("gone")
    overlap.close(2)
    return overlap


MISTAKES: dict[str, Callable[[Overlap], object]] = {
    "missing before: 2 are there, these start at 3": lambda o: o.add("a", 0, [1], start=3),
    "came already: 2 are there, these start at 1": lambda o: o.add("a", 0, [1], start=1),
    "missing before: 0 are there": lambda o: o.add("new", 0, [1], start=1),
    "'a' belongs to prompt 0, not 1": lambda o: o.add("a", 1, [1]),
    "'ended' is finished": lambda o: o.add("ended", 0, [1]),
    "'gone' was dropped": lambda o: o.add("gone", 0, [1], start=2),
    "unknown prompt 7": lambda o: o.add("new", 7, [1]),
    "prompt 2 is closed": lambda o: o.add("new", 2, [1]),
    "token id 40 is not among the 40": lambda o: o.add("a", 0, [1, 40]),
    "token id -1 ": lambda o: o.add("new", 0, [-1]),
    "prompt 1 is there already": lambda o: o.prompt(1, [1]),
    "prompt 8 has no tokens": lambda o: o.prompt(8, []),
    "has 3 tokens, but 2 came": lambda o: o.finish("a", 3),
    "unknown trajectory 'x'": lambda o: o.finish("x"),
    "trajectory 'x': add its first": lambda o: o.drop("x"),
    "'x'": lambda o: o.logprobs("x"),
    "'gone'": lambda o: o.logprobs("gone"),
    "trajectory 'ended' is finished": lambda o: o.finish("ended"),
    "unknown prompt 9": lambda o: o.close(9),
    "entropy=True": lambda o: o.entropies("a"),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_named_and_changes_nothing(message: str) -> None:
    overlap = begun()
    waiting = overlap.waiting
    with pytest.raises(ValueError, match=message):
        MISTAKES[message](overlap)
    assert overlap.waiting == waiting
    assert ("new" in overlap, "a" in overlap, "ended" in overlap) == (False, True, True)
    assert len(overlap.logprobs("a")) == 2


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"temperature": float("nan")}, {"batch_tokens": 0}])
def test_a_wrong_setting_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Overlap(small(), **wrong)


GROUP = Group("g", None, (), number=0)
USAGE = Usage(generated=9, returned=3, wasted=6, seconds=1.0)
TYPED: list[Event] = [
    Delta(trajectory_id="g:0", number=0, start=0, token_ids=(5, 6), logprobs=None),
    Delta(trajectory_id="h:0", number=1, start=0, token_ids=(5,), logprobs=None),
    Delta(trajectory_id="g:1", number=0, start=0, token_ids=(9,), logprobs=None),
    Delta(trajectory_id="g:0", number=0, start=2, token_ids=(7, 8), logprobs=None),
    Discard(trajectory_id="g:1", number=0, length=1, reason="surplus"),
    Discard(trajectory_id="g:2", number=0, length=0, reason="surplus"),
    TrajectoryEvent("g:0", 0, (5, 6, 7), None, "", "length", cut=True),
    GroupEvent(GROUP),
    Done(USAGE, (Unfinished(number=1, prompt_key="k", metadata=None),)),
]
WIRE: list[tuple[str, dict[str, Any]]] = [
    ("batch", {"id": "b", "policy": "uniform", "groups": 2}),
    ("delta", {"trajectory_id": "g:0", "number": 0, "start": 0, "token_ids": [5, 6], "logprobs": None}),
    ("delta", {"trajectory_id": "h:0", "number": 1, "start": 0, "token_ids": [5], "logprobs": None}),
    ("delta", {"trajectory_id": "g:1", "number": 0, "start": 0, "token_ids": [9], "logprobs": None}),
    ("delta", {"trajectory_id": "g:0", "number": 0, "start": 2, "token_ids": [7, 8], "logprobs": None}),
    ("discard", {"trajectory_id": "g:1", "number": 0, "length": 1, "reason": "surplus"}),
    ("discard", {"trajectory_id": "g:2", "number": 0, "length": 0, "reason": "surplus"}),
    ("trajectory", {"trajectory_id": "g:0", "number": 0, "length": 3, "finish_reason": "length", "cut": True}),
    ("group", {"number": 0, "group_id": "g", "trajectories": []}),
    ("done", {"id": "b", "usage": {}, "unfinished": [{"number": 1, "prompt_key": "k", "metadata": None}]}),
]


@pytest.mark.parametrize("form", ["typed", "wire"])
def test_the_events_of_a_stream_can_be_fed_as_they_come(form: str) -> None:
    model, overlap = small(), Overlap(small())
    for number in range(2):
        overlap.prompt(number, [1, 2, 3])
    typed, wire = [partial(overlap.feed, event) for event in TYPED], [partial(overlap.feed_wire, *it) for it in WIRE]
    for feed in typed if form == "typed" else wire:
        feed()
        overlap.step()
    assert [name in overlap for name in ("g:0", "g:1", "g:2", "h:0")] == [True, False, False, False]
    assert_equal(overlap.logprobs("g:0"), whole(model, [1, 2, 3], [5, 6, 7]))
    assert overlap.kept_tokens == overlap.waiting == 0
    with pytest.raises(ValueError, match="prompt 1 is closed"):
        overlap.add("h:1", 1, [5])


class Wrapped(torch.nn.Module):
    """A model behind a wrapper that takes any argument, in the manner of PEFT."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def get_base_model(self) -> Any:
        return self.model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["model"], name)

    def forward(self, **given: Any) -> Any:
        return self.model(**given)


def test_a_wrapped_model_is_judged_by_what_it_wraps() -> None:
    overlap = Overlap(Wrapped(small()).eval())
    overlap.prompt(0, [1, 2, 3])
    overlap.add("a", 0, [4, 5])
    assert_equal(overlap.logprobs("a"), whole(small(), [1, 2, 3], [4, 5]))
    with pytest.raises(ValueError, match="DynamicSlidingWindowLayer"):
        Overlap(Wrapped(causal_lm(*UNSUPPORTED["DynamicSlidingWindowLayer"])))


def test_without_torch_the_client_works_and_overlap_names_what_to_install() -> None:
    code = "import sys; sys.modules['torch'] = None; import darts_client; import darts_client.overlap"
    paths = os.pathsep.join(path for path in sys.path if path)
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": paths}
    )
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].endswith("darts_client.overlap needs darts-client[overlap]")
