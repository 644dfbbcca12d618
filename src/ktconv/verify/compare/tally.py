"""Adds up compared pairs to a verdict, by layer and worst first, with the likely cause."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from msgspec import Struct, field

from ktconv.formats import Matrix, cut_by_rows
from ktconv.system.units import counted, format_ranges
from ktconv.targets.packed.weights import Geometry
from ktconv.verify.compare.comparison import Comparison, shortened, step_words
from ktconv.verify.compare.pairs import DifferenceStats, MatrixTask, TaskResult, TensorTask
from ktconv.verify.compare.planning import Plan
from ktconv.verify.compare.sides import ORDER

WORST_KEPT = 20  # matrices


class _Layer(Struct):
    """Differences of one layer."""

    matrices: int = 0
    equal_bytes: int = 0
    different: Counter[Matrix] = field(default_factory=Counter)
    sums: DifferenceStats = field(default_factory=DifferenceStats)  # of the matrices that differ
    experts: dict[int, DifferenceStats] = field(default_factory=dict)

    def add(self, done: TaskResult, task: MatrixTask) -> None:
        self.matrices += 1
        self.equal_bytes += done.same_bytes
        self.different[task.proj] += not done.equal
        self.experts.setdefault(task.expert, DifferenceStats())
        if done.sums is not None:
            self.sums.add(done.sums)
            self.experts[task.expert].add(done.sums)

    def as_dict(self, layer: int) -> dict[str, Any]:
        """Errors are of the matrices that differ, since equal ones are not unpacked."""
        different = self.different.total()
        return {
            "layer": layer,
            "matrices": self.matrices,
            "equal_bytes": self.equal_bytes,
            "equal_weights": self.matrices - different,
            "different": {proj: self.different[proj] for proj in ORDER if proj in self.different},
            **self.sums.as_dict(),
            "experts": [
                {"expert": expert, "relative_rms_difference": sums.relative}
                for expert, sums in sorted(self.experts.items())
            ],
        }


class Tally:
    """Collects results in the order of the plan; for one thread."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._layers: dict[int, _Layer] = {}
        self._worst: list[TaskResult] = []
        self._sums = DifferenceStats()
        self._tensors: list[str] = []
        self._digests: tuple[dict[bytes, MatrixTask], dict[bytes, MatrixTask]] = ({}, {})
        self._elements = self._others = 0
        self._equal_bytes = True

    def add(self, done: TaskResult) -> None:
        self._equal_bytes = self._equal_bytes and done.same_bytes
        if isinstance(done.task, TensorTask):
            self._others += 1
            if not done.equal:
                self._tensors.append(f"{done.task.a.name} differs from its byte {done.offset} on.")
            return
        self._elements += done.task.elements
        self._layers.setdefault(done.task.layer, _Layer()).add(done, done.task)
        if not done.equal:
            self._different(done, done.task)

    def _different(self, done: TaskResult, task: MatrixTask) -> None:
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
        layers = self._layers
        matrices = sum(layer.matrices for layer in layers.values())
        differing = {n: layer for n, layer in sorted(layers.items()) if layer.different.total()}
        found, explained = _matrices(plan, differing, matrices, self._sums)
        moved = shortened(list(_moved(*self._digests)), "moved expert")
        tensors = shortened(self._tensors, "non-expert tensor")
        differences = [*plan.differences, *found, *moved, *tensors]
        same = self._equal_bytes and plan.same_bytes
        return Comparison(
            a=plan.a.about(),
            b=plan.b.about(),
            verdict="different" if differences else "equal bytes" if same else "equal weights",
            expected=explained and not (plan.differences or tensors),
            sample=plan.sample,
            seed=plan.seed,
            matrices=matrices,
            elements=self._elements,
            other_tensors=self._others,
            side_files=plan.side_files,
            layers=[layers[layer].as_dict(layer) for layer in sorted(layers)],
            worst=[_worst_dict(done) for done in self._worst],
            only_in_a=plan.a.only,
            only_in_b=plan.b.only,
            differences=differences,
            notes=plan.notes,
        )


def _badness(done: TaskResult) -> float:
    """The relative RMS difference; infinite if there is none."""
    relative = done.sums.relative if done.sums else None
    return math.inf if relative is None else relative


def _worst_dict(done: TaskResult) -> dict[str, Any]:
    assert isinstance(done.task, MatrixTask) and done.sums is not None
    about = {"layer": done.task.layer, "expert": done.task.expert, "projection": done.task.proj}
    if done.first is None:
        return about | dict.fromkeys(done.sums.as_dict())
    return about | done.sums.as_dict() | {"elements": done.task.elements} | done.first


def _matrices(
    plan: Plan, differing: Mapping[int, _Layer], total: int, sums: DifferenceStats
) -> tuple[list[str], bool]:
    """Sentences about all matrices that differ and about options that cause it, if there are any;
    and whether these explain all. `total` matrices were compared."""
    if not differing:
        return [], False
    different = sum((layer.different for layer in differing.values()), Counter[Matrix]())
    among = ", ".join(f"{different[proj]} {proj}" for proj in ORDER if proj in different)
    sentence = (
        f"{different.total()} of {counted(total, 'expert matrix')} differ ({among}), in layers "
        f"{format_ranges(list(differing))}."
    )
    pairs = [(plan.a.packed.layers[n], plan.b.packed.layers[n]) for n in differing]
    reason = _reason(pairs, different.keys())
    if reason is None:
        return [sentence], False
    if sums.rounded_steps <= max(_bound(here) + _bound(there) for here, there in pairs):
        most = (
            "no value differs by more than two roundings can, or than one side cuts off, at most "
            f"{step_words(sums.max_steps)}"
        )
        return [sentence, f"This is expected: {reason}; {most}."], True
    cause = f"{reason}, but that does not explain {step_words(sums.rounded_steps)}."
    return [sentence, cause], False


def _reason(pairs: Sequence[tuple[Geometry, Geometry]], different: Set[Matrix]) -> str | None:
    """The option that all these layers differ in, if it can affect these projections."""
    known = [(here.format, there.format) for here, there in pairs]
    if not known or any(None in formats for formats in known):
        return None
    if all(here is not there for here, there in known):
        names = [fmt.name if fmt else "" for fmt in known[0]]
        return f"A is {names[0]} and B is {names[1]}, which round every weight differently"
    by_rows = any(cut_by_rows(proj) for proj in different)
    if all(here.parts != there.parts for here, there in pairs) and not by_rows:
        here, there = pairs[0]
        return (
            f"A has {counted(here.parts, 'NUMA part')} and B has {there.parts}, and each part has "
            "scales of its own for its columns of down, while gate and up are cut between rows"
        )
    return None


def _bound(geometry: Geometry) -> float:
    """The largest error of rounding, in steps."""
    return geometry.format.max_error_steps if geometry.format else 0.0


def _moved(a: Mapping[bytes, MatrixTask], b: Mapping[bytes, MatrixTask]) -> Iterator[str]:
    """Sentences about matrices of A that are in another place in B."""
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
