"""Writes docs/which-method.md from the tables of families, formats and methods: python
docs/write_which_method.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from runpy import run_path

from ktconv.families.family import Released
from ktconv.families.table import FAMILIES
from ktconv.targets.consumers import right_methods
from ktconv.targets.encoded.scheme import ROWS

PAGE = Path(__file__).with_name("which-method.md")
FAMILIES_PAGE = run_path(str(Path(__file__).with_name("write_families.py")))
# --method by the method of KTransformers that loads its output.
COMMANDS = {"AMXINT4": "int4", "AMXINT8": "int8"} | {
    row.kt_method: row.name for row in ROWS if row.kt_method
}
# By encoding of a released checkpoint: the methods of KTransformers that keep its codes and scales.
KEPT = {
    "bf16": "BF16", "fp8-block": "FP8", "fp8-channel": "FP8_PERCHANNEL", "int4-packed": "RAWINT4",
    "mxfp4": "MXFP4", "nvfp4": "NVFP4",
}  # fmt: skip
# Bits of a weight with its scales, in a matrix of 2048 columns.
BITS = {
    "int4": 4 + 32 / 2048, "int8": 8 + 32 / 2048, "rawint4": 4.5, "mxfp4": 4.25, "mxfp8": 8.25,
    "nvfp4": 4.5, "fp8": 8 + 32 / 128**2, "fp8-channel": 8 + 32 / 2048, "gptq-int4": 4 + 20 / 128,
    "bf16": 16.0,
}  # fmt: skip
SMALL, LARGE = ("AMXINT4", "MXFP4", "RAWINT4"), ("AMXINT8", "MXFP8", "FP8")

HEAD = """\
# Which method for my model

Written by `python docs/write_which_method.py` from the tables of families, formats and methods; a
test compares them. A method is right if it computes what the model's experts compute; several
methods of KTransformers run other models without a word, and their results are wrong.

1. Find the model. `ktconv inspect MODEL` says which row it is, and what its experts compute.
2. *Kept*: the codes and scales of the released checkpoint as they are, without loss: the first
   choice if they fit into memory.
3. Otherwise *4 bits* or *8 bits*, which `quantize-cpu` rounds from the best release there is (the
   first one listed), and [proves](verify.md). Where a release has 4 bits already, they are kept:
   rounding them again to one scale for each row, as `int4` has, loses much.

`ktconv quantize-cpu MODEL OUTPUT --method METHOD`, where METHOD is one of the table, is all it
takes; `--dry-run` tells sizes and memory before. For KTransformers through sglang-kt 0.7.2, the
plan, the end of the run and the model card name the options to serve it with. *Runtime* is
[ktconv's own](runtime.md), which follows every activation of this table that has a "yes".

SGLang and vLLM without KTransformers run the model's own code on GPUs, whatever it computes:
`ktconv quantize-gpu MODEL OUTPUT --scheme W4A16`, or a scheme of
[quantize-gpu.md](quantize-gpu.md), which has what each engine loads.

In KTransformers `fp8-channel` needs AVX-512, and `nvfp4` has an AVX2 kernel alone: set
`KT_MXFP4_BACKEND=avx2` where there is AMX.
"""

SIZES = """\
## Size, memory, time

Of 100 billion weights of experts, in a file and in memory (matrices with 2048 columns):

"""

TIME = """\

A conversion needs about 100 MB of memory, and is bound by the disk: two cores turn 1.8 to 2.8 GB of
bf16 a second ([benchmarks](../benchmarks/RESULTS.md)), so 470 GB (Qwen3-235B) take 3 to 4 minutes
where the disk reads and writes as fast, and 13 minutes at 600 MB/s. `--scale search`, the default
for integers, takes about two CPU seconds per GB: 8 minutes on two cores, less with more.
"""


def page() -> str:
    """The contents of docs/which-method.md."""
    table = FAMILIES_PAGE["_table"]
    columns = ("models", "released as", "experts compute", "kept", "4 bits", "8 bits", "runtime")
    sizes = ((f"`{name}`", f"{bits:.2f}", f"{bits * 12.5:.0f} GB") for name, bits in BITS.items())
    return "\n".join((HEAD, table(rows(), columns))) + (
        "\n" + SIZES + table(sizes, ("method", "bits", "size")) + TIME
    )


def rows() -> Iterator[tuple[str, ...]]:
    for family in FAMILIES.rows:
        for released in family.released:
            activation = FAMILIES_PAGE["activation_of"](family, released)
            right = right_methods([activation], [released.type])
            yield (
                released.models,
                ", ".join(released.encodings.split()),
                str(activation) + (f" ({released.where})" if released.where else ""),
                kept(released, right),
                first(small(released), right),
                first(LARGE, right),
                "yes" if activation.supported else "no",
            )


def kept(released: Released, right: Iterable[str]) -> str:
    """The methods that keep what is released, where they are right."""
    found = [KEPT.get(encoding, "") for encoding in released.encodings.split()]
    return ", ".join(f"`{COMMANDS[name]}`" for name in found if name in set(right)) or "–"


def small(released: Released) -> Iterable[str]:
    """Methods with 4 bits: first those that keep what the release has."""
    own = (KEPT.get(encoding, "") for encoding in released.encodings.split())
    return (*(name for name in own if name in SMALL), *SMALL)


def first(wanted: Iterable[str], right: Iterable[str]) -> str:
    """The best method of KTransformers that is right, by the order of `wanted`."""
    names = set(right)
    return next((f"`{COMMANDS[name]}`" for name in wanted if name in names), "–")


if __name__ == "__main__":
    PAGE.write_text(page())
