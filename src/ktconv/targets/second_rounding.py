"""Outputs of ours as sources: what would round their weights once more is refused."""

from __future__ import annotations

from collections.abc import Iterable

from ktconv.errors import UsageError
from ktconv.formats.gguf import GGUF_FORMATS
from ktconv.source import Checkpoint, ExpertMatrix
from ktconv.system.stores import is_remote
from ktconv.writer.manifest import read_manifest

_BLOCKS = {row.type for row in GGUF_FORMATS.values()}


def refuse_second_rounding(
    checkpoint: Checkpoint, rounded: Iterable[ExpertMatrix], wanted: str
) -> None:
    """UsageError where the source is an output of ktconv, and some of its matrices that are
    quantized there would be quantized again: `rounded` are those that are not kept. `wanted`: the
    method, as messages have it."""
    lossy = next((matrix for matrix in rounded if _is_rounded(matrix)), None)
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
    if is_remote(path):
        return None
    manifest = read_manifest(path if path.is_dir() else path.parent)
    options = {} if manifest is None else manifest.options
    if checkpoint.is_gguf:
        method = options.get("method")
        return method if isinstance(method, str) and method in GGUF_FORMATS else None
    from ktconv.targets.encoded.scheme import SCHEMES

    scheme = options.get("scheme")
    return scheme if isinstance(scheme, str) and scheme in SCHEMES else None


def _is_rounded(matrix: ExpertMatrix) -> bool:
    """Whether its numbers have scales, of their own or in blocks of ggml."""
    return matrix.quantization is not None or matrix.element.name in _BLOCKS
