"""`ktconv.plan` for loaders: what it offers, and how little it needs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module


def test_loaders_need_numpy_only() -> None:
    """Neither the C library nor any other dependency, and no reader of checkpoints."""
    code = """
import sys
for name in ("torch", "transformers", "safetensors", "click", "ktconv._native"):
    sys.modules[name] = None  # importing it raises ImportError
from ktconv.plan import expert_map, tp_slice
assert expert_map(8, 2, 1).tolist() == [-1] * 4 + [0, 1, 2, 3]
assert tp_slice((4, 2), "w1", 2, 1).source[0] == slice(2, 4)
assert not [name for name in sys.modules if name.startswith(("ktconv.source", "ktconv.native"))]
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_everything_public_is_described() -> None:
    page = import_module("ktconv.plan")  # a function to mypy, and a module
    for name in page.__all__:
        assert inspect.getdoc(getattr(page, name)), name
