import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from darts_server.vllm.api.launch import bring_to_state, drop_api_keys, fingerprint_of

MODEL: dict[str, Any] = {
    "model": "org/name",
    "revision": None,
    "dtype": "bfloat16",
    "quantization": None,
    "max_model_len": 1024,
    "hf_config": None,
    "hf_config_path": None,
    "hf_overrides": {},
}


def fingerprint(load_format: str = "auto", **changed: Any) -> str:
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(**MODEL | changed), load_config=SimpleNamespace(load_format=load_format)
    )
    return fingerprint_of(config)


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "org/other"},
        {"revision": "v2"},
        {"dtype": "float32"},
        {"quantization": "fp8"},
        {"max_model_len": 512},
        {"load_format": "dummy"},
        {"hf_config_path": "org/other"},
        {"hf_overrides": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}},
        {"hf_config": SimpleNamespace(_commit_hash="1f2e")},
    ],
)
def test_the_fingerprint_differs_with_everything_that_tokens_depend_on(changed: dict[str, Any]) -> None:
    assert fingerprint() == fingerprint()
    assert fingerprint(**changed) != fingerprint()


def test_the_fingerprint_differs_when_the_weights_in_a_folder_were_replaced(tmp_path: Path) -> None:
    folder = str(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1234")
    original = fingerprint(model=folder)

    (tmp_path / "README.md").write_text("not of the model")
    assert fingerprint(model=folder) == original

    weights.write_bytes(b"12345")
    resized = fingerprint(model=folder)
    os.utime(weights, ns=(0, 1))
    touched = fingerprint(model=folder)
    (tmp_path / "config.json").write_text("{}")
    configured = fingerprint(model=folder)
    assert len({original, resized, touched, configured, fingerprint(model=str(weights))}) == 5


@pytest.mark.parametrize(
    "flags",
    [
        ["--api-key", "one", "two"],
        ["--api-key=one"],
        ["--api_key", "one"],
        ["--api-k=one"],
    ],
)
def test_hosts_get_all_flags_but_keys(flags: list[str]) -> None:
    assert drop_api_keys(["--seed", "1", *flags, "--port", "8000"]) == ["--seed", "1", "--port", "8000"]


def test_the_model_after_a_key_is_kept() -> None:
    assert drop_api_keys(["--api-key=one", "org/name", "--api-server-count", "1"]) == [
        "org/name",
        "--api-server-count",
        "1",
    ]


@pytest.mark.anyio
async def test_an_engine_that_starts_again_gets_drafts_and_pause_as_they_are_when_it_is_ready() -> None:
    calls: list[tuple[Any, ...]] = []

    async def call(*arguments: Any, engine: bytes) -> None:
        assert engine == b"one"
        calls.append(arguments)
        if len(calls) == 1:
            # A change while the engine is brought to the state of the others.
            llm.is_drafting = False

    async def load(engine: bytes) -> None:
        assert engine == b"one"

    core = SimpleNamespace(_call_utility_async=call)
    llm: Any = SimpleNamespace(
        engine_core=core,
        weight_version=0,
        is_pause_wanted=False,
        is_drafting=True,
        written_by_trainer=False,
        updates=None,
    )
    model: Any = SimpleNamespace(state=(), bring_to_state=load)
    await bring_to_state(llm, model, SimpleNamespace(name=b"one"))  # type: ignore[arg-type]
    assert calls == [
        ("collective_rpc", "darts_speculate", None, (True,), None),
        ("resume_scheduler",),
        ("collective_rpc", "darts_speculate", None, (False,), None),
        ("resume_scheduler",),
    ]
