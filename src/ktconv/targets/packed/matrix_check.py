"""Check one part's packed matrix against its source: element by element, scale by scale.

Unpacking is the audit's (native/src/audit), which shares no code with the packer. Used while
a layer is written (quantize-cpu) and on finished outputs (verify).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

from ktconv import native
from ktconv.conversion.tasks import four_digits
from ktconv.formats import KINDS, Format, TensorId, cut_by_rows, scales, tensor_name
from ktconv.system.arrays import F32, F64, I8, I64, U8, Array, Bools
from ktconv.targets.packed.proof import Proof
from ktconv.targets.packed.scale_rules import (
    SMALLEST_SCALE,
    Allowed,
    allowed_scales,
)

BINARY32_SLACK = 2.0**-15  # of a step: what comparing in binary32 can add to an error
RECORDED = ("relative_rms_error", "max_error_steps", "zero_share")  # in manifests
NAMED_PER_CALL = 3  # elements outside the bound that are named


class ErrorStats(Struct):
    """Errors of any number of elements."""

    squared_source: float = 0.0
    squared_error: float = 0.0
    squared_value: float = 0.0
    max_steps: float = 0.0
    zeros: int = 0
    elements: int = 0

    def add(self, other: ErrorStats | native.Audit) -> None:
        self.squared_source += other.squared_source
        self.squared_error += other.squared_error
        self.squared_value += other.squared_value
        self.max_steps = max(self.max_steps, other.max_steps)
        self.zeros += other.zeros
        self.elements += other.elements

    def as_dict(self) -> dict[str, float]:
        source, value = self.squared_source, self.squared_value
        product = (source + value - self.squared_error) / 2
        length = math.sqrt(source) * math.sqrt(value)
        both_zero = 1.0 if source == value == 0 else 0.0
        return {
            "relative_rms_error": math.sqrt(self.squared_error / source) if source else 0.0,
            # In this order a NaN stays one.
            "cosine": min(product / length, 1.0) if length else both_zero,
            "max_error_steps": self.max_steps,
            "zero_share": self.zeros / self.elements if self.elements else 0.0,
        }

    def record(self) -> dict[str, float]:
        """The errors that a manifest records."""
        errors = self.as_dict()
        return {name: four_digits(errors[name]) for name in RECORDED}


class Violation(Struct, frozen=True):
    """A failed check. row and column are those of the whole matrix."""

    check: str  # element, error, level, scale or source
    message: str
    tensor: str
    row: int | None = None
    column: int | None = None
    source_value: float | None = None
    value: float | None = None
    steps: float | None = None


class Packed(Struct, frozen=True):
    """Packed rows of a matrix [rows, cols]."""

    weight: U8
    scale: U8  # packed
    rows: int


class _Piece(NamedTuple):
    """Findings in some rows; scales are [rows, 1], or [rows, groups]."""

    scale: F32
    allowed: Allowed
    squares: tuple[F64, F64]


class MatrixCheck:
    """The check of one part's matrix, which `weight` names; its rows may come in pieces, in their
    order."""

    def __init__(
        self,
        fmt: Format,
        weight: TensorId,
        rows: int,
        cols: int,
        report: Callable[[Violation], None],
        proof: Proof,
    ) -> None:
        self._proof = proof
        self._fmt, self._id, self._rows, self._cols = fmt, weight, rows, cols
        self._report = report
        self.weight_name, self.scale_name = (
            tensor_name(weight.layer, weight.proj, weight.expert, weight.part, kind)
            for kind in KINDS
        )
        self._pieces: list[_Piece] = []
        self._sums = ErrorStats()
        # Steps that no element of sound rows is off; None: rows and scales are not that simple.
        simple = proof.exact and proof.row_error is None and not fmt.group
        simple = simple and fmt.scale_dtype == "f32" and 1.0 in proof.factors
        self._quick = fmt.error_steps(proof.rule) + BINARY32_SLACK if simple else None
        self._sound = True  # all rows, as far as they came
        self.kept_rows = 0  # whose integers and scale are those of the source

    def _whole(self, row: int, column: int) -> tuple[int, int]:
        """Row and column in the whole matrix of an element of this part."""
        if cut_by_rows(self._id.proj):
            return self._id.part * self._rows + row, column
        return row, self._id.part * self._cols + column

    @property
    def squares(self) -> F64:
        """Sums of each row's, [2, rows]: of its errors, of its source."""
        return np.concatenate([piece.squares for piece in self._pieces], axis=1)

    # ---- elements ----

    def compare(self, source: native.Matrix, start: int, packed: Packed) -> None:
        """Rows from `start` on of this part, whose source is `source`."""
        layout, choice = self._fmt.layout, self._proof.choice
        weight, scale = packed.weight, packed.scale
        found = native.audit(layout, source, packed.rows, 0, weight, scale, choice)
        self.judge(found, source, start, packed)

    def judge(self, found: native.Audit, source: native.Matrix, start: int, packed: Packed) -> None:
        """Compare as `compare`, given what an audit of these rows by the proof's choice found."""
        fmt = self._fmt
        if self._is_sound(found, source, packed):
            shape = len(found.row_scale), -1
            scale = found.row_scale.reshape(shape)
            squares = found.row_squared_error, found.row_squared_source
            self._pieces.append(_Piece(scale, Allowed(scale, scale), squares))
            self._sums.add(found)
            return
        self._sound = False
        allowed = allowed_scales(fmt, found, source, self._proof)
        self.kept_rows += allowed.kept
        scale = scales.values(fmt, scales.ordered(fmt, packed.scale, packed.rows, self._cols))
        squares = found.row_squared_error, found.row_squared_source
        self._pieces.append(_Piece(scale, allowed, squares))
        self._sums.add(found)
        if found.invalid:
            self._name_level(start, scale, packed)
        if not math.isfinite(found.squared_source):
            self._name_source(source, start)
        if self._proof.row_error is None and not self._is_within(found, scale):
            outside = self._outside(found.row_error.reshape(scale.shape), scale)
            if outside is not None:
                self._name_elements(source, start, np.flatnonzero(outside.any(axis=1)), packed)

    def _is_sound(self, found: native.Audit, source: native.Matrix, packed: Packed) -> bool:
        """Whether rows have just the scales of the rule, and sums tell the rest: of most matrices,
        with little time; the GIL is held here, for every matrix of a model."""
        if self._quick is None or source.row_scale is not None or found.invalid:
            return False
        if not (found.max_steps < self._quick and math.isfinite(found.squared_error)):
            return False
        if not math.isfinite(found.squared_source):
            return False
        rule = found.row_scale  # bytes: a copy of both is quicker than NumPy's way
        if rule.tobytes() != packed.scale.tobytes():
            return False
        return bool(rule.min() >= SMALLEST_SCALE)  # none is infinite: no error is

    def _is_within(self, found: native.Audit, scale: F32) -> bool:
        """Whether sums tell that no element is farther off than rounding allows, as they do of
        sound rows; the GIL is held here, for every matrix of a model. A NaN is in the sum."""
        bound = self._fmt.error_steps(self._proof.rule) + BINARY32_SLACK
        sound = found.max_steps < bound and math.isfinite(found.squared_error)
        return sound and bool(scale.min() > 0)  # of others there are no steps

    def _outside(self, error: F32, scale: F32) -> Bools | None:
        """Scales under which an element is farther off than rounding allows; None: none are."""
        fmt, rule = self._fmt, self._proof.rule
        outside: Bools = ~(error <= scales.error_bound(fmt, scale, BINARY32_SLACK, rule))
        outside |= ~np.isfinite(error)
        return outside if outside.any() else None

    def _codes(self, packed: Packed) -> I8:
        return native.audit_codes(self._fmt.layout, packed.weight, packed.rows, self._cols)

    def _of_elements(self, scale: Array) -> Array:
        """The scale of every element of some rows."""
        return np.repeat(scale, self._cols // scale.shape[1], axis=1)

    def _name_elements(self, matrix: native.Matrix, start: int, rows: I64, packed: Packed) -> None:
        """The worst elements of rows with one that is too far off."""
        source = native.decode(matrix)[rows].astype(np.float64)
        step = self._pieces[-1].scale[rows].astype(np.float64) * self._fmt.traits.scale_units
        step = self._of_elements(step)
        reach = self._fmt.traits.max_level * step if self._proof.rule != "amax" else np.inf
        with np.errstate(all="ignore"):
            value = self._codes(packed)[rows] * step
            off = np.abs(np.clip(source, -reach, reach) - value)
            steps = np.nan_to_num(np.where(step > 0, off / step, off), nan=np.inf)
        columns = steps.argmax(axis=1)
        worst = steps[np.arange(len(rows)), columns]
        for i in np.argsort(worst)[::-1][:NAMED_PER_CALL]:
            column = int(columns[i])
            row, whole = self._whole(int(start + rows[i]), column)
            self._element(row, whole, source[i, column], value[i, column], float(worst[i]))

    def _element(self, row: int, column: int, source: Any, value: Any, steps: float) -> None:
        key = self._id
        self._report(
            Violation(
                "element",
                f"{self.weight_name}: layer {key.layer}, expert {key.expert}, {key.proj} "
                f"[{row}, {column}] is {float(source):.9g} in the source, but "
                f"{float(value):.9g} here, {steps:.4g} steps off where "
                f"{self._fmt.error_steps(self._proof.rule):.4g} are allowed under --scale "
                f"{self._proof.scale}.",
                self.weight_name,
                row,
                column,
                float(source),
                float(value),
                steps,
            )
        )

    def _name_level(self, start: int, scale: F32, packed: Packed) -> None:
        codes, top = self._codes(packed), self._fmt.traits.max_level
        beyond = np.abs(codes.astype(np.int16)) > top
        beyond |= (codes != 0) & self._of_elements(scale == 0)
        row, column = (int(i) for i in np.argwhere(beyond)[0])
        at = self._whole(start + row, column)
        self._report(
            Violation(
                "level",
                f"{self.weight_name} contains level {codes[row, column]} at [{at[0]}, "
                f"{at[1]}] of its matrix: levels are -{top} to "
                f"{top}, and 0 where the scale is 0 ({int(beyond.sum())} "
                "codes are beyond).",
                self.weight_name,
                *at,
                value=float(codes[row, column]),
            )
        )

    def _name_source(self, matrix: native.Matrix, start: int) -> None:
        values = native.decode(matrix)
        row, column = (int(i) for i in np.argwhere(~np.isfinite(values))[0])
        at = self._whole(start + row, column)
        self._report(
            Violation(
                "source",
                f"the source of {self.weight_name} contains {values[row, column]} at "
                f"[{at[0]}, {at[1]}].",
                self.weight_name,
                *at,
            )
        )

    # ---- scales ----

    def finish(self, allowed: Allowed | None = None, squares: F64 | None = None) -> ErrorStats:
        """Check the scales, and errors of rows, after all rows were compared; returns the sums.

        Of an output that ktconv reshard made: `allowed`, what scales can be that were chosen for
        other parts; `squares` of the rows of other parts.
        """
        if self._sound and allowed is None:  # which only a simple check can be
            return self._sums
        scale = np.concatenate([piece.scale for piece in self._pieces])
        allowed = allowed or Allowed.joined([piece.allowed for piece in self._pieces])
        if not allowed.equals(scale, self._proof.factors):
            self._check_scales(scale, allowed)
        if self._proof.row_error is not None:
            errors = relative_errors(self.squares if squares is None else squares)
            self._name_rows(errors, self._proof.row_error)
        return self._sums

    def _check_scales(self, scale: F32, allowed: Allowed) -> None:
        odd = ~np.isfinite(scale) | (scale < 0) | _denormal(scale)
        if odd.any():
            at = _first(odd)
            self._wrong_scale(
                at,
                scale,
                f"has {scale[at]} at {self._place(at)}: scales are finite, not negative and not "
                "denormal.",
            )
        wrong = ~allowed.includes(self._fmt, scale, self._proof.factors) & ~odd
        self._name_scales(wrong & np.isfinite(allowed.most), scale, allowed)

    def _name_scales(self, wrong: Bools, scale: F32, allowed: Allowed) -> None:
        """Every scale follows from the weights of its row or group."""
        if wrong.any():
            at, count = _first(wrong), int(wrong.sum())
            of = "groups" if self._fmt.group else "rows"
            least, most = float(allowed.least[at]), float(allowed.most[at])
            found = f"{most:.9g}" if least == most else f"{least:.9g} to {most:.9g}"
            self._wrong_scale(
                at,
                scale,
                f"has {float(scale[at]):.9g} at {self._place(at)}, but "
                f"{self._proof.sentence} {found} ({count} of {wrong.size} {of} differ).",
                most,
            )

    def _name_rows(self, errors: F64, bound: float) -> None:
        if (errors <= bound).all():
            return
        row = int(np.nan_to_num(errors, nan=np.inf).argmax())
        count = int((~(errors <= bound)).sum())
        words = (
            f"{self.weight_name}: row {row} has a relative RMS error of {errors[row]:.6g}, where "
            f"{bound:.6g} is recorded as the largest ({count} of {len(errors)} rows exceed it)."
        )
        whole = self._whole(row, 0)[0]
        self._report(Violation("error", words, self.weight_name, whole, value=float(errors[row])))

    def _place(self, at: tuple[int, int]) -> str:
        return f"row {at[0]}" + (f", group {at[1]}" if self._fmt.group else "")

    def _wrong_scale(
        self, at: tuple[int, int], scale: F32, words: str, expected: float | None = None
    ) -> None:
        name, value = self.scale_name, float(scale[at])
        self._report(Violation("scale", f"{name} {words}", name, at[0], None, expected, value))


def relative_errors(squares: F64) -> F64:
    """Relative RMS errors [rows] from sums of squared errors and source values [2, rows]."""
    error, source = squares
    with np.errstate(divide="ignore", invalid="ignore"):
        found: F64 = np.where(error == 0, 0.0, np.sqrt(error / source))
    return found


def _first(where: Bools) -> tuple[int, int]:
    row, column = np.argwhere(where)[0]
    return int(row), int(column)


def sum_of_squares(values: F32) -> float:
    """Sum in double precision: squares of weights near 1e-20 or 1e20 are no float32."""
    wide = values.astype(np.float64).reshape(-1)
    return float(np.vdot(wide, wide))


def _denormal(values: F32) -> Bools:
    tiny: Bools = (values != 0) & (np.abs(values) < np.finfo(np.float32).tiny)
    return tiny
