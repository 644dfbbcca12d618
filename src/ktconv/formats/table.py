"""The table of weight formats: one row each, pure Python, no NumPy.

Everything else about a format follows from its row: sizes from the C library (`layout`), how
numbers are chosen and what codes mean from the modules next to this one (`reference`), whether
quantize-cpu writes it from `output`.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from ktconv.errors import UsageError

from .dialects import aliases_of_kernel, translated

if TYPE_CHECKING:
    from ktconv.native import Layout
    from ktconv.native.layouts import Traits

    from .names import Kind

SMALLEST_NORMAL = 2.0**-126  # anything nearer to zero is flushed (SPEC 3)
# Of group INT4, by the steps below with M = 7: 1/2 + 8 * 2^-23 + 7 * 2^-24 in steps of the stored
# scale. A bf16 scale is off by up to 2^-8 of itself: |x/d| is at most 7(1 + 2^-8), so that no code
# saturates.
GINT4_ERROR_STEPS = 0.5 + 2.0**-20 + 2.0**-21
# Of group INT8: the same with M = 127, 1/2 + 128 * 2^-23 + 127 * 2^-24 in steps of the stored
# scale. A bf16 scale is off by up to 2^-9 of itself: |x/d| <= 127.25, so that no code saturates.
GINT8_ERROR_STEPS = 0.5 + 2.0**-16 + 2.0**-17


class Format(Struct, frozen=True, dict=True):
    """One weight format: a row of SPEC 4.1 or 8, with the levels of section 3.

    Rows N and columns K are those of one packed matrix, `[N, K]`, PyTorch's
    `[out, in]` after the split into parts.

    `tolerance` is what to expect of the relative error of a layer's output against float32
    arithmetic on the same quantized weights and ordinary inputs: that of rounding activations
    (int8: about 1/127 of the largest in a row, twice; bf16: 2^-9). Outliers can make it larger
    without anything being wrong.

    `max_error_steps` bounds |x - dequantized| / step for every finite element of
    a row with scale d > 0 (the flushed elements below excepted), where a step is
    scale_units * d (d, or 16 d for INT4) and dequantized is fl32(code * step).
    Let u = 2^-24, the relative error of one float32 rounding, and
    M = max_level * scale_units (127 or 112).

    1. d = (amax / M)(1 + e0) with |e0| <= u + 2^-28: INT8 multiplies by
       fl32(1/127) = (1 - 2^-28)/127, which is where 2^-28 comes from, INT4
       rounds a quotient once (twice through binary64, which for a float32
       quotient changes nothing).  So |x/d| <= amax/d <= M(1 + 2u).
    2. inv = (1/d)(1 + e1) and y = x * inv * (1 + e2) = (x/d)(1 + e1)(1 + e2), with
       |e1|, |e2| <= u: d is at least 2^-126 and at most 2^128/112, so neither
       inv nor a y of at least 2^-126 is denormal, and a smaller y rounds to code 0
       either way.  Hence |y - x/d| <= M(1 + 2u)(2u + u^2) < (M + 1) 2^-23, which is
       at most 2^-16 for INT8 and below 113 * 2^-23 for INT4, in units of d.
    3. |q - y| <= 1/2.  Nothing saturates: |y| < M + 1/2 by 1 and 2.
    4. INT4 rounds q once more: |c - q/16| <= 1/2.  With 3, |c - y/16| <= 1/2 + 1/32,
       and y = 7.5 (q = 8, c = 1) reaches it.
    5. The product that restores the weight is rounded once, relative to u:
       max_level * u, below 2^-17 steps for INT8 and 2^-21 for INT4.

    Together 1/2 + 2^-16 + 2^-17 steps of d for INT8, and for INT4
    1/2 + 1/32 + (113/16) 2^-23 + 2^-21 < 1/2 + 1/32 + 2^-20 + 2^-21 steps of 16 d.
    The amax element itself is no exception: |y| is within M(1 + 4u) there, and its
    code is max_level.  Nothing overflows: d grows with amax, and a row whose amax
    is FLT_MAX restores to finite values.

    Denormal elements become code 0 whatever d is; they are off by less than
    2^-126, which is more than half a step only for INT8 with d < 2^-125.
    Rows whose amax lies below `smallest_amax` get d = 0 and restore to zeros.
    """

    key: str  # of --method and manifests: "int4"
    name: str  # of .kt files, as upstream spells it: "INT4"
    code: str  # kt_format of ktconv.h
    group: int = 0  # columns that share a scale; 0: all of a row
    scale_dtype: str = "f32"  # kt_scale_dtype
    activations: Literal["int8", "bf16"] = "bf16"  # what the kernels multiply with
    tolerance: float = 0.01  # see above
    max_error_steps: float = math.inf  # see above; of formats with a quantizer of that bound
    output: bool = False  # whether quantize-cpu writes it; needs max_error_steps

    @cached_property
    def aliases(self) -> tuple[str, ...]:
        """Other names of the format, in lower case."""
        return aliases_of_kernel(self.key)

    @cached_property
    def layout(self) -> Layout:
        """Codes and scales in memory, as the C library describes them."""
        from ktconv.native import Layout  # imports NumPy, which --help should not

        return Layout(self.code, self.group, self.scale_dtype)

    @property
    def traits(self) -> Traits:
        return self.layout.traits

    def stored(self, kind: Kind, rows: int, cols: int) -> tuple[str, tuple[int, ...], int]:
        """dtype, shape and bytes of a packed matrix's tensor in shards."""
        if kind == "bias":
            return "F32", (rows,), 4 * rows
        if kind == "weight":
            nbytes = self.layout.weight_size(rows, cols)
            return "I8", (nbytes,), nbytes
        shape = self.layout.packed_scale_shape(rows, cols)
        return self.scale_dtype.upper(), shape, self.layout.scale_size(rows, cols)

    def error_steps(self, rule: str) -> float:
        """The bound of |x - dequantized| / step under a rule for scales, "amax" or "search".

        By 2, 3 and 5 above where numbers are rounded once and x is cut to the levels: then
        |x/d| <= M, with d the step.
        """
        if rule == "amax":
            return self.max_error_steps
        top = self.traits.max_level
        return 0.5 + (top + 1) * 2.0**-23 + top * 2.0**-24

    @property
    def smallest_amax(self) -> float:
        """The smallest row (or group) maximum whose scale survives flush-to-zero (SPEC 3.2).

        Exactly 127 * 2^-126 (INT8) and 112 * 2^-126 (INT4), for float32 row
        maxima as for bf16: the float32 just below already gives a denormal.
        """
        return self.traits.max_level * self.traits.scale_units * SMALLEST_NORMAL

    def expert_bytes(
        self, hidden: int, intermediate: int, parts: int = 1, *, gated: bool = True
    ) -> int:
        """Bytes of one expert, scales included."""
        width = intermediate // parts
        shapes = ((width, hidden),) * (1 + gated) + ((hidden, width),)
        sizes = (self.layout.weight_size(*s) + self.layout.scale_size(*s) for s in shapes)
        return parts * sum(sizes)

    def check_matrix(self, rows: int, cols: int) -> str | None:
        """Reason why a lone [rows, cols] matrix cannot be packed, or None if it can."""
        row_step, col_step = self.traits.row_multiple, self.traits.col_multiple
        if rows < 1 or rows % row_step:
            return f"{rows} rows: {self.name} needs a positive multiple of {row_step}"
        if cols < 1 or cols % col_step:
            return f"{cols} columns: {self.name} needs a positive multiple of {col_step}"
        return None

    def check(self, hidden: int, intermediate: int, parts: int) -> str | None:
        """Reason why a layer cannot be split into `parts` parts, or None if it can (SPEC 4.1).

        What columns must be a multiple of is itself a multiple of that for rows.
        """
        step = self.traits.col_multiple
        if parts < 1:
            return f"{parts} parts: at least 1 is needed"
        if hidden < 1 or hidden % step:
            return f"hidden size {hidden} is not a multiple of {step}, as {self.name} needs"
        if intermediate < 1 or intermediate % parts:
            return f"intermediate size {intermediate} does not divide into {parts} parts"
        width = intermediate // parts
        if width % step:
            return (
                f"intermediate size {intermediate} in {parts} parts is {width} per part, "
                f"not a multiple of {step}, as {self.name} needs"
            )
        return None

    def allowed_parts(self, hidden: int, intermediate: int) -> list[int]:
        """Every number of parts that the dimensions allow, ascending; may be empty."""
        if self.check(hidden, intermediate, 1) is not None:
            return []
        tiles = intermediate // self.traits.col_multiple
        return [parts for parts in range(1, tiles + 1) if tiles % parts == 0]

    def multiplies(self, hidden: int, intermediate: int, parts: int) -> bool:
        """Whether the kernels compute layers of that shape, cut into `parts` parts."""
        if intermediate % parts:
            return False
        width = intermediate // parts
        shapes = ((width, hidden), (hidden, width))
        return all(self.layout.multiplies(*shape) for shape in shapes)


INT4 = Format(
    "int4",
    "INT4",
    "int4",
    activations="int8",
    tolerance=0.08,
    max_error_steps=0.5 + 2.0**-5 + 2.0**-20 + 2.0**-21,
    output=True,
)
INT8 = Format(
    "int8",
    "INT8",
    "int8",
    activations="int8",
    tolerance=0.08,
    max_error_steps=0.5 + 2.0**-16 + 2.0**-17,
    output=True,
)


def _group_int(bits: int, group: int, *, scale_dtype: str = "bf16") -> Format:
    """Checkpoints of this kind have scales in bf16, or in fp16, which float32 has exactly."""
    variant = "" if scale_dtype == "bf16" else f"-{scale_dtype}"
    key = f"gint{bits}-{group}{variant}"
    return Format(
        key,
        key.replace("-", "_").upper(),
        f"gint{bits}",
        group,
        scale_dtype,
        activations="int8",
        tolerance=0.05,
        max_error_steps=GINT4_ERROR_STEPS if bits == 4 else GINT8_ERROR_STEPS,
    )


FORMATS: dict[str, Format] = {
    row.key: row
    for row in (
        INT4,
        INT8,
        Format("bf16", "BF16", "bf16", scale_dtype="none"),
        Format("fp8", "FP8", "fp8", 128),
        Format("fp8-channel", "FP8_CHANNEL", "fp8"),
        Format("mxfp4", "MXFP4", "mxfp4", 32, "ue8m0"),
        Format("nvfp4", "NVFP4", "nvfp4"),
        Format("mxfp8", "MXFP8", "mxfp8", 32, "ue8m0"),
        *(_group_int(4, group) for group in (32, 64, 128)),
        *(_group_int(4, group, scale_dtype="f32") for group in (32, 64, 128)),
        *(_group_int(8, group) for group in (32, 64, 128)),
        *(_group_int(8, group, scale_dtype="f32") for group in (32, 64, 128)),
    )
}


def output_formats() -> dict[str, Format]:
    """The rows that quantize-cpu writes, by key."""
    return {key: row for key, row in FORMATS.items() if row.output}


def output_named(name: str) -> Format | None:
    """The output format whose .kt files have this name."""
    return next((row for row in output_formats().values() if row.name == name), None)


def format_named(name: str) -> Format:
    """A row of FORMATS, by its key or a name in another dialect; else UsageError."""
    if isinstance(name, str):
        row = FORMATS.get(name.lower()) or FORMATS.get(translated(name, "kernel"))
        if row is not None:
            return row
    raise UsageError(f"unknown method {name!r}", f"available: {', '.join(FORMATS)}")


def formats_for(hidden: int, intermediate: int, parts: int) -> list[str]:
    """Keys of the formats whose kernels compute layers of that shape."""
    return [row.key for row in FORMATS.values() if row.multiplies(hidden, intermediate, parts)]
