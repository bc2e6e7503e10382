import json
import os
from argparse import Namespace
from importlib import import_module

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from darts_server.exceptions import InvalidSetting
from darts_server.offline.demo.server import MODEL
from darts_server.vllm import flags
from darts_server.vllm.checks import check_devices
from darts_server.vllm.engine_core import worker
from darts_server.vllm.engine_core.plugin import SERVER_PID, SHARE_CORES
from darts_server.vllm.flags import (
    DRAFTER,
    NO_COMPILATION,
    NO_COMPILER,
    PLUGINS,
    can_compile,
    extension,
    parse,
    prepare,
    speculation_flags,
)


class Users:
    """A user's own extension."""

    def users_own(self) -> str:
        return "here"


def arguments() -> Namespace:
    return Namespace(
        worker_extension_cls="", enable_chunked_prefill=None, max_num_batched_tokens=None, enforce_eager=False
    )


def resolved(name: str) -> type:
    """Resolve a name as vLLM's worker does."""
    module, _, attribute = name.rpartition(".")
    assert module == worker.__name__
    found = getattr(worker, attribute)
    assert isinstance(found, type)
    return found


def test_the_worker_extension_combines_our_class_with_the_users() -> None:
    assert resolved(extension(None)) is resolved(extension("")) is worker.WorkerExtension
    both = resolved(extension(f"{__name__}.Users"))
    assert issubclass(both, Users)
    assert issubclass(both, worker.WorkerExtension)
    assert resolved(extension(f"{__name__}.Users")) is both
    with pytest.raises(AttributeError):
        resolved(f"{worker.__name__}.Other")


@pytest.mark.parametrize(("users", "loaded"), [(None, None), ("theirs", "theirs,darts_server"), ("", "darts_server")])
def test_our_plugin_is_loaded_beside_the_users_plugins(
    users: str | None, loaded: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After this, monkeypatch restores the variables.
    for name in (PLUGINS, NO_COMPILATION, SHARE_CORES, SERVER_PID):
        monkeypatch.setenv(name, "")
    if users is None:
        monkeypatch.delenv(PLUGINS)
    else:
        monkeypatch.setenv(PLUGINS, users)
    prepare(arguments())
    assert os.environ.get(PLUGINS) == loaded
    assert os.environ[SERVER_PID] == str(os.getpid())


def test_without_our_plugin_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "OUR_PLUGIN", "not-installed")
    with pytest.raises(InvalidSetting, match="pip install it"):
        prepare(arguments())


@pytest.mark.skipif(not current_platform.is_cpu(), reason="tests the CPU build")
@pytest.mark.parametrize("compiler", ["sh", "no-such-compiler"])
def test_without_a_compiler_compilation_is_disabled(
    compiler: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", compiler)
    # After this, monkeypatch restores the variables.
    for name in (NO_COMPILATION, SHARE_CORES, SERVER_PID):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    args = arguments()
    compiles = can_compile()
    prepare(args)
    assert args.enforce_eager is not compiles
    assert os.environ.get(NO_COMPILATION) == (None if compiles else "1")
    assert (NO_COMPILER in caplog.text) is not compiles
    assert (NO_COMPILER in check_devices()[0]) is not compiles
    assert not (compiler == "no-such-compiler" and compiles)


def test_speculate_adds_our_drafter_to_vllms_flags() -> None:
    assert speculation_flags(["some/model"], speculate=False) == ["some/model"]
    *model, flag, config = speculation_flags(["some/model"], speculate=True)
    assert (model, flag) == (["some/model"], "--speculative-config")
    module, _, name = json.loads(config)["model"].rpartition(".")
    assert hasattr(import_module(module), name)


@pytest.mark.parametrize(
    "flags", [["--speculative-config", "{}"], ["--speculative_config={}"], ["--spec-method=ngram"]]
)
def test_speculate_and_a_drafter_of_vllm_exclude_each_other(flags: list[str]) -> None:
    with pytest.raises(InvalidSetting, match="--speculate auto has a drafter of its own"):
        speculation_flags(["some/model", *flags], speculate=True)


def test_vllm_names_our_drafter_in_its_configuration() -> None:
    """`VllmEngine.drafts_from_siblings` reads it there."""
    args = parse(speculation_flags([str(MODEL)], speculate=True))
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config().speculative_config
    assert config is not None
    assert config.model == DRAFTER
