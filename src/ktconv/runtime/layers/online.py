"""Experts quantized from arrays while they are loaded: by the converter's packer, without files.

experts = pack_online(gate, up, down, "int4", parts=2)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ktconv import native
from ktconv.errors import UsageError
from ktconv.formats import Format, Projection, Slice, format_named, matrix_shape, reference, split
from ktconv.native import Activation, Choice, PackedMatrix
from ktconv.native.rules import RULES
from ktconv.runtime.layers.experts import Experts
from ktconv.runtime.layers.filling import Bind, Packer, Shape, Wanted, fill_experts
from ktconv.runtime.layers.slots import Slots, slot_origins
from ktconv.system.arrays import F32, U16, Array

Stack = Array | Sequence[Array]  # the matrices of all experts: [E, rows, cols]
_DTYPES = {"uint16": "BF16", "float16": "F16", "float32": "F32"}


def pack_online(
    gate: Stack | None,
    up: Stack,
    down: Stack,
    method: str,
    *,
    parts: int = 1,
    activation: Activation | None = None,
    biases: tuple[Stack | None, Stack, Stack] | None = None,
    scale: str = "search",
    slots: Slots | None = None,
    bind: Bind | None = None,
    threads: int | None = None,
) -> Experts:
    """The experts of a layer in any weight format, from their weights in memory.

    gate and up [E, I, H], down [E, H, I], PyTorch's [out, in], each one array or a matrix for each
    expert: float32, float16, or uint16 for the bits of bf16. `gate` is None for an activation
    without one (None: SiLU). `biases`: those of gate, up and down, [E, I], [E, I] and [E, H], each
    expert's in float32.

    INT8, INT4 and group INT4 are quantized as quantize-cpu does by default, or with scale="amax" as
    KTransformers does: the same bytes. FP8 and MXFP4 are rounded to nearest under scales from the
    largest weight (docs/formats.md, 8); bf16 is rounded to nearest, so bits of bf16 stay.

    `slots`: see `slot_origins`. The memory of each part is given to `bind`, with the part's number,
    before anything is written to it; `threads` threads fill it (None: one per CPU), each with a few
    matrices more. Raises UsageError for arrays of other shapes or dtypes, a NaN or an infinity, an
    unknown method or scale, and a shape that the format does not allow.
    """
    fmt, chosen = format_named(method), activation or Activation()
    if scale not in RULES:
        raise UsageError(f"unknown rule for scales {scale!r}", f"available: {', '.join(RULES)}")
    given = _Given(gate, up, down, biases)
    given.check(chosen)
    shape = Shape(fmt, given.hidden, given.intermediate, parts, chosen)
    origins = slot_origins(slots, given.count)
    pack_part = _quantizer(fmt, scale)

    def pack(wanted: Wanted) -> F32 | None:
        _pack(given, wanted, fmt, pack_part)
        return given.bias(wanted.expert, wanted.proj)

    def packer() -> Packer:
        return pack

    return fill_experts(shape, origins, packer, bind, threads)


class _Given:
    """The arrays of a layer."""

    def __init__(
        self,
        gate: Stack | None,
        up: Stack,
        down: Stack,
        biases: tuple[Stack | None, Stack, Stack] | None,
    ) -> None:
        stacks: dict[Projection, Stack | None] = {"gate": gate, "up": up, "down": down}
        self.stacks = {proj: stack for proj, stack in stacks.items() if stack is not None}
        own = dict(zip(stacks, biases, strict=True)) if biases else {}
        self._biases = {proj: one for proj, one in own.items() if one is not None}
        self.count = len(up)
        if not self.count or np.ndim(up[0]) != 2:
            raise UsageError(
                f"up must have a matrix for each expert, not {_described(up)}",
                "give arrays [experts, intermediate size, hidden size]",
            )
        self.intermediate, self.hidden = (int(size) for size in up[0].shape)

    def check(self, activation: Activation) -> None:
        """UsageError unless shapes and dtypes belong together."""
        if activation.gated != ("gate" in self.stacks):
            raise UsageError(
                f"experts with the activation {activation.function} have "
                f"{'a' if activation.gated else 'no'} gate",
                "give gate for activations that need it, else None",
            )
        for proj, stack in self.stacks.items():
            _expect(proj, stack, self.count, self._shape(proj), _DTYPES)
        for proj, bias in self._biases.items():
            if proj not in self.stacks:
                raise UsageError(f"there is a bias of {proj}, but no {proj}", "omit it")
            _expect(f"the bias of {proj}", bias, self.count, self._shape(proj)[:1], ("float32",))

    def _shape(self, proj: Projection) -> tuple[int, int]:
        return matrix_shape(proj, self.hidden, self.intermediate)

    def matrix(self, expert: int, proj: Projection) -> Array:
        """[rows, cols], contiguous."""
        return np.ascontiguousarray(self.stacks[proj][expert])

    def bias(self, expert: int, proj: Projection) -> F32 | None:
        """[rows], as it is now: the caller may change his arrays afterwards."""
        if proj not in self._biases:
            return None
        return np.array(self._biases[proj][expert], np.float32)


def _expect(
    what: str, stack: Stack, count: int, shape: tuple[int, ...], dtypes: Sequence[str] | Any
) -> None:
    wrong = len(stack) != count
    for one in stack if not isinstance(stack, np.ndarray) else stack[:1]:
        wrong |= one.shape != shape or one.dtype.name not in dtypes
    if wrong:
        raise UsageError(
            f"{what} must have {count} arrays {list(shape)} in {' or '.join(dtypes)}, not "
            f"{_described(stack)}",
            "uint16 are the bits of bf16; convert other dtypes first",
        )


def _described(stack: Stack) -> str:
    if isinstance(stack, np.ndarray):
        return f"{stack.dtype.name} {list(stack.shape)}"
    kinds = dict.fromkeys(f"{one.dtype.name} {list(one.shape)}" for one in stack)
    return f"{len(stack)} of {', '.join(kinds) or 'nothing'}"


# Packs the rows and columns of a part of a matrix into its place.
_PartPacker = Callable[[Array, Slice, PackedMatrix], None]


def _pack(given: _Given, wanted: Wanted, fmt: Format, pack_part: _PartPacker) -> None:
    matrix, parts = given.matrix(wanted.expert, wanted.proj), len(wanted.places)
    for part, place in enumerate(wanted.places):
        owned = split(wanted.proj, given.hidden, given.intermediate, part, parts)
        try:
            pack_part(matrix, owned, place)
        except native.NonFiniteError as error:
            row, col = owned.row_start + error.row, owned.col_start + error.col
            found, value = "a NaN or an infinity", matrix[row, col]
            if matrix.dtype != np.uint16 and np.isfinite(value):
                found = f"a number beyond {fmt.key}, {value:g},"
            raise UsageError(
                f"{wanted.proj} of expert {wanted.expert} has {found} at row {row}, column {col}",
                "give finite weights",
            ) from None


def _quantizer(fmt: Format, scale: str) -> _PartPacker:
    """Quantizer of a part: the C library's where it has one, else the reference. It raises
    NonFiniteError."""
    choice = Choice(scale)

    def fused(matrix: Array, part: Slice, place: PackedMatrix) -> None:
        assert place.scale is not None
        view = _view(matrix, part)
        native.quantize_pack(fmt.layout, view, place.codes, place.scale, choice=choice)

    def plain(matrix: Array, part: Slice, place: PackedMatrix) -> None:
        if fmt.code == "bf16":
            codes, stored = _bf16(matrix, part), None
        else:
            codes, stored = _quantized(fmt, matrix, part)
        packed = native.pack_weight(fmt.layout, *part.shape, codes, stored, place.codes)
        if place.scale is not None:
            place.scale[:] = packed

    return fused if fmt.traits.max_level else plain


def _bf16(matrix: Array, part: Slice) -> U16:
    """Bits, rounded to nearest."""
    if matrix.dtype == np.uint16:
        bits = np.ascontiguousarray(matrix[part.index])
    else:
        rounded = native.decode(_view(matrix, part, round_to_bf16=True))
        bits = np.ascontiguousarray(rounded.view(np.uint16)[:, 1::2])
    _expect_finite(bits & np.uint16(0x7F80) != 0x7F80)
    return bits


def _quantized(fmt: Format, matrix: Array, part: Slice) -> tuple[Array, Array]:
    """Plain codes and scales."""
    values = native.decode(_view(matrix, part))
    _expect_finite(np.isfinite(values))
    return reference.quantize(fmt, values)


def _expect_finite(finite: Array) -> None:
    if not finite.all():
        raise native.NonFiniteError(*(int(i) for i in np.argwhere(~finite)[0]))


def _view(matrix: Array, part: Slice, round_to_bf16: bool = False) -> native.Matrix:
    return native.Matrix(
        matrix.view(np.uint8).reshape(-1),
        _DTYPES[matrix.dtype.name],
        *part.shape,
        start=part.row_start * matrix.shape[1] + part.col_start,
        row_stride=matrix.shape[1],
        round_to_bf16=round_to_bf16,
    )
