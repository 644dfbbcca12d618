"""Deviation of quantized matrices from their sources; writing those that are whole in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ktconv import native
from ktconv.conversion.tasks import write_tensor
from ktconv.errors import CheckpointError, VerificationError
from ktconv.quantize.encoded.stored import scale_values, stored_matrix, tensor_scale
from ktconv.system.arrays import U8, U16, Array
from ktconv.targets.encoded.layouts.packed import PACK_QUANTIZED
from ktconv.targets.encoded.scheme import Scheme
from ktconv.targets.packed.matrix_check import ErrorStats
from ktconv.writer.staging import Staging

# Largest error allowed, in quantization steps. Rounding to the nearest level is off by half a step;
# scales and quotients in bf16 add to that. GPTQ moves weights on purpose: only values that are not
# finite are refused. So does a search, which cuts weights on purpose.
MOST_STEPS = {"rtn": 1.5, "gptq": float("inf")}
_KEPT_ERROR = 1e-12  # relative, of squares: a second scale may be turned into its reciprocal
SMALLEST_BF16, SMALLEST_HALF = 2.0**-126, 2.0**-14  # of normal numbers
_WAYS_OUT = {
    "rtn": "check this machine's memory and disk, then run the same command again",
    "gptq": "install the llm-compressor version that ktconv supports: pip install 'ktconv[gpu]'",
}


class Deviation:
    """The error of a matrix, some rows after the other."""

    def __init__(
        self,
        scheme: Scheme,
        method: str,
        name: str,
        half: bool,
        factor: float = 0.0,
        keeps: bool = False,
    ) -> None:
        """`name`: of the tensor, for messages; `half`: whether the source's weights are f16;
        `factor`: the second scale as it is stored; `keeps`: codes and scales are the source's."""
        self._scheme, self._method, self._name = scheme, method, name
        self._half, self._factor, self._keeps = half, factor, keeps
        self._sums = ErrorStats()

    def add(self, source: native.Matrix, codes: U8, scales: Array, zeros: U8 | None = None) -> None:
        """The next rows: their source, codes as bytes, scales as kt_encode leaves them, and codes
        that mean 0, see `stored_matrix`.

        Raises VerificationError where they cannot be a rounding of it, CheckpointError for weights
        that the format has no finite number for.
        """
        scheme, found = self._scheme, None
        if not self._keeps:
            factor = tensor_scale(scheme, self._factor)
            found = audit(scheme.encoding(self._half), source, codes, scales, factor)
        if found is not None:
            self.add_audit(found, source.rows * source.cols)
        else:
            self._add(self._compared(source, codes, scales, zeros), source.rows * source.cols)

    def add_audit(self, found: native.EncodedAudit, elements: int) -> None:
        """The next rows, as the C library has compared them. Raises as `add` does."""
        if self._method == "rtn":
            self._check_rounding(found)
        self._add(found, elements)

    def _add(self, found: native.EncodedAudit, elements: int) -> None:
        if self._method == "rtn" and math.isinf(found.squared_error):
            self._refuse_infinite(found.squared_source)
        sums = self._sums
        sums.add(ErrorStats(*found[:5], elements))
        most = math.inf if self._scheme.search else MOST_STEPS[self._method]
        if not sums.max_steps <= most or not np.isfinite(sums.squared_error):
            self._refuse(
                f"it is up to {sums.max_steps:.4g} steps off its source, more than the {most} "
                "allowed"
            )
        if self._keeps and sums.squared_error > _KEPT_ERROR * sums.squared_source:
            self._refuse("it is not what its source is, although its codes are kept")

    def _compared(
        self, source: native.Matrix, codes: U8, scales: Array, zeros: U8 | None
    ) -> native.EncodedAudit:
        """Errors in NumPy: of shapes that the C library does not take, and kinds of numbers that
        it does not compare."""
        scheme, codes, most = self._scheme, codes.reshape(source.rows, -1), 0.0
        stored = stored_matrix(scheme, codes, scales, source.cols, self._half, self._factor, zeros)
        found, wanted = native.decode(stored), native.decode(source)
        off = (found - wanted).astype(np.float64)
        if scheme.row.is_int and not self._keeps:
            step = scale_values(scheme, scales, self._half)
            steps = np.abs(off).reshape(*step.shape, -1).max(axis=2)
            precise = step >= (SMALLEST_HALF if scheme.is_half(self._half) else SMALLEST_BF16)
            most = float(np.max(steps[precise] / step[precise], initial=0.0))
        nothing = int(np.count_nonzero(found == 0))
        wanted_squares = float(np.vdot(wanted.astype(np.float64), wanted))
        return native.EncodedAudit(
            wanted_squares, float(np.vdot(off, off)), 0.0, most, nothing, 0, 0
        )

    def _check_rounding(self, found: native.EncodedAudit) -> None:
        for wrong, what in (
            (found.other_scales, "scales are not those of its source's weights"),
            (found.other_codes, "codes are not its source's weights, rounded to nearest"),
        ):
            if wrong:
                self._refuse(f"{wrong} {what}")

    def _refuse_infinite(self, squared_source: float) -> None:
        """CheckpointError for weights whose nearest codes stand for infinity: some levels of MXFP4
        and of integers are beyond the largest weight."""
        if math.isfinite(squared_source):
            raise CheckpointError(
                f"{self._name} would have infinite weights: those of its source are close to the "
                f"largest float32, and {self._scheme.name} has no finite number near them",
                "use another format, such as --method fp8 or bf16",
            )

    def _refuse(self, why: str) -> None:
        raise VerificationError(f"{self._name} is wrong: {why}", _WAYS_OUT[self._method])

    def finish(self) -> dict[str, float]:
        """Record for the manifest."""
        return self._sums.record()


def write_matrix(
    staging: Staging,
    scheme: Scheme,
    module: str,
    weight: U16,
    arrays: Mapping[str, Array],
    dtype: str,
    verify: bool,
) -> dict[str, Any]:
    """Write the three tensors of a quantized matrix; what the manifest records of each.

    `weight`: the source, bits [rows, cols] of `dtype`. `arrays`: weight_packed int32, weight_scale
    (two-byte floats as uint16), weight_shape int64. Raises VerificationError where one has another
    shape than planned, differs when read back, or cannot be a rounding of the source.
    """
    records: dict[str, Any] = {}
    written: dict[str, U8] = {}
    rows, cols = weight.shape
    for tensor, part in zip(
        scheme.tensors(module, rows, cols, dtype), PACK_QUANTIZED.parts, strict=True
    ):
        array = arrays.get(part)
        if array is None or array.shape != tensor.shape or array.nbytes != tensor.nbytes:
            found = "is missing" if array is None else f"has shape {list(array.shape)}"
            raise VerificationError(
                f"{tensor.name} should have shape {list(tensor.shape)}, but {found}: the "
                "installed llm-compressor packs differently than ktconv expects",
                "install the version that ktconv supports: pip install 'ktconv[gpu]'",
            )
        written[part] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        records[tensor.name] = write_tensor(tensor.name, [written[part]], staging, verify)
    name = f"{module}.weight_packed"
    deviation = Deviation(scheme, "gptq", name, dtype == "F16")
    source = native.Matrix(
        np.ascontiguousarray(weight).reshape(-1).view(np.uint8), dtype, rows, cols
    )
    scales = written["weight_scale"].view(np.uint16).reshape(rows, -1)
    deviation.add(source, written["weight_packed"], scales)
    records[name] |= deviation.finish()
    return records


_WHOLE = 32  # columns and groups, and rows of sources [in, out], are multiples of this


def audit(
    encoding: native.Encoding, source: native.Matrix, codes: U8, scales: Array, tensor_scale: float
) -> native.EncodedAudit | None:
    """None for a shape that it does not compare."""
    if not is_compared(encoding, source.rows, source.cols, source.c.col_stride != 1):
        return None
    return native.audit_encoded(encoding, source, codes, scales, tensor_scale)


def is_compared(encoding: native.Encoding, rows: int, cols: int, across: bool) -> bool:
    """Whether the C library compares matrices of this shape; `across`: stored column by column."""
    grouped = encoding.group % _WHOLE and encoding.kind != "nvfp4"
    return not (cols % _WHOLE or grouped or (across and rows % _WHOLE))
