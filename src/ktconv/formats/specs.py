"""The names of each format in every dialect: one row each, from which the tables of rooms derive.

A row is a kind of numbers with the weights that share a scale. The same numbers are stored in
different tensors: packed for kernels (`kernel`), as quantize-cpu writes checkpoints (`cpu`), as
compressed-tensors has them (`scheme`), as KTransformers loads them (`kt`). `dialects` looks names
up, with those of other programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

CHANNEL = -1  # a group: one scale per row
USUAL_GROUP = 128
Dialect = Literal["kernel", "quantize-cpu", "quantize-gpu"]


@dataclass(frozen=True)
class FormatSpec:
    """One format of numbers, by its names; an empty name: the dialect does not have it."""

    kind: str  # of numbers: int4, int8, fp8, mxfp4, mxfp8, nvfp4, bf16
    bits: int
    group: int  # columns that share a scale; 0: other scales, or none
    kernel: str = ""  # of --method of bench and plan, and keys of formats.FORMATS
    cpu: str = ""  # of --method of quantize-cpu
    scheme: str = ""  # of --scheme of quantize-gpu, with --group-size `group` where it has several
    kt: tuple[str, ...] = ()  # of --kt-method: methods whose weights have these numbers
    block: int = 1  # rows that share a scale

    @property
    def is_int(self) -> bool:
        return self.kind.startswith("int")

    def name_in(self, dialect: Dialect) -> str:
        """The name of this format in a dialect; empty if the dialect has none."""
        named = {"kernel": self.kernel, "quantize-cpu": self.cpu, "quantize-gpu": self.scheme}
        return named[dialect]


def _groups(kind: str, cpu: Mapping[int, str], *kt: str) -> Iterator[FormatSpec]:
    """Integers in groups, as kernels have them: with scales in bf16, and in float32 into which they
    pack those in fp16."""
    bits, scheme = int(kind[3:]), f"W{kind[3:]}A16"
    for group in (32, 64, 128):
        yield FormatSpec(kind, bits, group, f"g{kind}-{group}", cpu.get(group, ""), scheme, kt)
    for group in (32, 64, 128):
        yield FormatSpec(kind, bits, group, f"g{kind}-{group}-f32", kt=kt)


SPECS = (
    FormatSpec("int4", 4, CHANNEL, "int4", "int4", "W4A16", ("AMXINT4",)),
    FormatSpec("int8", 8, CHANNEL, "int8", "int8", "W8A16", ("AMXINT8",)),
    *_groups("int4", {32: "rawint4", 64: "int4-g64", 128: "int4-g128"}, "RAWINT4", "GPTQ_INT4"),
    *_groups("int8", {128: "int8-g128"}),
    FormatSpec("fp8", 8, 128, "fp8", "fp8", "FP8_BLOCK", ("FP8",), block=128),
    FormatSpec("fp8", 8, CHANNEL, "fp8-channel", "fp8-channel", "FP8_DYNAMIC", ("FP8_PERCHANNEL",)),
    FormatSpec("mxfp4", 4, 32, "mxfp4", "mxfp4", "MXFP4A16", ("MXFP4",)),
    FormatSpec("mxfp8", 8, 32, cpu="mxfp8", kt=("MXFP8",)),
    FormatSpec("nvfp4", 4, 16, "nvfp4", "nvfp4", "NVFP4A16", ("NVFP4",)),
    # Other tensors for the numbers of gint4-128.
    FormatSpec("int4", 4, 128, cpu="gptq-int4", kt=("GPTQ_INT4",)),
    FormatSpec("int4", 4, 128, cpu="awq"),
    FormatSpec("bf16", 16, 0, "bf16", "bf16", kt=("BF16",)),
)


def kernel_of(kind: str, group: int) -> str | None:
    """The key of the kernels' format that has exactly these numbers, with scales in bf16 where it
    has a choice; None where there is none."""
    found = (one.kernel for one in SPECS if (one.kind, one.group) == (kind, group))
    return next(filter(None, found), None)


def spec_of(name: str, dialect: Dialect) -> FormatSpec:
    """The row that a dialect calls so; the usual groups of 128 where several are."""
    found = [one for one in SPECS if one.name_in(dialect) == name]
    return next((one for one in found if one.group == USUAL_GROUP), found[0])


def names_in(dialect: Dialect) -> tuple[str, ...]:
    """The names that a dialect has, each once."""
    return tuple(dict.fromkeys(name for one in SPECS if (name := one.name_in(dialect))))


def kernels_of_kt() -> dict[str, tuple[str, ...]]:
    """KTransformers' methods, and the kernels' formats that their weights may have; the first is
    the one that weights from tensors get."""
    found: dict[str, tuple[str, ...]] = {}
    for one in SPECS:
        for name in one.kt if one.kernel else ():
            found[name] = (*found.get(name, ()), one.kernel)
    return found
