import json
import os
from argparse import Namespace
from importlib import import_module

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from darts_server.exceptions import InvalidSetting
from darts_server.offline.demo.server import MODEL
from darts_server.vllm import flags
from darts_server.vllm.checks import check_devices
from darts_server.vllm.compat import import_cli_args
from darts_server.vllm.engine_core import worker
from darts_server.vllm.engine_core.plugin import COUPLED, SERVER_PID, SHARE_CORES
from darts_server.vllm.flags import (
    DRAFTER,
    MODEL_RUNNER,
    NO_COMPILATION,
    NO_COMPILER,
    PLUGINS,
    add_sampling_flags,
    can_compile,
    complete_args,
    parse,
    worker_extension_name,
)


class Users:
    """A user's own extension."""

    def users_own(self) -> str:
        return "here"


def arguments() -> Namespace:
    return Namespace(
        worker_extension_cls="",
        enable_chunked_prefill=None,
        max_num_batched_tokens=None,
        enforce_eager=False,
        additional_config={},
    )


def resolved(name: str) -> type:
    """Resolve a name as vLLM's worker does."""
    module, _, attribute = name.rpartition(".")
    assert module == worker.__name__
    found = getattr(worker, attribute)
    assert isinstance(found, type)
    return found


def test_the_worker_extension_combines_our_class_with_the_users() -> None:
    assert resolved(worker_extension_name(None)) is resolved(worker_extension_name("")) is worker.WorkerExtension
    both = resolved(worker_extension_name(f"{__name__}.Users"))
    assert issubclass(both, Users)
    assert issubclass(both, worker.WorkerExtension)
    assert resolved(worker_extension_name(f"{__name__}.Users")) is both
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
    complete_args(arguments())
    assert os.environ.get(PLUGINS) == loaded
    assert os.environ[SERVER_PID] == str(os.getpid())


def test_without_our_plugin_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "OUR_PLUGIN", "not-installed")
    with pytest.raises(InvalidSetting, match="pip install it"):
        complete_args(arguments())


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
    complete_args(args)
    assert args.enforce_eager is not compiles
    assert os.environ.get(NO_COMPILATION) == (None if compiles else "1")
    assert (NO_COMPILER in caplog.text) is not compiles
    assert (NO_COMPILER in check_devices()[0]) is not compiles
    assert not (compiler == "no-such-compiler" and compiles)


def test_speculate_adds_our_drafter_to_vllms_flags() -> None:
    assert add_sampling_flags(["some/model"], speculate=False, couple=False) == ["some/model"]
    *model, flag, config = add_sampling_flags(["some/model"], speculate=True, couple=False)
    assert (model, flag) == (["some/model"], "--speculative-config")
    module, _, name = json.loads(config)["model"].rpartition(".")
    assert hasattr(import_module(module), name)


@pytest.mark.parametrize(
    "flags", [["--speculative-config", "{}"], ["--speculative_config={}"], ["--spec-method=ngram"]]
)
def test_our_flags_and_a_drafter_of_vllm_exclude_each_other(flags: list[str]) -> None:
    with pytest.raises(InvalidSetting, match="--speculate auto has a drafter of its own"):
        add_sampling_flags(["some/model", *flags], speculate=True, couple=True)
    with pytest.raises(InvalidSetting, match="--sampling coupled verifies no drafts of vLLM's own methods"):
        add_sampling_flags(["some/model", *flags], speculate=False, couple=True)


def test_coupled_sampling_reaches_the_workers_beside_the_users_own_configuration() -> None:
    argv = add_sampling_flags(["some/model", "--additional-config.own", "3"], speculate=True, couple=True)
    args = import_cli_args().make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    assert args.additional_config == {"own": 3, COUPLED: True}
    with pytest.raises(InvalidSetting, match=r"--additional-config\.KEY VALUE"):
        add_sampling_flags(["some/model", "--additional_config={}"], speculate=False, couple=True)


@pytest.mark.parametrize("runner", [None, "0", "1"])
def test_coupled_sampling_needs_the_first_model_runner(runner: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    # The plug-in of the package is found, and the environment is restored.
    for name in (MODEL_RUNNER, SERVER_PID, SHARE_CORES, NO_COMPILATION):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    if runner is not None:
        monkeypatch.setenv(MODEL_RUNNER, runner)
    args = arguments()
    complete_args(args)
    assert os.environ.get(MODEL_RUNNER) == runner
    args.additional_config = {COUPLED: True}
    if runner == "1":
        with pytest.raises(InvalidSetting, match=f"unset {MODEL_RUNNER}"):
            complete_args(args)
    else:
        complete_args(args)
        assert os.environ[MODEL_RUNNER] == "0"


def test_vllm_names_our_drafter_in_its_configuration() -> None:
    """`VllmEngine.drafts_from_siblings` reads it there."""
    args = parse(add_sampling_flags([str(MODEL)], speculate=True, couple=False))
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config().speculative_config
    assert config is not None
    assert config.model == DRAFTER
