"""Names of non-expert tensors in the output.

Names are those of the reference converter (docs/formats.md, sections 2.2 and 7), but only whole
components at the start of a name are replaced, and names that would collide are refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ktconv.errors import CheckpointError
from ktconv.formats import parse_tensor_name
from ktconv.source import TensorRef

_START = re.compile(r"(?:language_model\.|model\.)*(?:layers\.([0-9]+)\.)?")  # fits any name


def output_name(name: str) -> str:
    """The name of a non-expert tensor in the output.

    >>> output_name("model.language_model.layers.3.self_attn.q_proj.weight")
    'blk.3.self_attn.q_proj.weight'
    >>> output_name("model.vision_model.encoder.layers.0.w")
    'vision_model.encoder.layers.0.w'
    """
    start = _START.match(name)
    assert start is not None  # all of it is optional
    rest = name[start.end() :]
    return f"blk.{start[1]}.{rest}" if start[1] else rest


def rename_tensors(tensors: Sequence[TensorRef]) -> list[tuple[TensorRef, str]]:
    """Each tensor with its output name, in order. CheckpointError if two names collide."""
    taken: dict[str, TensorRef] = {}
    for tensor in tensors:
        name = output_name(tensor.name)
        if name in ("", "__metadata__") or parse_tensor_name(name):
            raise CheckpointError(
                f"non-expert tensor {tensor.name} would become {name!r} in the output, a name with "
                "a meaning of its own",
                "convert with --experts-only, which leaves non-expert tensors out",
            )
        if name in taken:
            raise CheckpointError(
                f"tensors {taken[name].name} and {tensor.name} would both become {name} in the "
                "output",
                "convert with --experts-only, which leaves non-expert tensors out",
            )
        taken[name] = tensor
    return [(tensor, name) for name, tensor in taken.items()]
