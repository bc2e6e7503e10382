"""A fake vLLM that has only the recorded names, with their parameters."""

import argparse
import builtins
import sys
from abc import ABC
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Modules that import vLLM, and are imported again with the fake.
FRESH = ("vllm", "darts_server.vllm", "examples.tiny_rl.engine")
BASES = vars(builtins) | {"ABC": ABC, "ArgumentParser": argparse.ArgumentParser, "Enum": Enum}


class Unknown:
    """Stands in for a value or type of which only the name is recorded."""


class Fake(MetaPathFinder, Loader):
    """Finds and loads fake modules. ``calls``: names of the functions that were called."""

    def __init__(self, recorded: Mapping[str, str]) -> None:
        self._recorded = recorded
        self.calls: list[str] = []
        recordings = [text[3:] for text in recorded.values()]
        homes = [name.partition(":")[0] for name in (*recorded, *recordings)]
        self._modules = {".".join(home.split(".")[:i]) for home in homes for i in range(1, home.count(".") + 2)}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname in self._modules else None

    def exec_module(self, module: ModuleType) -> None:
        for name in self._recorded:
            home, _, path = name.partition(":")
            if home == module.__name__ and path and "[" not in path:
                self._make(module, path.partition(".")[0])

    def get(self, name: str) -> Any:
        """Return the fake of ``name``, a ``module:object`` or ``module:Class.attribute``."""
        module, _, path = name.partition(":")
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        return found

    def _make(self, module: ModuleType, name: str) -> None:
        if hasattr(module, name):
            return
        recorded_as = self._recorded.get(f"{module.__name__}:{name}", "class()")
        if recorded_as.startswith("is "):
            home, _, original = recorded_as.removeprefix("is ").partition(":")
            self._make(import_module(home), original)
            setattr(module, name, getattr(sys.modules[home], original))
        elif recorded_as.startswith("class("):
            setattr(module, name, self._class(module.__name__, name, recorded_as))
        else:
            setattr(module, name, self._value(module.__name__, name, recorded_as))

    def _class(self, home: str, name: str, recorded_as: str) -> type:
        known = [self._base(b) for b in recorded_as[len("class(") : recorded_as.index(")")].split(", ")]
        bases = tuple(base for base in known if base is not object)
        prefix = f"{home}:{name}."
        inside = {n.removeprefix(prefix): s for n, s in self._recorded.items() if n.startswith(prefix)}
        if Enum in bases:
            return Enum(name, {inner: inner for inner in inside}, module=home)  # type: ignore[return-value]  # it returns a class
        made = {inner: self._value(home, f"{name}.{inner}", s) for inner, s in inside.items()}
        options = classmethod(lambda cls, **_: None)  # of msgspec's
        return type(name, bases, made | {"__module__": home, "__init_subclass__": options})

    def _base(self, name: str) -> Any:
        if name in BASES:
            return BASES[name]
        home = next((full.partition(":")[0] for full in self._recorded if full.endswith(f":{name}")), None)
        if home is None:
            return object
        self._make(import_module(home), name)  # it may come later in the same module
        return getattr(sys.modules[home], name)

    def _value(self, home: str, path: str, recorded_as: str) -> Any:
        """Functions return their first argument."""
        kind, _, parameters = recorded_as.removesuffix(")").partition("def (")
        if "def (" not in recorded_as:
            return property(lambda _: None) if recorded_as == "property" else Unknown
        names = [p.removesuffix("=") for p in parameters.split(", ")]
        scope: dict[str, Any] = {"calls": self.calls}
        exec(
            f"{kind}def made({parameters.replace('=', '=None')}):\n"
            f"    calls.append({f'{home}:{path}'!r})\n"
            f"    return {names[0].lstrip('*') or None}",
            scope,
        )
        made = scope["made"]
        made.__module__, made.__qualname__ = home, path
        return made


@contextmanager
def in_place_of_vllm(recorded: Mapping[str, str]) -> Iterator[Fake]:
    """Replace vLLM by the fake until the block ends, for modules that import it."""
    fake = Fake(recorded)
    kept = {name: module for name, module in sys.modules.items() if _is_fresh(name)}
    for name in kept:
        del sys.modules[name]
    sys.meta_path.insert(0, fake)
    try:
        yield fake
    finally:
        sys.meta_path.remove(fake)
        for name in [name for name in sys.modules if _is_fresh(name)]:
            del sys.modules[name]
        sys.modules.update(kept)
        for name in FRESH:
            _set_on_parent(name, kept.get(name))


def _is_fresh(name: str) -> bool:
    return any(name == fresh or name.startswith(f"{fresh}.") for fresh in FRESH)


def _set_on_parent(name: str, module: ModuleType | None) -> None:
    """Set or delete the attribute that an import sets on the parent module."""
    parent, _, child = name.rpartition(".")
    if parent not in sys.modules:
        return
    if module is not None:
        setattr(sys.modules[parent], child, module)
    elif hasattr(sys.modules[parent], child):
        delattr(sys.modules[parent], child)
