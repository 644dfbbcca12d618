"""Plans a comparison: what is read, and the differences that headers and side files show."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from ktconv.errors import CheckpointError
from ktconv.formats import is_backward
from ktconv.source import TensorRef
from ktconv.source.side_files import is_legal, list_side_files
from ktconv.system.regular_files import read_small
from ktconv.system.units import counted
from ktconv.targets.packed.weights import Geometry
from ktconv.verify.compare.comparison import NAMED, matrix_words, place_words, shortened
from ktconv.verify.compare.pairs import MatrixTask, Task, TensorTask
from ktconv.verify.compare.sides import ORDER, Expert, Input, Side
from ktconv.verify.request import check_sample
from ktconv.verify.side_content import content_differences
from ktconv.writer.journal import Journal


class Plan(Struct):
    """Differences that are known already, and what is to be read."""

    a: Input
    b: Input
    sample: float
    seed: int
    tasks: list[Task] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # False: some tensors are extra, or side files not the same, though the weights may be equal.
    same_bytes: bool = True
    side_files: int = 0  # that were compared


def make_plan(a: Path, b: Path, sample: float, seed: int) -> Plan:
    check_sample(sample)
    plan = Plan(Input("A", a), Input("B", b), sample, seed)
    for here in (plan.a, plan.b):
        plan.differences += shortened(list(here.flaws()), f"flaw of {here.name}")
        if Journal(here.packed.directory).has_run():
            plan.notes.append(f"{here.name} is incomplete: run quantize-cpu again.")
    rng, faults = random.Random(seed), list[str]()
    for layer in sorted(plan.a.layers.keys() & plan.b.layers.keys()):
        faults += _plan_layer(plan, layer, rng)
    plan.differences += shortened(faults, "incomplete matrix")
    for here, there in ((plan.a, plan.b), (plan.b, plan.a)):
        _plan_only(plan, here, there)
    _plan_others(plan, rng)
    plan.differences += shortened(list(_side_files(plan, a, b)), "difference of a side file")
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
        a, b = (side.side(layer, expert, proj) for side in (plan.a, plan.b))
        if fault := _one_sided(plan, layer, a, b):
            faults.append(f"{matrix_words(layer, expert, proj)} cannot be compared: {fault}.")
        elif expert in chosen:
            plan.tasks.append(MatrixTask(a, b, layer, expert, proj))
    return faults


def _one_sided(plan: Plan, layer: int, a: Side, b: Side) -> str | None:
    """Reason why a pair differs without being read; None where it can be compared, if only as
    bytes."""
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


def _plan_only(plan: Plan, here: Input, there: Input) -> None:
    """Layers, experts and projections that `there` does not have."""
    places = list(_only_in(here, there))
    extra = [place for place in places if is_backward(place.get("projection", "up"))]
    missing = [place for place in places if place not in extra]
    here.only += places
    if missing:
        plan.differences.append(f"Only in {here.name}: {place_words(missing)}.")
    if extra:
        plan.same_bytes = False
        plan.notes.append(
            f"Only {here.name} has backward matrices, which fine-tuning uses: {place_words(extra)}."
        )


def _only_in(here: Input, there: Input) -> Iterator[dict[str, Any]]:
    """Layers, then projections, experts and matrices, that are missing in `there`."""
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
    if _one_has_none(plan, a.keys(), b.keys(), "non-expert tensors", "tensor"):
        return
    for here, extra in ((plan.a, a.keys() - b.keys()), (plan.b, b.keys() - a.keys())):
        places = [{"tensor": tensor} for tensor in sorted(extra)]
        here.only += places
        if places:
            plan.differences.append(
                f"Non-expert tensors only in {here.name}: {place_words(places)}."
            )
    for tensor in sorted(a.keys() & b.keys()):
        if (a[tensor].dtype, a[tensor].shape) != (b[tensor].dtype, b[tensor].shape):
            plan.differences.append(
                f"{tensor} is {_type(a[tensor])} in A, {_type(b[tensor])} in B."
            )
        elif plan.sample >= 1 or rng.random() < plan.sample:
            plan.tasks.append(TensorTask(a[tensor], b[tensor]))


def _one_has_none(plan: Plan, a: Set[Any], b: Set[Any], what: str, word: str) -> bool:
    """Whether A or B has none of them, and a note if the other one has some."""
    if bool(a) != bool(b):
        here, there = ("A", "B") if a else ("B", "A")
        count = counted(len(a or b), word)
        plan.notes.append(f"Only {here} has {what} ({count}), {there} none.")
    return not a or not b


def _type(tensor: TensorRef) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


# ---- side files: config, tokenizer, templates, code -------------------------------------


def _side_files(plan: Plan, a: Path, b: Path) -> Iterator[str]:
    """Differences of all side files. An output without any, as other tools write it, is not
    different."""
    names = set(list_side_files(a)), set(list_side_files(b))
    if _one_has_none(plan, *names, "side files", "file"):
        return
    for name in sorted(names[0] ^ names[1], key=lambda name: (name in names[1], name)):
        plan.same_bytes = False
        sentence = f"Only {'B' if name in names[1] else 'A'} has {name}."
        if is_legal(name):
            plan.notes.append(sentence)
        else:
            yield sentence
    for name in sorted(names[0] & names[1]):
        try:
            here, there = (read_small(directory, name) for directory in (a, b))
        except CheckpointError as error:
            yield f"{name} cannot be compared: {error}."
            continue
        plan.side_files += 1
        if here != there:
            plan.same_bytes = False
            yield from _content(plan, name, here, there)


def _content(plan: Plan, name: Path, here: bytes, there: bytes) -> Iterator[str]:
    """Differences in content; of unknown files, which were copied from the model, in bytes."""
    found = content_differences(name, here, there, "in B")
    if found is None:
        found = [] if is_legal(name) else ["its bytes differ"]
    if not found:
        means = (
            "its text differs" if is_legal(name) else "written differently, but it means the same"
        )
        plan.notes.append(f"{name}: {means}.")
    yield from (f"{name}: {difference}." for difference in found)
