"""What is verified: an output as it lies on the disk, its manifest, and the plan it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ktconv.checkpoint import Checkpoint, open_checkpoint
from ktconv.errors import CheckpointError, UsageError
from ktconv.formats import FORMATS
from ktconv.packed import PackedWeights, open_packed
from ktconv.plan import Options, Plan, make_plan
from ktconv.writer.finish import MANIFEST, read_manifest

_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class Subject:
    """An opened output. `plan` and `checkpoint` are None without a source."""

    packed: PackedWeights
    manifest: Mapping[str, Any] | None  # None: another tool's output
    options: Options
    checkpoint: Checkpoint | None
    plan: Plan | None

    @property
    def directory(self) -> Path:
        return self.packed.directory

    @property
    def ours(self) -> bool:
        return self.manifest is not None

    def checksums(self) -> dict[str, str]:
        """Tensor -> SHA-256, as the manifest has them; empty without one."""
        if self.manifest is None:
            return {}
        units = [unit for unit in self.manifest["units"].values() if unit is not None]
        return {
            name: about["sha256"]
            for unit in units
            for name, about in unit["tensors"].items()
            if "sha256" in about
        }


def open_subject(output: Path, source: str | None) -> Subject:
    """Raises UsageError if there is nothing to verify, CheckpointError for an unusable source."""
    if not output.is_dir():
        raise UsageError(f"{output} is no directory", "give an OUTPUT of ktconv quantize-cpu")
    packed = open_packed(output)
    manifest = read_manifest(output)
    if not packed.tensors and manifest is None and not packed.damaged:
        raise UsageError(
            f"{output} holds no packed experts", "give an OUTPUT of ktconv quantize-cpu"
        )
    checkpoint = open_checkpoint(source) if source else None
    options = _options(packed, manifest, checkpoint)
    plan = make_plan(checkpoint, options) if checkpoint else None
    return Subject(packed, manifest, options, checkpoint, plan)


def _options(
    packed: PackedWeights, manifest: Mapping[str, Any] | None, checkpoint: Checkpoint | None
) -> Options:
    """How it was converted: as its manifest says, else as its tensors tell."""
    if manifest is not None:
        known = {field.name for field in fields(Options)}
        options = Options(**{k: v for k, v in manifest["options"].items() if k in known})
        if options.method not in FORMATS:
            raise CheckpointError(
                f"{packed.directory / MANIFEST} names the method {options.method!r}, which this "
                "version does not know",
                "verify with the version of ktconv that converted it",
            )
        return options
    found = [layer for layer in packed.layers.values() if layer.format is not None]
    if not found:
        raise CheckpointError(
            f"{packed.directory} holds tensors of no format that ktconv knows",
            f"it knows {', '.join(FORMATS)}",
        )
    return Options(
        method=found[0].format.key if found[0].format else "",
        numa=found[0].parts,
        layout="layers" if packed.layout == "layers" else "safetensors",
        compat=True,  # the reference converter rounds to bf16 first
        mtp=_has_mtp(packed, checkpoint),
        experts_only=not packed.others,
        max_shard_size=_NO_LIMIT,
    )


def _has_mtp(packed: PackedWeights, checkpoint: Checkpoint | None) -> bool:
    """Whether experts of MTP layers are there; the reference converter leaves them out."""
    if checkpoint is None:
        return True
    return any(layer.is_mtp and layer.index in packed.layers for layer in checkpoint.layers)
