"""Writes one quantized matrix, reads it back and compares it with its source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ktconv.conversion.tasks import four_digits, write_tensor
from ktconv.errors import VerificationError
from ktconv.formats.decode import bf16_to_f32, f16_to_f32
from ktconv.system.arrays import F32, U16, Array
from ktconv.targets.pack_quantized.scheme import PARTS, Scheme
from ktconv.writer.staging import Staging

# Largest error allowed, in quantization steps. Rounding to the nearest level is off by half a step;
# scales and quotients in bf16 add to that. GPTQ moves weights on purpose: only values that are not
# finite are refused.
MOST_STEPS = {"rtn": 1.5, "gptq": float("inf")}
ELEMENTS_AT_ONCE = 1 << 20  # compared at once, which bounds memory
SMALLEST_BF16, SMALLEST_HALF = 2.0**-126, 2.0**-14  # of normal numbers


def write_matrix(
    staging: Staging,
    scheme: Scheme,
    method: str,
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
    rows, cols = weight.shape
    for tensor, part in zip(scheme.tensors(module, rows, cols, dtype), PARTS, strict=True):
        array = arrays.get(part)
        if array is None or array.shape != tensor.shape or array.nbytes != tensor.nbytes:
            found = "is missing" if array is None else f"has shape {list(array.shape)}"
            raise VerificationError(
                f"{tensor.name} should have shape {list(tensor.shape)}, but {found}: the "
                "installed llm-compressor packs differently than ktconv expects",
                "install the version that ktconv supports: pip install 'ktconv[gpu]'",
            )
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        records[tensor.name] = write_tensor(tensor.name, [data], staging, verify)
    name = f"{module}.weight_packed"
    records[name] |= error_of(scheme, method, name, arrays, weight, dtype == "F16")
    return records


def dequantized(scheme: Scheme, arrays: Mapping[str, Array], half: bool) -> F32:
    """The values [rows, cols] of a packed matrix, without llm-compressor's help."""
    rows, cols = (int(size) for size in arrays["weight_shape"])
    packed = np.ascontiguousarray(arrays["weight_packed"]).view(np.uint8)
    if scheme.bits == 4:
        levels = np.empty((rows, 2 * packed.shape[1]), np.uint8)
        levels[:, 0::2], levels[:, 1::2] = packed & 15, packed >> 4
    else:
        levels = packed
    values: F32 = levels[:, :cols].astype(np.float32) - np.float32(1 << (scheme.bits - 1))
    scales = (f16_to_f32 if half else bf16_to_f32)(arrays["weight_scale"])
    values.reshape(rows, scales.shape[1], -1)[:] *= scales[:, :, None]
    return values


def error_of(
    scheme: Scheme, method: str, name: str, arrays: Mapping[str, Array], source: U16,
    half: bool,
) -> dict[str, float]:  # fmt: skip
    """How far a packed matrix is from its source, bits [rows, cols], for the manifest.

    Raises VerificationError where it cannot be a rounding of it.
    """
    squared_error = squared_source = 0.0
    most_steps, zeros = 0.0, 0
    floats = f16_to_f32 if half else bf16_to_f32
    rows, cols = source.shape
    step = max(1, ELEMENTS_AT_ONCE // cols)
    for first in range(0, rows, step):
        here = slice(first, min(first + step, rows))
        part = {
            "weight_shape": np.array([here.stop - first, cols]),
            "weight_packed": arrays["weight_packed"][here],
            "weight_scale": arrays["weight_scale"][here],
        }
        value, wanted = dequantized(scheme, part, half), floats(source[here])
        off = np.abs(value - wanted)
        most_steps = max(most_steps, _most_steps(off, floats(part["weight_scale"]), half))
        squared_error += float(np.vdot(off, off))
        squared_source += float(np.vdot(wanted, wanted))
        zeros += int(np.count_nonzero(value == 0))
    if not most_steps <= MOST_STEPS[method] or not np.isfinite(squared_error):
        raise VerificationError(
            f"{name} is up to {most_steps:.4g} steps off its source, more than the "
            f"{MOST_STEPS[method]} allowed",
            "install the llm-compressor version that ktconv supports: pip install 'ktconv[gpu]'",
        )
    relative = (squared_error / squared_source) ** 0.5 if squared_source else 0.0
    return {
        "relative_rms_error": four_digits(relative),
        "max_error_steps": four_digits(most_steps),
        "zero_share": four_digits(zeros / source.size),
    }


def _most_steps(off: F32, scales: F32, half: bool) -> float:
    """The largest error of `off` [rows, cols] in steps, without denormal scales: these are too
    coarse for the bound."""
    steps = off.reshape(len(off), scales.shape[1], -1).max(axis=2)
    precise = scales >= (SMALLEST_HALF if half else SMALLEST_BF16)
    return float(np.max(steps[precise] / scales[precise], initial=0.0))
