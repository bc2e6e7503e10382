"""Inputs that Overlap rejects, and the events that it accepts."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from transformers import T5Config, T5ForConditionalGeneration

from darts_client.overlap import Overlap

from .causal_lms import SIZES, VOCABULARY, assert_equal, causal_lm, expected_logprobs, small
from .test_stream import build_reader, read
from .transcripts import delta, discard, done, group, started, trajectory, trajectory_end


def test_a_model_in_training_mode_is_rejected() -> None:
    overlap = Overlap(causal_lm("llama", SIZES).train())
    overlap.add_prompt(0, [1, 2])
    with pytest.raises(ValueError, match=r"model\.eval"):
        overlap.step()
    assert overlap.pending_tokens == 1


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
def test_a_model_whose_prefixes_cannot_be_cached_is_rejected_with_the_reason(reason: str) -> None:
    model = causal_lm(*UNSUPPORTED[reason])
    with pytest.raises(ValueError, match=f"{type(model).__name__}.*{reason}"):
        Overlap(model)


def test_an_encoder_decoder_is_rejected() -> None:
    model: Any = T5ForConditionalGeneration
    config = T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match="encoder-decoder"):
        Overlap(model(config))


def build_overlap() -> Overlap:
    """Return prompt 0 with `a` (2 tokens), `finished` and `dropped`; prompt 1; prompt 2, closed."""
    overlap = Overlap(small())
    for number in range(3):
        overlap.add_prompt(number, [1, 2, 3])
    for name in ("a", "finished", "dropped"):
        overlap.add_tokens(name, 0, [4, 5])
    overlap.finish("finished")
    overlap.drop("dropped")
    overlap.close_prompt(2)
    return overlap


MISTAKES: dict[str, Callable[[Overlap], object]] = {
    "missing: it has 2, these start at 3": lambda o: o.add_tokens("a", 0, [1], start=3),
    "repeated: it has 2, these start at 1": lambda o: o.add_tokens("a", 0, [1], start=1),
    "'a' belongs to prompt 0, not 1": lambda o: o.add_tokens("a", 1, [1]),
    "'finished' is finished": lambda o: o.add_tokens("finished", 0, [1]),
    "'dropped' was dropped": lambda o: o.add_tokens("dropped", 0, [1], start=2),
    "unknown prompt 7": lambda o: o.add_tokens("new", 7, [1]),
    "prompt 2 is closed": lambda o: o.add_tokens("new", 2, [1]),
    "token id 40 is not in the model's vocabulary of 40": lambda o: o.add_tokens("a", 0, [1, 40]),
    "token id -1 ": lambda o: o.add_tokens("new", 0, [-1]),
    "prompt 1 was already added": lambda o: o.add_prompt(1, [1]),
    "prompt 8 has no tokens": lambda o: o.add_prompt(8, []),
    "length is 3, but 2 tokens came": lambda o: o.finish("a", 3),
    "unknown trajectory 'x'": lambda o: o.finish("x"),
    "trajectory 'finished' is finished": lambda o: o.finish("finished"),
    "entropy=True": lambda o: o.entropies("a"),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_an_invalid_call_changes_nothing(message: str) -> None:
    overlap = build_overlap()
    pending = overlap.pending_tokens
    with pytest.raises(ValueError, match=message):
        MISTAKES[message](overlap)
    assert overlap.pending_tokens == pending
    assert ("new" in overlap, "a" in overlap, "finished" in overlap) == (False, True, True)
    assert len(overlap.logprobs("a")) == 2


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"temperature": float("nan")}, {"batch_tokens": 0}])
def test_invalid_settings_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Overlap(small(), **wrong)


STREAM = [
    started(2),
    ("delta", delta(0, 0, 0, 2)),
    ("delta", delta(1, 0, 0, 1)),
    ("delta", delta(0, 1, 0, 1)),
    ("delta", delta(0, 0, 2, 4)),
    ("discard", discard(0, 1, 1)),
    ("discard", discard(0, 2, 0)),
    ("trajectory", trajectory_end(0, 0, 3, cut=True)),
    ("group", group(0, trajectory(0, 0, 3, tokens=False, cut=True))),
    done(1),
]


@pytest.mark.parametrize("form", ["typed", "raw"])
def test_the_events_of_a_stream_add_finish_and_drop_trajectories(form: str) -> None:
    overlap = Overlap(small())
    for number in range(2):
        overlap.add_prompt(number, [1, 2, 3])
    events = read(build_reader(stream="tokens", group_size=1), *STREAM)
    typed = [partial(overlap.add_event, event) for event in events]
    raw = [partial(overlap.add_raw_event, *event) for event in STREAM]
    for add in typed if form == "typed" else raw:
        add()
        overlap.step()
    assert [f"roll-1-{name}" in overlap for name in ("0:0", "0:1", "0:2", "1:0")] == [True, False, False, False]
    assert_equal(overlap.logprobs("roll-1-0:0"), expected_logprobs(small(), [1, 2, 3], [0, 1, 2]))
    assert overlap.cached_tokens == overlap.pending_tokens == 0
    with pytest.raises(ValueError, match="prompt 1 is closed"):
        overlap.add_tokens("roll-1-1:1", 1, [5])


class Wrapped:
    """A model behind a wrapper that takes any argument, like PEFT's."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def get_base_model(self) -> Any:
        return self._model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **given: Any) -> Any:
        return self._model(**given)


def test_the_model_inside_a_wrapper_is_checked() -> None:
    overlap = Overlap(Wrapped(small()))
    overlap.add_prompt(0, [1, 2, 3])
    overlap.add_tokens("a", 0, [4, 5])
    assert_equal(overlap.logprobs("a"), expected_logprobs(small(), [1, 2, 3], [4, 5]))
    with pytest.raises(ValueError, match="DynamicSlidingWindowLayer"):
        Overlap(Wrapped(causal_lm(*UNSUPPORTED["DynamicSlidingWindowLayer"])))
