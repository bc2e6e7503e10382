"""What is wired before the engine starts."""

import os
from argparse import Namespace

import pytest

from darts_server import app
from darts_server.settings import load


def test_keys_are_taken_from_the_environment_so_that_the_engine_does_not_inherit_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, key in {"VLLM_API_KEY": "one", "DARTS_ADMIN_API_KEY": "root"}.items():
        monkeypatch.setenv(name, key)
    access = app._access(load({}, None), Namespace(api_key=None, host="127.0.0.1", allowed_origins=[]))
    assert access.keys.find(b"one")
    assert access.admin_keys.find(b"root")
    assert not {"one", "root"} & set(os.environ.values())
