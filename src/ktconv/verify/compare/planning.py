"""What is to be compared, and the differences that headers show."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktconv.checkpoint import TensorRef
from ktconv.formats import is_backward
from ktconv.packed.weights import Geometry
from ktconv.verify.compare.pairs import MatrixTask, Task, TensorTask
from ktconv.verify.compare.side_files import SideFiles, compare_side_files
from ktconv.verify.compare.sides import ORDER, Expert, Input, Side, side_of
from ktconv.verify.compare.words import NAMED, counted, matrix_words, place_words, shortened
from ktconv.verify.request import check_sample
from ktconv.writer.journal import Journal


@dataclass(slots=True)
class Plan:
    """Differences by headers, and what is to be read."""

    a: Input
    b: Input
    sample: float
    seed: int
    tasks: list[Task] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    only: tuple[list[dict[str, Any]], list[dict[str, Any]]] = field(
        default_factory=lambda: ([], [])
    )
    same_tensors: bool = True  # False: some are extra, though the weights may be equal
    side_files: SideFiles = field(default_factory=SideFiles)


def make_plan(a: Path, b: Path, sample: float, seed: int) -> Plan:
    check_sample(sample)
    plan = Plan(Input("A", a), Input("B", b), sample, seed)
    for here in (plan.a, plan.b):
        plan.differences += shortened(list(here.flaws()), f"flaw of {here.name}")
        if Journal(here.packed.directory).run_file.exists():
            plan.notes.append(f"{here.name} is incomplete: run quantize-cpu again.")
    rng, faults = random.Random(seed), list[str]()
    for layer in sorted(plan.a.layers.keys() & plan.b.layers.keys()):
        faults += _plan_layer(plan, layer, rng)
    plan.differences += shortened(faults, "incomplete matrix")
    _plan_only(plan)
    _plan_others(plan, rng)
    plan.side_files = compare_side_files(a, b)
    plan.differences += shortened(plan.side_files.differences, "difference of a side file")
    plan.notes += plan.side_files.notes
    return plan


def _plan_layer(plan: Plan, layer: int, rng: random.Random) -> list[str]:
    """Adds the matrices that both have; sentences about incomplete ones."""
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
        pair = [side_of(side, layer, expert, proj) for side in (plan.a, plan.b)]
        if fault := _one_sided(plan, layer, *pair):
            faults.append(f"{matrix_words(layer, expert, proj)} cannot be compared: {fault}.")
        elif expert in chosen:
            plan.tasks.append(MatrixTask(layer, expert, proj, *pair))
    return faults


def _one_sided(plan: Plan, layer: int, a: Side, b: Side) -> str | None:
    """Why a pair differs without being read; None where it can be compared, if only as bytes."""
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
        f"{counted(geometry.experts, 'expert')} of hidden size {geometry.hidden} and intermediate "
        f"size {geometry.intermediate}{parts}"
    )


def _plan_only(plan: Plan) -> None:
    """Layers, experts and projections that only one side has."""
    for index, (here, there) in enumerate(((plan.a, plan.b), (plan.b, plan.a))):
        places = list(_only_in(here, there))
        extra = [place for place in places if is_backward(place.get("projection", "gate"))]
        missing = [place for place in places if place not in extra]
        plan.only[index].extend(places)
        if missing:
            plan.differences.append(f"Only in {here.name}: {place_words(missing)}.")
        if extra:
            plan.same_tensors = False
            plan.notes.append(
                f"Only {here.name} has backward matrices, which fine-tuning uses: "
                f"{place_words(extra)}."
            )


def _only_in(here: Input, there: Input) -> Iterator[dict[str, Any]]:
    """What is missing in `there`: layers, then projections, experts, matrices."""
    for layer, matrices in sorted(here.layers.items()):
        if layer in there.layers:
            for place in _only_in_layer(matrices.keys(), there.layers[layer].keys()):
                yield {"layer": layer, **place}
        else:
            yield {"layer": layer}


def _only_in_layer(here: Set[Expert], there: Set[Expert]) -> Iterator[dict[str, Any]]:
    experts, projections = {expert for expert, _ in there}, {proj for _, proj in there}
    for proj in sorted({proj for _, proj in here} - projections, key=ORDER.index):
        yield {"projection": proj}
    for expert in sorted({expert for expert, _ in here} - experts):
        yield {"expert": expert}
    for expert, proj in _in_order(here - there):
        if expert in experts and proj in projections:
            yield {"expert": expert, "projection": proj}


def _in_order(matrices: Iterable[Expert]) -> list[Expert]:
    return sorted(matrices, key=lambda one: (one[0], ORDER.index(one[1])))


def _plan_others(plan: Plan, rng: random.Random) -> None:
    """Non-expert tensors. Layer folders and `--experts-only` have none: that is no difference."""
    a, b = plan.a.packed.others, plan.b.packed.others
    if not a or not b:
        if a or b:
            here, there = ("A", "B") if a else ("B", "A")
            count = counted(len(a or b), "tensor")
            plan.notes.append(f"Only {here} has non-expert tensors ({count}), {there} none.")
        return
    for index, (name, extra) in enumerate((("A", a.keys() - b.keys()), ("B", b.keys() - a.keys()))):
        places = [{"tensor": tensor} for tensor in sorted(extra)]
        plan.only[index].extend(places)
        if places:
            plan.differences.append(f"Non-expert tensors only in {name}: {place_words(places)}.")
    for tensor in sorted(a.keys() & b.keys()):
        if (a[tensor].dtype, a[tensor].shape) != (b[tensor].dtype, b[tensor].shape):
            plan.differences.append(
                f"{tensor} is {_type(a[tensor])} in A, {_type(b[tensor])} in B."
            )
        elif plan.sample >= 1 or rng.random() < plan.sample:
            plan.tasks.append(TensorTask(a[tensor], b[tensor]))


def _type(tensor: TensorRef) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
