"""Two conversions of the same model against each other, whoever made them and however they lie.

    found = compare(Path("ours"), Path("theirs"))
    found.verdict        # "equal bytes", "equal weights" or "different"

Needs no manifest and no source: headers tell what is there, the bytes tell the rest. Unpacking
is the audit's (native/src/audit). A worker holds one matrix of both sides at a time.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ktconv import machine, native
from ktconv.checkpoint import TensorRef
from ktconv.errors import UsageError
from ktconv.formats import Kind, Matrix, TensorId, is_backward, packed_shape
from ktconv.packed import Geometry, PackedWeights, Place, name_of, open_packed
from ktconv.units import format_ranges
from ktconv.verify.weights import read_place
from ktconv.writer.files import translated
from ktconv.writer.journal import STATE_DIRECTORY

if TYPE_CHECKING:
    from ktconv.pipeline import Observer

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]

Verdict = Literal["equal bytes", "equal weights", "different"]

SCHEMA = 1
WORST_KEPT = 20  # matrices
SAID = 50  # sentences of one kind
NAMED = 8  # places in one sentence
WORST_SAID = 5  # matrices in the summary
CHUNK_ELEMENTS = 1 << 17  # of a matrix, at a time in float64
CHUNK_BYTES = 8 << 20  # of a non-expert tensor, at a time
OTHER = "other"  # unit of progress of the non-expert tensors

# Matrices whose rows are cut: each part has scales of its own, so other parts, other weights.
_CUT_ROWS: frozenset[Matrix] = frozenset(("down", "gate_bwd", "up_bwd"))
_ORDER: Sequence[Matrix] = ("gate", "up", "down", "gate_bwd", "up_bwd", "down_bwd")

Expert = tuple[int, Matrix]  # expert, projection
Piece = tuple[int, Kind]  # part, weight or scale


@dataclass(frozen=True, slots=True)
class Comparison:
    """What comparing found. `differences` and `notes` are whole sentences about A and B."""

    a: Mapping[str, Any]  # path, layout, method, numa, layers
    b: Mapping[str, Any]
    verdict: Verdict
    expected: bool  # different, but no more than the options of both conversions explain
    sample: float
    seed: int
    matrices: int  # compared
    elements: int
    other_tensors: int
    layers: Sequence[Mapping[str, Any]]
    worst: Sequence[Mapping[str, Any]]
    only_in_a: Sequence[Mapping[str, Any]]
    only_in_b: Sequence[Mapping[str, Any]]
    differences: Sequence[str]
    notes: Sequence[str]

    @property
    def equal(self) -> bool:
        """Whether both hold the same weights, as far as they were compared."""
        return self.verdict != "different"

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON. A number that is not finite is null."""
        return {
            "schema": SCHEMA,
            "kind": "comparison",
            "a": self.a["path"],
            "b": self.b["path"],
            "verdict": self.verdict,
            "passed": self.equal,
            "expected": self.expected,
            "sample": self.sample,
            "seed": self.seed,
            "conversions": {"a": dict(self.a), "b": dict(self.b)},
            "matrices": self.matrices,
            "elements": self.elements,
            "other_tensors": self.other_tensors,
            "layers": [dict(layer) for layer in self.layers],
            "worst": [dict(matrix) for matrix in self.worst],
            "only_in_a": [dict(place) for place in self.only_in_a],
            "only_in_b": [dict(place) for place in self.only_in_b],
            "differences": list(self.differences),
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """A short summary for people: the verdict, what differs, the worst matrices, notes."""
        share = f" (of a sample of {100 * self.sample:.4g} %)" if self.sample < 1 else ""
        return [
            f"{self.verdict}{share}: {_count(self.matrices, 'expert matrix')} and "
            f"{_count(self.other_tensors, 'other tensor')} compared",
            f"A: {_words_about(self.a)}",
            f"B: {_words_about(self.b)}",
            *self.differences[:NAMED],
            *_more(len(self.differences) - NAMED, "difference"),
            *(_words_of_matrix(matrix) for matrix in self.worst[:WORST_SAID]),
            *self.notes,
        ]


def compare(
    a: Path,
    b: Path,
    *,
    sample: float = 1.0,
    seed: int = 0,
    threads: int | None = None,
    observer: Observer | None = None,
) -> Comparison:
    """Compares the packed weights of two directories: shards or layer folders.

    Names and sizes are compared completely; of the bytes, those of a `sample` of the experts of
    each layer (at least one) and of the other tensors. Whatever is wrong with a file that can be
    read is a difference. Raises UsageError for a directory without packed weights.
    """
    if threads is not None and threads < 1:
        raise UsageError(f"--threads {threads} is not a positive number")
    plan = _make_plan(a, b, sample, seed)
    tally = _Tally(plan)
    for done in _run(plan.tasks, threads or machine.usable_cpus(), observer):
        tally.add(done)
    return tally.result()


def comparison_sizes(a: Path, b: Path, *, sample: float = 1.0, seed: int = 0) -> dict[str, int]:
    """Bytes that `compare` will read of both sides, by the units it tells its observer."""
    sizes: Counter[str] = Counter()
    for task in _make_plan(a, b, sample, seed).tasks:
        sizes[task.unit] += task.nbytes
    return dict(sizes)


# ---- what there is to compare, from headers ----------------------------------------------


class _Input:
    """An opened directory, its packed tensors by layer and matrix."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        with translated("read", directory):
            if not directory.is_dir():
                raise UsageError(f"{directory} is no directory", "give outputs of quantize-cpu")
            self.packed: PackedWeights = open_packed(directory)
        if not self.packed.tensors and not self.packed.damaged:
            raise UsageError(f"{directory} holds no packed experts", "give outputs of quantize-cpu")
        self.layers: dict[int, dict[Expert, dict[Piece, Place]]] = {}
        for tensor, place in self.packed.tensors.items():
            matrices = self.layers.setdefault(tensor.layer, {})
            pieces = matrices.setdefault((tensor.expert, tensor.proj), {})
            pieces[tensor.part, tensor.kind] = place

    def about(self) -> dict[str, Any]:
        """What it is; None for what is not the same in all layers."""
        layers = self.packed.layers.values()
        methods = {layer.format.key if layer.format else None for layer in layers}
        parts = {layer.parts for layer in layers}
        return {
            "path": str(self.packed.directory),
            "layout": self.packed.layout,
            "method": methods.pop() if len(methods) == 1 else None,
            "numa": parts.pop() if len(parts) == 1 else None,
            "layers": sorted(self.layers),
        }

    def flaws(self) -> Iterator[str]:
        """What is wrong with its files, and keeps it from being equal to anything."""
        for file, why in sorted(self.packed.damaged.items()):
            yield f"{self.name} has the damaged file {file}: {why.rstrip('.')}."
        for tensor, first, second in self.packed.doubles:
            yield (
                f"{self.name} has {tensor} in {first} and again in {second}: which one is used "
                "depends on the reader."
            )


@dataclass(frozen=True, slots=True)
class _Side:
    """One matrix as one directory has it: all its parts."""

    pieces: Mapping[Piece, Place]
    proj: Matrix
    geometry: Geometry
    fault: str | None  # why it cannot be dequantized

    @property
    def nbytes(self) -> int:
        return sum(place.nbytes for place in self.pieces.values())

    def load(self) -> dict[Piece, U8]:
        return {piece: read_place(self.pieces[piece]) for piece in sorted(self.pieces)}

    def joined(self, data: Mapping[Piece, U8]) -> _Values:
        """Codes and steps of the whole matrix."""
        fmt, parts = self.geometry.format, range(self.geometry.parts)
        assert fmt is not None and self.fault is None
        rows, cols = _part_shape(self.geometry, self.proj)
        codes = [native.audit_codes(fmt.key, data[part, "weight"], rows, cols) for part in parts]
        scales = [data[part, "scale"].view("<f4").astype(np.float32) for part in parts]
        axis = 1 if self.proj in _CUT_ROWS else 0
        stacked = np.stack(scales, 1) if axis else np.concatenate(scales)[:, None]
        with np.errstate(all="ignore"):
            step = stacked * np.float32(fmt.scale_units)
        return _Values(np.concatenate(codes, axis) if len(codes) > 1 else codes[0], step)


@dataclass(frozen=True, slots=True)
class _Values:
    """A matrix as codes [rows, cols] and steps [rows, n], one for cols / n columns each."""

    codes: NDArray[np.int8]
    step: F32

    def values(self, rows: slice) -> F32:
        """fl32(code * step) of some rows."""
        codes = self.codes[rows].astype(np.float32)
        shaped = codes.reshape(len(codes), self.step.shape[1], -1)
        shaped *= self.step[rows][:, :, None]
        return codes

    def steps(self, rows: slice) -> F32:
        """The step of every element of some rows."""
        width = self.codes.shape[1] // self.step.shape[1]
        found: F32 = np.abs(np.repeat(self.step[rows], width, axis=1))
        return found

    def same_as(self, other: _Values) -> bool:
        """Surely the same values; if not, they may still be."""
        return np.array_equal(self.step, other.step) and np.array_equal(self.codes, other.codes)


def _part_shape(geometry: Geometry, proj: Matrix) -> tuple[int, int]:
    return packed_shape(proj, geometry.hidden, geometry.intermediate, geometry.parts)


def _side(here: _Input, layer: int, expert: int, proj: Matrix) -> _Side:
    pieces, geometry = here.layers[layer][expert, proj], here.packed.layers[layer]
    fault = None
    if geometry.format is None or any(p.file.name.startswith("MOE_") for p in pieces.values()):
        fault = f"{here.name} is of no format that ktconv knows"
    else:
        fault = _fault(here.name, TensorId(layer, proj, expert, 0, "weight"), pieces, geometry)
    return _Side(pieces, proj, geometry, fault)


def _fault(
    name: str, about: TensorId, pieces: Mapping[Piece, Place], geometry: Geometry
) -> str | None:
    """Which tensor of a matrix is missing or not as large as it must be."""
    fmt = geometry.format
    assert fmt is not None
    rows, cols = _part_shape(geometry, about.proj)
    sizes: dict[Kind, int] = {
        "weight": fmt.weight_nbytes(rows, cols),
        "scale": fmt.scale_nbytes(rows),
    }
    for part in range(geometry.parts):
        for kind, size in sizes.items():
            tensor = name_of(TensorId(about.layer, about.proj, about.expert, part, kind))
            place = pieces.get((part, kind))
            if place is None:
                return f"{name} lacks {tensor}"
            if place.nbytes != size:
                return f"{name} has {place.nbytes} bytes of {tensor}, not {size}"
    return None


@dataclass(slots=True)
class _Plan:
    """All that headers tell, and what is to be read."""

    a: _Input
    b: _Input
    sample: float
    seed: int
    tasks: list[_Task] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    only: tuple[list[dict[str, Any]], list[dict[str, Any]]] = field(
        default_factory=lambda: ([], [])
    )
    same_tensors: bool = True  # False: some are extra, though the weights may be equal


def _make_plan(a: Path, b: Path, sample: float, seed: int) -> _Plan:
    if not 0 < sample <= 1:
        raise UsageError(f"--sample {sample} is no share", "give more than 0, at most 1")
    plan = _Plan(_Input("A", a), _Input("B", b), sample, seed)
    for here in (plan.a, plan.b):
        plan.differences += _at_most(SAID, list(here.flaws()), f"flaw of {here.name}")
        if (here.packed.directory / STATE_DIRECTORY / "run.json").exists():
            plan.notes.append(f"{here.name} is not finished: run quantize-cpu again.")
    rng, faults = random.Random(seed), list[str]()
    for layer in sorted(plan.a.layers.keys() & plan.b.layers.keys()):
        faults += _plan_layer(plan, layer, rng)
    plan.differences += _at_most(SAID, faults, "incomplete matrix")
    _plan_only(plan)
    _plan_others(plan, rng)
    return plan


def _plan_layer(plan: _Plan, layer: int, rng: random.Random) -> list[str]:
    """Adds the matrices that both have; sentences about those that one has incompletely."""
    here, there = (side.packed.layers[layer] for side in (plan.a, plan.b))
    if (here.hidden, here.intermediate) != (there.hidden, there.intermediate):
        plan.differences.append(
            f"Layer {layer} has other dimensions: {_dimensions(here)} in A, "
            f"{_dimensions(there)} in B."
        )
        return []
    both = plan.a.layers[layer].keys() & plan.b.layers[layer].keys()
    experts = sorted({expert for expert, _ in both})
    chosen = set(rng.sample(experts, max(1, round(len(experts) * plan.sample)))) if experts else {}
    faults = []
    for expert, proj in _in_order(both):
        pair = [_side(side, layer, expert, proj) for side in (plan.a, plan.b)]
        if fault := _one_sided(plan, layer, *pair):
            faults.append(f"{_matrix_words(layer, expert, proj)} cannot be compared: {fault}.")
        elif expert in chosen:
            plan.tasks.append(_MatrixTask(layer, expert, proj, *pair))
    return faults


def _one_sided(plan: _Plan, layer: int, a: _Side, b: _Side) -> str | None:
    """Why a pair is different without reading it. What both lack is compared as bytes."""
    sizes = [{piece: place.nbytes for piece, place in side.pieces.items()} for side in (a, b)]
    if a.fault is None and b.fault is None:
        return None
    if sizes[0] != sizes[1]:
        return " and ".join(fault for fault in (a.fault, b.fault) if fault)
    note = f"Layer {layer} was compared as bytes where {a.fault or b.fault}."
    if note not in plan.notes and len(plan.notes) < NAMED:
        plan.notes.append(note)
    return None


def _dimensions(geometry: Geometry) -> str:
    parts = f" in {geometry.parts} parts" if geometry.parts != 1 else ""
    return (
        f"{_count(geometry.experts, 'expert')} of hidden size {geometry.hidden} and intermediate "
        f"size {geometry.intermediate}{parts}"
    )


def _plan_only(plan: _Plan) -> None:
    """Layers, experts and projections that only one side has."""
    for index, (here, there) in enumerate(((plan.a, plan.b), (plan.b, plan.a))):
        places = list(_only_in(here, there))
        extra = [place for place in places if is_backward(place.get("projection", "gate"))]
        lacking = [place for place in places if place not in extra]
        plan.only[index].extend(places)
        if lacking:
            plan.differences.append(f"Only in {here.name}: {_places(lacking)}.")
        if extra:
            plan.same_tensors = False
            plan.notes.append(
                f"Only {here.name} has backward matrices, which fine-tuning uses: {_places(extra)}."
            )


def _only_in(here: _Input, there: _Input) -> Iterator[dict[str, Any]]:
    """The largest things that `there` lacks: layers, then projections, experts, matrices."""
    for layer, matrices in sorted(here.layers.items()):
        if layer in there.layers:
            for place in _only_in_layer(matrices.keys(), there.layers[layer].keys()):
                yield {"layer": layer, **place}
        else:
            yield {"layer": layer}


def _only_in_layer(here: Set[Expert], there: Set[Expert]) -> Iterator[dict[str, Any]]:
    experts, projections = {expert for expert, _ in there}, {proj for _, proj in there}
    for proj in sorted({proj for _, proj in here} - projections, key=_ORDER.index):
        yield {"projection": proj}
    for expert in sorted({expert for expert, _ in here} - experts):
        yield {"expert": expert}
    for expert, proj in _in_order(here - there):
        if expert in experts and proj in projections:
            yield {"expert": expert, "projection": proj}


def _in_order(matrices: Iterable[Expert]) -> list[Expert]:
    return sorted(matrices, key=lambda one: (one[0], _ORDER.index(one[1])))


def _plan_others(plan: _Plan, rng: random.Random) -> None:
    """Non-expert tensors. Layer folders and `--experts-only` have none: that is no difference."""
    a, b = plan.a.packed.others, plan.b.packed.others
    if not a or not b:
        if a or b:
            here, there = ("A", "B") if a else ("B", "A")
            count = _count(len(a or b), "tensor")
            plan.notes.append(f"Only {here} has non-expert tensors ({count}), {there} none.")
        return
    for index, (name, extra) in enumerate((("A", a.keys() - b.keys()), ("B", b.keys() - a.keys()))):
        places = [{"tensor": tensor} for tensor in sorted(extra)]
        plan.only[index].extend(places)
        if places:
            plan.differences.append(f"Non-expert tensors only in {name}: {_places(places)}.")
    for tensor in sorted(a.keys() & b.keys()):
        if (a[tensor].dtype, a[tensor].shape) != (b[tensor].dtype, b[tensor].shape):
            plan.differences.append(
                f"{tensor} is {_type(a[tensor])} in A, {_type(b[tensor])} in B."
            )
        elif plan.sample >= 1 or rng.random() < plan.sample:
            plan.tasks.append(_TensorTask(a[tensor], b[tensor]))


def _type(tensor: TensorRef) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


# ---- reading and comparing, in worker threads --------------------------------------------


@dataclass(slots=True)
class _Sums:
    """Differences of any number of elements."""

    squared_a: float = 0.0
    squared_b: float = 0.0
    product: float = 0.0
    squared_difference: float = 0.0
    max_steps: float = 0.0  # of the coarser step of both; NaN if a difference is not finite
    differing: int = 0

    def add(self, other: _Sums) -> None:
        self.squared_a += other.squared_a
        self.squared_b += other.squared_b
        self.product += other.product
        self.squared_difference += other.squared_difference
        self.max_steps = float(np.maximum(self.max_steps, other.max_steps))
        self.differing += other.differing

    def as_dict(self) -> dict[str, Any]:
        """Relative to A, or to B where A is all zero. None: not finite."""
        whole = self.squared_a or self.squared_b
        relative = math.sqrt(self.squared_difference / whole) if whole else 0.0
        length = math.sqrt(self.squared_a) * math.sqrt(self.squared_b)
        cosine = min(self.product / length, 1.0) if length else 1.0 - bool(whole)
        return {
            "relative_rms_difference": _finite(relative),
            "cosine": _finite(cosine),
            "max_difference_steps": _finite(self.max_steps),
            "differing_elements": self.differing,
        }


_UNKNOWN = _Sums(*(math.nan,) * 5)  # of what could only be compared as bytes


@dataclass(frozen=True, slots=True)
class _First:
    """The first element that differs, row by row of the whole matrix."""

    row: int
    column: int
    a: float
    b: float


@dataclass(frozen=True, slots=True)
class _Done:
    """What comparing a matrix or a tensor found."""

    task: _Task
    same_bytes: bool
    equal: bool
    sums: _Sums | None = None  # None: equal
    first: _First | None = None  # None: equal, or only bytes could be compared
    digests: tuple[bytes, bytes] | None = None  # of what A and B have, where they differ
    offset: int = 0  # of the first byte that differs, of a tensor


@dataclass(frozen=True, slots=True)
class _MatrixTask:
    """One projection of one expert, all parts, of both sides."""

    layer: int
    expert: int
    proj: Matrix
    a: _Side
    b: _Side

    @property
    def unit(self) -> str:
        return f"layer-{self.layer:05d}"

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    @property
    def elements(self) -> int:
        rows, cols = _part_shape(self.a.geometry, self.proj)
        return rows * cols * self.a.geometry.parts

    def run(self) -> _Done:
        a, b = self.a.load(), self.b.load()
        if a.keys() == b.keys() and all(np.array_equal(a[piece], b[piece]) for piece in a):
            return _Done(self, same_bytes=True, equal=True)
        if self.a.fault or self.b.fault:
            return _Done(self, False, False, _UNKNOWN, None, (_digest(a), _digest(b)))
        values = self.a.joined(a), self.b.joined(b)
        if values[0].same_as(values[1]):
            return _Done(self, same_bytes=False, equal=True)
        sums, first = _measure(*values)
        if first is None:
            return _Done(self, same_bytes=False, equal=True)
        return _Done(self, False, False, sums, first, (_digest(a), _digest(b)))


def _digest(data: Mapping[Piece, U8]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for piece in sorted(data):
        digest.update(f"{piece} {data[piece].nbytes}".encode())
        digest.update(data[piece].data)
    return digest.digest()


def _measure(a: _Values, b: _Values) -> tuple[_Sums, _First | None]:
    """Some rows at a time, so that float64 copies stay small."""
    rows, cols = a.codes.shape
    height = max(1, CHUNK_ELEMENTS // cols)
    total, first = _Sums(), None
    with np.errstate(all="ignore"):
        for start in range(0, rows, height):
            here = slice(start, start + height)
            left, right = a.values(here), b.values(here)
            unequal = (left != right) & ~(np.isnan(left) & np.isnan(right))
            if first is None and unequal.any():
                row, column = divmod(int(unequal.argmax()), cols)
                at = float(left[row, column]), float(right[row, column])
                first = _First(start + row, column, *at)
            total.add(_sums(left, right, unequal, np.maximum(a.steps(here), b.steps(here))))
    return total, first


def _sums(left: F32, right: F32, unequal: NDArray[np.bool_], step: F32) -> _Sums:
    a, b = left.astype(np.float64), right.astype(np.float64)
    difference = np.zeros_like(a)
    np.subtract(a, b, out=difference, where=unequal)
    steps = np.divide(np.abs(difference), step, out=np.zeros_like(a), where=unequal)
    return _Sums(
        _product(a, a),
        _product(b, b),
        _product(a, b),
        _product(difference, difference),
        float(steps.max(initial=0.0)),
        int(unequal.sum()),
    )


def _product(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """The sum of products in a fixed order; BLAS would divide it among threads."""
    return float(np.einsum("ij,ij->", a, b))


@dataclass(frozen=True, slots=True)
class _TensorTask:
    """One non-expert tensor of both sides, of the same type."""

    a: TensorRef
    b: TensorRef

    @property
    def unit(self) -> str:
        return OTHER

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    def run(self) -> _Done:
        for offset in range(0, self.a.nbytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, self.a.nbytes - offset)
            a, b = (
                read_place(Place(tensor.file, tensor.offset + offset, size))
                for tensor in (self.a, self.b)
            )
            if not np.array_equal(a, b):
                return _Done(self, False, False, offset=offset + int((a != b).argmax()))
        return _Done(self, same_bytes=True, equal=True)


_Task = _MatrixTask | _TensorTask


def _run(tasks: Sequence[_Task], threads: int, observer: Observer | None) -> Iterator[_Done]:
    """Everything in order; no more than two pairs per worker are under way. An error ends it."""
    progress, waiting = _Progress(tasks, observer), deque[Future[_Done]]()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for task in tasks:
                progress.start(task)
                waiting.append(pool.submit(task.run))
                if len(waiting) >= 2 * threads:
                    yield progress.finish(waiting.popleft().result())
            while waiting:
                yield progress.finish(waiting.popleft().result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


class _Progress:
    """Tells an observer about units, whose tasks come one after the other; from one thread."""

    def __init__(self, tasks: Sequence[_Task], observer: Observer | None) -> None:
        self._observer = observer
        self._left = Counter(task.unit for task in tasks)
        self._started: set[str] = set()
        if observer:
            observer.begin(list(self._left))

    def start(self, task: _Task) -> None:
        if self._observer and task.unit not in self._started:
            self._started.add(task.unit)
            self._observer.unit_started(task.unit)

    def finish(self, done: _Done) -> _Done:
        unit = done.task.unit
        self._left[unit] -= 1
        if self._observer:
            self._observer.advanced(done.task.nbytes)
            if not self._left[unit]:
                self._observer.unit_finished(unit)
        return done


# ---- the result --------------------------------------------------------------------------


@dataclass(slots=True)
class _Layer:
    """What was found in one layer."""

    matrices: int = 0
    equal_bytes: int = 0
    different: Counter[Matrix] = field(default_factory=Counter)
    sums: _Sums = field(default_factory=_Sums)  # of the matrices that differ
    experts: dict[int, _Sums] = field(default_factory=dict)

    def add(self, done: _Done, task: _MatrixTask) -> None:
        self.matrices += 1
        self.equal_bytes += done.same_bytes
        self.different[task.proj] += not done.equal
        self.experts.setdefault(task.expert, _Sums())
        if done.sums is not None:
            self.sums.add(done.sums)
            self.experts[task.expert].add(done.sums)

    def as_dict(self, layer: int) -> dict[str, Any]:
        """Numbers are over the matrices that differ: those that are equal are not unpacked."""
        different = self.different.total()
        return {
            "layer": layer,
            "matrices": self.matrices,
            "equal_bytes": self.equal_bytes,
            "equal_weights": self.matrices - different,
            "different": {proj: self.different[proj] for proj in _ORDER if proj in self.different},
            **self.sums.as_dict(),
            "experts": [
                {"expert": expert, "relative_rms_difference": _relative(sums)}
                for expert, sums in sorted(self.experts.items())
            ],
        }


def _relative(sums: _Sums) -> float | None:
    found: float | None = sums.as_dict()["relative_rms_difference"]
    return found


class _Tally:
    """Collects what the workers found; from one thread, in the order of the plan."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        self._layers: dict[int, _Layer] = {}
        self._worst: list[_Done] = []
        self._sums = _Sums()
        self._tensors: list[str] = []
        self._digests: tuple[dict[bytes, _MatrixTask], dict[bytes, _MatrixTask]] = ({}, {})
        self._elements = self._others = 0
        self._equal_bytes = True

    def add(self, done: _Done) -> None:
        self._equal_bytes = self._equal_bytes and done.same_bytes
        if isinstance(done.task, _TensorTask):
            self._others += 1
            if not done.equal:
                self._tensors.append(f"{done.task.a.name} differs from its byte {done.offset} on.")
            return
        self._elements += done.task.elements
        self._layers.setdefault(done.task.layer, _Layer()).add(done, done.task)
        if not done.equal:
            self._different(done, done.task)

    def _different(self, done: _Done, task: _MatrixTask) -> None:
        self._worst.append(done)
        if len(self._worst) > 10 * WORST_KEPT:
            self._keep_worst()
        assert done.sums is not None and done.digests is not None
        self._sums.add(done.sums)
        for known, digest in zip(self._digests, done.digests, strict=True):
            known.setdefault(digest, task)

    def _keep_worst(self) -> None:
        self._worst.sort(key=_badness, reverse=True)  # stable: the first of equals stays first
        del self._worst[WORST_KEPT:]

    def result(self) -> Comparison:
        plan = self._plan
        self._keep_worst()
        matrices = self._matrices()
        cause, explained = _cause(plan, self._layers, self._sums)
        explained = explained and not (plan.differences or self._tensors)
        moved = _at_most(SAID, list(_moved(*self._digests)), "moved expert")
        tensors = _at_most(SAID, self._tensors, "non-expert tensor")
        differences = [*plan.differences, *matrices, *cause, *moved, *tensors]
        same = self._equal_bytes and plan.same_tensors
        return Comparison(
            a=plan.a.about(),
            b=plan.b.about(),
            verdict="different" if differences else "equal bytes" if same else "equal weights",
            expected=explained,
            sample=plan.sample,
            seed=plan.seed,
            matrices=sum(layer.matrices for layer in self._layers.values()),
            elements=self._elements,
            other_tensors=self._others,
            layers=[self._layers[layer].as_dict(layer) for layer in sorted(self._layers)],
            worst=[_worst_dict(done) for done in self._worst],
            only_in_a=plan.only[0],
            only_in_b=plan.only[1],
            differences=differences,
            notes=plan.notes,
        )

    def _matrices(self) -> list[str]:
        """The one sentence about all matrices that differ."""
        different = _by_projection(self._layers.values())
        if not different:
            return []
        total = sum(layer.matrices for layer in self._layers.values())
        among = ", ".join(f"{different[proj]} {proj}" for proj in _ORDER if proj in different)
        where = format_ranges([n for n, one in self._layers.items() if one.different.total()])
        return [
            f"{different.total()} of {_count(total, 'expert matrix')} differ ({among}), in layers "
            f"{where}."
        ]


def _by_projection(layers: Iterable[_Layer]) -> Counter[Matrix]:
    found: Counter[Matrix] = Counter()
    for layer in layers:
        found.update(layer.different)
    return +found


def _badness(done: _Done) -> float:
    """The relative RMS difference; what has none is worst."""
    relative = _relative(done.sums) if done.sums else None
    return math.inf if relative is None else relative


def _worst_dict(done: _Done) -> dict[str, Any]:
    assert isinstance(done.task, _MatrixTask) and done.sums is not None
    about = {"layer": done.task.layer, "expert": done.task.expert, "projection": done.task.proj}
    if done.first is None:
        return about | dict.fromkeys(done.sums.as_dict())
    return {
        **about,
        **done.sums.as_dict(),
        "elements": done.task.elements,
        "row": done.first.row,
        "column": done.first.column,
        "value_a": _finite(done.first.a),
        "value_b": _finite(done.first.b),
    }


def _cause(plan: _Plan, layers: Mapping[int, _Layer], sums: _Sums) -> tuple[list[str], bool]:
    """What options explain matrices that differ, in words, and whether they explain all."""
    differing = {number: layer for number, layer in layers.items() if layer.different.total()}
    pairs = [(plan.a.packed.layers[n], plan.b.packed.layers[n]) for n in differing]
    reason = _reason(pairs, _by_projection(differing.values()).keys())
    if reason is None:
        return [], False
    if sums.max_steps <= max(_bound(here) + _bound(there) for here, there in pairs):
        most = f"no value differs by more than two roundings can, at most {_steps(sums.max_steps)}"
        return [f"This is expected: {reason}; {most}."], True
    return [f"{reason}, but that does not explain {_steps(sums.max_steps)}."], False


def _reason(pairs: Sequence[tuple[Geometry, Geometry]], different: Set[Matrix]) -> str | None:
    """Which option makes all these layers differ, if it can make these projections differ."""
    known = [(here.format, there.format) for here, there in pairs]
    if not known or any(None in formats for formats in known):
        return None
    if all(here is not there for here, there in known):
        names = [fmt.name if fmt else "" for fmt in known[0]]
        return f"A is {names[0]} and B is {names[1]}, which round every weight differently"
    if all(here.parts != there.parts for here, there in pairs) and different <= _CUT_ROWS:
        here, there = pairs[0]
        return (
            f"A has {_count(here.parts, 'NUMA part')} and B has {there.parts}, and each part has "
            "scales of its own for its columns of down, while gate and up are cut between rows"
        )
    return None


def _bound(geometry: Geometry) -> float:
    """Farthest that rounding takes a value from its source, in steps."""
    return geometry.format.max_error_steps if geometry.format else 0.0


def _moved(a: Mapping[bytes, _MatrixTask], b: Mapping[bytes, _MatrixTask]) -> Iterator[str]:
    """Matrices of A that lie somewhere else in B."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for digest in a.keys() & b.keys():
        here, there = a[digest], b[digest]
        places = (
            f"expert {here.expert} of layer {here.layer} in A",
            f"expert {there.expert} of layer {there.layer} in B",
        )
        same = here.proj == there.proj
        found[places].append(here.proj if same else f"{here.proj} as {there.proj}")
    for (first, second), names in sorted(found.items()):
        yield f"The {', '.join(sorted(names))} of {first} is that of {second}."


# ---- words -------------------------------------------------------------------------------


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _count(count: int, word: str) -> str:
    plural = f"{word[:-1]}ces" if word.endswith("x") else f"{word}s"
    return f"{count:,} {word if count == 1 else plural}"


def _steps(steps: float) -> str:
    return (
        f"{steps:.4g} quantization steps" if math.isfinite(steps) else "values that are no number"
    )


def _more(count: int, word: str) -> list[str]:
    return [f"... and {_count(count, f'more {word}')}"] if count > 0 else []


def _at_most(limit: int, sentences: Sequence[str], word: str) -> list[str]:
    return [*sentences[:limit], *_more(len(sentences) - limit, word)]


def _matrix_words(layer: int, expert: int, proj: str) -> str:
    return f"Layer {layer}, expert {expert}, {proj}"


def _places(places: Sequence[Mapping[str, Any]]) -> str:
    words = [" ".join(f"{key} {value}" for key, value in place.items()) for place in places]
    more = f" and {len(words) - NAMED:,} more" if len(words) > NAMED else ""
    return ", ".join(words[:NAMED]).replace("tensor ", "").replace("projection ", "") + more


def _words_about(side: Mapping[str, Any]) -> str:
    method = (side["method"] or "several or unknown formats").upper()
    parts = _count(side["numa"], "NUMA part") if side["numa"] else "several numbers of NUMA parts"
    layers = _count(len(side["layers"]), "layer")
    return f"{side['path']}: {method}, {parts}, {layers}, as {side['layout']}"


def _words_of_matrix(matrix: Mapping[str, Any]) -> str:
    """One of the worst matrices as a line."""
    place = _matrix_words(matrix["layer"], matrix["expert"], matrix["projection"])
    if "row" not in matrix:
        return f"{place}: the bytes differ."
    relative, cosine, steps, first, second = (
        "not finite" if matrix[key] is None else f"{matrix[key]:.6g}"
        for key in (
            "relative_rms_difference",
            "cosine",
            "max_difference_steps",
            "value_a",
            "value_b",
        )
    )
    return (
        f"{place}: relative RMS {relative}, cosine {cosine}, at most {steps} steps, "
        f"{matrix['differing_elements']:,} of {matrix['elements']:,} elements; first "
        f"[{matrix['row']}, {matrix['column']}], {first} in A, {second} in B"
    )
