"""The names of each format in every dialect: one row each, from which the tables of rooms derive.

A row is a kind of numbers with the weights that share a scale. The same numbers are stored in
different tensors: packed for kernels (`kernel`), as quantize-cpu writes checkpoints (`cpu`), as
compressed-tensors has them (`scheme`), as KTransformers loads them (`kt`). `dialects` looks names
up, with those of other programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

CHANNEL = -1  # a group: one scale per row
USUAL_GROUP = 128
Dialect = Literal["kernel", "quantize-cpu", "quantize-gpu"]


class Stored(Struct, frozen=True):
    """The tensors and the config.json of a checkpoint in a format: names of what describes them in
    `ktconv.targets.encoded`, which formats do not import."""

    layout: str  # module:object, in `layouts`
    section: str = "compressed_tensors"  # in `sections`
    naming: str = "OWN"  # in `naming`: what modules are called
    groups: tuple[int, ...] = ()  # sizes to choose from, the default first; (): the format's own
    half: bool | None = None  # whether scales of integers are f16; None: as the weights are
    activations: str = ""  # compressed-tensors' input_activations: "token", "group" or "mx"


class FormatSpec(Struct, frozen=True):
    """One format of numbers, by its names; an empty name: the dialect does not have it."""

    kind: str  # of numbers: int4, int8, fp8, mxfp4, mxfp8, nvfp4, bf16
    bits: int
    group: int  # columns that share a scale; 0: other scales, or none
    kernel: str = ""  # of --method of bench and plan, and keys of formats.FORMATS
    cpu: str = ""  # of --method of quantize-cpu
    scheme: str = ""  # of --scheme of quantize-gpu, with --group-size `group` where it has several
    kt: tuple[str, ...] = ()  # of --kt-method: methods whose weights have these numbers
    block: int = 1  # rows that share a scale
    words: str = ""  # what quantize-cpu's method is, in one line
    others: tuple[str, ...] = ()  # names in other programs, beside those of KTransformers
    runs_as: str = ""  # the kernels' format with the same numbers, where `kernel` is empty
    number: str = ""  # the element of a source that its codes are, where they are no integers
    cpu_stored: Stored | None = None  # as quantize-cpu writes checkpoints; None: packed
    gpu_stored: Stored | None = None  # by quantize-gpu, in groups of the scheme's rows

    @property
    def is_int(self) -> bool:
        return self.kind.startswith("int")

    def name_in(self, dialect: Dialect) -> str:
        """The name of this format in a dialect; empty if the dialect has none."""
        named = {"kernel": self.kernel, "quantize-cpu": self.cpu, "quantize-gpu": self.scheme}
        return named[dialect]


_INTEGERS = "packed:PACK_QUANTIZED"


def _groups(kind: str, *rows: FormatSpec) -> Iterator[FormatSpec]:
    """Integers in groups, as kernels have them: with scales in bf16, for which `rows` have the
    names, and in float32 into which they pack those in fp16."""
    named = {row.group: row for row in rows}
    kt, bits, stored = rows[0].kt, int(kind[3:]), Stored(_INTEGERS)
    for group in (32, 64, 128):
        row = named.get(group, FormatSpec(kind, bits, group))
        kernel, scheme = f"g{kind}-{group}", f"W{bits}A16"
        yield replace(row, kernel=kernel, scheme=scheme, kt=kt, gpu_stored=stored)
    for group in (32, 64, 128):
        yield FormatSpec(kind, bits, group, f"g{kind}-{group}-f32", kt=kt)


def _named(
    kind: str, group: int, cpu: str, *others: str, kt: tuple[str, ...] = (), naming: str = "OWN"
) -> FormatSpec:
    bits, stored = kind[3:], Stored(_INTEGERS, naming=naming, half=False)
    return FormatSpec(
        kind, int(bits), group, cpu=cpu, kt=kt, words=f"INT{bits} in groups of {group}",
        others=others, cpu_stored=stored,
    )  # fmt: skip


SPECS = (
    FormatSpec("int4", 4, CHANNEL, "int4", "int4", "W4A16", ("AMXINT4",),
               words="INT4, a scale per row"),
    FormatSpec("int8", 8, CHANNEL, "int8", "int8", "W8A16", ("AMXINT8",),
               words="INT8, a scale per row"),
    *_groups(
        "int4",
        _named("int4", 32, "rawint4", "int4-g32", "gint4", "gint4-g32",
               kt=("RAWINT4", "GPTQ_INT4"), naming="MLP"),
        _named("int4", 64, "int4-g64", "gint4-g64"),
        _named("int4", 128, "int4-g128", "gint4-g128"),
    ),
    *_groups("int8", _named("int8", 128, "int8-g128", "gint8-g128")),
    FormatSpec("fp8", 8, 128, "fp8", "fp8", "FP8_BLOCK", ("FP8",), block=128,
               number="F8_E4M3", words="FP8 in blocks of 128 x 128",
               cpu_stored=Stored("plain:FP8_BLOCK", "fine_grained_fp8", "THREE"),
               gpu_stored=Stored("plain:FLOAT_QUANTIZED", activations="group")),
    FormatSpec("fp8", 8, CHANNEL, "fp8-channel", "fp8-channel", "FP8_DYNAMIC", ("FP8_PERCHANNEL",),
               number="F8_E4M3", words="FP8, a scale per row",
               cpu_stored=Stored("plain:FLOAT_QUANTIZED", naming="THREE", activations="token"),
               gpu_stored=Stored("plain:FLOAT_QUANTIZED", activations="token")),
    FormatSpec("mxfp4", 4, 32, "mxfp4", "mxfp4", "MXFP4A16", ("MXFP4",),
               number="F4_E2M1", words="FP4 in groups of 32",
               cpu_stored=Stored("plain:MXFP4_V4", "deepseek_v4", "V4"),
               gpu_stored=Stored("plain:MXFP4_PACK_QUANTIZED")),
    FormatSpec("mxfp8", 8, 32, "mxfp8", "mxfp8", "MXFP8", ("MXFP8",),
               number="F8_E4M3", words="FP8 in groups of 32",
               cpu_stored=Stored("plain:MXFP8_M3", "mxfp8", "M3"),
               gpu_stored=Stored("plain:MXFP8_QUANTIZED", activations="mx")),
    FormatSpec("nvfp4", 4, 16, "nvfp4", "nvfp4", "NVFP4A16", ("NVFP4",),
               number="F4_E2M1", words="FP4 in groups of 16",
               cpu_stored=Stored("plain:NVFP4_MODELOPT", "modelopt_nvfp4", "MLP"),
               gpu_stored=Stored("plain:NVFP4_PACK_QUANTIZED")),
    # Other tensors for the numbers of gint4-128.
    FormatSpec("int4", 4, 128, cpu="gptq-int4", kt=("GPTQ_INT4",), runs_as="gint4-128",
               words="INT4 in groups of 128, in GPTQ's files",
               cpu_stored=Stored("words:GPTQ", "gptq", "THREE", half=True)),
    FormatSpec("int4", 4, 128, cpu="awq", words="INT4 in groups of 128, in AWQ's files",
               cpu_stored=Stored("words:AWQ", "no_section", "BLK", (128, 32, 64), half=True)),
    FormatSpec("bf16", 16, 0, "bf16", "bf16", kt=("BF16",), number="BF16",
               words="not quantized", cpu_stored=Stored("plain:BF16", "no_section", "THREE")),
)  # fmt: skip


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


def names_of_kt() -> tuple[str, ...]:
    """KTransformers' methods, each once."""
    return tuple(dict.fromkeys(name for one in SPECS for name in one.kt))


def kernels_of_kt() -> dict[str, tuple[str, ...]]:
    """KTransformers' methods, and the kernels' formats that their weights may have; the first is
    the one that weights from tensors get."""
    found: dict[str, tuple[str, ...]] = {}
    for one in SPECS:
        for name in one.kt if one.kernel else ():
            found[name] = (*found.get(name, ()), one.kernel)
    return found
