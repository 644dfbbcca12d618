"""Levels 1 and 2 for experts on GPUs in one pass over the bytes: checksums, copies, and every
expert's matrix, unpacked without compressed-tensors, against its source."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktconv import native
from ktconv.checkpoint import ExpertMatrix, TensorRef
from ktconv.copying import Buffers, BufferSizes
from ktconv.formats.decode import f32_to_bf16
from ktconv.matrix_reader import ITEM_SIZE, MatrixReader, chunk_rows, chunks
from ktconv.packed import Place
from ktconv.proof import Problem, Sums
from ktconv.quantize_gpu.target import GpuTarget
from ktconv.regular_files import opened_regular
from ktconv.verify.claims import check_claims
from ktconv.verify.copies import CopyItem
from ktconv.verify.gpu.opened import PARTS, GpuOutput, Module
from ktconv.verify.gpu.quantization import Group
from ktconv.verify.gpu.rounding import MatrixProof, bound_steps, rules_of
from ktconv.verify.gpu.unpack import F32, SCALE_DTYPES, levels, scales, values
from ktconv.verify.reading import Context, check_sum, compare_sum, read_into, read_place
from ktconv.verify.subject import Subject
from ktconv.verify.sweep import Item
from ktconv.verify.totals import Done, Totals

U8 = NDArray[np.uint8]
Advance = Callable[[int], None]

LEVEL = "weights"
OTHER = "other"  # the unit of copies


@dataclass(frozen=True, slots=True)
class MatrixItem:
    """One projection of one expert: its three tensors, and its source if there is one."""

    context: Context
    module: Module
    group: Group
    matrix: ExpertMatrix | None  # None: checksums and shape only

    @property
    def unit(self) -> str:
        layer = self.module.layer
        return OTHER if layer is None else f"layer-{layer:05d}"

    @property
    def nbytes(self) -> int:
        """Of progress: source bytes if they are read, else packed ones."""
        if self.matrix is not None:
            return self.matrix.rows * self.matrix.cols * ITEM_SIZE[self.matrix.tensor.dtype]
        return self.module.nbytes

    def run(self, buffers: Buffers, advance: Advance) -> Done:
        parts, checked = {}, []
        for part, tensor in self.module.parts.items():
            place = _place(tensor)
            parts[part] = read_place(place)
            checked.append(check_sum(self.context, tensor.name, place, parts[part]))
        self._shape(parts)
        sums = None
        if self.matrix is not None and self.sound:
            sums = self._compare(self.matrix, parts, buffers)
            if all(one.equal for one in checked):  # else the manifest is about other bytes
                check_claims(self.context, self.module.parts[PARTS[0]].name, sums)
        checksums = sum(one.compared for one in checked)
        advance(self.nbytes)
        where = self.module.where
        if where is None:
            return Done(self.module.nbytes, checksums)
        layer, nbytes = self.module.layer, self.module.nbytes
        return Done(nbytes, checksums, 0, layer, where.expert, where.proj, sums)

    @property
    def sound(self) -> bool:
        """Whether dtypes and shapes are those of its group; else level structure says so."""
        return self.matrix is not None and _is_sound(
            self.module, self.group, self.matrix.rows, self.matrix.cols
        )

    def _shape(self, parts: dict[str, U8]) -> None:
        """weight_shape says rows and columns of the matrix, as its tensors do."""
        tensor, packed = self.module.parts.get(PARTS[2]), self.module.parts.get(PARTS[0])
        if tensor is None or packed is None or tensor.shape != (2,) or len(packed.shape) != 2:
            return
        told = parts[PARTS[2]].view(np.int64 if tensor.dtype == "I64" else np.int32).tolist()
        true = [packed.shape[0], packed.shape[1] * 32 // self.group.bits]
        if self.matrix is not None:
            true = [self.matrix.rows, self.matrix.cols]
        if told != true:
            self.context.findings.fail(
                "structure",
                "wrong shape",
                f"{tensor.name} in {tensor.file.name} says {told}, but the matrix is {true}.",
                file=tensor.file.name,
                tensor=tensor.name,
                **self.module.at,
            )

    def _compare(self, matrix: ExpertMatrix, parts: dict[str, U8], buffers: Buffers) -> Sums:
        assert self.context.reader is not None
        dtype = self.module.parts[PARTS[1]].dtype
        scale = scales(parts[PARTS[1]], dtype, matrix.rows)
        packed = parts[PARTS[0]].reshape(matrix.rows, -1)
        proof = self._proof(dtype)
        source = MatrixReader(self.context.reader, matrix, round_to_bf16=dtype == "BF16")
        with source.open() as fd:
            grid = source.load_scales()
            for chunk in chunks(matrix, matrix.rows):
                here = slice(chunk.start, chunk.stop)
                source.read(fd, chunk, buffers.source, buffers.bounce)
                weights = native.decode(source.view(chunk, grid, buffers.source, 0, matrix.cols))
                level = levels(packed[here].reshape(-1), len(weights), matrix.cols, self.group.bits)
                proof.compare(weights, level, scale[here], chunk.start)
        return proof.judge()

    def _proof(self, dtype: str) -> MatrixProof:
        subject = self.context.subject
        assert isinstance(subject, GpuOutput)
        at, rules = self.module.at, rules_of(subject.method, subject.ours)
        where = f"layer {at['layer']}, expert {at['expert']}, {at['projection']}"
        return MatrixProof(self.group, rules, dtype, self.module.name, where, self._fail, Sums())

    def _fail(self, problem: Problem) -> None:
        self.context.findings.fail(
            LEVEL,
            problem.check,
            problem.message,
            file=self.module.parts[PARTS[0]].file.name,
            tensor=problem.tensor,
            row=problem.row,
            column=problem.column,
            source_value=problem.source_value,
            value=problem.value,
            steps=problem.steps,
            **self.module.at,
        )


@dataclass(frozen=True, slots=True)
class DecodedItem:
    """A matrix of no expert that was block-quantized in the source and is bf16 here."""

    context: Context
    tensor: TensorRef  # in the output
    matrix: ExpertMatrix  # in the source

    unit = OTHER

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def run(self, buffers: Buffers, advance: Advance) -> Done:
        assert self.context.reader is not None
        digest, equal = hashlib.sha256(), True
        source = MatrixReader(self.context.reader, self.matrix, round_to_bf16=True)
        with source.open() as fd, opened_regular(self.tensor.file) as own:
            grid = source.load_scales()
            for chunk in chunks(self.matrix, self.matrix.rows):
                source.read(fd, chunk, buffers.source, buffers.bounce)
                view = source.view(chunk, grid, buffers.source, 0, self.matrix.cols)
                wanted = f32_to_bf16(native.decode(view)).reshape(-1).view(np.uint8)
                found = np.empty_like(wanted)
                start = self.tensor.offset + 2 * chunk.start * self.matrix.cols
                read_into(own, self.tensor.file, found, start)
                digest.update(found.data)
                equal = equal and bool(np.array_equal(found, wanted))
                advance(found.nbytes)
        if not equal:
            self.context.findings.fail(
                "structure",
                "copied tensor",
                f"{self.tensor.name} in {self.tensor.file.name} is not what the source decodes to.",
                file=self.tensor.file.name,
                tensor=self.tensor.name,
            )
        checked = compare_sum(
            self.context, self.tensor.name, _place(self.tensor), digest.hexdigest()
        )
        return Done(self.tensor.nbytes, checked.compared, 1)


def _place(tensor: TensorRef) -> Place:
    return Place(tensor.file, tensor.offset, tensor.nbytes, tensor.dtype, tensor.shape)


def _is_sound(module: Module, group: Group, rows: int, cols: int) -> bool:
    if not module.whole:
        return False
    packed, scale, _ = (module.parts[part] for part in PARTS)
    return (
        packed.dtype == "I32"
        and packed.shape == (rows, group.words(cols))
        and scale.dtype in SCALE_DTYPES
        and scale.shape == (rows, group.scales(cols))
    )


def dequantized(output: GpuOutput, module: Module, matrix: ExpertMatrix) -> F32:
    """The values of a packed module [rows, cols], whose tensors level structure found sound."""
    group = output.quantization.group_of(module.name)
    assert group is not None and _is_sound(module, group, matrix.rows, matrix.cols)
    packed, scale = (read_place(_place(module.parts[part])) for part in PARTS[:2])
    level = levels(packed, matrix.rows, matrix.cols, group.bits)
    return values(level, scales(scale, module.parts[PARTS[1]].dtype, matrix.rows))


# ---- all of them -----------------------------------------------------------------------


def items_of(context: Context, sample: float, seed: int) -> list[Item]:
    """What to check, in the order of the output; a sample of it if `sample` is below 1.

    A sample has at least one expert of every layer.
    """
    subject = context.subject
    assert isinstance(subject, GpuOutput)
    rng = random.Random(seed)
    chosen = {
        (layer, expert)
        for layer, experts in subject.layers().items()
        for expert in rng.sample(experts, max(1, round(len(experts) * sample)))
    }
    sources = subject.sources() if context.compare else {}
    found: list[Item] = []
    for module in subject.modules.values():
        group = subject.quantization.group_of(module.name) or subject.quantization.groups[0]
        matrix = None
        if module.where is not None and module.layer is not None:
            if (module.layer, module.where.expert) not in chosen:
                continue
            layer = sources.get(module.layer)
            if layer is not None and module.where.expert < len(layer.experts):
                matrix = layer.experts[module.where.expert][module.where.proj]
        found.append(MatrixItem(context, module, group, matrix))
    return [*found, *_copies(context, subject, sample, rng)]


def _copies(
    context: Context, subject: GpuOutput, sample: float, rng: random.Random
) -> Iterator[Item]:
    origins, decoded = {}, {}
    if subject.plan is not None:
        plan: Any = subject.plan
        origins = {name: ref for unit in plan.others for ref, name in unit.copies}
        assert isinstance(plan.target, GpuTarget)
        decoded = dict(plan.target.decoded)
    for name, tensor in subject.others.items():
        if sample < 1 and rng.random() >= sample:
            continue
        matrix = decoded.get(name)
        if matrix is None:
            yield CopyItem(context, OTHER, tensor, origins.get(name))
        elif tensor.dtype == "BF16" and tensor.shape == (matrix.rows, matrix.cols):
            yield DecodedItem(context, tensor, matrix)


def buffer_sizes(subject: Subject) -> BufferSizes:
    """What a worker needs to read any matrix of the source."""
    assert isinstance(subject, GpuOutput)
    plan: Any = subject.plan
    matrices = [m for layer in subject.sources().values() for m in layer.experts[0].values()]
    matrices += plan.target.decoded.values() if plan else []
    return BufferSizes(max(map(_source_bytes, matrices), default=0))


def _source_bytes(matrix: ExpertMatrix) -> int:
    rows = min(chunk_rows(matrix), matrix.rows)
    return rows * matrix.cols * ITEM_SIZE[matrix.tensor.dtype]


def weights_facts(totals: Totals, subject: Subject) -> dict[str, Any]:
    assert isinstance(subject, GpuOutput)
    counts = {layer: len(one.experts) for layer, one in subject.sources().items()}
    bound = None
    if rules_of(subject.method, subject.ours).elements:
        bound = max(bound_steps(group, _dtype(subject)) for group in subject.quantization.groups)
    return totals.as_dict(bound, counts)


def _dtype(subject: GpuOutput) -> str:
    """Of the scales, the coarsest."""
    found = {m.parts[PARTS[1]].dtype for m in subject.modules.values() if PARTS[1] in m.parts}
    return next((dtype for dtype in SCALE_DTYPES if dtype in found), "BF16")
