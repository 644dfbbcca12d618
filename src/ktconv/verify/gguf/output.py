"""A GGUF output on disk, by the headers of its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ktconv.conversion.plan import plan_checkpoint
from ktconv.errors import CheckpointError
from ktconv.formats.gguf import GGUF_FORMATS
from ktconv.source import Projection, TensorRef, open_checkpoint
from ktconv.source.model_source import ModelSource
from ktconv.targets.gguf.target import FORMAT, GgufTarget, Options
from ktconv.targets.gguf.weights import open_gguf
from ktconv.verify.output import NO_LIMIT, OpenedOutput
from ktconv.writer.journal import Journal
from ktconv.writer.manifest import MANIFEST, read_manifest, read_run


class GgufOutput(OpenedOutput, frozen=True, kw_only=True):
    method: str
    experts: Mapping[tuple[int, Projection], TensorRef]
    biases: Mapping[tuple[int, Projection], TensorRef]

    @property
    def described(self) -> dict[str, Any]:
        return {"method": self.method, "numa": None}

    @property
    def has_config(self) -> bool:
        return False  # which is no part of it: metadata are in the files

    def experts_in(self, layer: int) -> Sequence[int]:
        found = self.experts.get((layer, "down"))
        return range(found.shape[0]) if found is not None and found.shape else ()


def is_gguf_output(directory: Path) -> bool:
    """Whether quantize-cpu wrote, or began to write, GGUF files there, by its records."""
    return recorded_options(directory).get("format") == FORMAT


def recorded_options(directory: Path) -> Mapping[str, Any]:
    """The options in the manifest, or in the journal of a conversion that is not finished."""
    if (manifest := read_run(directory)) is not None:
        return manifest.options
    options = (Journal(directory).peek_run() or {}).get("options")
    return options if isinstance(options, dict) else {}


def open_gguf_output(output: Path, source: ModelSource | None) -> GgufOutput:
    """An output, and the model that it was converted from, if given. Raises as `open_checkpoint`
    for the source."""
    manifest = read_manifest(output)
    found = open_gguf(output)
    checkpoint = open_checkpoint(source) if source is not None else None
    options = _options(output)
    plan = None
    if checkpoint is not None:
        plan = plan_checkpoint(checkpoint, GgufTarget(options, checkpoint, None))
    return GgufOutput(
        packed=found.files,
        manifest=manifest,
        checkpoint=checkpoint,
        plan=plan,
        others=found.others,
        method=options.method,
        experts=found.experts,
        biases=found.biases,
    )


def _options(output: Path) -> Options:
    record = recorded_options(output)
    method, mtp = record.get("method"), record.get("mtp")
    if method not in GGUF_FORMATS or type(mtp) is not bool:
        raise CheckpointError(
            f"{output / MANIFEST} names no method of GGUF files: {method!r:.40}",
            "restore it from a copy, or convert the model again",
        )
    return Options(method=str(method), mtp=mtp, max_shard_size=NO_LIMIT)
