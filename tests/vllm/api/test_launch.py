import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from darts_server.vllm.api.launch import fingerprint_of

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
def test_it_differs_with_everything_that_tokens_depend_on(changed: dict[str, Any]) -> None:
    assert fingerprint() == fingerprint()
    assert fingerprint(**changed) != fingerprint()


def test_it_differs_when_the_weights_in_a_folder_were_replaced(tmp_path: Path) -> None:
    weights, readme = tmp_path / "model.safetensors", tmp_path / "README.md"
    weights.write_bytes(b"1234")
    seen = [fingerprint(model=str(tmp_path))]
    readme.write_text("not of the model")
    assert fingerprint(model=str(tmp_path)) == seen[0]
    weights.write_bytes(b"12345")
    seen.append(fingerprint(model=str(tmp_path)))
    os.utime(weights, ns=(0, 1))
    seen.append(fingerprint(model=str(tmp_path)))
    (tmp_path / "config.json").write_text("{}")
    seen.append(fingerprint(model=str(tmp_path)))
    assert len({*seen}) == 4
    assert fingerprint(model=str(weights)) not in seen
