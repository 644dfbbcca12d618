"""Methods for a checkpoint, by its headers: bytes, what becomes of numbers, and which engines read
the output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ktconv.errors import KtconvError
from ktconv.formats import FORMATS, output_formats
from ktconv.source import Checkpoint, ExpertMatrix
from ktconv.targets.consumers import refuse_biases
from ktconv.targets.encoded.kept import awq_group, is_kept
from ktconv.targets.encoded.readers import readers_of
from ktconv.targets.encoded.scheme import Scheme, group_size_of, names_of
from ktconv.targets.encoded.target import encoded_bytes, weight_dtype

_SHORT = 5.0  # bits per weight: sources below it were quantized to 4 or 5 bits
_INTEGER_BITS = {"int4": 4, "int8": 8}


def methods(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Methods with the bytes of all experts, and in words what each does to the source's numbers.
    Of those that write a checkpoint also the engines that load the whole of it."""
    # A hundred thousand matrices are counted once.
    found = Counter(
        (one.element, one.rows, one.cols, weight_dtype(one)) for one in _matrices(checkpoint)
    )
    nbytes = sum(count * element.nbytes(*size) for (element, *size, _), count in found.items())
    weights = sum(count * rows * cols for (_, rows, cols, _), count in found.items())
    bits = 8 * nbytes / weights
    packed: dict[str, Any] = {
        method: {
            "expert_bytes": sum(
                len(layer.experts)
                * FORMATS[method].expert_bytes(
                    layer.hidden_size, layer.intermediate_size, gated=layer.gated
                )
                for layer in checkpoint.layers
            ),
            "numbers": _numbers(checkpoint, method, bits),
        }
        for method in output_formats()
    }
    counts: Counter[tuple[int, int, str]] = Counter()
    for (_, rows, cols, dtype), count in found.items():
        counts[rows, cols, dtype] += count
    return {**packed, **_encoded(checkpoint, counts)}


def _encoded(
    checkpoint: Checkpoint, counts: Mapping[tuple[int, int, str], int]
) -> Mapping[str, Any]:
    """Methods that write a checkpoint, with their bytes and effects; why not, where the model
    cannot have them."""
    found: dict[str, Any] = {}
    for name in names_of("quantize-cpu"):
        size = awq_group(checkpoint.layers) if name == "awq" else None
        scheme = Scheme(name, size or group_size_of(name))
        try:
            refuse_biases(checkpoint.layers, "this method does not write them", "")
            scheme.check(checkpoint.layers)
        except KtconvError as error:
            found[name] = {"expert_bytes": None, "numbers": f"not possible: {error}"}
            continue
        kinds = [matrix for layer in checkpoint.layers for matrix in layer.kinds]
        kept = [is_kept(scheme, one, weight_dtype(one) == "F16") for one in kinds]
        found[name] = {
            "expert_bytes": encoded_bytes(scheme, counts),
            "numbers": _of_format(scheme, kept),
            "read_by": _engines(scheme, checkpoint),
        }
    return found


def _engines(scheme: Scheme, checkpoint: Checkpoint) -> list[str]:
    """Names and versions of the engines that load the output by its config.json; none where experts
    get other names than the model's."""
    if not all(scheme.row.naming.keeps(layer) for layer in checkpoint.layers):
        return []
    readers = readers_of(scheme.name, checkpoint)
    return [reader.title for reader, failure in readers.items() if failure is None]


def _of_format(scheme: Scheme, kept: Sequence[bool]) -> str:
    if not scheme.encodes:
        return "decoded to bf16"
    if all(kept):
        return "codes and scales of the source are kept"
    some = "; some matrices have this format in the source and keep it" if any(kept) else ""
    return f"rounded to {scheme.bits} bits, {scheme.grouping}{some}"


def _numbers(checkpoint: Checkpoint, method: str, bits: float) -> str:
    kept = {_kept_bits(matrix) for layer in checkpoint.layers for matrix in layer.kinds}
    wanted = _INTEGER_BITS.get(method)
    if wanted in kept and kept == {wanted}:
        return "integers of the source are kept"
    if method == "int8":
        short = bits < _SHORT
        return "nearly all of the source's 4 bits are kept" if short else "nearly as the source"
    if bits < _SHORT:
        return "the source's 4 bits are rounded once more; compare with --dry-run --estimate"
    return "rounded to 4 bits; compare with --dry-run --estimate"


def _kept_bits(matrix: ExpertMatrix) -> int | None:
    """Bits of integers with a scale per row; None for other numbers."""
    scale = matrix.scale
    if matrix.element.integer_zero is None or scale is None or scale.block_cols < matrix.cols:
        return None
    element = matrix.element
    return 8 * element.unit_bytes // (element.unit_rows * element.unit_cols)


def _matrices(checkpoint: Checkpoint) -> Iterator[ExpertMatrix]:
    for layer in checkpoint.layers:
        for expert in layer.experts:
            yield from expert.values()
