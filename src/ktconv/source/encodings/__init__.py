"""The input encodings that can be read: one file each, and a row in `ENCODINGS`.

Which one a weight has is decided for each weight: by the names and dtypes of its tensors, then by
their shapes. config.json is only asked where both leave a choice, and must not contradict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from ktconv.errors import CheckpointError
from ktconv.source.config import ModelConfig
from ktconv.source.encodings.base import BIAS, SCALE, WEIGHT, Encoding, Parts, Roles
from ktconv.source.encodings.compressed import ANGELSLIM, INT8, MSMODELSLIM, PACKED
from ktconv.source.encodings.fp4 import (
    MXFP4,
    MXFP4_BLOCKS,
    MXFP4_PACKED,
    MXFP6_PACKED,
    MXINT4,
    NVFP4_E5M3,
    NVFP4_MODELOPT,
    NVFP4_PACKED,
)
from ktconv.source.encodings.fp8 import FP8
from ktconv.source.encodings.gguf import GGUF
from ktconv.source.encodings.gptq import AWQ, AWQ_REORDERED, GPTQ
from ktconv.source.encodings.refusals import (
    packed_floats,
    packed_without_straddling,
    unsupported,
    wrong_scales,
)
from ktconv.source.encodings.unquantized import BF16, FP16, FP32
from ktconv.source.types import ExpertMatrix, TensorRef
from ktconv.source.views import StoredView

_SAFETENSORS: tuple[Encoding, ...] = (
    BF16, FP16, FP32, *FP8, INT8, MSMODELSLIM, *PACKED, ANGELSLIM,
    MXFP4, MXFP4_BLOCKS, MXINT4, MXFP4_PACKED, MXFP6_PACKED, NVFP4_PACKED,
    NVFP4_MODELOPT, NVFP4_E5M3, *GPTQ, AWQ, AWQ_REORDERED,
)  # fmt: skip
ENCODINGS = tuple(dict.fromkeys((*_SAFETENSORS, *GGUF)))


def _rows(gguf: bool) -> tuple[Encoding, ...]:
    """Encodings of a kind of file: dtypes and names that both have, as F32 `scale`, differ in what
    they mean."""
    return GGUF if gguf else _SAFETENSORS


class Candidate:
    """An encoding that names and dtypes of a weight's tensors allow, and which tensor is what."""

    __slots__ = ("_names", "_parts", "encoding")

    def __init__(self, encoding: Encoding, names: Sequence[tuple[str, str]], parts: Parts) -> None:
        self.encoding, self._names, self._parts = encoding, names, parts

    @property
    def weight(self) -> TensorRef:
        return self._parts[self.encoding.primary]

    @property
    def roles(self) -> Roles:
        """Made when asked for, because most candidates have another shape."""
        return {role: self._parts[part] for role, part in self._names}

    def of(self, parts: Parts) -> Candidate:
        """Candidate for another weight, whose tensors have the same names, dtypes and shapes."""
        return Candidate(self.encoding, self._names, parts)

    def matrix(self, view: StoredView, config: ModelConfig) -> ExpertMatrix | None:
        """The matrix at `view`, for which the weight's shape is right; None if its scales have
        other shapes."""
        encoding, roles, quantization = self.encoding, self.roles, None
        if encoding.transposed and not encoding.outputs(roles):
            return None  # its scales are those of other outputs
        if encoding.quantization is not None and len(roles) > 1:
            quantization = encoding.quantization(roles, view, config)
            if quantization is None:
                return None
        return view.matrix(self.weight, encoding.element, quantization)


def candidates(parts: Parts) -> Sequence[Candidate]:
    """Encodings that the weight whose tensors are `parts` can have, at least one.

    Raises CheckpointError that names the unsupported tensor.
    """
    gguf = next(iter(parts.values())).file.name.endswith(".gguf")
    known = _by_names(gguf, tuple((part, tensor.dtype) for part, tensor in parts.items()))
    if not known:
        raise unsupported(parts, _rows(gguf))
    return [Candidate(encoding, names, parts) for encoding, names in known]


@lru_cache(1000)  # there are a hundred thousand weights, of few kinds
def _by_names(
    gguf: bool, parts: tuple[tuple[str, str], ...]
) -> Sequence[tuple[Encoding, Sequence[tuple[str, str]]]]:
    found = ((encoding, encoding.roles(dict(parts))) for encoding in _rows(gguf))
    return [(encoding, tuple(roles.items())) for encoding, roles in found if roles is not None]


def stored_matrix(
    parts: Parts,
    view_of: Callable[[Encoding], StoredView],
    config: ModelConfig,
    wrong_shape: Callable[[TensorRef, str], CheckpointError],
) -> tuple[Candidate, ExpertMatrix]:
    """The encoding of a weight, and its matrix, where `view_of` says that it lies.

    Raises CheckpointError that names the unsupported tensor, or the one whose shape is wrong.
    """
    possible = candidates(parts)
    shaped = []
    for one in possible:
        encoding, view = one.encoding, view_of(one.encoding)
        if one.weight.shape != view.shape(encoding.element) or not view.whole(encoding.element):
            continue
        shaped.append(one)
        matrix = one.matrix(view, config)
        if matrix is not None:
            return one, matrix
    first = (shaped or possible)[0]
    if unread := packed_floats(first.weight, first.roles.get(SCALE), view_of(first.encoding)):
        raise unread
    if shaped:
        raise wrong_scales(first.encoding, first.roles, view_of(first.encoding), config)
    if old := packed_without_straddling(first.weight, view_of(first.encoding), config):
        raise old
    names: dict[tuple[int, ...], str] = {}
    for one in possible:
        names.setdefault(view_of(one.encoding).shape(one.encoding.element), one.encoding.name)
    expected = [f"{list(shape)} ({name})" for shape, name in names.items()]
    if len(names) == 1:
        expected = [str(list(shape)) for shape in names]
    raise wrong_shape(first.weight, " or ".join(expected))


PARTS = frozenset((BIAS,)).union(*(encoding.names for encoding in ENCODINGS))
_IGNORED = frozenset(name for encoding in ENCODINGS for name in encoding.ignored)
UNDERSCORED = {  # gate_up_proj_scale_inv, gate_up_proj_blocks
    f"_{part.removeprefix(f'{WEIGHT}_')}": part
    for part in PARTS
    if part.startswith(f"{WEIGHT}_") or part in ("blocks", "scales", BIAS) or part in _IGNORED
}


def part_of(name: str) -> tuple[str, str]:
    """A tensor's name without the ending that its encoding gives it, and the part that it is; the
    whole name for one without a known ending."""
    base, _, last = name.rpartition(".")
    if base and last in PARTS:
        return base, last
    for end, part in UNDERSCORED.items():
        if name.endswith(end) and part != BIAS:
            return name.removesuffix(end), part
    return name, WEIGHT
