"""The levels of kernels: which this machine has, and which one is in use."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ktconv._native import ffi, lib
from ktconv.errors import UsageError
from ktconv.native.arrays import check, words


def _isa_names() -> Iterator[tuple[int, str]]:
    index = 0
    while (level := int(lib.kt_isa_at(index))) >= 0:
        yield level, ffi.string(lib.kt_isa_name(level)).decode()
        index += 1


ISA_NAMES = dict(_isa_names())  # the levels of this architecture, lowest first


def isa() -> str:
    """The level in use. Raises UsageError when KTCONV_ISA cannot be used."""
    level = lib.kt_isa_active()
    if level == -lib.KT_ERR_ASSUME_UNKNOWN:
        value = os.environ.get("KTCONV_ASSUME")
        raise UsageError(f"KTCONV_ASSUME={value} names no level", "unset it, or write amx")
    if level < 0:
        names = ", ".join(ISA_NAMES.values())
        unknown = level == -lib.KT_ERR_ISA_UNKNOWN
        why = f"a level is one of {names}" if unknown else words(-level)
        raise UsageError(
            f"KTCONV_ISA={os.environ.get('KTCONV_ISA')} cannot be used: {why}",
            f"unset it, or choose one of: {', '.join(isa_available())}",
        )
    return ISA_NAMES[level]


def isa_available() -> list[str]:
    """The levels that this machine can run, lowest first."""
    return [name for level, name in ISA_NAMES.items() if lib.kt_isa_has(level)]


def use_isa(name: str) -> None:
    """Use this level, or part of one, from now on. Not while other threads compute."""
    check(lib.kt_isa_use_named(name.encode()))


def cpu_features() -> dict[str, bool]:
    """Features that CPU and OS report, by the names of struct kt_cpu."""
    cpu = ffi.new("kt_cpu *")
    lib.kt_cpu_detect(cpu)
    return {name: bool(getattr(cpu, name)) for name, _ in ffi.typeof("kt_cpu").fields}
