"""The table of CPU weight formats: one row each, pure Python, no NumPy.

Everything that follows from dimensions alone lives here: sizes, what may be
divided how, and how far a dequantized weight may lie from its source.  The
arithmetic itself is in `int8`, `int4` and `kt_layout`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import SupportsFloat

SMALLEST_NORMAL = 2.0**-126  # anything nearer to zero is flushed (SPEC 3)
SCALE_NBYTES = 4  # one float32 per row


@dataclass(frozen=True, slots=True)
class Format:
    """One row of SPEC 4.1, with the levels of section 3.

    Rows N and columns K are those of one packed matrix, `[N, K]`, PyTorch's
    `[out, in]` after the split into parts.

    `max_error_steps` bounds |x - dequantized| / step for every finite element of
    a row with scale d > 0 (the flushed elements below excepted), where
    dequantized is fl32(code * step(d)).  Let u = 2^-24, the relative error of one
    float32 rounding, and M = max_level * scale_units (127 or 112).

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

    name: str  # as .kt files and upstream spell it: "INT4"
    key: str  # as our options spell it: "int4"
    bits: int  # per weight
    n_step: int  # N must be a multiple of this
    k_tile: int  # K must be a multiple of this (KT)
    n_block: int  # rows per row block (NB)
    k_block: int  # columns per column block (KB)
    max_level: int  # codes of finite rows lie in -max_level .. max_level
    scale_units: int  # one step between levels is this many stored scales
    max_error_steps: float  # see above

    @property
    def smallest_amax(self) -> float:
        """The smallest row maximum whose scale survives flush-to-zero (SPEC 3.2).

        Exactly 127 * 2^-126 (INT8) and 112 * 2^-126 (INT4), for float32 row
        maxima as for bf16: the float32 just below already gives a denormal.
        """
        return self.max_level * self.scale_units * SMALLEST_NORMAL

    def step(self, scale: SupportsFloat) -> float:
        """Distance of two neighbouring levels in weight units: d, or 16 d for INT4.

        Exact: a binary64 holds it, also where a float32 `scale` is a NumPy scalar.
        """
        return self.scale_units * float(scale)

    def error_bound(self, scale: SupportsFloat) -> float:
        """Largest |x - dequantized| in weight units that the rules allow in a row.

        For a scale of zero that is what amax stays below.
        """
        if float(scale) == 0.0:
            return self.smallest_amax
        return max(self.max_error_steps * self.step(scale), SMALLEST_NORMAL)

    def weight_nbytes(self, rows: int, cols: int) -> int:
        """Bytes of the packed payload of an [rows, cols] matrix (SPEC 2.1)."""
        return rows * cols * self.bits // 8

    def scale_nbytes(self, rows: int) -> int:
        """Bytes of the scales of a matrix of `rows` rows."""
        return rows * SCALE_NBYTES

    def scale_rows(self, nbytes: int) -> int:
        """Rows of the matrix whose scales have so many bytes."""
        return nbytes // SCALE_NBYTES

    def check_matrix(self, rows: int, cols: int) -> str | None:
        """Why a lone [rows, cols] matrix cannot be packed, or None if it can."""
        if rows < 1 or rows % self.n_step:
            return f"{rows} rows: {self.name} needs a positive multiple of {self.n_step}"
        if cols < 1 or cols % self.k_tile:
            return f"{cols} columns: {self.name} needs a positive multiple of {self.k_tile}"
        return None

    def check(self, hidden: int, intermediate: int, parts: int) -> str | None:
        """Why a layer cannot be split into `parts` parts, or None if it can (SPEC 4.1)."""
        if parts < 1:
            return f"{parts} parts: at least 1 is needed"
        if hidden < 1 or hidden % self.k_tile:
            return f"hidden size {hidden} is not a multiple of {self.k_tile}, as {self.name} needs"
        if intermediate < 1 or intermediate % parts:
            return f"intermediate size {intermediate} does not divide into {parts} parts"
        width = intermediate // parts
        if width % self.k_tile:
            return (
                f"intermediate size {intermediate} in {parts} parts is {width} per part, "
                f"not a multiple of {self.k_tile}, as {self.name} needs"
            )
        return None

    def allowed_parts(self, hidden: int, intermediate: int) -> list[int]:
        """Every number of parts that the dimensions allow, ascending; may be empty."""
        if self.check(hidden, intermediate, 1) is not None:
            return []
        tiles = intermediate // self.k_tile
        return [parts for parts in range(1, tiles + 1) if tiles % parts == 0]


INT8 = Format(
    name="INT8",
    key="int8",
    bits=8,
    n_step=32,
    k_tile=64,
    n_block=64,
    k_block=3584,
    max_level=127,
    scale_units=1,
    max_error_steps=0.5 + 2.0**-16 + 2.0**-17,
)

INT4 = Format(
    name="INT4",
    key="int4",
    bits=4,
    n_step=32,
    k_tile=128,
    n_block=128,
    k_block=3584,
    max_level=7,
    scale_units=16,
    max_error_steps=0.5 + 2.0**-5 + 2.0**-20 + 2.0**-21,
)

FORMATS: dict[str, Format] = {row.key: row for row in (INT4, INT8)}
