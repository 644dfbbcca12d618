"""The levels of kernels: which this machine has, and which one is in use."""

from __future__ import annotations

import os

from ktconv._native import ffi, lib
from ktconv.errors import UsageError
from ktconv.native.arrays import check, words

ISA_NAMES = {lib.KT_ISA_SCALAR: "scalar", lib.KT_ISA_AVX512: "avx512", lib.KT_ISA_AMX: "amx"}


def isa() -> str:
    """The level in use. Raises UsageError when KTCONV_ISA cannot be used."""
    level = lib.kt_isa_active()
    if level == -lib.KT_ERR_ASSUME_UNKNOWN:
        value = os.environ.get("KTCONV_ASSUME")
        raise UsageError(f"KTCONV_ASSUME={value} names no level", "unset it, or write amx")
    if level < 0:
        raise UsageError(
            f"KTCONV_ISA={os.environ.get('KTCONV_ISA')} cannot be used: {words(-level)}",
            f"unset it, or choose one of: {', '.join(isa_available())}",
        )
    return ISA_NAMES[level]


def isa_available() -> list[str]:
    """The levels that this machine can run, lowest first."""
    return [name for level, name in ISA_NAMES.items() if level <= lib.kt_isa_available()]


def use_isa(name: str) -> None:
    """Use this level from now on. Not while other threads compute."""
    levels = {name: level for level, name in ISA_NAMES.items()}
    check(lib.kt_isa_use(levels[name]))


def cpu_features() -> dict[str, bool]:
    """What CPU and OS report, by the names of struct kt_cpu."""
    cpu = ffi.new("kt_cpu *")
    lib.kt_cpu_detect(cpu)
    return {name: bool(getattr(cpu, name)) for name, _ in ffi.typeof("kt_cpu").fields}
