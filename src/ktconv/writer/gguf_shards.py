"""The layout of a part of a GGUF model: header and every offset, before anything is written.

A file is the magic "GGUF", the version, counts of tensors and pairs, the pairs, an entry per
tensor, and from the next multiple of ALIGNMENT on the tensors, each at such a multiple too.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack

from ktconv.source.gguf.types import TYPES
from ktconv.writer.shards import Shard, Tensor

ALIGNMENT = 32
TENSORS_COUNT = "split.tensors.count"  # the key of how many tensors all parts have
_VERSION = 3
_NUMBERS = {row.name: number for number, row in TYPES.items()}
_U16, _U32, _I32, _STRING = 2, 4, 5, 8  # types of values


def text_pair(key: str, value: str) -> bytes:
    """A key with a string."""
    return _string(key) + pack("<I", _STRING) + _string(value)


def number_pair(key: str, value: int) -> bytes:
    """A key with an unsigned number of 32 bits."""
    return _string(key) + pack("<II", _U32, value)


def split_pairs(number: int, count: int, tensors: int) -> list[bytes]:
    """Pairs of part `number` (from 0) of `count`; `tensors`: of all parts."""
    return [
        _string("split.no") + pack("<IH", _U16, number),
        _string("split.count") + pack("<IH", _U16, count),
        _string(TENSORS_COUNT) + pack("<Ii", _I32, tensors),
    ]


def plan_gguf(name: str, tensors: Sequence[Tensor], pairs: Sequence[bytes]) -> Shard:
    """The header and offsets of a file with `tensors`, whose dtypes are ggml's names of types and
    whose shapes begin with the dimension that varies slowest."""
    entries, starts, position = [], {}, 0
    for tensor in tensors:
        starts[tensor.name] = position
        dims = tensor.shape[::-1]
        entries.append(
            _string(tensor.name)
            + pack(f"<I{len(dims)}QIQ", len(dims), *dims, _NUMBERS[tensor.dtype], position)
        )
        position += _aligned(tensor.nbytes)
    head = b"GGUF" + pack("<IQQ", _VERSION, len(tensors), len(pairs))
    header = b"".join([head, *pairs, *entries])
    start = _aligned(len(header))
    offsets = {key: start + offset for key, offset in starts.items()}
    header += bytes(start - len(header))
    return Shard(name, header, offsets, start + position, sum(one.nbytes for one in tensors))


def _string(text: str) -> bytes:
    data = text.encode()
    return pack("<Q", len(data)) + data


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
