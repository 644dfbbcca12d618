"""Outputs of ours as sources: what would round their weights once more is refused."""

from __future__ import annotations

from collections.abc import Iterable

from ktconv.errors import UsageError
from ktconv.source import Checkpoint, ExpertMatrix
from ktconv.system.stores import is_remote
from ktconv.targets.encoded.scheme import SCHEMES
from ktconv.writer.manifest import read_manifest


def refuse_second_rounding(
    checkpoint: Checkpoint, rounded: Iterable[ExpertMatrix], wanted: str
) -> None:
    """UsageError where the source is an output of ktconv, and some of its matrices that are
    quantized there would be quantized again: `rounded` are those that are not kept. `wanted`: the
    method, as messages have it."""
    lossy = next((matrix for matrix in rounded if matrix.quantization is not None), None)
    if lossy is None or (scheme := _written_by_us(checkpoint)) is None:
        return
    raise UsageError(
        f"{checkpoint.path} is an output of ktconv in {scheme}: {wanted} would round "
        f"{lossy.tensor.name} once more",
        "convert the original model; or decode it with --method bf16; or add --requantize to round "
        "these weights again",
    )


def _written_by_us(checkpoint: Checkpoint) -> str | None:
    """The format of an output of ours on this machine; None for any other source."""
    path = checkpoint.path
    if is_remote(path) or not path.is_dir():
        return None
    manifest = read_manifest(path)
    scheme = None if manifest is None else manifest.options.get("scheme")
    return scheme if isinstance(scheme, str) and scheme in SCHEMES else None
