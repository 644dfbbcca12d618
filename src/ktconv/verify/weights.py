"""Levels 1 and 2 in one pass over the bytes: checksums, copies, matrices against their source.

Unpacking is the audit's (native/src/audit), which shares no code with the packer.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktconv import native
from ktconv.checkpoint import MoELayer, TensorRef
from ktconv.errors import CheckpointError
from ktconv.formats import (
    FORMATS,
    PROJECTIONS,
    Format,
    Projection,
    TensorId,
    packed_shape,
)
from ktconv.matrix_reader import MatrixReader, chunks
from ktconv.packed import Place, name_of
from ktconv.plan import matrix_source_bytes
from ktconv.proof import Packed, PartProof, Problem, Sums
from ktconv.source import SourceReader
from ktconv.tasks import Buffers, BufferSizes
from ktconv.verify.findings import Findings
from ktconv.verify.subject import Subject
from ktconv.writer.files import io_error, read_exactly

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]

LEVEL = "weights"
COPY_BYTES = 4 << 20
WORST_KEPT = 20


@dataclass(slots=True)
class Totals:
    """What was read and found. Added to by one thread."""

    bytes_checked: int = 0
    checksums: int = 0
    copied_tensors: int = 0
    matrices: int = 0
    sums: Sums = field(default_factory=Sums)
    by_expert: dict[tuple[int, int], Sums] = field(default_factory=dict)
    by_layer: dict[int, Sums] = field(default_factory=dict)
    worst: list[dict[str, Any]] = field(default_factory=list)

    def add(self, done: Done) -> None:
        self.bytes_checked += done.nbytes
        self.checksums += done.checksums
        self.copied_tensors += done.copied
        if done.sums is None or done.layer is None:
            return
        self.matrices += 1
        self.sums.add(done.sums)
        self.by_layer.setdefault(done.layer, Sums()).add(done.sums)
        self.by_expert.setdefault((done.layer, done.expert), Sums()).add(done.sums)
        about = {"layer": done.layer, "expert": done.expert, "projection": done.proj}
        self.worst.append(about | done.sums.as_dict())
        if len(self.worst) > 10 * WORST_KEPT:
            self._keep_worst()

    def _keep_worst(self) -> None:
        self.worst.sort(key=lambda one: (-one["relative_rms_error"], one["layer"], one["expert"]))
        del self.worst[WORST_KEPT:]

    def as_dict(self, subject: Subject) -> dict[str, Any]:
        self._keep_worst()
        fmt = FORMATS[subject.options.method]
        return {
            "matrices": self.matrices,
            "elements": self.sums.elements,
            **self.sums.as_dict(),
            "bound_steps": fmt.max_error_steps,
            "layers": [self._layer(subject, layer) for layer in sorted(self.by_layer)],
            "worst": self.worst,
        }

    def _layer(self, subject: Subject, layer: int) -> dict[str, Any]:
        count = subject.packed.layers[layer].experts
        errors = [self.by_expert.get((layer, expert)) for expert in range(count)]
        return {
            "layer": layer,
            **self.by_layer[layer].as_dict(),
            "experts": [one.as_dict()["relative_rms_error"] if one else None for one in errors],
        }


@dataclass(frozen=True, slots=True)
class Done:
    """What one item found."""

    nbytes: int
    checksums: int = 0
    copied: int = 0
    layer: int | None = None
    expert: int = 0
    proj: str = ""
    sums: Sums | None = None


Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Context:
    """What all items share."""

    subject: Subject
    findings: Findings
    checksums: dict[str, str]
    reader: SourceReader | None
    compare: bool  # with the source


@dataclass(frozen=True, slots=True)
class MatrixItem:
    """One projection of one expert, all parts."""

    context: Context
    unit: str
    layer: int
    expert: int
    proj: Projection
    source: MoELayer | None  # None: checksums only

    @property
    def nbytes(self) -> int:
        """Of progress: source bytes if they are read, else packed ones."""
        if self.source is not None:
            return matrix_source_bytes(self.source, self.expert, self.proj)
        return sum(place.nbytes for place in self._places())

    def _places(self) -> list[Place]:
        tensors = self.context.subject.packed.tensors
        found = (
            tensors.get(TensorId(self.layer, self.proj, self.expert, part, kind))
            for part in range(self.context.subject.options.numa)
            for kind in ("weight", "scale")
        )
        return [place for place in found if place is not None]

    def run(self, buffers: Buffers, advance: Advance) -> Done:
        parts = [_Part(self, part) for part in range(self.context.subject.options.numa)]
        checksums = sum(part.load() for part in parts)
        sound = all(part.complete for part in parts)
        sums = self._compare(parts, buffers) if sound and self.source is not None else None
        advance(self.nbytes)
        nbytes = sum(part.nbytes for part in parts)
        return Done(nbytes, checksums, 0, self.layer, self.expert, self.proj, sums)

    def _compare(self, parts: Sequence[_Part], buffers: Buffers) -> Sums:
        assert self.source is not None and self.context.reader is not None
        matrix = self.source.experts[self.expert][self.proj]
        compat = self.context.subject.options.compat
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
                    part.compare(view, chunk.start % rows)
        total = Sums()
        for part in parts:
            total.add(part.proof.judge())
        return total


class _Part:
    """One part's packed matrix: its bytes, and the proof that they hold their source."""

    def __init__(self, item: MatrixItem, index: int) -> None:
        self.item, self.index = item, index
        subject = item.context.subject
        geometry = subject.packed.layers[item.layer]
        self.rows, self.cols = packed_shape(
            item.proj, geometry.hidden, geometry.intermediate, subject.options.numa
        )
        self.fmt: Format = FORMATS[subject.options.method]
        self.weight: U8 | None = None
        self.scale: F32 | None = None
        self.nbytes = 0
        weight = self.tensor("weight")
        inherited = "resharded_from" in (subject.manifest or {}) and item.proj == "down"
        self.proof = PartProof(self.fmt, weight, self.rows, self.cols, self._fail, inherited)

    @property
    def complete(self) -> bool:
        return self.weight is not None and self.scale is not None

    def tensor(self, kind: Any) -> TensorId:
        return TensorId(self.item.layer, self.item.proj, self.item.expert, self.index, kind)

    def load(self) -> int:
        """Reads both tensors; how many checksums were compared."""
        self.weight, weights = self._read("weight", self.fmt.weight_nbytes(self.rows, self.cols))
        scale, scales = self._read("scale", self.fmt.scale_nbytes(self.rows))
        self.scale = None if scale is None else scale.view(np.float32)
        return weights + scales

    def _read(self, kind: Any, nbytes: int) -> tuple[U8 | None, int]:
        """The bytes if they are as many as they should be, else level 1 has said so."""
        context, tensor = self.item.context, self.tensor(kind)
        place = context.subject.packed.tensors.get(tensor)
        if place is None or place.nbytes != nbytes:
            return None, 0
        data = read_place(place)
        self.nbytes += nbytes
        return data, check_sum(context, name_of(tensor), place, data)

    def compare(self, view: native.Matrix, first: int) -> None:
        """Rows from `first` on of this part, which `view` has the source of."""
        assert self.weight is not None and self.scale is not None
        self.proof.compare(view, first, Packed(self.weight, self.scale, self.rows, first))

    def _fail(self, problem: Problem) -> None:
        context, weight = self.item.context, self.tensor("weight")
        context.findings.fail(
            LEVEL,
            problem.check,
            problem.message,
            file=context.subject.packed.tensors[weight].file.name,
            tensor=problem.tensor,
            layer=weight.layer,
            expert=weight.expert,
            projection=weight.proj,
            part=self.index,
            row=problem.row,
            column=problem.column,
            source_value=problem.source_value,
            value=problem.value,
            steps=problem.steps,
        )


@dataclass(frozen=True, slots=True)
class CopyItem:
    """One non-expert tensor: checksum, and byte for byte what the source has."""

    context: Context
    unit: str
    tensor: TensorRef  # in the output
    origin: TensorRef | None  # in the source

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def run(self, buffers: Buffers, advance: Advance) -> Done:
        digest, equal = hashlib.sha256(), True
        with _opened(self.tensor.file) as fd:
            for offset in range(0, self.tensor.nbytes, COPY_BYTES):
                piece = buffers.source[: min(COPY_BYTES, self.tensor.nbytes - offset)]
                _read(fd, self.tensor.file, piece, self.tensor.offset + offset)
                digest.update(piece.data)
                equal = equal and self._equal(piece, offset, buffers)
                advance(len(piece))
        if not equal:
            self.context.findings.fail(
                "structure",
                "copied tensor",
                f"{self.tensor.name} in {self.tensor.file.name} is not what the source has.",
                file=self.tensor.file.name,
                tensor=self.tensor.name,
            )
        place = Place(self.tensor.file, self.tensor.offset, self.tensor.nbytes)
        checksums = compare_sum(self.context, self.tensor.name, place, digest.hexdigest())
        return Done(self.tensor.nbytes, checksums, int(self.origin is not None))

    def _equal(self, piece: U8, offset: int, buffers: Buffers) -> bool:
        if self.origin is None or self.context.reader is None:
            return True
        if self.origin.nbytes != self.tensor.nbytes:
            return False
        other = buffers.source[COPY_BYTES : COPY_BYTES + len(piece)]
        with self.context.reader.open(self.origin.file) as fd:
            self.context.reader.read(fd, self.origin, other.data, offset)
        return bool(np.array_equal(piece, other))


Item = MatrixItem | CopyItem


def items_of(context: Context, sample: float, seed: int) -> list[Item]:
    """What to check, in the order of the output; a sample of it if `sample` is below 1.

    A sample has at least one expert of every layer.
    """
    subject = context.subject
    rng = random.Random(seed)
    found: list[Item] = []
    sources = (
        {layer.index: layer for layer in subject.checkpoint.layers} if subject.checkpoint else {}
    )
    for layer, geometry in subject.packed.layers.items():
        if geometry.format is None or geometry.format.key != subject.options.method:
            _odd_layer(context, layer)
            continue
        source = _matching(context, layer, sources.get(layer)) if context.compare else None
        count = max(1, round(geometry.experts * sample))
        for expert in sorted(rng.sample(range(geometry.experts), count)):
            for proj in PROJECTIONS:
                unit = f"layer-{layer:05d}"
                found.append(MatrixItem(context, unit, layer, expert, proj, source))
    return found + list(_copies(context, sample, rng))


def _copies(context: Context, sample: float, rng: random.Random) -> Iterator[CopyItem]:
    subject = context.subject
    origins = {}
    if subject.plan is not None:
        origins = {name: ref for unit in subject.plan.others for ref, name in unit.copies}
    for name, tensor in subject.packed.others.items():
        if sample >= 1 or rng.random() < sample:
            yield CopyItem(context, "other", tensor, origins.get(name))


def _matching(context: Context, layer: int, source: MoELayer | None) -> MoELayer | None:
    """The source of a layer, if it has the same dimensions."""
    geometry = context.subject.packed.layers[layer]
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


def _odd_layer(context: Context, layer: int) -> None:
    context.findings.fail(
        "structure",
        "dimensions",
        f"the tensors of layer {layer} do not have the sizes of "
        f"{FORMATS[context.subject.options.method].name}.",
        layer=layer,
    )


def buffer_sizes(subject: Subject) -> BufferSizes:
    """What a worker needs besides the packed matrix that it reads."""
    layers = list(subject.checkpoint.layers) if subject.checkpoint else []
    return BufferSizes.of(layers, FORMATS[subject.options.method])


def read_place(place: Place) -> U8:
    """The bytes of a packed tensor."""
    data = np.empty(place.nbytes, np.uint8)
    with _opened(place.file) as fd:
        _read(fd, place.file, data, place.offset)
    return data


def check_sum(context: Context, name: str, place: Place, data: U8) -> int:
    """Compares with the manifest's checksum if it has one; how many were compared."""
    if name not in context.checksums:
        return 0
    return compare_sum(context, name, place, hashlib.sha256(data.data).hexdigest())


def compare_sum(context: Context, name: str, place: Place, digest: str) -> int:
    expected = context.checksums.get(name)
    if expected is None:
        return 0
    if digest != expected:
        context.findings.fail(
            "structure",
            "checksum",
            f"{name} in {place.file.name} does not have the checksum of the manifest.",
            file=place.file.name,
            tensor=name,
        )
    return 1


@contextmanager
def _opened(path: Any) -> Iterator[int]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise io_error("read", path, error) from error
    try:
        yield fd
    finally:
        os.close(fd)


def _read(fd: int, path: Any, target: U8, offset: int) -> None:
    try:
        read_exactly(fd, target.data, offset)
    except EOFError:
        raise CheckpointError(f"{path} became shorter while it was read") from None
    except OSError as error:
        raise io_error("read", path, error) from error
