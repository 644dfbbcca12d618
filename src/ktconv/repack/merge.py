"""`ktconv merge`: layer folders, ours or the reference converter's, into shards.

    report = merge(Request(Path("layers"), Path("out"), source="path/to/model"))

The steps are: read names and sizes of all folders; compare them with their manifest and
source; copy layer by layer, checking every checksum there is; write index and manifest.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from ktconv.conversion.pipeline import Observer, Task
from ktconv.conversion.plan import LayerUnit, lay_out
from ktconv.conversion.run import Report, check_output, refuse_nested
from ktconv.errors import CheckpointError
from ktconv.formats import KINDS, TensorId
from ktconv.repack import derived
from ktconv.repack.derived import Derived, packed_content, plan_alone
from ktconv.repack.sources import (
    check_alone,
    check_manifest,
    check_same_source,
    check_source,
    config_beside,
    options_of,
    read_known,
)
from ktconv.repack.tasks import MergeTask
from ktconv.repack.tree import (
    KtEntry,
    Tree,
    TreeLayer,
    listing_sha256,
    read_tree,
    scan_layer,
)
from ktconv.source import Checkpoint, ModelSource, open_checkpoint
from ktconv.source.config import CONFIG_NAME
from ktconv.source.model_source import source_or_none
from ktconv.source.reading.reader import SourceReader
from ktconv.system.units import format_ranges
from ktconv.targets.card import model_name
from ktconv.targets.packed.target import Options, Plan, make_plan, target_for
from ktconv.writer.manifest import Manifest


class Request(Struct, frozen=True):
    """The request of `merge`: what to merge and how."""

    layers_dir: Path  # with `_layer_*` folders, ours or another converter's
    output: Path
    source: ModelSource | str | None = (
        None  # the model: its other tensors, config and tokenizer are taken
    )
    experts_only: bool = False  # of no other tensor, although there is a source
    mtp: bool | None = None  # None: as the manifest says, else all layers
    max_shard_size: int = Options().max_shard_size
    threads: int | None = None
    verify: bool = True
    overwrite: bool = False

    @property
    def original(self) -> ModelSource | None:
        """The model with the options about reading it; None where the manifest has the rest."""
        return source_or_none(self.source)


class _Input(Struct, frozen=True):
    """Everything that a merge reads."""

    request: Request
    tree: Tree
    manifest: Manifest | None
    source: Checkpoint | None
    options: Options


class Preflight(derived.Preflight, frozen=True):
    """A planned merge with what it will need here; what `--dry-run` prints."""

    inputs: _Input


def prepare(request: Request) -> Preflight:
    """Read names, sizes and headers, check and plan. Writes nothing."""
    refuse_nested(request.layers_dir, request.output, "the directory")
    tree = read_tree(request.layers_dir)
    manifest = read_known(request.layers_dir)
    source = None
    if (original := request.original) is not None:
        source = open_checkpoint(manifest.as_converted(original) if manifest else original)
        refuse_nested(source.path, request.output)
    inputs = _Input(request, tree, manifest, source, _options(request, tree, manifest))
    _check(inputs)
    plan = _plan(inputs)
    check_output(plan, request.output)
    return _preflight(inputs, plan)


def merge(
    request: Request, observer: Observer | None = None, preflight: Preflight | None = None
) -> Report:
    """Merge; see `Request`. Raises KtconvError, or KeyboardInterrupt with all state kept."""
    return Merging(preflight or prepare(request), observer or Observer()).run()


# ---- planning --------------------------------------------------------------------------


def _options(request: Request, tree: Tree, manifest: Manifest | None) -> Options:
    """The options of the conversion that made the folders, as far as it is known."""
    # Folders without a manifest are the reference converter's, which rounds to bf16 first.
    made = options_of(manifest) if manifest else Options(compat=True, mtp=_has_mtp(request, tree))
    return replace(
        made,
        method=tree.format.key,
        numa=tree.parts,
        layout="safetensors",
        mtp=made.mtp if request.mtp is None else request.mtp,
        experts_only=request.experts_only or request.source is None,
        max_shard_size=request.max_shard_size,
        allow_activation_mismatch=True,  # decided when the folders were made
    )


def _has_mtp(request: Request, tree: Tree) -> bool:
    """Whether folders without a manifest have MTP layers, as far as a config.json says."""
    config = config_beside(tree.root) if request.source is None else None
    layers = config.num_layers if config else None
    return layers is None or any(index >= layers.value for index in tree.layers)


def _check(inputs: _Input) -> None:
    """Everything that is known agrees."""
    if inputs.manifest is not None:
        check_manifest(inputs.manifest, inputs.tree)
    if inputs.source is not None:
        check_source(inputs.tree, inputs.source, inputs.options.mtp)
        if inputs.manifest is not None:
            check_same_source(inputs.manifest, inputs.source)
    if inputs.manifest is None and inputs.source is None:
        check_alone(inputs.tree)


def _plan(inputs: _Input) -> Plan:
    """Plan of a merge; with a source that of its conversion, with bytes from the folders."""
    if inputs.source is None:
        return plan_alone(inputs.tree, inputs.options, inputs.manifest, (), _notes(inputs))
    fresh = make_plan(inputs.source, inputs.options)
    target = target_for(inputs.source, fresh.moe_layers, inputs.options, inputs.tree.backward)
    return lay_out(
        inputs.source,
        target,
        packed_content(fresh.moe_layers, inputs.tree),
        [copy for unit in fresh.others for copy in unit.copies],
        fresh.sidecars,
        [*fresh.notes, *_notes(inputs)],
        fresh.skipped,
    )


def _notes(inputs: _Input) -> Sequence[str]:
    """Notes for the user."""
    tree, notes = inputs.tree, []
    if inputs.manifest is None:
        notes.append(f"{tree.root} has no ktconv.json: there are no checksums to compare with")
    if inputs.source is None:
        notes.append("without --source only experts are merged, no other tensors")
        if not (tree.root / CONFIG_NAME).exists():
            notes.append(f"{tree.root} has no config.json, so the output will have none")
        if inputs.manifest is None:
            layers = format_ranges(list(tree.layers))
            notes.append(f"whether the model has MoE layers before or after {layers} is not known")
    return notes


def _preflight(inputs: _Input, plan: Plan) -> Preflight:
    asked = inputs.request
    model = asked.source or str(asked.layers_dir)
    base = model_name(inputs.source.path) if inputs.source else None
    return Preflight(
        **derived.needs(asked, model, plan, 0, inputs.manifest),
        origin={"merged_from": _origin(inputs, plan)},
        about="layer folders" + (f" of {base}" if base else ""),
        command=_command(inputs),
        inputs=inputs,
    )


def _origin(inputs: _Input, plan: Plan) -> dict[str, object]:
    """Origin of the bytes; a resumed run must have the same."""
    return {
        "manifest": inputs.manifest is not None,
        "backward": inputs.tree.backward,
        "layers": {
            str(unit.layer.index): inputs.tree.layers[unit.layer.index].record
            for unit in plan.layers
        },
    }


def _command(inputs: _Input) -> str:
    """The command that gives the same bytes again."""
    words = ["ktconv merge LAYERS_DIR OUTPUT"]
    if inputs.source is not None:
        words.append(f"--source {shlex.quote(model_name(inputs.source.path))}")
        words += ["--experts-only"] if inputs.options.experts_only else []
        words += [] if inputs.options.mtp else ["--no-mtp"]
    words.append(f"--max-shard-size {inputs.options.max_shard_size}")
    return " ".join(words)


# ---- merging ---------------------------------------------------------------------------


class Merging(Derived):
    """One run of a planned merge."""

    def __init__(self, preflight: Preflight, observer: Observer) -> None:
        super().__init__(preflight, observer, preflight.inputs.manifest)
        self._tree = preflight.inputs.tree

    def expert_tasks(self, unit: LayerUnit, reader: SourceReader) -> Iterator[Task]:
        found = self._tree.layers[unit.layer.index]
        files = {entry.tensor: entry for entry in self._listing(found)}
        for part in range(found.parts):
            for expert in found.here:
                for proj in found.matrices(found.backward):
                    tensors = (TensorId(found.index, proj, expert, part, kind) for kind in KINDS)
                    entries = [files[tensor] for tensor in tensors]
                    yield MergeTask(self._tree.root, entries, self.known, self.request.verify)

    def _listing(self, found: TreeLayer) -> list[KtEntry]:
        """The files of a layer, which are what they were when the merge was planned."""
        entries = scan_layer(self._tree.root, found.index)
        if listing_sha256(entries) != found.sha256:
            raise CheckpointError(
                f"{self._tree.root / f'_layer_{found.index}'} changed during the merge",
                "make sure nothing writes there, then run the same command again",
            )
        return entries
