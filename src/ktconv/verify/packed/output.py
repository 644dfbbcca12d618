"""Packed experts for CPUs on disk, and how they were converted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ktconv.errors import CheckpointError, UsageError
from ktconv.formats import is_backward, output_formats
from ktconv.quantize.ways import WAYS
from ktconv.source import Checkpoint, open_checkpoint
from ktconv.source.agreement import Dimensions
from ktconv.source.model_source import ModelSource
from ktconv.source.remote.urls import no_directory
from ktconv.system.units import counted
from ktconv.targets.packed.target import Options, make_plan, options_of_record
from ktconv.targets.packed.weights import PackedWeights, no_packed_experts, open_packed
from ktconv.verify.output import NO_LIMIT, OpenedOutput
from ktconv.verify.packed.unrecorded import found_rule
from ktconv.writer.journal import Journal, is_run_record
from ktconv.writer.manifest import MANIFEST, Manifest, read_manifest

_HINT = "give an OUTPUT of ktconv quantize-cpu or quantize-gpu"


class PackedOutput(OpenedOutput, frozen=True, kw_only=True):
    options: Options
    contradiction: str | None  # between manifest and tensors; then `options` are the tensors'
    backward: Options | None  # how matrices of backward passes were quantized; None: without them

    @property
    def described(self) -> dict[str, Any]:
        return {"method": self.options.method, "numa": self.options.numa}

    @property
    def dimensions(self) -> dict[int, Dimensions]:
        """Sizes of layers in a known format."""
        known = {index: here for index, here in self.packed.layers.items() if here.format}
        return {
            n: (here.experts, here.hidden, here.intermediate, here.gated)
            for n, here in known.items()
        }

    def experts_in(self, layer: int) -> Sequence[int]:
        geometry = self.packed.layers.get(layer)
        return geometry.here if geometry else ()


def open_cpu_output(output: Path, source: ModelSource | str | None) -> PackedOutput:
    """An output and the model that it was converted from, if given.

    Raises UsageError if there is nothing to verify, CheckpointError for an unusable source.
    """
    if not output.is_dir():
        raise UsageError(no_directory(output), _HINT)
    packed = open_packed(output)
    manifest = _usable(read_manifest(output), output)
    if not packed.tensors and manifest is None and not packed.damaged:
        message, _ = no_packed_experts(output)
        raise UsageError(message, f"{_HINT}; if it is one, restore its {MANIFEST}")
    checkpoint = open_checkpoint(source) if source else None
    options = (
        (manifest and _options_of_manifest(manifest, packed, checkpoint))
        or _options_of_run(output)
        or _options_by_tensors(packed, checkpoint)
    )
    contradiction = _contradiction(packed, options)
    if contradiction:
        actual = _options_by_tensors(packed, checkpoint)
        options = replace(options, method=actual.method, numa=actual.numa)
    backward = options if options.save_backward else None
    if backward is None and _has_foreign_backward(packed, manifest) and not options.fold:
        backward = replace(options, **found_rule(packed, checkpoint, "down_bwd"))
    options = replace(options, save_backward=backward is not None)
    # A mismatch of activations was decided about when it was converted.
    options = replace(options, max_shard_size=NO_LIMIT, allow_activation_mismatch=True)
    return PackedOutput(
        packed=packed,
        manifest=manifest,
        checkpoint=checkpoint,
        plan=make_plan(checkpoint, options) if checkpoint else None,
        others=packed.others,
        options=options,
        contradiction=contradiction,
        backward=backward,
    )


def _has_foreign_backward(packed: PackedWeights, manifest: Manifest | None) -> bool:
    """Whether there are matrices of backward passes that another tool wrote: next to packed weights
    without a manifest, or before ktconv merged them or cut them again."""
    kept = manifest is None or manifest.merged or manifest.resharded_from is not None
    return kept and any(is_backward(tensor.proj) for tensor in packed.tensors)


def _usable(manifest: Manifest | None, output: Path) -> Manifest | None:
    """The manifest if it is a valid one of ours, else None."""
    options = _options_of(manifest) if manifest and manifest.has_source else None
    if options is None:
        return None
    if options.method not in output_formats():
        raise _of_another_version(output / MANIFEST, f"the method {options.method!r}")
    _check_ways(options, output / MANIFEST)
    return manifest


def _check_ways(options: Options, path: Path) -> None:
    """CheckpointError for codes that were chosen in a way whose proof is not here."""
    for option in sorted(options.ways.keys() - {row.option for row in WAYS}):
        raise _of_another_version(path, f"--{option.replace('_', '-')}")


def _of_another_version(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} names {what}, which this version does not support",
        "verify with the version of ktconv that converted it",
    )


def _options_of(manifest: Manifest) -> Options | None:
    """Options of the conversion; None if the manifest does not say them as ours do."""
    complete = {"method", "numa"} <= manifest.options.keys()
    return options_of_record(manifest.options) if complete else None


def _options_of_manifest(
    manifest: Manifest, packed: PackedWeights, checkpoint: Checkpoint | None
) -> Options | None:
    """`_options_of`, with the rule of weights that were repacked from an output without one."""
    options, record = _options_of(manifest), manifest.record
    origins = [record.get(key) for key in ("merged_from", "resharded_from")]
    if options and any(one.get("manifest") is False for one in origins if isinstance(one, dict)):
        return replace(options, **found_rule(packed, checkpoint))
    return options


def _options_of_run(output: Path) -> Options | None:
    """The options of an incomplete conversion."""
    journal = Journal(output)
    run = journal.peek_run()
    options = _options_of(Manifest(journal.run_file, run)) if is_run_record(run) else None
    if options is None or options.method not in output_formats() or options.numa < 1:
        return None
    _check_ways(options, journal.run_file)
    return options


def _contradiction(packed: PackedWeights, options: Options) -> str | None:
    """A sentence if no layer has this method and number of parts."""
    kinds = {(one.format.key, one.parts) for one in packed.layers.values() if one.format}
    if not kinds or (options.method, options.numa) in kinds:
        return None
    method, parts = min(kinds)
    return (
        f"{MANIFEST} says {options.method.upper()} in {counted(options.numa, 'NUMA part')}, but "
        f"the tensors are {method.upper()} in {parts}"
    )


def _options_by_tensors(packed: PackedWeights, checkpoint: Checkpoint | None) -> Options:
    """Options of the conversion, by the tensors of most layers."""
    kinds = Counter((one.format, one.parts) for one in packed.layers.values() if one.format)
    if not kinds:
        raise CheckpointError(
            f"{packed.directory} contains tensors of an unknown format",
            f"known formats: {', '.join(output_formats())}",
        )
    (fmt, parts), _ = kinds.most_common(1)[0]
    return Options(
        method=fmt.key,
        numa=parts,
        layout="layers" if packed.layout == "layers" else "safetensors",
        **found_rule(packed, checkpoint),
        mtp=_has_mtp(packed, checkpoint),
        experts_only=not packed.others,
    )


def _has_mtp(packed: PackedWeights, checkpoint: Checkpoint | None) -> bool:
    """Whether there are experts of MTP layers, which the reference converter omits."""
    if checkpoint is None:
        return True
    return any(layer.is_mtp and layer.index in packed.layers for layer in checkpoint.layers)
