"""How the C library is compiled."""

from __future__ import annotations

import runpy
import shlex
import sysconfig
from pathlib import Path

import pytest
from mutation.run import COMPILE
from native.kernels.product import FLAGS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The flags of the extension module: Python's, then ours; the last of a kind counts."""
    monkeypatch.chdir(ROOT)  # where build_ffi.py finds its files
    settings = runpy.run_path("native/build_ffi.py")
    ours = settings["ffi"]._assigned_source[3]["extra_compile_args"]
    return [*shlex.split(sysconfig.get_config_var("CFLAGS") or ""), *ours]


def test_sums_of_integers_may_be_taken_not_to_wrap_round(extension: list[str]) -> None:
    last = [flag for flag in extension if flag in ("-fwrapv", "-fno-wrapv")][-1]
    assert last == "-fno-wrapv"


def test_products_are_tested_as_they_are_compiled_for_users(extension: list[str]) -> None:
    assert set(FLAGS) - {"-fPIC"} <= set(extension)


def test_mutants_are_compiled_as_users_compile(extension: list[str]) -> None:
    """But faster, and without debug code."""
    assert set(COMPILE) - {"-O1", "-w", "-fPIC", "-DNDEBUG"} <= set(extension)
