"""ktconv: Mixture-of-Experts checkpoints into CPU expert weights, provably right.

    ktconv.quantize_cpu("MODEL", "OUTPUT", method="int4", numa=2)
    ktconv.verify("OUTPUT", source="MODEL")["passed"]

The commands as functions; `ktconv.cli.library` has them with their arguments. Importing ktconv
imports nothing but the errors: a function is loaded when it is first named.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from ktconv.errors import KtconvError

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ktconv.cli.library import (
        bench,
        compare,
        doctor,
        generate,
        inspect,
        load_layer,
        merge,
        plan,
        prune,
        push,
        quantize_cpu,
        quantize_gpu,
        reshard,
        stats,
        verify,
    )

__all__ = [
    "KtconvError",
    "bench",
    "compare",
    "doctor",
    "generate",
    "inspect",
    "load_layer",
    "merge",
    "plan",
    "prune",
    "push",
    "quantize_cpu",
    "quantize_gpu",
    "reshard",
    "stats",
    "verify",
]

# Functions whose name a module has, too. `import ktconv.verify`, by whomever, replaces what
# `ktconv.verify` was with the module. So the module itself can be called, and is what the name
# always means: `ktconv.verify("OUTPUT")` and `ktconv.verify.Request` work in whatever order.
_MODULES = {*__all__} - {"KtconvError", "compare", "doctor", "load_layer", "quantize_gpu"}


if not TYPE_CHECKING:  # else a type checker would believe that every name exists

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            from importlib import import_module

            return import_module(f"ktconv.{name}")
        return _function(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _function(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ktconv' has no attribute {name!r}")
    from ktconv.cli import library

    return getattr(library, name)


class _CallableModule(ModuleType):
    """A module that is the function of its name when it is called."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return _function(self.__name__.rpartition(".")[2])(*arguments, **options)

    def __reduce__(self) -> Any:  # a pool of processes gets functions as pickles
        from importlib import import_module

        return import_module, (self.__name__,)

    @property
    def __signature__(self) -> Any:
        from inspect import signature

        return signature(_function(self.__name__.rpartition(".")[2]))


def callable_module(name: str) -> None:
    """Let the module of this name be called as the function of `__all__` that is named like it."""
    from sys import modules

    modules[name].__class__ = _CallableModule
