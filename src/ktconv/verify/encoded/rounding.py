"""Whether packed levels are a rounding of their source, by the rule of compressed-tensors.

Symmetric, b bits, one scale per group, u the precision of scales (bf16: 2^-8):

    scale = largest |w| of the group / (2^b - 1) * 2, rounded to the precision of scales
            (the smallest number eps for which 1 + eps differs, where that is 0)
    level = w / scale, rounded to the same precision, cut to -2^(b-1) ... 2^(b-1) - 1,
            rounded to the nearest integer, halves to the even one

So the largest positive weight, 7.5 or 127.5 steps, becomes level 7 or 127: half a step is lost by
the cut, and up to 2^b / 2 * u more because the scale may have been rounded down. A quotient
between 2^k and 2^(k+1) is off by at most 2^k * u before it is rounded again. Largest errors in
steps follow from both:

    W4A16 in bf16: max(0.5 + 4 u, 7.5 (1 + u) - 7)     = 0.5293
    W8A16 in bf16: max(0.5 + 64 u, 127.5 (1 + u) - 127) = 0.9981

That bound would let some wrong levels pass. Levels are therefore computed again where an element
is near it; a level is right if the exact quotient, or one within 2^-21 of it (GPUs divide less
exactly), rounds to it. GPTQ moves weights to compensate the errors of others: no element has a
bound then, but a whole matrix has.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from ktconv import native
from ktconv.formats.decode import rounded
from ktconv.system.arrays import F32, I8, Bools
from ktconv.targets.packed.matrix_check import ErrorStats, Violation, sum_of_squares
from ktconv.verify.encoded.quantization import Group
from ktconv.verify.encoded.unpack import values

NAMED = 3  # reported elements of some rows
AT_ONCE = 1 << 16  # elements that are compared at once: they stay in the cache
SLOP = 2.0**-21  # relative, of quotients
# Of a whole matrix where elements have no bound. Rounding to nearest gives about 0.11 (4 bits,
# groups of 128) and 0.3 steps, GPTQ 0.14 and 0.4; another matrix' levels give 1.4 and more than 3.
MOST_RELATIVE_ERROR = 0.5
MOST_RMS_STEPS = 2.0
UNIT = {"BF16": 2.0**-8, "F16": 2.0**-11, "F32": 2.0**-24}  # what rounding adds, relative

# Scales below are rounded more coarsely: their levels are computed again, but have no bound.
SMALLEST_NORMAL = {"BF16": 2.0**-126, "F16": 2.0**-14, "F32": 2.0**-126}


class Rules(Struct, frozen=True):
    """Checks that are possible for a matrix, by how it was made."""

    elements: bool  # every level is its weight's, rounded to nearest
    scales: bool  # every scale follows from the largest weight of its group


def rules_of(method: str, ours: bool) -> Rules:
    """GPTQ chooses scales before it moves weights, as ktconv runs it; others may not."""
    return Rules(method == "rtn", method == "rtn" or (method == "gptq" and ours))


def bound_steps(group: Group, dtype: str = "BF16") -> float:
    """The largest error in steps that rounding to nearest can make."""
    unit, half = UNIT[dtype], group.half_range
    return max(0.5 + (group.max_level + 1) / 2 * unit, half * (1 + unit) - group.max_level)


class RoundingCheck(Struct):
    """Checks one matrix, whose rows may come in pieces."""

    group: Group
    rules: Rules
    dtype: str  # of the scales
    module: str
    where: str  # "layer 3, expert 5, up": for messages
    report: Callable[[Violation], None]
    codes: str = "weight_packed"  # last components of the tensors' names
    scales: str = "weight_scale"
    quotients: str = ""  # the precision of quotients, if it is not that of scales
    sums: ErrorStats = field(default_factory=ErrorStats)
    squared_steps: float = 0.0

    def compare(self, source: F32, level: I8, scale: F32, first: int) -> None:
        """Rows from `first` on: weights and levels [rows, cols], scales [rows, groups]."""
        rows = max(1, AT_ONCE // source.shape[1])
        with np.errstate(all="ignore"):
            for start in range(0, len(source), rows):
                here = slice(start, start + rows)
                self._compare(source[here], level[here], scale[here], first + start)

    def accepts(self, found: native.EncodedAudit, elements: int) -> bool:
        """Whether the C library has found nothing wrong with some rows, which then count; else they
        are compared here, where what is wrong gets a name, and what only other hardware rounds
        otherwise does not."""
        if found.other_codes or found.other_scales:
            return False
        self.sums.add(ErrorStats(*found[:5], elements))
        return True

    def _compare(self, source: F32, level: I8, scale: F32, first: int) -> None:
        sound = self._scales(source, scale, first)
        value = values(level, scale)
        error = source - value
        zeros = int(level.size - np.count_nonzero(level))
        of_source, of_error, of_value = map(sum_of_squares, (source, error, value))
        self.sums.add(ErrorStats(of_source, of_error, of_value, 0.0, zeros, level.size))
        steps = np.abs(error, out=error).reshape(*scale.shape, -1)
        steps /= scale[:, :, None]
        steps[~sound] = 0
        flat = steps.reshape(source.shape)
        normal = scale >= SMALLEST_NORMAL[self.dtype]
        largest = float(steps.max(axis=2)[normal].max(initial=0))
        self.sums.max_steps = max(self.sums.max_steps, largest)
        self.squared_steps += sum_of_squares(flat)
        if not np.isfinite(source).all():
            self._name_source(source, first)
        elif self.rules.elements:
            self._elements(source, level, scale, flat, first)

    def finish(self) -> ErrorStats:
        """Errors of the whole matrix, which are checked where elements have no bound."""
        if self.rules.elements:
            return self.sums
        relative = self.sums.as_dict()["relative_rms_error"]
        steps = math.sqrt(self.squared_steps / max(1, self.sums.elements))
        for found, most, words in (
            (relative, MOST_RELATIVE_ERROR, "of its norm"),
            (steps, MOST_RMS_STEPS, "steps on average"),
        ):
            if not found <= most:
                message = f"differs from its source by {found:.4g} {words}"
                self._violation("error", f"{message}, where {most:g} is expected.", value=found)
                break
        return self.sums

    # ---- scales ----

    def _scales(self, source: F32, scale: F32, first: int) -> Bools:
        """Groups with a usable scale. Reports unusable and wrong ones."""
        sound: Bools = np.isfinite(scale) & (scale > 0)
        if not sound.all():
            row, group = (int(i) for i in np.argwhere(~sound)[0])
            value = scale[row, group]
            words = f"is {value} at [{first + row}, {group}]: scales are finite and positive."
            self._violation("scale", words, first + row, group, value=float(value))
        if self.rules.scales:
            widest = np.abs(source).reshape(*scale.shape, -1).max(axis=2).astype(np.float64)
            exact = widest / self.group.half_range
            low, high = (self._scale(exact * (1 + slop)) for slop in (-SLOP, SLOP))
            wrong = sound & np.isfinite(widest) & ((scale < low) | (scale > high))
            if wrong.any():
                row, group = (int(i) for i in np.argwhere(wrong)[0])
                value, expected = float(scale[row, group]), float(high[row, group])
                words = (
                    f"is {value:.9g} at [{first + row}, {group}], but the largest weight of the "
                    f"group makes {expected:.9g} ({int(wrong.sum())} scales differ)."
                )
                about = {"source_value": expected, "value": value}
                self._violation("scale", words, first + row, group, **about)
        return sound

    def _scale(self, exact: NDArray[np.float64]) -> F32:
        rounded = self._round(exact)
        return np.where(rounded == 0, np.float32(2 * UNIT[self.dtype]), rounded)

    def _round(self, exact: NDArray[np.float64]) -> F32:
        """Rounds to the precision of scales, by way of float32 as hardware divides."""
        return rounded(exact.astype(np.float32), self.dtype)

    # ---- elements ----

    def _elements(self, source: F32, level: I8, scale: F32, steps: F32, first: int) -> None:
        """Rounds elements again that are about half a step off."""
        unit = np.float32(UNIT[self.dtype])
        off = level.astype(np.float32)
        np.abs(off, out=off)
        off *= unit
        off += steps
        rows, cols = divmod(np.flatnonzero(off > np.float32(0.5) - 2 * unit), source.shape[1])
        if not len(rows):
            return
        width = source.shape[1] // scale.shape[1]
        chosen = scale[rows, cols // width].astype(np.float64)
        exact = source[rows, cols].astype(np.float64) / chosen
        one, other = (self._level(exact * (1 + slop)) for slop in (-SLOP, SLOP))
        got = level[rows, cols]
        wrong = (got < np.minimum(one, other)) | (got > np.maximum(one, other))
        wrong &= np.isfinite(chosen) & (chosen > 0)
        found = np.flatnonzero(wrong)
        order = np.argsort(steps[rows[found], cols[found]])[::-1][:NAMED]
        for index in found[order]:
            row, col = int(rows[index]), int(cols[index])
            value = float(got[index]) * float(chosen[index])
            error = float(steps[row, col])
            expected = float(source[row, col])
            words = (
                f"[{first + row}, {col}] is {expected:.9g} in the source, but {value:.9g} here: "
                f"level {got[index]} where rounding makes {one[index]:g}, {error:.4g} steps off "
                f"({len(found)} levels of these rows are wrong)."
            )
            about = {"source_value": expected, "value": value, "steps": error}
            self._violation("element", words, first + row, col, **about)

    def _level(self, exact: NDArray[np.float64]) -> F32:
        top = self.group.max_level
        quotient = exact.astype(np.float32) if self.quotients == "F32" else self._round(exact)
        found: F32 = np.rint(np.clip(quotient, -top - 1, top))
        return found

    def _name_source(self, source: F32, first: int) -> None:
        row, col = (int(i) for i in np.argwhere(~np.isfinite(source))[0])
        words = f"has a source that contains {source[row, col]} at [{first + row}, {col}]."
        self._violation("source", words, first + row, col)

    def _violation(
        self,
        check: str,
        words: str,
        row: int | None = None,
        column: int | None = None,
        **values: float,
    ) -> None:
        """Reports a Violation of a tensor: of its scales if that is what was checked."""
        name = f"{self.module}.{self.scales if check == 'scale' else self.codes}"
        message = f"{name} ({self.where}) {words}"
        self.report(Violation(check, message, name, row, column, **values))
