"""`ktconv merge`: layer folders, ours or the reference converter's, into shards.

    report = merge(Request(Path("layers"), Path("out"), source="path/to/model"))

The steps are: read names and sizes of all folders; hold them against their manifest and
source; copy layer by layer, checking every checksum there is; write index and manifest.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ktconv.checkpoint import Checkpoint, MoELayer, open_checkpoint
from ktconv.checkpoint.config import CONFIG_NAME, interpret_config, read_config
from ktconv.checkpoint.side_files import find_side_files
from ktconv.conversion import BufferedTask, Report, SilentObserver, refuse_nested
from ktconv.conversion.pipeline import Observer
from ktconv.errors import CheckpointError
from ktconv.quantize_cpu import run as quantize_cpu
from ktconv.reading.reader import SourceReader
from ktconv.repack import derived
from ktconv.repack.derived import Derived
from ktconv.repack.planning import Content, PackedLayer, plan_packed
from ktconv.repack.sources import (
    Manifest,
    check_alone,
    check_manifest,
    check_same_source,
    check_side_files,
    check_source,
    layer_alone,
    read_known,
)
from ktconv.repack.tasks import MergeTask
from ktconv.repack.tree import (
    KtEntry,
    Tree,
    TreeLayer,
    listing_sha256,
    matrices,
    read_tree,
    scan_layer,
)
from ktconv.system import machine
from ktconv.system.units import format_ranges
from ktconv.targets.card import model_name
from ktconv.targets.ktransformers import Copy, Options, Plan, Unit, make_plan


@dataclass(frozen=True, slots=True)
class Request:
    """What to merge and how."""

    layers_dir: Path
    output: Path
    source: str | None = None  # the model: its other tensors, config and tokenizer are taken
    experts_only: bool = False  # of no other tensor, although there is a source
    mtp: bool | None = None  # None: as the manifest says, else all layers
    max_shard_size: int = Options().max_shard_size
    threads: int | None = None
    verify: bool = True
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class Preflight(derived.Preflight):
    """A planned merge with what it will need here; what `--dry-run` prints."""

    tree: Tree
    manifest: Manifest | None


@dataclass(frozen=True, slots=True)
class _Input:
    """Everything that a merge reads."""

    request: Request
    tree: Tree
    manifest: Manifest | None
    source: Checkpoint | None
    options: Options


def prepare(request: Request) -> Preflight:
    """Read names, sizes and headers, check and plan. Writes nothing."""
    refuse_nested(request.layers_dir, request.output, "the directory")
    tree = read_tree(request.layers_dir)
    manifest = read_known(request.layers_dir)
    source = open_checkpoint(request.source) if request.source else None
    if source is not None:
        refuse_nested(source.path, request.output)
    given = _Input(request, tree, manifest, source, _options(request, tree, manifest))
    _check(given)
    plan = _plan(given)
    derived.check_output(plan, request.output)
    return _preflight(given, plan)


def merge(
    request: Request, observer: Observer | None = None, preflight: Preflight | None = None
) -> Report:
    """Merge; see `Request`. Raises KtconvError, or KeyboardInterrupt with all state kept."""
    return Merging(preflight or prepare(request), observer or SilentObserver()).run()


# ---- planning --------------------------------------------------------------------------


def _options(request: Request, tree: Tree, manifest: Manifest | None) -> Options:
    """The options of the conversion that made the folders, as far as anything tells."""
    # Folders without a manifest are the reference converter's, which rounds to bf16 first.
    made = manifest.options if manifest else Options(compat=True, mtp=_has_mtp(request, tree))
    return replace(
        made,
        method=tree.format.key,
        numa=tree.parts,
        layout="safetensors",
        mtp=made.mtp if request.mtp is None else request.mtp,
        experts_only=request.experts_only or request.source is None,
        max_shard_size=request.max_shard_size,
    )


def _has_mtp(request: Request, tree: Tree) -> bool:
    """Whether folders without a manifest hold MTP layers, as far as a config.json tells."""
    if request.source is not None or not (tree.root / CONFIG_NAME).exists():
        return True
    layers = interpret_config(read_config(tree.root).content).num_layers
    return layers is None or any(index >= layers.value for index in tree.layers)


def _check(given: _Input) -> None:
    """Everything that is known agrees."""
    if given.manifest is not None:
        check_manifest(given.manifest, given.tree)
    if given.source is not None:
        check_source(given.tree, given.source, given.options.mtp)
        if given.manifest is not None:
            check_same_source(given.manifest, given.source)
    if given.manifest is None and given.source is None:
        check_alone(given.tree)


def _plan(given: _Input) -> Plan:
    """With a source: the plan of its conversion, with bytes from the folders."""
    if given.source is None:
        return plan_packed(_content_alone(given))
    fresh = make_plan(given.source, given.options)
    layers = [unit.layer for unit in fresh.layers if unit.layer]
    copies: list[Copy] = [copy for unit in fresh.others for copy in unit.copies]
    return plan_packed(
        Content(
            given.source,
            given.options,
            [_packed(layer, given.tree) for layer in layers],
            copies,
            fresh.sidecars,
            [*fresh.notes, *_notes(given)],
            fresh.skipped,
        )
    )


def _content_alone(given: _Input) -> Content:
    root, told = given.tree.root, given.manifest.layers if given.manifest else {}
    layers = [
        layer_alone(
            found.index, found.experts, found.hidden, found.intermediate, told.get(index, {})
        )
        for index, found in given.tree.layers.items()
    ]
    has_config = (root / CONFIG_NAME).exists()
    checkpoint = Checkpoint(
        path=root,
        config=read_config(root).content if has_config else {},
        files=(),
        layers=layers,
        other_tensors=(),
        notes=(),
        sources=given.manifest.source_files if given.manifest else (),
    )
    packed = [_packed(layer, given.tree) for layer in layers]
    check_side_files(given.manifest, root)
    sidecars, notes = find_side_files(root), _notes(given)
    return Content(checkpoint, given.options, packed, sidecars=sidecars, notes=notes)


def _packed(layer: MoELayer, tree: Tree) -> PackedLayer:
    found = tree.layers[layer.index]
    return PackedLayer(layer, found.here, found.backward, found.nbytes)


def _notes(given: _Input) -> Sequence[str]:
    """What a user should know."""
    tree, notes = given.tree, []
    if given.manifest is None:
        notes.append(f"{tree.root} has no ktconv.json: there are no checksums to compare with")
    if given.source is None:
        notes.append("without --source only experts are merged, no other tensors")
        if not (tree.root / CONFIG_NAME).exists():
            notes.append(f"{tree.root} has no config.json, so the output will have none")
        if given.manifest is None:
            layers = format_ranges(list(tree.layers))
            notes.append(f"nothing tells whether the model has MoE layers before or after {layers}")
    return notes


def _preflight(given: _Input, plan: Plan) -> Preflight:
    request = given.request
    threads = request.threads or min(machine.usable_cpus(), derived.MOST_THREADS)
    known = [given.manifest.path] if given.manifest else []
    base = model_name(given.source.path) if given.source else None
    return Preflight(
        request=quantize_cpu.Request(
            model=request.source or str(request.layers_dir),
            output=request.output,
            options=plan.options,
            threads=threads,
            verify=request.verify,
            overwrite=request.overwrite,
        ),
        plan=plan,
        units=plan.layers,
        threads=threads,
        peak_memory=derived.expected_memory(threads, 0, known),
        disk_free=machine.disk_free(request.output),
        origin={"merged_from": _origin(given, plan)},
        about="layer folders" + (f" of {base}" if base else ""),
        base=base,
        command=_command(given),
        tree=given.tree,
        manifest=given.manifest,
    )


def _origin(given: _Input, plan: Plan) -> dict[str, object]:
    """What the bytes come from; a resumed run must have the same."""
    taken = [unit.layer.index for unit in plan.layers if unit.layer]
    return {
        "manifest": given.manifest is not None,
        "backward": given.tree.backward,
        "layers": {str(index): given.tree.layers[index].record for index in taken},
    }


def _command(given: _Input) -> str:
    """The command that gives the same bytes again."""
    words = ["ktconv merge LAYERS_DIR OUTPUT"]
    if given.source is not None:
        words.append(f"--source {shlex.quote(model_name(given.source.path))}")
        words += ["--experts-only"] if given.options.experts_only else []
        words += [] if given.options.mtp else ["--no-mtp"]
    words.append(f"--max-shard-size {given.options.max_shard_size}")
    return " ".join(words)


# ---- merging ---------------------------------------------------------------------------


class Merging(Derived):
    """One run of a planned merge."""

    def __init__(self, preflight: Preflight, observer: Observer) -> None:
        super().__init__(preflight, observer)
        self._tree = preflight.tree
        self._known = preflight.manifest.tensors if preflight.manifest else {}

    def expert_tasks(self, unit: Unit, reader: SourceReader) -> Iterator[BufferedTask]:
        assert unit.layer is not None
        found = self._tree.layers[unit.layer.index]
        files = {entry.tensor: entry for entry in self._listing(found)}
        by_matrix: dict[tuple[str, int, int], list[KtEntry]] = {}
        for tensor, entry in files.items():
            by_matrix.setdefault((tensor.proj, tensor.expert, tensor.part), []).append(entry)
        for part in range(found.parts):
            for expert in found.here:
                for proj in matrices(found.backward):
                    entries = by_matrix[proj, expert, part]
                    yield MergeTask(self._tree.root, entries, self._known, self.request.verify)

    def _listing(self, found: TreeLayer) -> list[KtEntry]:
        """The files of a layer, which are what they were when the merge was planned."""
        entries = scan_layer(self._tree.root, found.index)
        if listing_sha256(entries) != found.sha256:
            raise CheckpointError(
                f"{self._tree.root / f'_layer_{found.index}'} changed during the merge",
                "make sure nothing writes there, then run the same command again",
            )
        return entries
