"""Levels structure and weights for experts of every format but pack-quantized integers, and for
those whose codes are the source's: checksums, every scale and every code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ktconv import native
from ktconv.formats.decode import f32_to_bf16
from ktconv.quantize.encoded.deviation import audit
from ktconv.quantize.encoded.passing import kept_scales
from ktconv.quantize.encoded.stored import scale_values, second_scale, tensor_scale
from ktconv.quantize.encoded.task import largest_of
from ktconv.source import ExpertMatrix, Projection
from ktconv.source.reading.buffers import Buffers
from ktconv.source.reading.matrices import MatrixReader
from ktconv.system.arrays import F32, U8, Bools
from ktconv.targets.encoded.kept import is_kept
from ktconv.targets.encoded.scheme import Scheme
from ktconv.targets.encoded.target import weight_dtype
from ktconv.targets.packed.matrix_check import ErrorStats, Violation, sum_of_squares
from ktconv.verify.encoded import nearest
from ktconv.verify.encoded.module_check import ModuleCheck
from ktconv.verify.encoded.quantization import Group
from ktconv.verify.encoded.rounding import RoundingCheck, Rules
from ktconv.verify.encoded.stored import StoredParts, stored_parts
from ktconv.verify.encoded.unpack import levels
from ktconv.verify.reading import TensorStream
from ktconv.verify.second_reader.numbers import E4M3

LEVEL = "weights"
NAMED = 3  # wrong codes and scales of some rows
_SLOP = 1e-6  # relative, of values whose second scale is a reciprocal


class EncodedCheck(ModuleCheck, frozen=True):
    """The tensors of one projection of one expert in a format that the C library encodes."""

    scheme: Scheme
    requantized: bool  # codes of the source were not kept

    def _is_sound(self, matrix: ExpertMatrix) -> bool:
        half = weight_dtype(matrix) == "F16"
        planned = self.scheme.layout.tensors(
            self.module.name, self.scheme.sizes(matrix.rows, matrix.cols, half)
        )
        parts = self.module.parts
        return self.module.whole and all(
            (parts[part].dtype, parts[part].shape) == (tensor.dtype, tensor.shape)
            for part, tensor in zip(self.scheme.layout.parts, planned, strict=True)
        )

    # ---- comparing ----

    def _compare(
        self, matrix: ExpertMatrix, streams: Mapping[str, TensorStream], buffers: Buffers
    ) -> ErrorStats:
        scheme, layout, parts = self.scheme, self.scheme.layout, self.module.parts
        read = {
            part: streams[part].read(np.empty(parts[part].nbytes, np.uint8))
            for part in layout.parts[1:]
        }
        stored = stored_parts(scheme, self.module, matrix, read)
        kept = scheme.encodes and not self.requantized
        kept = kept and is_kept(scheme, matrix, stored.half)
        if not (kept and stored.zeros is not None):  # else values show them
            self._constant_parts(stored, read)
        if scheme.row.kind == "nvfp4":
            self._second_scale(stored.factor, matrix, kept)
        rounded = scheme.row.is_int and not (stored.half and scheme.is_half(stored.half))
        source = MatrixReader(self.context.reader, matrix, round_to_bf16=rounded and not kept)
        reading = self._reading(source)
        whole = None
        if not layout.streamed:
            data = streams[layout.parts[0]].read(np.empty(parts[layout.parts[0]].nbytes, np.uint8))
            whole = layout.codes(data, stored.sizes)
        sums = ErrorStats()
        for chunk, view in source.views(buffers.source, buffers.bounce):
            if whole is not None:
                codes = whole[chunk.start : chunk.stop].reshape(-1)
            else:
                size = len(chunk) * stored.sizes.row_bytes
                codes = streams[layout.parts[0]].read(np.empty(size, np.uint8))
            if reading:
                reading.decoded(chunk, native.decode(view), source.round_to_bf16)
            sums.add(self._rows(stored, chunk, view, codes, kept))
        return sums

    def _second_scale(self, found: float, matrix: ExpertMatrix, kept: bool) -> None:
        """Check that the second scale has the very bits that the largest weight makes, or the
        source has: codes and scales alone leave some of them open."""
        reader, scheme = self.context.reader, self.scheme
        if kept:
            wanted = kept_scales(scheme, MatrixReader(reader, matrix), half=False)[1]
        else:
            wanted = second_scale(scheme, largest_of(reader, matrix))
            if wanted != found:  # of gate and up, which engines compute as one, the larger counts
                wanted = second_scale(scheme, self._largest_together())
        if wanted != found:
            part = scheme.layout.parts[-1]
            name = f"{self.module.name}.{part}"
            words = f"{name} ({self._where}) is {found!r}, but its source makes {wanted!r}."
            self._report(Violation("scale", words, name, source_value=wanted, value=found))

    def _largest_together(self) -> float:
        """The largest magnitude of the matrices that share a second scale."""
        where, layer, reader = self.module.where, self.source, self.context.reader
        assert where is not None and layer is not None
        together: Sequence[Projection] = ("down",) if where.proj == "down" else ("gate", "up")
        found = layer.experts[where.expert]
        return max(largest_of(reader, found[proj]) for proj in together if proj in found)

    def _constant_parts(self, stored: StoredParts, read: Mapping[str, U8]) -> None:
        """Parts that are the same for every matrix of a shape: zero points, order of groups."""
        layout = self.scheme.layout
        scales = stored.scales
        if not self.scheme.row.is_int:
            return
        expected = layout.others(stored.sizes, scales.view(np.uint16), stored.factor)
        for part, array in expected.items():
            if part == layout.scale_part:
                continue
            bytes_of = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            if not np.array_equal(read[part], bytes_of):
                tensor = self.module.parts[part]
                words = "has other numbers than symmetric weights in order have"
                self.context.findings.fail_tensor(
                    LEVEL, "constant", tensor.name, tensor.file, words, **self.module.at
                )

    def _rows(
        self, stored: StoredParts, chunk: range, view: native.Matrix, codes: U8, kept: bool
    ) -> ErrorStats:
        """Compares some rows."""
        if kept:
            return self._kept(stored, chunk, native.decode(view), codes)
        if self.scheme.search:
            self._searched(stored, chunk, view)
        proved = self._proved(stored, chunk, view, codes)
        if proved is not None:
            return proved
        if not self.scheme.encodes:
            return self._plain(chunk, native.decode(view), codes)
        return self._named(stored, chunk, native.decode(view), codes)

    def _proved(
        self, stored: StoredParts, chunk: range, view: native.Matrix, codes: U8
    ) -> ErrorStats | None:
        """Compare with the C library, where it takes the shape and finds nothing wrong."""
        scheme, scales = self.scheme, stored.scales_of(chunk)
        encoding = scheme.encoding(stored.half)
        second = tensor_scale(scheme, stored.factor)
        found = audit(encoding, view, codes, scales.reshape(-1), second)
        if found is None or found.other_codes or found.other_scales:
            return None
        return ErrorStats(*found[:5], view.rows * view.cols)

    def _plain(self, chunk: range, weights: F32, codes: U8) -> ErrorStats:
        bits = f32_to_bf16(weights)
        found = codes.view(np.uint16).reshape(bits.shape)
        self._wrong(found != bits, chunk, "is not its source rounded to bf16")
        values = (found.astype(np.uint32) << 16).view(np.float32)
        return _sums(weights, values)

    def _kept(self, stored: StoredParts, chunk: range, weights: F32, codes: U8) -> ErrorStats:
        values = native.decode(stored.matrix(chunk, codes))
        equal = values.view(np.uint32) == weights.view(np.uint32)
        if self.scheme.row.kind == "nvfp4":
            equal |= np.isclose(values, weights, rtol=_SLOP, atol=0)
        self._wrong(~equal, chunk, "is not the source's number, which has this format already")
        return _sums(weights, values)

    def _named(self, stored: StoredParts, chunk: range, weights: F32, codes: U8) -> ErrorStats:
        """Compare element by element, and name the wrong ones."""
        scheme, row = self.scheme, self.scheme.row
        scales = stored.scales_of(chunk)
        if row.is_int:
            return self._integers(stored, chunk, weights, codes)
        divisor = _spread(scheme, self._divisors(stored, scales), weights.shape)
        here = scales.view(np.float32) if row.kind == "fp8" else scales
        largest = _largest(scheme, weights)
        wanted = nearest.expected_scales(
            row.kind, largest, tensor_scale(scheme, stored.factor)
        ).reshape(largest.shape)
        here = here.reshape(largest.shape)
        for at in np.argwhere(here != wanted)[:NAMED]:
            place = int(chunk.start // row.block + at[0]), int(at[1])
            words = (
                f"is {here[tuple(at)]} at {list(place)}, but the largest weight of its group "
                f"makes {wanted[tuple(at)]}"
            )
            self._violation("scale", words, chunk.start + int(at[0]) * row.block, None, scales=True)
        found = nearest.compare(row.kind, weights, codes, divisor)
        self._wrong(found.wrong, chunk, "is not the nearest code")
        return found.sums

    def _divisors(self, stored: StoredParts, scales: U8) -> F32:
        """Divisors of weights: a second scale that is multiplied was a divisor first."""
        second = tensor_scale(self.scheme, stored.factor)
        if not second:
            return scale_values(self.scheme, scales, stored.half)
        found: F32 = E4M3[scales] / np.float32(second)
        return found

    def _integers(self, stored: StoredParts, chunk: range, weights: F32, codes: U8) -> ErrorStats:
        """Compare by the rule of compressed-tensors, from its definition."""
        scheme, layout, half = self.scheme, self.scheme.layout, self.scheme.is_half(stored.half)
        size = scheme.group_size if scheme.group_size > 0 else None
        check = RoundingCheck(
            Group(scheme.name, [], scheme.bits, size, ""),
            Rules(elements=True, scales=not scheme.search),
            "F16" if half else "BF16",
            self.module.name,
            self._where,
            self._report,
            codes=layout.parts[0],
            scales=str(layout.scale_part),
            quotients="F32" if scheme.search else "",
        )
        scale = scale_values(scheme, stored.scales_of(chunk), stored.half).reshape(len(chunk), -1)
        level = levels(codes.reshape(-1), len(chunk), weights.shape[1], scheme.bits)
        check.compare(weights, level, scale, chunk.start)
        return check.finish()

    def _searched(self, stored: StoredParts, chunk: range, view: native.Matrix) -> None:
        """Check that scales are those that the search finds, which is done again: by the code that
        wrote them, whose tests hold it against its specification."""
        encoding = self.scheme.encoding(stored.half)
        _, wanted = native.encode(encoding, view)
        found = stored.scales_of(chunk).view(wanted.dtype).reshape(wanted.shape)
        for row, group in np.argwhere(found != wanted)[:NAMED]:
            at = chunk.start + int(row), int(group)
            words = f"is not the scale at {list(at)} that the search finds"
            self._violation("scale", words, at[0], None, scales=True)

    # ---- reporting ----

    def _wrong(self, wrong: Bools, chunk: range, words: str) -> None:
        count = int(np.count_nonzero(wrong))
        for row, col in np.argwhere(wrong)[:NAMED] if count else ():
            more = f" ({count} of these rows are wrong)"
            at = chunk.start + int(row), int(col)
            self._violation("element", f"{words} at {list(at)}{more}", *at)

    def _violation(
        self, check: str, words: str, row: int | None, column: int | None, scales: bool = False
    ) -> None:
        part = self.scheme.layout.scale_part if scales else self.scheme.layout.parts[0]
        name = f"{self.module.name}.{part}"
        self._report(Violation(check, f"{name} ({self._where}) {words}.", name, row, column))


def _spread(scheme: Scheme, values: F32, shape: tuple[int, int]) -> F32:
    """Scales [rows, cols] of elements."""
    rows, cols = shape
    block, width = scheme.row.block, scheme.group_size if scheme.group_size > 0 else cols
    grid = values.reshape(-(-rows // block), -1)
    found: F32 = np.repeat(np.repeat(grid, block, axis=0)[:rows], width, axis=1)[:, :cols]
    return found


def _largest(scheme: Scheme, weights: F32) -> F32:
    """Largest magnitudes of groups or blocks."""
    rows, cols = weights.shape
    block, width = scheme.row.block, scheme.group_size if scheme.group_size > 0 else cols
    grouped = np.abs(weights).reshape(rows, -1, width).max(axis=2)
    starts = np.arange(0, rows, block)
    found: F32 = np.maximum.reduceat(grouped, starts, axis=0)
    return found


def _sums(weights: F32, values: F32) -> ErrorStats:
    of_source, of_error, of_values = map(sum_of_squares, (weights, weights - values, values))
    zeros = int(np.count_nonzero(values == 0))
    return ErrorStats(of_source, of_error, of_values, 0.0, zeros, weights.size)
