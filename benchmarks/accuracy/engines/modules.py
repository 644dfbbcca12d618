"""Modules of serving engines, imported from their sources without what else these import.

A file with Triton kernels imports half of its engine: CUDA extensions, servers, other kernels. Here
every module of the engine that is not asked for has stand-ins for all of its names, which are
false, empty, and return themselves when they are called.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class StandIn:
    """Any function, class, setting or logger that is asked nothing in earnest."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getitem__(self, _: Any) -> Any:
        return self

    def __or__(self, _: Any) -> Any:
        return self

    __ror__ = __or__

    def __mro_entries__(self, _: tuple[Any, ...]) -> tuple[type, ...]:
        return ()


@contextmanager
def engine_modules(
    sources: Path, roots: Sequence[str], wanted: Sequence[str], given: Mapping[str, Any]
) -> Iterator[dict[str, ModuleType]]:
    """The modules `wanted` by name, from files below `sources`; all others of the packages `roots`
    are stand-ins, but for names in `given`, as "package.module.name". None of them remains in
    `sys.modules` afterwards."""
    finder = _Finder(sources, roots, wanted, given)
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if finder.has(name)}
    sys.meta_path.insert(0, finder)
    try:
        yield {name: importlib.import_module(name) for name in wanted}
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if finder.has(name)]:
            del sys.modules[name]
        sys.modules.update(before)


class _Finder:
    def __init__(
        self, sources: Path, roots: Sequence[str], wanted: Sequence[str], given: Mapping[str, Any]
    ) -> None:
        self._sources, self._roots, self._wanted = sources, set(roots), set(wanted)
        self._given = given

    def has(self, name: str) -> bool:
        return name.partition(".")[0] in self._roots

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not self.has(name):
            return None
        if name in self._wanted:
            file = self._sources.joinpath(*name.split(".")).with_suffix(".py")
            if not file.is_file():
                raise SystemExit(f"{file} does not exist; give the folder of another version")
            return importlib.util.spec_from_file_location(name, file)
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def find(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return self._given.get(f"{module.__name__}.{name}", STAND_IN)

        module.__getattr__ = find  # type: ignore[method-assign]


STAND_IN = StandIn()
