"""Levels 1 and 2 in one pass over the bytes: checksums, copies, matrices against their source.

Unpacking is the audit's (native/src/audit), which shares no code with the packer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from ktconv import native
from ktconv.checkpoint import MoELayer, TensorRef
from ktconv.formats import (
    FORMATS,
    KINDS,
    PROJECTIONS,
    Format,
    Projection,
    TensorId,
    is_backward,
    packed_shape,
)
from ktconv.packed.matrix_check import ErrorStats, MatrixCheck, Packed, Violation
from ktconv.packed.weights import Geometry, name_of
from ktconv.quantize_cpu.task import quantize_buffers
from ktconv.reading.buffers import Buffers, BufferSizes
from ktconv.reading.matrices import MatrixReader, chunks, source_bytes
from ktconv.verify.claims import check_claims
from ktconv.verify.copies import CopyCheck
from ktconv.verify.cpu.output import CpuOutput
from ktconv.verify.reading import Context, SumCheck, TensorStream
from ktconv.verify.runner import Advance
from ktconv.verify.totals import ItemResult

F32 = NDArray[np.float32]

LEVEL = "weights"


@dataclass(frozen=True, slots=True)
class ExpertMatrixCheck:
    """One projection of one expert, all parts."""

    context: Context
    output: CpuOutput
    layer: int
    expert: int
    proj: Projection
    source: MoELayer | None  # None: checksums only

    @property
    def unit(self) -> str:
        return f"layer-{self.layer:05d}"

    @property
    def nbytes(self) -> int:
        """Of progress: source bytes if they are read, else packed ones."""
        if self.source is not None:
            return source_bytes(self.source.experts[self.expert][self.proj])
        return sum(place.nbytes for place in self._places())

    def _places(self) -> list[TensorRef]:
        tensors = self.output.packed.tensors
        found = (
            tensors.get(TensorId(self.layer, self.proj, self.expert, part, kind))
            for part in range(self.output.options.numa)
            for kind in ("weight", "scale")
        )
        return [place for place in found if place is not None]

    def run(self, buffers: Buffers, advance: Advance) -> ItemResult:
        parts = [_Part(self, part) for part in range(self.output.options.numa)]
        comparable = self.source is not None and all(part.complete for part in parts)
        if comparable:
            self._compare(parts, buffers)
        checksums = sum(part.read_rest(buffers) for part in parts)
        sums = self._finish(parts) if comparable else None
        advance(self.nbytes)
        nbytes = sum(part.nbytes for part in parts)
        return ItemResult(nbytes, checksums, 0, self.layer, self.expert, self.proj, sums)

    def _compare(self, parts: Sequence[_Part], buffers: Buffers) -> None:
        assert self.source is not None and self.context.reader is not None
        matrix = self.source.experts[self.expert][self.proj]
        compat = self.output.options.compat
        source = MatrixReader(self.context.reader, matrix, compat)
        rows = matrix.rows if self.proj == "down" else parts[0].rows
        with source.open() as fd:
            grid = source.load_scales()
            for chunk in chunks(matrix, rows):
                source.read(fd, chunk, buffers.source, buffers.bounce)
                touched = parts if self.proj == "down" else [parts[chunk.start // rows]]
                for part in touched:
                    first_col = part.index * part.cols if self.proj == "down" else 0
                    view = source.view(chunk, grid, buffers.source, first_col, part.cols)
                    part.compare(view, chunk.start % rows, buffers)

    def _finish(self, parts: Sequence[_Part]) -> ErrorStats:
        total, before = ErrorStats(), _parts_before(self.output)
        for part in parts:
            if self.proj != "down" or before is None:
                total.add(part.finish())
            else:
                together = _within(part.index, len(parts), before[0])
                widest = np.maximum.reduce([parts[index].check.rule for index in together])
                total.add(part.finish(widest, exact=before[1]))
        return total


def _parts_before(output: CpuOutput) -> tuple[int, bool] | None:
    """The fewest parts that down ever had before it was cut anew, and whether its scales follow
    from those alone; None: it never was."""
    record = output.manifest.resharded_from if output.manifest else None
    if record is None:
        return None
    earlier, now = record.get("earlier"), output.options.numa
    chain = [record.get("numa"), *(earlier if isinstance(earlier, list) else [])]
    parts = [count for count in chain if type(count) is int and count > 0]
    if not parts:
        return None
    if any(count % now and now % count for count in parts):
        return 1, False  # parts that were cut and joined at once
    return min([*parts, now]), True


def _within(part: int, parts: int, before: int) -> range:
    """The parts that were one with `part` when there were `before`, which divides `parts`."""
    width = parts // before
    return range(part // width * width, part // width * width + width)


class _Part:
    """One part's packed matrix, read a few rows at a time, and the check that they hold their
    source. A tensor of another size is not read: level structure says so."""

    def __init__(self, item: ExpertMatrixCheck, index: int) -> None:
        self._context, self._packed, self.index = item.context, item.output.packed, index
        geometry, options = self._packed.layers[item.layer], item.output.options
        self.rows, self.cols = packed_shape(
            item.proj, geometry.hidden, geometry.intermediate, options.numa
        )
        self._fmt: Format = FORMATS[options.method]
        self.nbytes = 0
        weight, scale = (TensorId(item.layer, item.proj, item.expert, index, k) for k in KINDS)
        self._id = weight
        self._weight = self._stream(weight, self._fmt.weight_nbytes(self.rows, self.cols))
        self._scales = self._stream(scale, self._fmt.scale_nbytes(self.rows))
        self._checked: Sequence[SumCheck] = ()
        self._scale = np.empty(self.rows, np.float32)
        if self._scales is not None:
            self._scales.read(self._scale.view(np.uint8))
        self.check = MatrixCheck(self._fmt, weight, self.rows, self.cols, self._report)

    def _stream(self, tensor: TensorId, nbytes: int) -> TensorStream | None:
        place = self._packed.tensors.get(tensor)
        if place is None or place.nbytes != nbytes:
            return None
        self.nbytes += nbytes
        return TensorStream(self._context, place)

    @property
    def complete(self) -> bool:
        return self._weight is not None and self._scales is not None

    def compare(self, view: native.Matrix, first: int, buffers: Buffers) -> None:
        """The next rows, which begin at `first` and which `view` has the source of."""
        assert self._weight is not None
        packed = self._weight.read(buffers.packed[: self._fmt.weight_nbytes(view.rows, self.cols)])
        scale = self._scale[first : first + view.rows]
        self.check.compare(view, first, Packed(packed, scale, view.rows))

    def read_rest(self, buffers: Buffers) -> int:
        """Reads what was not compared; how many checksums were."""
        streams = [one for one in (self._weight, self._scales) if one is not None]
        for one in streams:
            one.read_rest(buffers.source)
        self._checked = [one.check() for one in streams]
        return sum(one.compared for one in self._checked)

    def finish(self, widest: F32 | None = None, exact: bool = True) -> ErrorStats:
        """What the check found, after all rows and checksums were compared; see MatrixCheck."""
        found = self.check.finish(widest, exact)
        if all(one.equal for one in self._checked):  # of other bytes the manifest tells nothing
            check_claims(self._context, name_of(self._id), found)
        return found

    def _report(self, violation: Violation) -> None:
        weight = self._id
        self._context.findings.fail(
            LEVEL,
            **asdict(violation),
            file=self._packed.tensors[weight].file.name,
            layer=weight.layer,
            expert=weight.expert,
            projection=weight.proj,
            part=weight.part,
        )


def expert_checks(
    output: CpuOutput, context: Context, share: float, rng: random.Random
) -> Iterator[ExpertMatrixCheck | CopyCheck]:
    """Of a share of the experts, at least one in every layer."""
    sources = output.checkpoint.layers if output.checkpoint else ()
    source_of = {layer.index: layer for layer in sources} if context.compare else {}
    for layer, geometry in output.packed.layers.items():
        if geometry.format is None or geometry.format.key != output.options.method:
            continue  # level structure says so
        source = _matching(context, layer, geometry, source_of.get(layer))
        count = max(1, round(len(geometry.here) * share))
        for expert in sorted(rng.sample(geometry.here, count)):
            for proj in PROJECTIONS:
                yield ExpertMatrixCheck(context, output, layer, expert, proj, source)
    for tensor, place in output.packed.tensors.items():
        # Transposed matrices, which only fine-tuning uses: their checksums.
        if is_backward(tensor.proj) and (share >= 1 or rng.random() < share):
            yield CopyCheck(context, "backward", place, None)


def _matching(
    context: Context, layer: int, geometry: Geometry, source: MoELayer | None
) -> MoELayer | None:
    """The source of a layer, if it has the same dimensions."""
    if source is None:
        return None  # an unexpected layer: level 1 says so
    there = len(source.experts), source.hidden_size, source.intermediate_size
    here = geometry.experts, geometry.hidden, geometry.intermediate
    if there == here:
        return source
    context.findings.fail(
        "structure",
        "dimensions",
        f"layer {layer} has {here[0]} experts of hidden {here[1]} and intermediate {here[2]}, its "
        f"source {there[0]} of {there[1]} and {there[2]}.",
        layer=layer,
    )
    return None


def buffer_sizes(output: CpuOutput) -> BufferSizes:
    """What a worker needs."""
    layers = list(output.checkpoint.layers) if output.checkpoint else []
    return quantize_buffers(layers, FORMATS[output.options.method])
