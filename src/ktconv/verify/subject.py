"""What is verified: an output as it lies on the disk, its manifest, and the plan it came from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ktconv.checkpoint import Checkpoint, open_checkpoint
from ktconv.errors import CheckpointError, UsageError
from ktconv.formats import FORMATS
from ktconv.packed.weights import PackedWeights, open_packed
from ktconv.targets.ktransformers import Options, Plan, make_plan, options_of_record
from ktconv.writer.journal import Journal, is_run_record
from ktconv.writer.metadata import MANIFEST, read_manifest

_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class Subject:
    """An opened output. `plan` and `checkpoint` are None without a source."""

    packed: PackedWeights
    manifest: Mapping[str, Any] | None  # None: another tool's output, or an unusable one
    options: Options
    checkpoint: Checkpoint | None
    plan: Plan | None
    contradiction: str | None = None  # of manifest and tensors: then `options` are the tensors'

    @property
    def directory(self) -> Path:
        return self.packed.directory

    @property
    def described(self) -> dict[str, Any]:
        """What the report says of how it was made."""
        return {"method": self.options.method, "numa": self.options.numa}

    @property
    def ours(self) -> bool:
        return self.manifest is not None

    @property
    def unfinished(self) -> bool:
        """Whether a conversion into it was begun; manifest, index and side files come last."""
        return Journal(self.directory).run_file.exists()

    def checksums(self) -> dict[str, str]:
        """Tensor -> SHA-256, as the manifest has them; empty without one."""
        return {name: about["sha256"] for name, about in self.claims().items() if "sha256" in about}

    def claims(self) -> dict[str, Mapping[str, Any]]:
        """Tensor -> its record in the manifest; empty without one."""
        units = self.manifest["units"].values() if self.manifest else ()
        return {
            name: about
            for unit in units
            if unit is not None
            for name, about in unit["tensors"].items()
        }


def open_subject(output: Path, source: str | None) -> Subject:
    """Raises UsageError if there is nothing to verify, CheckpointError for an unusable source."""
    if not output.is_dir():
        raise UsageError(
            f"{output} is no directory", "give an OUTPUT of ktconv quantize-cpu or quantize-gpu"
        )
    packed = open_packed(output)
    manifest = _usable(read_manifest(output), output)
    if not packed.tensors and manifest is None and not packed.damaged:
        raise UsageError(
            f"{output} holds no packed experts",
            "give an OUTPUT of ktconv quantize-cpu or quantize-gpu",
        )
    checkpoint = open_checkpoint(source) if source else None
    told = _options_of(manifest) if manifest else _options_of_run(output)
    options = told or _options_by_tensors(packed, checkpoint)
    contradiction = _contradiction(packed, options)
    if contradiction:
        true = _options_by_tensors(packed, checkpoint)
        options = replace(options, method=true.method, numa=true.numa)
    options = replace(options, max_shard_size=_NO_LIMIT)  # which shard holds what means nothing
    plan = make_plan(checkpoint, options) if checkpoint else None
    return Subject(packed, manifest, options, checkpoint, plan, contradiction)


def _usable(manifest: dict[str, Any] | None, output: Path) -> dict[str, Any] | None:
    """A manifest whose options and source have the form of ours; None for any other."""
    if manifest is None or _options_of(manifest) is None or not _tells_source(manifest):
        return None
    method = _options_of(manifest).method  # type: ignore[union-attr]
    if method not in FORMATS:
        raise CheckpointError(
            f"{output / MANIFEST} names the method {method!r}, which this version does not know",
            "verify with the version of ktconv that converted it",
        )
    return manifest


def _options_of(manifest: Mapping[str, Any]) -> Options | None:
    """How it was converted; None where a value is not of the type of ours."""
    record = manifest["options"]
    return options_of_record(record) if {"method", "numa"} <= record.keys() else None


def _options_of_run(output: Path) -> Options | None:
    """How a conversion that is not finished was begun."""
    run = Journal(output).peek_run()
    told = _options_of(run) if is_run_record(run) else None
    return told if told and told.method in FORMATS and told.numa > 0 else None


def _tells_source(manifest: Mapping[str, Any]) -> bool:
    source = manifest.get("source", {})
    files = source.get("files", {}) if isinstance(source, dict) else None
    return isinstance(files, dict) and all(isinstance(file, dict) for file in files.values())


def _contradiction(packed: PackedWeights, options: Options) -> str | None:
    """Why these cannot be the options of a conversion: no layer is of that kind."""
    kinds = {(one.format.key, one.parts) for one in packed.layers.values() if one.format}
    if not kinds or (options.method, options.numa) in kinds:
        return None
    method, parts = min(kinds)
    return (
        f"{MANIFEST} says {options.method.upper()} in {options.numa} NUMA part(s), but the "
        f"tensors are {method.upper()} in {parts}"
    )


def _options_by_tensors(packed: PackedWeights, checkpoint: Checkpoint | None) -> Options:
    """How it was converted, as its tensors tell: as most layers are."""
    kinds = Counter((one.format, one.parts) for one in packed.layers.values() if one.format)
    if not kinds:
        raise CheckpointError(
            f"{packed.directory} holds tensors of no format that ktconv knows",
            f"it knows {', '.join(FORMATS)}",
        )
    (fmt, parts), _ = kinds.most_common(1)[0]
    return Options(
        method=fmt.key,
        numa=parts,
        layout="layers" if packed.layout == "layers" else "safetensors",
        compat=True,  # the reference converter rounds to bf16 first
        mtp=_has_mtp(packed, checkpoint),
        experts_only=not packed.others,
    )


def _has_mtp(packed: PackedWeights, checkpoint: Checkpoint | None) -> bool:
    """Whether experts of MTP layers are there; the reference converter leaves them out."""
    if checkpoint is None:
        return True
    return any(layer.is_mtp and layer.index in packed.layers for layer in checkpoint.layers)
