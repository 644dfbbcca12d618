"""Whether two outputs together contain every expert of a model exactly once.

The other output can be anything with experts: an output of quantize-gpu, a checkpoint, or packed
experts in another format. Tensors decide which experts are there; manifests say what to expect and
whether both outputs come from the same model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ktconv.errors import CheckpointError, UsageError
from ktconv.families import table
from ktconv.formats import is_backward
from ktconv.source import TensorRef
from ktconv.source.remote.urls import no_directory
from ktconv.source.stacks import Stack, split_tensors
from ktconv.system.units import listed
from ktconv.targets.packed.weights import PackedWeights, open_packed
from ktconv.verify.findings import Findings
from ktconv.verify.packed.output import PackedOutput
from ktconv.writer.journal import Journal, Record
from ktconv.writer.manifest import Manifest, read_manifest

LEVEL = "coverage"

_GATE_UP = "gate and up"
_WHOLE = ({"gate", "up", "down"}, {_GATE_UP, "down"})
_WHOLE_UNGATED = ({"up", "down"},)

Ids = dict[int, set[int]]  # experts by layer


class Layer(NamedTuple):
    experts: int
    source: str  # model.layers.3.mlp.experts
    gated: bool


Layers = dict[int, Layer]


def check_cover(output: PackedOutput, other: Path, findings: Findings) -> dict[str, Any]:
    """Compares both with the model; facts for the report.

    Raises UsageError where the experts of the model are not known or `other` has none,
    CheckpointError where `other` cannot be read.
    """
    if not other.is_dir():
        raise UsageError(f"--with {no_directory(other)}", "give an output of ktconv quantize-gpu")
    layers = _layers(output)
    manifest = read_manifest(other)
    if Journal(other).has_run():
        message = f"{other} is incomplete: run the command that converted it again."
        findings.fail(LEVEL, "unfinished", message, file=str(other))
    _same_source(output.manifest, manifest, other, findings)
    here, there = _packed_ids(output.packed), _ids_of(other, layers, findings)
    for layer, (count, *_) in layers.items():
        everything, ours, theirs = (
            set(range(count)),
            here.get(layer, set()),
            there.get(layer, set()),
        )
        for check, ids, words in (
            ("experts in neither", everything - ours - theirs, "in neither output"),
            ("experts in both", ours & theirs, "in both"),
            ("unknown experts", (ours | theirs) - everything, "not the model's"),
        ):
            if ids:
                message = f"layer {layer}: {listed('expert', ids)} {words}."
                findings.fail(LEVEL, check, message, layer=layer, expert=min(ids))
    for layer in sorted(there.keys() - layers.keys()):
        message = f"{other} has experts of layer {layer}, which is not an MoE layer"
        findings.fail(LEVEL, "unknown layer", f"{message} of this conversion.", layer=layer)
    return {
        "output": str(output.directory),
        "with": str(other),
        "with_options": manifest.options if manifest else None,
        "layers": len(layers),
        "experts": sum(one.experts for one in layers.values()),
        "experts_here": sum(map(len, here.values())),
        "experts_there": sum(map(len, there.values())),
    }


def _layers(output: PackedOutput) -> Layers:
    """Layers of the source if it is given, else of the manifest."""
    if output.checkpoint is not None:
        return {
            layer.index: Layer(len(layer.experts), layer.source, layer.gated)
            for layer in output.checkpoint.layers
            if output.options.mtp or not layer.is_mtp
        }
    if output.manifest is None:
        raise UsageError(
            f"the experts of the model of {output.directory} are not known",
            "give the original checkpoint with --source MODEL",
        )
    layers = output.manifest.layers.items()
    return {
        index: Layer(about["experts"], about["source"], about.get("gated") is not False)
        for index, about in layers
    }


def _same_source(
    ours: Manifest | None, theirs: Manifest | None, other: Path, findings: Findings
) -> None:
    """Checks that both manifests name the same source files, apart from their times."""
    here, there = (_source_files(manifest) for manifest in (ours, theirs))
    if not (here and there):
        findings.note(f"whether {other} was made from the same model is not known")
        return
    names = sorted(here.keys() | there.keys())
    different = [name for name in names if here.get(name) != there.get(name)]
    if different:
        message = f"{other} was made from another model: {different[0]} differs."
        findings.fail(LEVEL, "another source", message, file=different[0])


def _source_files(manifest: Manifest | None) -> dict[str, Record]:
    files = manifest.source_files if manifest else {}
    return {
        name: {key: value for key, value in about.items() if key not in ("mtime_ns", "etag")}
        for name, about in files.items()
    }


# ---- which experts are there -----------------------------------------------------------


def _packed_ids(packed: PackedWeights) -> Ids:
    found: Ids = {}
    for tensor in packed.tensors:
        if not is_backward(tensor.proj):
            found.setdefault(tensor.layer, set()).add(tensor.expert)
    return found


def _ids_of(other: Path, layers: Layers, findings: Findings) -> Ids:
    packed = open_packed(other)
    if packed.tensors:
        return _packed_ids(packed)
    if packed.damaged:
        raise CheckpointError(next(iter(packed.damaged.values())), "write it again")
    stacks = split_tensors(packed.others.values()).stacks
    if not stacks:
        raise UsageError(
            f"--with {other} contains no experts", "give an output of ktconv quantize-gpu"
        )
    numbers = {one.source: layer for layer, one in layers.items()}
    by_layer = ((numbers.get(stack.source, stack.path.number), stack) for stack in stacks)
    ungated = {layer for layer, one in layers.items() if not one.gated}
    return {
        layer: set(_whole(stack, layer, findings, _WHOLE_UNGATED if layer in ungated else _WHOLE))
        for layer, stack in by_layer
    }


def _whole(
    stack: Stack, layer: int, findings: Findings, whole: Sequence[set[str]]
) -> Iterator[int]:
    """The experts of a stack. An incomplete expert is a failure, but counts as there."""
    found: dict[int, set[str]] = {}
    for rest, tensor in stack.tensors.items():
        for expert, matrix in _matrices(rest, tensor):
            found.setdefault(expert, set()).add(matrix)
    for expert, matrices in sorted(found.items()):
        if matrices not in whole:
            message = f"layer {layer}: expert {expert} has only {', '.join(sorted(matrices))}."
            findings.fail(LEVEL, "incomplete expert", message, layer=layer, expert=expert)
        yield expert


def _matrices(rest: str, tensor: TensorRef) -> Sequence[tuple[int, str]]:
    """(expert, matrix) of a tensor's name; of every expert where they are fused."""
    known = table.FAMILIES
    fused = dict.fromkeys(known.fused, _GATE_UP) | dict.fromkeys(known.fused.values(), "down")
    words: dict[str, str] = {**fused, **known.projections}
    first, _, name = rest.partition(".")
    if first in words:
        return [(expert, words[first]) for expert in range(tensor.shape[0])]
    word = name.partition(".")[0]
    if word in words and first.isascii() and first.isdecimal():
        return [(int(first), words[word])]
    return []
