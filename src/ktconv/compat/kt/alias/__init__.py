"""The alias `kt_kernel`: a directory on the module path whose `kt_kernel` is ktconv.

Child processes inherit it through PYTHONPATH, however they are started, unless they run with
`python -E` or `-I`, which ignore the environment.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from ktconv import __version__
from ktconv.errors import UsageError

DIRECTORY = Path(__file__).resolve().parent
NAMES = ("kt_kernel", "kt_kernel_ext")
_ANNOUNCED = "KTCONV_KT_ALIAS"  # in the environment: which directory was announced


def install() -> None:
    """Makes `import kt_kernel` and `import kt_kernel_ext` mean ktconv in this process and in those
    that it starts, and says so once on the standard error. UsageError where another kt_kernel is
    imported already."""
    for name in NAMES:
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None) or ""
        if module is not None and DIRECTORY not in Path(file).parents:
            raise UsageError(
                f"{name} is imported already, from {file or 'somewhere else'}",
                "call ktconv.compat.kt.install() before the program imports it",
            )
    if str(DIRECTORY) not in sys.path:
        sys.path.insert(0, str(DIRECTORY))
        importlib.invalidate_caches()
    prepare(os.environ)


def prepare(environment: os._Environ[str] | dict[str, str]) -> None:
    """Puts the directory first on the module path of processes with this environment, and says so
    unless one of their parents has."""
    others = [one for one in environment.get("PYTHONPATH", "").split(os.pathsep) if one]
    own = str(DIRECTORY)
    environment["PYTHONPATH"] = os.pathsep.join([own, *(one for one in others if one != own)])
    if environment.get(_ANNOUNCED) != own:
        environment[_ANNOUNCED] = own
        print(
            f"ktconv {__version__}: import kt_kernel means ktconv, in child processes too",
            file=sys.stderr,
            flush=True,
        )
