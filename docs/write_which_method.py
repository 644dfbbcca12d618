"""Writes docs/which-method.md from the tables of families, sizes, formats and consumers: python
docs/write_which_method.py."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

from ktconv.errors import KtconvError
from ktconv.families.family import PLAIN, ExpertActivation, Family, Released, Router
from ktconv.families.sizes import SIZES, Size, size_named, sizes_of
from ktconv.families.table import FAMILIES
from ktconv.formats import PROJECTIONS, UNGATED, matrix_shape, output_formats
from ktconv.system.units import format_duration, format_size
from ktconv.targets.consumers import (
    METHODS,
    SGLANG,
    SGLANG_KT,
    VLLM,
    Engine,
    right_methods,
    server_refuses,
)
from ktconv.targets.encoded import readers
from ktconv.targets.encoded.scheme import MIXED, ROWS, SCHEMES, Row, Scheme

PAGE = Path(__file__).with_name("which-method.md")
RESULTS = "../benchmarks/RESULTS.md"
table = run_path(str(Path(__file__).with_name("write_families.py")))["_table"]

# --method by the method of KTransformers that loads its output.
COMMANDS = {f"AMX{fmt.name}": fmt.key for fmt in output_formats().values()} | {
    row.kt_method: row.name for row in ROWS if row.kt_method
}
# By encoding of a released checkpoint, as `Line.encodings` has it: the --method that keeps its
# codes and scales.
KEPT = {
    "bf16": "bf16", "fp8-block": "fp8", "fp8-channel": "fp8-channel", "int4-packed": "rawint4",
    "mxfp8": "mxfp8", "mxfp4": "mxfp4", "nvfp4": "nvfp4",
}  # fmt: skip
# Released encodings that no method keeps, by the scheme whose bytes for a matrix they have.
AS_LARGE = {"fp8-tensor": "fp8-channel"}
BITS_OF_SOURCE = {"fp32": 32}
# By their errors for their bytes (docs/accuracy.md), best first. What a release has is first.
SMALL, LARGE = ("int4", "mxfp4", "rawint4"), ("int8", "mxfp8", "fp8")
GPU = "W4A16"
TO_SERVE = (readers.SGLANG, readers.VLLM)
ALLOW = "--allow-activation-mismatch"

FIRST = (
    "Qwen3-30B-A3B", "Qwen3-235B-A22B", "DeepSeek-V3", "DeepSeek-R1", "DeepSeek-V3.2", "Kimi-K2",
    "Kimi-K2-Thinking", "GLM-4.5", "GLM-4.7", "MiniMax-M2", "gpt-oss-120b", "DeepSeek-V4-Flash",
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """CPU seconds of a conversion, from a section of benchmarks/RESULTS.md that has `words`."""

    cpu_seconds: float
    gigabytes: float  # of the source, in bf16
    section: str
    words: str

    @property
    def each(self) -> float:
        """CPU seconds for a GB of bf16."""
        return self.cpu_seconds / self.gigabytes


_EVERY = "Every format, and the comparison of all of them in C"
_GROUP = "Group INT8, the comparison with AVX-512, recipes that fit"
_SEARCH = Measured(1.55, 1.21, "Scales by the search", "| search, 1 thread | 1.55 | 1.55 |")
# By method, with the default rule for scales. All on 2 cores of an Intel Xeon (Sapphire or Emerald
# Rapids).
TIMES = {
    "int4": _SEARCH,
    "int8": _SEARCH,  # INT8 takes 1.05 times as long
    "rawint4": Measured(2.2, 0.604, "Searched scales", "2.2 CPU seconds (scales searched;"),
    "fp8": Measured(5.1, 2.43, _GROUP, "`fp8` 2.9 and 5.1"),
    "fp8-channel": Measured(5.9, 2.43, _EVERY, "| `fp8-channel` | 3.4 | 5.9 |"),
    "mxfp4": Measured(5.6, 2.43, _GROUP, "`mxfp4` 3.1 and 5.6"),
    "mxfp8": Measured(7.0, 2.43, _EVERY, "| `mxfp8` | 3.8 | 7.0 |"),
    "nvfp4": Measured(9.4, 2.43, _GROUP, "`nvfp4` 5.0 and 9.4"),
    "bf16": Measured(5.3, 2.43, _GROUP, "`bf16` 3.0 and 5.3"),
}
# Codes that are kept are not searched.
KEPT_INT4 = Measured(5.2, 2.43, _EVERY, "| `rawint4` | 3.0 | 5.2 |")
# A disk that reads and writes so many bytes a second, and cores that convert.
SLOW, FAST = (600e6, 8), (3e9, 32)
MEMORY = ("Memory", "| mixtral-8x22b, 2 experts, bf16 | 1.23 | 0.045 | 0.020 | 0.065 |")


# ---- bytes and seconds ---------------------------------------------------------------------


def matrices(size: Size, gated: bool = True) -> Iterator[tuple[int, int]]:
    """Rows and columns of an expert's."""
    for proj in PROJECTIONS if gated else UNGATED:
        yield matrix_shape(proj, size.hidden, size.intermediate)


def expert_bytes(method: str, size: Size, gated: bool = True) -> int:
    """Bytes of one expert with its scales, in a method of quantize-cpu or quantize-gpu's scheme."""
    if method in output_formats():
        fmt = output_formats()[method]
        return fmt.expert_bytes(size.hidden, size.intermediate, gated=gated)
    scheme = Scheme(method, SCHEMES[method].groups[0])
    tensors = (one for shape in matrices(size, gated) for one in scheme.tensors("", *shape, "BF16"))
    return sum(tensor.nbytes for tensor in tensors)


def all_bytes(method: str, size: Size, gated: bool = True) -> int:
    """Bytes of a model's routed experts."""
    return size.layers * size.experts * expert_bytes(method, size, gated)


def source_bytes(encoding: str, size: Size, gated: bool = True) -> float:
    """Bytes of the routed experts as the model is released."""
    if encoding in BITS_OF_SOURCE:
        return all_bytes("bf16", size, gated) * BITS_OF_SOURCE[encoding] / 16
    return all_bytes(KEPT.get(encoding) or AS_LARGE[encoding], size, gated)


def fits(method: str, size: Size, gated: bool = True) -> bool:
    """Whether the method can have such matrices, in one NUMA part."""
    if method in output_formats():
        return output_formats()[method].check(size.hidden, size.intermediate, 1) is None
    layer: Any = SimpleNamespace(
        hidden_size=size.hidden, intermediate_size=size.intermediate, index=0,
        projections=PROJECTIONS if gated else UNGATED,
    )  # fmt: skip
    try:
        Scheme(method, SCHEMES[method].groups[0]).check([layer])
    except KtconvError:
        return False
    return True


def bits_of(method: str) -> float:
    """Bits of a weight with its scales, in matrices of 2048 columns."""
    size = Size("", "", 1, 1, 2048, 2048, 1)
    return 8 * expert_bytes(method, size) / sum(rows * cols for rows, cols in matrices(size))


def seconds(method: str, encoding: str, size: Size, gated: bool, disk: float, cores: int) -> float:
    """Seconds of a conversion: what the disk or the cores take, whichever is longer."""
    kept = KEPT.get(encoding) == method
    measured = KEPT_INT4 if kept and method == "rawint4" else TIMES[method]
    io = source_bytes(encoding, size, gated) + all_bytes(method, size, gated)
    return max(io / disk, measured.each * all_bytes("bf16", size, gated) / 1e9 / cores)


# ---- what is right -------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A release of a family."""

    family: Family
    released: Released

    @cached_property
    def activation(self) -> ExpertActivation:
        return self.family.activation_of(self.released)

    @cached_property
    def right(self) -> list[str]:
        """The methods of quantize-cpu whose output KTransformers computes right."""
        found = right_methods([self.activation], [self.released.type])
        return [COMMANDS[name] for name in found if name in COMMANDS]

    @property
    def encodings(self) -> list[str]:
        """Encodings as `inspect` names them, but for MXFP8, which it shows as fp8-block."""
        names = self.released.encodings.split()
        return ["mxfp8" if one == "fp8-block" and self.released.mxfp8 else one for one in names]

    @property
    def models(self) -> str:
        """Names by which a release is found: "the same" is as the row before it."""
        own = self.released.models
        if not own.startswith("the same"):
            return own
        return f"{self.family.released[0].models.partition(',')[0]}: {own}"

    @property
    def kept(self) -> list[str]:
        """Methods that keep what is released, of those that are right."""
        found = (KEPT.get(encoding, "") for encoding in self.encodings)
        return [name for name in found if name in self.right]

    def first(self, wanted: Iterable[str], size: Size | None = None) -> str:
        """The best right method of these, what is released first; "" if there is none. Of a model:
        what its first release has."""
        wanted, usual = tuple(wanted), KEPT.get(self.encodings[0])
        kept = [name for name in self.kept if name in wanted and (size is None or name == usual)]
        names = (*kept, *wanted)
        return next((one for one in names if one in self.right and self.fits(one, size)), "")

    def fits(self, method: str, size: Size | None) -> bool:
        """Whether a model can have the method; without sizes nothing speaks against it."""
        return size is None or fits(method, size, self.activation.gated)

    def small(self, size: Size | None = None) -> str:
        return self.first(SMALL, size)

    def large(self, size: Size | None = None) -> str:
        return self.first(LARGE, size)

    def own(self) -> str:
        """The method for ktconv's runtime where none is right in KTransformers: what keeps the
        first release if that has 4 bits, else the smallest that every known model of the type can
        have."""
        if self.four_bits:
            return KEPT[self.encodings[0]]
        sizes = sizes_of(self.released.type)
        return "int4" if all(self.fits("int4", one) for one in sizes) else "int8"

    @property
    def four_bits(self) -> bool:
        """Whether its first release has them."""
        return KEPT.get(self.encodings[0]) in ("mxfp4", "nvfp4", "rawint4")

    def command(self, model: str = "MODEL", size: Size | None = None) -> str:
        """The best in 4 bits, else in 8; else for ktconv's runtime."""
        method = self.small(size) or self.large(size)
        allow = "" if method else f" {ALLOW}"
        method = method or self.own()
        output = "OUTPUT" if size is None else f"{size.model.lower()}-{method}"
        download = " --download" if "/" in model else ""
        return f"ktconv quantize-cpu {model} {output} --method {method}{allow}{download}"

    def left_out(self) -> frozenset[str]:
        """The fields in which the activation is not plain SiLU."""
        names = ExpertActivation.__struct_fields__
        own = self.activation
        return frozenset(name for name in names if getattr(own, name) != getattr(PLAIN, name))


def lines() -> Iterator[Line]:
    for family in FAMILIES.rows:
        for released in family.released:
            yield Line(family, released)


def line_of(size: Size) -> Line:
    """The first release of a model's type."""
    return next(line for line in lines() if line.released.type == size.type)


def numbered(family: Family) -> bool:
    """Whether some release has a tensor for each expert: then engines know such names."""
    return any(one.layout in ("N", "W", "V", "U") for one in family.released)


def gpu_verdict(engine: Engine, line: Line) -> str:
    """Verdict on an engine other than KTransformers: the release, and quantize-gpu's outputs."""
    kind = line.released.type
    if kind in engine.general:
        return "its general class"
    if kind in engine.lacks:
        return "no class"
    if kind not in engine.has:
        return "not known"
    return f"release; {quantized(engine, line)}"


def quantized(engine: Engine, line: Line) -> str:
    """Verdict on an engine with an output of quantize-gpu."""
    if line.family.no_gpu or line.activation.biases:
        return f"`{GPU}`: refused by `quantize-gpu`"
    if line.released.type in engine.by_function:
        return f"`{GPU}`: not loaded"
    left = line.left_out() - engine.computes
    if left & engine.stops:
        return f"`{GPU}`: an error"
    if line.released.type in engine.own_config or left & engine.unread or not numbered(line.family):
        return f"`{GPU}`: not known"
    return f"`{GPU}`: **wrong**, plain SiLU" if left else f"`{GPU}`"


def kt_verdict(line: Line) -> str:
    """Verdict on KTransformers: what is right, and what becomes of other methods."""
    words = "all"
    if not line.right:
        words = "none: **wrong** without a word"
    elif len(line.right) < len(COMMANDS):
        refuses = server_refuses(line.released.type)
        others = "refused at start" if refuses else "**wrong** without a word"
        words = f"{ticked(line.right)}; others {others}"
    kind = line.released.type
    if kind in SGLANG_KT.lacks:
        return f"{words}; no class in sglang-kt"
    if kind in SGLANG_KT.by_function:
        return f"{words}; not taken over by sglang-kt"
    return words if kind in SGLANG_KT.has else f"{words}; class in sglang-kt: not known"


def read_too(line: Line) -> str:
    """Methods of quantize-cpu whose output has the model's own names, which SGLang and vLLM read
    as well."""
    kind = line.released.type
    if not numbered(line.family) or not (kind in SGLANG.has or kind in VLLM.has):
        return ""
    every = [row.name for row in ROWS if row.kt_method]
    names = [row.name for row in ROWS if row.kt_method and both_read(line, row)]
    if line.left_out():  # of their kernels for other formats than the release's nothing is known
        return ticked(name for name in names if name in line.kept)
    others = [name for name in every if name not in names]
    return f"all but {ticked(others)}" if len(others) < len(names) else ticked(names)


def both_read(line: Line, row: Row) -> bool:
    """Whether SGLang and vLLM read an output of the format, as far as they have the model."""
    own = keeps_names(line, row)
    return own and not any(one.failure(row.name, [line.released.type]) for one in TO_SERVE)


def keeps_names(line: Line, row: Row) -> bool:
    """Whether an output of the format has the model's own names of experts."""
    words = (f"{line.family.layers}.3", line.family.block, line.family.experts, "0")
    up = line.family.matrices.up or "up_proj"
    name = line.released.prefix + ".".join(filter(None, (*words, up)))
    return not row.naming.accepted or re.fullmatch(row.naming.accepted, name) is not None


# ---- the page ------------------------------------------------------------------------------

HEAD = """\
# Which method for my model

Find your model, copy its command: on the site, a click selects all of it. It reads the release from
the hub if it is not in the local cache, and stores nothing but the output; a directory or a GGUF
file can stand in place of the id. Models that are not here: [all families](#all-families).
`--dry-run` tells exact sizes, memory and disk space before anything is written.
"""

LEGEND = f"""\
- *Size*: of the routed experts, in files, and in memory while they are served: what the memory of
  all NUMA nodes must hold. The rest of the model, usually on the GPU, and layers for multi-token
  prediction are not counted.
- *Time*: computed, [see below](#time-and-memory-of-a-conversion).
- *Without loss*: the codes and scales of the release, the first choice if they fit into memory.
  Where the loader of KTransformers knows the release's names ([methods.md](methods.md)), it can
  also be served from the release itself.
- *4 bits, 8 bits*: rounded from the release, and [proved](verify.md). A release with 4 bits is
  kept: rounding it again to one scale for each row, as `int4` has, loses much.
- *GPU*: `ktconv quantize-gpu MODEL OUTPUT --scheme {GPU}`, for SGLang and vLLM without
  KTransformers; or the release itself.

KTransformers here is kt-kernel 0.7.2 and sglang-kt 0.7.2. The plan, the end of a run and the model
card name the options to serve with. `quantize-cpu` refuses what KTransformers would compute
wrongly, unless `{ALLOW}` is given. With it the output is for [ktconv's own runtime](runtime.md)
alone, which computes the experts of every model on this page.

This page is written by `python docs/write_which_method.py` from the tables of families, sizes,
formats and consumers; tests compare it with them and with what `quantize-cpu` decides.
"""

ALL = """\
## All families

The command is for 4 bits where they are right, else for 8; MODEL is the release that has what *4
bits* names, where there are several. `int4` needs dimensions that 128 divides, `int8` 64, others
what their groups and blocks divide: the plan says so, and names what is possible.
"""

ENGINES = """\
## What each engine computes right

A method is right if it computes what the model's experts compute. KTransformers reads parameters
that a method does not have as zero, without a word.

- *KTransformers*: methods whose output it computes right, and what becomes of others. "not taken
  over": sglang-kt's class computes the experts by a function that KTransformers does not replace.
- *SGLang*, *vLLM*: without KTransformers. "release": it has a class for the model, which runs the
  release. "`{gpu}`": the output of `quantize-gpu --scheme {gpu}` or `W8A16` has names that it
  reads, and its kernels follow the activation. **wrong**: its Marlin kernels, the usual ones before
  Blackwell, compute plain SiLU, without a word. "not loaded": its class computes experts from plain
  weights alone. "its general class": it names `TransformersMoEForCausalLM`, its class for any
  model. "no class": it names none.
- *They read too*: methods of `quantize-cpu` whose output keeps the model's own names, so that
  SGLang and vLLM read it by its `quantization_config`.
- *Runtime*: ktconv's own.

Read in the source of sglang-kt {kt}, SGLang {sglang} and vLLM {vllm}; none of it was run on a GPU.
"not known": not read, or not clear from reading. Of other schemes of `quantize-gpu` with other
activations than SiLU nothing is known. What was run: kt-kernel 0.7.2, every method
([methods.md](methods.md)), and vLLM 0.32 on a CPU: `bf16`, and where there is AMX also `W4A16`,
`int4-g64`, `int4-g128`, `gptq-int4` and blocks of FP8. It has no CPU kernels for other formats.
"""

FORMATS = """\
## Formats that an engine does not read

Of outputs whose experts have the model's own names. A format that is not here is read by all four.

"""

KT = """\
## Methods of KTransformers

All compute SiLU of gate times up; *follows* is what they compute besides that.

"""

TRAPS = """\
- No method adds biases of experts (gpt-oss), and none clamps after SiLU (Step, in two layers).
- `MXFP4` clamps, but drops alpha: MiniMax-M3 needs `MXFP8`.
- GLM-5.3-Flash: its server refuses all but `FP8`.
- `RAWINT4` loads groups of 64 and 128 as well, and then crashes or computes wrong values.
- The loader of AMXINT4 and AMXINT8 reads all folders below `--kt-weight-path`, of files with the
  same name only one: keep each output in a directory of its own. It counts experts up to the first
  gap, and NUMA parts of expert 0 alone.
"""

PRUNED = """\
## With fewer experts

Where the size is still too large, experts can be dropped (`ktconv prune`, or `--prune FILE` with
the command above): sizes of the experts when a quarter or half of each layer go. That loses more
than another format of 4 bits ([measured](pruning.md)): take the smallest right format first.

"""

UNLISTED = """\
## Other models by size

Of a model that is not listed `ktconv quantize-cpu MODEL OUTPUT --dry-run` tells sizes and memory,
from its headers alone.
"""


def page() -> str:
    """The contents of docs/which-method.md."""
    engines = ENGINES.format(
        gpu=GPU, kt=SGLANG_KT.version, sglang=SGLANG.version, vllm=VLLM.version
    )
    others = (one for one in SIZES if one.model not in FIRST)
    parts = (
        HEAD, table(model_rows(map(size_named, FIRST)), MODEL_COLUMNS), LEGEND,
        PRUNED, table(pruned_rows(), PRUNED_COLUMNS),
        ALL, table(rows(), COLUMNS),
        UNLISTED, table(model_rows(others), MODEL_COLUMNS),
        engines, table(engine_rows(), ENGINE_COLUMNS),
        FORMATS + table(format_rows(), ("format", *(one.title for one in readers.READERS))),
        KT + table(kt_rows(), KT_COLUMNS), TRAPS, times(),
    )  # fmt: skip
    return "\n".join(parts)


COLUMNS = ("models", "released as", "without loss", "4 bits", "8 bits", "command")
MODEL_COLUMNS = (
    "model", "command", "size", "time at 600 MB/s", "at 3 GB/s", "8 bits", "without loss", "GPU"
)  # fmt: skip
KT_COLUMNS = ("`--kt-method`", "`--method`", "bits of a weight", "follows", "needs")
ENGINE_COLUMNS = (
    "models", "experts compute", "KTransformers", f"SGLang {SGLANG.version}",
    f"vLLM {VLLM.version}", "they read too", "runtime",
)  # fmt: skip


PRUNED_COLUMNS = ("model", "method", "all experts", "three quarters", "half")


def pruned_rows() -> Iterator[tuple[str, ...]]:
    """Sizes of the experts of models when some go. Whole groups where routers choose groups: a
    quarter and half of the released numbers of groups are whole. Experts that follow from tokens
    stay, so that models with such layers are not here."""
    for size in map(size_named, FIRST):
        line = line_of(size)
        routing = line.family.routing
        if isinstance(routing, Router) and "hash layers" in routing.reads:
            continue
        method = method_of(line.command(size.hub or "MODEL", size))
        nbytes = all_bytes(method, size, line.activation.gated)
        shares = ((size.experts, 1.0), (size.experts * 3 // 4, 0.75), (size.experts // 2, 0.5))
        cells = (f"{count}: {format_size(int(nbytes * share))}" for count, share in shares)
        yield (size.model, f"`{method}`", *cells)


def rows() -> Iterator[tuple[str, ...]]:
    """Methods and a command for each release of a family."""
    for line in lines():
        yield (
            line.models,
            ", ".join(line.encodings),
            ticked(line.kept) or "–",
            ticked([line.small()]) or "–",
            ticked([line.large()]) or "–",
            f"`{line.command()}`",
        )


def model_rows(sizes: Iterable[Size]) -> Iterator[tuple[str, ...]]:
    """Commands, sizes and times of models."""
    for size in sizes:
        line = line_of(size)
        command = line.command(size.hub or "MODEL", size)
        method, gated = method_of(command), line.activation.gated
        only = "" if ALLOW not in command else " (ktconv's runtime only)"
        each = (
            seconds(method, line.encodings[0], size, gated, disk, cores)
            for disk, cores in (SLOW, FAST)
        )
        usual = KEPT.get(line.encodings[0], "")
        large = line.large(size)
        yield (
            size.model,
            f"`{command}`{only}",
            format_size(all_bytes(method, size, gated)),
            *(format_duration(one) for one in each),
            sized(large, size, gated) if large and large != method else "–",
            "the command" if method == usual else kept_cell(line, usual, size),
            gpu_cell(line, size),
        )


def kept_cell(line: Line, usual: str, size: Size) -> str:
    """Size of what keeps the release, where KTransformers computes it right."""
    return sized(usual, size, line.activation.gated) if usual in line.kept else "–"


def gpu_cell(line: Line, size: Size) -> str:
    """Size of what quantize-gpu makes, where SGLang or vLLM compute it right."""
    engines = [one for one in (SGLANG, VLLM) if line.released.type in one.has]
    able = [one for one in engines if right_on_gpu(one, line)]
    if line.four_bits or not able or not line.fits(GPU, size):
        return f"the release{only_in(engines)}" if engines else "–"
    return sized(GPU, size, line.activation.gated) + only_in(able)


def only_in(engines: list[Engine]) -> str:
    return "" if len(engines) == 2 else f" ({engines[0].name})"


def right_on_gpu(engine: Engine, line: Line) -> bool:
    """Whether an output of quantize-gpu is known to be right in it."""
    return gpu_verdict(engine, line) == f"release; `{GPU}`"


def engine_rows() -> Iterator[tuple[str, ...]]:
    """Rows of the table by engine, for each release of a family."""
    for line in lines():
        yield (
            line.models,
            str(line.activation) + (f" ({line.released.where})" if line.released.where else ""),
            kt_verdict(line),
            gpu_verdict(SGLANG, line),
            gpu_verdict(VLLM, line),
            read_too(line) or "–",
            "yes" if line.activation.supported else "no",
        )


FOLLOWS = {"limit": "a clamp of gate and up", "alpha": "alpha"}


def format_rows() -> Iterator[tuple[str, ...]]:
    """Rows of the formats that at least one engine does not read, a cell per engine."""
    for row in (*ROWS, MIXED):
        if any(row.name in reader.fails for reader in readers.READERS):
            cells = (format_cell(reader, row.name) for reader in readers.READERS)
            name = "a recipe's mix" if row is MIXED else f"`{row.name}`"
            yield (name, *cells)


def format_cell(reader: readers.Reader, name: str) -> str:
    """The cell of an engine and a format: what it does, and the models that it reads even so."""
    models = ", ".join(models_of(kind) for kind in sorted(reader.types.get(name, ())))
    failure = reader.fails.get(name, "reads it")
    return f"{failure}; reads that of {models}" if models else failure


def kt_rows() -> Iterator[tuple[str, ...]]:
    for method in METHODS:
        own = COMMANDS.get(method.name, "")
        follows = [FOLLOWS[name] for name in sorted(method.computes, reverse=True)]
        for kind, more in method.families.items():
            follows += [f"{FOLLOWS[name]} of {models_of(kind)}" for name in sorted(more)]
        yield (
            f"`{method.name}`",
            f"`{own}`" if own else "–",
            f"{bits_of(own):.2f}" if own else "",
            ", ".join(follows) or "–",
            method.needs or "–",
        )


def models_of(kind: str) -> str:
    return next(line.models for line in lines() if line.released.type == kind)


def times() -> str:
    """The paragraphs on time and memory."""
    (slow, few), (fast, many) = SLOW, FAST
    costs = ((f"`{name}`", f"{one.each:.1f}", one.section) for name, one in TIMES.items())
    size = size_named("Qwen3-235B-A22B")
    read, written = all_bytes("bf16", size), all_bytes("int4", size)
    disk = format_duration((read + written) / slow)
    cores = format_duration(TIMES["int4"].each * read / 1e9 / few)
    kept, searched = KEPT_INT4.each, TIMES["rawint4"].each
    return f"""\
## Time and memory of a conversion

    seconds = max(GB read and written / GB/s of the disk,
                  CPU seconds per GB * GB of bf16 / cores)

The tables have this for the routed experts, with a disk of {slow / 1e6:.0f} MB/s, reading and
writing together, and {few} cores, and with one of {fast / 1e9:.0f} GB/s and {many} cores. An
example: Qwen3-235B-A22B to `int4` reads {format_size(read)} and writes {format_size(written)},
which takes {disk} at {slow / 1e6:.0f} MB/s, and {few} cores need {cores}, so the disk binds. From
the hub, the network is the disk. CPU seconds were measured on 2 cores of an Intel Xeon with
AVX-512 (Sapphire and Emerald Rapids), in these sections of [RESULTS.md]({RESULTS}); more cores are
computed from them, not measured.

{table(costs, ("method", "CPU seconds per GB of bf16", "section"))}
`--scale amax` instead of the search makes integers 1.3 times (whole rows) to three times (groups)
as fast, with larger errors.
Codes that are kept need no search: {kept:.1f} in place of {searched:.1f} for `rawint4`.

A conversion needs 60 to 100 MB of memory, whatever the size of the model (section {MEMORY[0]}),
and disk space for the output.
"""


def method_of(command: str) -> str:
    return command.partition("--method ")[2].split()[0]


def sized(method: str, size: Size, gated: bool) -> str:
    return f"`{method}` {format_size(all_bytes(method, size, gated))}"


def ticked(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names if name)


if __name__ == "__main__":
    PAGE.write_text(page())
