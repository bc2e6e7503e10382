"""The only file that imports TRL's internals: its errors, and both layouts of TRL, with stand-ins."""

import ast
import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from darts_client.integrations import _trl_names as names
from darts_client.integrations.trl import WeightTransfer

pytestmark = pytest.mark.filterwarnings("default")
ROOT = Path(__file__).parents[2]
OWN = {
    # The example extends the loop of TRL's asynchronous trainer, for which TRL has no public way.
    "trl": {"clients/darts_client/integrations/_trl_names.py", "examples/trl_sessions.py"},
    "verl": {"clients/darts_client/verl", "tests/trainers/verl"},
    "openrlhf": {"clients/darts_client/integrations/openrlhf.py", "tests/trainers/programs/openrlhf.py"},
    "areal": {"tests/trainers/programs/areal.py", "tests/trainers/areal/"},
    "nemo_gym": {"tests/trainers/programs/nemo_gym.py"},
    "responses_api_models": {"tests/trainers/programs/nemo_gym.py"},
    "skyrl": {"tests/trainers/programs/skyrl.py", "tests/trainers/harnesses/skyrl", "examples/skyrl_sessions.py"},
    "swift": {"tests/trainers/ms_swift/"},
    "verifiers": {"tests/trainers/programs/verifiers.py", "tests/trainers/harnesses/verifiers"},
}
"""The files and folders that may import the internals of each trainer."""
ERROR = r"darts-client works with TRL 1\.16 to 1\.18, and TRL [\d.]+ is installed"
LAYOUTS = {
    "1.16": ("trl.experimental.async_grpo.async_rollout_worker", "_AsyncRolloutLoop"),
    "1.18": ("trl.trainer.async_grpo_trainer", "AsyncRolloutLoop"),
}


def modules_imported(path: Path) -> set[str]:
    """Return the modules that a file imports, also within functions."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            imported.add(node.module)
    return imported


def test_only_its_own_files_import_the_internals_of_a_trainer() -> None:
    folders = ("benchmarks", "clients/darts_client", "darts_server", "examples", "faults", "tests")
    importers: dict[str, set[str]] = {trainer: set() for trainer in OWN}
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for module in modules_imported(path):
            trainer, _, internal = module.partition(".")
            if trainer in OWN and internal:
                importers[trainer].add(str(path.relative_to(ROOT)))
    for trainer, paths in importers.items():
        assert paths, f"nothing imports {trainer}"
        assert {path for path in paths if not path.startswith(tuple(OWN[trainer]))} == set()


def load_names() -> ModuleType:
    """Run the file of names once more, as a module of its own."""
    spec = importlib.util.spec_from_file_location("names_again", names.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_rollout_loop_is_found_in_each_layout_of_trl(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other, (module, name) in LAYOUTS.items():
        stand_in: Any = None
        if other == layout:
            stand_in = ModuleType(module)
            setattr(stand_in, name, f"the loop of {layout}")
        # None lets the import fail, as if TRL had no such module.
        monkeypatch.setitem(sys.modules, module, stand_in)
    assert names.find_object(*names.ROLLOUT_LOOP) == f"the loop of {layout}"


def test_a_name_that_is_nowhere_is_an_error_that_names_the_supported_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module, _ in LAYOUTS.values():
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    with pytest.raises(ImportError, match=r"no trl\.trainer.*AsyncRolloutLoop or trl\.experimental.*" + ERROR):
        names.find_object(*names.ROLLOUT_LOOP)


def test_a_package_that_trl_needs_is_named_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "needed", None)
    with pytest.raises(ModuleNotFoundError, match=r"import of needed halted") as caught:
        names.find_object("needed:name")
    assert caught.value.name == "needed"


@pytest.mark.parametrize("module", ["trl.trainer.utils", "trl.generation.vllm_client"])
def test_a_trl_without_a_name_is_an_error_that_names_the_supported_versions(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stand_in in (None, ModuleType(module)):
        monkeypatch.setitem(sys.modules, module, stand_in)
        with pytest.raises(ImportError, match=module + ".*" + ERROR):
            load_names()


class NoTrl:
    """A finder of modules for a Python without TRL."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "trl":
            raise ModuleNotFoundError("No module named 'trl'", name=name)


def test_without_trl_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "trl"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [NoTrl(), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match=r"this needs darts-client\[trl\]"):
        load_names()


def test_a_method_that_we_replace_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(names.GRPOTrainer, "_calculate_rewards")
    with pytest.raises(ImportError, match="GRPOTrainer has no _calculate_rewards: " + ERROR):
        load_names()


def test_a_version_that_was_not_run_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load_names()
        assert caplog.messages == []
        monkeypatch.setattr("importlib.metadata.version", lambda _: "1.18.0")
        load_names()
    assert caplog.messages == ["TRL 1.18.0 was not run with darts-client; TRL 1.16 was"]


class OwnTransfer:
    """The transfer that TRL's asynchronous trainer makes for itself."""

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Any) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


class OtherTransfer(OwnTransfer):
    def send_adapter(self) -> None: ...


def make_trainer(transfer: Any, is_main: bool = True) -> Any:
    return SimpleNamespace(accelerator=SimpleNamespace(is_main_process=is_main), weight_transfer=transfer)


def test_a_transfer_replaces_the_trainers_own() -> None:
    transfer = WeightTransfer("http://localhost")
    trainer = make_trainer(OwnTransfer())
    transfer.attach(trainer)
    assert trainer.weight_transfer is transfer


def test_only_the_main_process_has_a_transfer() -> None:
    trainer = make_trainer(None, is_main=False)
    WeightTransfer("http://localhost").attach(trainer)
    assert trainer.weight_transfer is None


@pytest.mark.parametrize("own", [None, OtherTransfer()])
def test_a_trainer_that_sends_weights_in_another_way_is_an_error(own: Any) -> None:
    with pytest.raises(ImportError, match="weight_transfer has the methods .*" + ERROR):
        WeightTransfer("http://localhost").attach(make_trainer(own))
