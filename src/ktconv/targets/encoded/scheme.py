"""The formats that experts of a checkpoint can be encoded in, from the rows of `formats.specs`.

A format is a kind of number (kt_encode), the tensors that a matrix becomes (`layouts`), what
modules are called (`naming`), and what config.json says (`sections`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from ktconv.errors import UsageError
from ktconv.formats.specs import CHANNEL as CHANNEL
from ktconv.formats.specs import SPECS, names_in, spec_of
from ktconv.source import PROJECTIONS, MoELayer, Projection
from ktconv.targets.encoded import naming as names
from ktconv.targets.encoded import sections
from ktconv.targets.encoded.layouts.base import MIXED_PRECISION, Layout, Sizes
from ktconv.targets.encoded.layouts.packed import PACK_QUANTIZED, WITHOUT_SHAPE
from ktconv.targets.encoded.layouts.words import AWQ, GPTQ
from ktconv.targets.encoded.naming import OWN, Naming
from ktconv.targets.encoded.sections import Section
from ktconv.writer.shards import Tensor

if TYPE_CHECKING:
    from ktconv.native import Encoding

Command = Literal["quantize-cpu", "quantize-gpu"]


class Row(Struct, frozen=True):
    """One format. `groups`: columns that can share a scale, the default first; (0,): no scales."""

    name: str  # of --scheme of quantize-gpu or --method of quantize-cpu
    command: Command
    kind: str  # of native.ENCODINGS
    groups: tuple[int, ...]
    layout: Layout
    section: Section
    naming: Naming = OWN
    kt_method: str = ""  # of KTransformers, which loads it
    half: bool | None = None  # whether scales of integers are f16; None: as the weights are
    bits: int = 4
    activations: Mapping[str, Any] | None = None  # input_activations of compressed-tensors
    block: int = 1  # rows that share a scale

    @property
    def is_int(self) -> bool:
        return self.kind.startswith("int")

    @property
    def mixes(self) -> bool:
        """Whether config.json can say that some experts have it and others another."""
        return self.section is sections.compressed_tensors or self.kind == "bf16"


_MX = {"scale_dtype": "torch.uint8"}  # an exponent
_DYNAMIC = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True}
_ACTIVATIONS: Mapping[str, Mapping[str, Any] | None] = {
    "": None,
    "token": {**_DYNAMIC, "strategy": "token", "group_size": None},
    "group": {**_DYNAMIC, "strategy": "group", "group_size": 128},
    "mx": {**_DYNAMIC, "strategy": "group", "group_size": 32, **_MX},
}


def _rows_of(command: Command) -> Iterator[Row]:
    """The formats in which a command writes checkpoints, from their rows in SPECS."""
    gpu = command == "quantize-gpu"
    for name in names_in(command):
        spec = spec_of(name, command)
        stored = spec.gpu_stored if gpu else spec.cpu_stored
        if stored is None:
            continue
        sizes = {one.group for one in SPECS if gpu and one.scheme == name} - {spec.group}
        own_groups = (spec.group, *sorted(sizes, key=lambda size: (size < 0, size)))
        module, layout = stored.layout.split(":")
        own = stored.naming == "OWN"
        yield Row(
            name,
            command,
            spec.kind,
            groups=stored.groups or own_groups,
            layout=getattr(import_module(f"ktconv.targets.encoded.layouts.{module}"), layout),
            section=getattr(sections, stored.section),
            naming=getattr(names, stored.naming),
            kt_method="" if own else "".join(spec.kt[:1]),  # which finds experts by their names
            half=stored.half,
            bits=spec.bits,
            activations=_ACTIVATIONS[stored.activations],
            block=spec.block,
        )


ROWS = (*_rows_of("quantize-gpu"), *_rows_of("quantize-cpu"))
# What an output with several formats is as a whole; a recipe has the format of each matrix.
MIXED = Row(
    "mixed", "quantize-cpu", "mixed", (0,), MIXED_PRECISION, sections.no_section
)  # fmt: skip
SCHEMES = {row.name: row for row in (*ROWS, MIXED)}
MIXABLE = tuple(row.name for row in ROWS if row.mixes)
FORMATS = frozenset(row.layout.name for row in SCHEMES.values())  # of manifests


def names_of(command: Command) -> list[str]:
    """The formats that a command writes."""
    return [row.name for row in ROWS if row.command == command]


def group_size_of(name: str) -> int:
    """The usual group size of a format."""
    return Scheme(name).row.groups[0]


class Scheme(Struct, frozen=True):
    """A format with its group size."""

    name: str = "W4A16"
    group_size: int = 128
    search: bool = False  # of integers: scales with the smallest squared error
    flat: bool = False  # tensors of all experts as vLLM reads them, see `stacking`

    @property
    def row(self) -> Row:
        if self.name not in SCHEMES:
            available = ", ".join(names_of("quantize-gpu"))
            raise UsageError(f"--scheme {self.name} is unknown", f"available: {available}")
        return SCHEMES[self.name]

    @property
    def bits(self) -> int:
        return self.row.bits

    @property
    def layout(self) -> Layout:
        layout = self.row.layout
        return WITHOUT_SHAPE if self.flat and layout is PACK_QUANTIZED else layout

    @property
    def parts(self) -> Sequence[str]:
        return self.layout.parts

    def check(
        self, layers: Sequence[MoELayer], projections: Collection[Projection] = PROJECTIONS
    ) -> None:
        """UsageError for a group size that does not divide every matrix of these projections."""
        row = self.row
        if self.group_size not in row.groups:
            raise _unknown_group(row, self.group_size)
        for layer in layers:
            hidden, inner = layer.hidden_size, layer.intermediate_size
            wide = [proj for proj in ("gate", "up") if proj in layer.projections]
            for some, rows, cols in ((wide, inner, hidden), (["down"], hidden, inner)):
                if not {*some} & {*projections}:
                    continue
                matrix = " and ".join(some)
                if self.group_size > 0 and cols % self.group_size:
                    raise self._unfit(layers, f"the {cols} columns of {matrix}", layer)
                if rows % row.block:
                    raise self._unfit(layers, f"the {rows} rows of {matrix}", layer)
                if row.layout in (GPTQ, AWQ) and (rows % 8 or cols % 8):
                    raise UsageError(
                        f"{self.name} has words of 8 weights, which do not divide the {rows} x "
                        f"{cols} weights of {matrix} in layer {layer.index}",
                        "choose another format",
                    )

    def _unfit(self, layers: Sequence[MoELayer], what: str, layer: MoELayer) -> UsageError:
        if len(self.row.groups) > 1:
            return UsageError(
                f"--group-size {self.group_size} does not divide {what} in layer {layer.index}",
                _fitting(layers, self.row.groups) or _others(layers, self.row.command),
            )
        return UsageError(
            f"{self.name} has groups of {self.group_size}, which do not divide {what} in layer "
            f"{layer.index}",
            _others(layers, self.row.command),
        )

    def tensors(self, module: str, rows: int, cols: int, scale_dtype: str) -> list[Tensor]:
        """Tensors of an encoded matrix; `module` is its name without ".weight", `scale_dtype` that
        of the weights, BF16 or F16."""
        return self.layout.tensors(module, self.sizes(rows, cols, scale_dtype == "F16"))

    def sizes(self, rows: int, cols: int, half: bool) -> Sizes:
        return _sizes(self, rows, cols, self.is_half(half))

    def is_half(self, half: bool) -> bool:
        """Whether weights are rounded to f16 and have such scales, where `half` of the source's
        are f16."""
        own = self.row.half
        return self.row.is_int and (half if own is None else own)

    @property
    def encodes(self) -> bool:
        """Whether there are codes and scales; else weights are bf16."""
        return self.row.kind != "bf16"

    def encoding(self, half: bool) -> Encoding:
        """Encoding of the C library; `half`: weights and scales are binary16, not bf16."""
        from ktconv.native import Encoding

        searched = self.search and self.row.is_int
        return Encoding(self.row.kind, max(self.group_size, 0), self.is_half(half), searched)

    def weight_arguments(self) -> dict[str, Any]:
        """compressed-tensors' QuantizationArgs, as in config.json."""
        row, channel = self.row, self.group_size == CHANNEL
        strategy = "channel" if channel else "group"
        more: Mapping[str, Any] = {}
        if row.block > 1:
            strategy, more = "block", {"block_structure": [row.block, self.group_size]}
        elif row.kind == "nvfp4":
            strategy, more = "tensor_group", {"scale_dtype": "torch.float8_e4m3fn"}
        elif row.kind in ("mxfp4", "mxfp8"):
            more = _MX
        return {
            "num_bits": self.bits,
            "type": "int" if row.is_int else "float",
            "symmetric": True,
            "strategy": strategy,
            "group_size": None if channel or row.block > 1 else self.group_size,
            "dynamic": False,
            **more,
        }

    def input_arguments(self) -> dict[str, Any] | None:
        """Arguments for the activations; None: they stay as they are."""
        return dict(self.row.activations) if self.row.activations else None

    @property
    def grouping(self) -> str:
        """Grouping of scales, in words."""
        if not self.encodes:
            return "no scales"
        if self.row.block > 1:
            return f"blocks of {self.row.block} x {self.group_size}"
        return "one scale per row" if self.group_size == CHANNEL else f"groups of {self.group_size}"


@lru_cache(256)
def _sizes(scheme: Scheme, rows: int, cols: int, half: bool) -> Sizes:
    found = scheme.encoding(half)
    scale_bytes = found.scale_array(rows, cols)().itemsize
    dtype = {4: "F32", 2: "F16" if half else "BF16"}.get(scale_bytes, "")
    shape = found.scale_shape(rows, cols)
    return Sizes(rows, cols, found.code_shape(rows, cols)[1], shape, dtype, scale_bytes)


def _unknown_group(row: Row, size: int) -> UsageError:
    if len(row.groups) == 1:
        return UsageError(
            f"--group-size {size} is not that of {row.name}, which has {_grouping(row)}", "omit it"
        )
    sizes = ", ".join(str(one) for one in sorted(row.groups) if one > 0)
    per_row = f", or {CHANNEL} for one scale per row" if CHANNEL in row.groups else ""
    return UsageError(
        f"--group-size {size} is not supported by inference engines", f"use {sizes}{per_row}"
    )


def _grouping(row: Row) -> str:
    return Scheme(row.name, row.groups[0]).grouping


def _fitting(layers: Sequence[MoELayer], groups: Sequence[int]) -> str:
    """A hint: the group sizes that these layers can have; "" where there is none."""
    cols = {size for layer in layers for size in (layer.hidden_size, layer.intermediate_size)}
    fitting = [size for size in sorted(groups) if size > 0 and not any(n % size for n in cols)]
    found = [*fitting, *({CHANNEL} & {*groups})]
    if not found:
        return ""
    return f"possible values of --group-size for this model: {', '.join(map(str, found))}"


def _others(layers: Sequence[MoELayer], command: Command) -> str:
    """A hint: the formats that these layers can have."""
    sizes = {size for layer in layers for size in (layer.hidden_size, layer.intermediate_size)}

    def fits(row: Row, group: int) -> bool:
        return group <= 0 or not any(size % group or size % row.block for size in sizes)

    rows = [row for row in ROWS if row.command == command]
    fitting = [row.name for row in rows if any(fits(row, group) for group in row.groups)]
    option = "--scheme" if command == "quantize-gpu" else "--method"
    return f"possible values of {option} for this model: {', '.join(fitting)}"
