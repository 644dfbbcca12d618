"""The layout of a safetensors shard: every offset, before anything is written.

A file is: 8 bytes header length, the JSON header padded with spaces, the data. We pad
so that the data starts on a 64-byte boundary, and put the tensors whose size is a
multiple of 64 first, then the others by falling element size: packed weights can then be
used from a mapping of the file, and every element is aligned for its type.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

ALIGNMENT = 64
_ENTRY_OVERHEAD = 128  # JSON around a name, with room for dtype and two offsets
_DIMENSION = 24  # one number of a shape


class Tensor(Struct, frozen=True):
    """A tensor that will be written: name, safetensors dtype, shape, bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Shard(Struct, frozen=True):
    """One planned file: its header and the offset of each tensor from the file's start."""

    name: str
    header: bytes  # with the 8 length bytes and the padding
    offsets: Mapping[str, int]
    size: int
    data_bytes: int  # without the header


def group(tensors: Iterable[Tensor], max_size: int) -> list[list[Tensor]]:
    """Consecutive tensors, cut so that no file exceeds `max_size` bytes.

    A tensor that cannot fit on its own gets a group of its own; the caller refuses it.
    """
    groups: list[list[Tensor]] = []
    used = max_size
    for tensor in tensors:
        name = len(json.dumps(tensor.name))  # escapes are longer than the name
        need = tensor.nbytes + name + _ENTRY_OVERHEAD + _DIMENSION * len(tensor.shape)
        if used + need > max_size or not groups:
            groups.append([])
            used = 1024  # __metadata__ and alignment
        groups[-1].append(tensor)
        used += need
    return groups


def plan_shard(name: str, tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> Shard:
    """The header and offsets of a file with `tensors`."""
    ordered = sorted(tensors, key=_place)
    entries = [f'"__metadata__":{json.dumps(dict(metadata), separators=(",", ":"))}']
    starts: dict[str, int] = {}
    position = 0
    for tensor in ordered:
        starts[tensor.name] = position
        end = position + tensor.nbytes
        entries.append(
            f'{json.dumps(tensor.name)}:{{"dtype":"{tensor.dtype}",'
            f'"shape":[{",".join(map(str, tensor.shape))}],"data_offsets":[{position},{end}]}}'
        )
        position = end
    text = ("{" + ",".join(entries) + "}").encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    offsets = {key: start + len(header) for key, start in starts.items()}
    return Shard(name, header, offsets, len(header) + position, position)


def _place(tensor: Tensor) -> tuple[bool, int]:
    """Sorts tensors so that each starts at a multiple of its element size."""
    if tensor.nbytes % ALIGNMENT == 0:
        return False, 0
    return True, -(tensor.nbytes // math.prod(tensor.shape))
