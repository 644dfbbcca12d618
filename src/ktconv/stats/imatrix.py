"""Importance matrices that llama.cpp recorded, in GGUF form.

For each tensor of weights that tokens were multiplied with, such as blk.3.ffn_gate_exps.weight,
with E experts and K inputs

    NAME.in_sum2   float32 [E, K]   sum of x^2 over the tokens that each expert got
    NAME.counts    float32 [E, 1]   tokens that each expert got

Sums become means here. gate and up have the same inputs; a file may have one of them, both, or the
fused name. Tensors of other matrices, and NAME.in_sum, are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from struct import Struct

import numpy as np

from ktconv.errors import CheckpointError, UsageError
from ktconv.source import TensorRef
from ktconv.source.config import MAX_SIZE
from ktconv.source.gguf.file import MAGIC, read_gguf_header
from ktconv.stats.importance_file import ImportanceFile, LayerImportance
from ktconv.stats.origin import Sizes
from ktconv.system.arrays import F32, I64, Array
from ktconv.system.files import read_exactly, translated
from ktconv.system.regular_files import opened_regular

KIND = "imatrix"
_AGAIN = "record it again with a current llama-imatrix (-o FILE.gguf), or with: ktconv stats MODEL "
_AGAIN += "--importance FILE"
_GIVE = "give a file of ktconv stats --importance, or of llama-imatrix"
_SUMS, _COUNTS = ".in_sum2", ".counts"
_EXPERTS = re.compile(
    r"blk\.(?P<layer>0|[1-9][0-9]{0,8})\.ffn_(?P<matrix>gate|up|gate_up|down)_exps\.weight"
)
# gate and up are multiplied with the same numbers. Files merged from several differ by the order
# of sums in float32, which is far below this share of the larger value.
_TOLERANCE = 1e-3
_MOST_TOKENS = 1 << 53  # what float64 counts exactly
_OLD_HEAD = Struct("<ii")  # number of entries; length of the first one's name


def is_imatrix(path: Path) -> bool:
    """Whether the file begins like a GGUF file. UsageError for the old form of imatrix files."""
    try:
        with opened_regular(path) as fd, open(fd, "rb", closefd=False) as file:
            start = file.read(256)
    except CheckpointError as error:
        raise UsageError(str(error), _GIVE) from error
    if _is_old(start):
        raise UsageError(
            f"{path} is an imatrix in the old binary form, which has no tokens per expert",
            _AGAIN,
        )
    return start[: len(MAGIC)] == MAGIC


def _is_old(start: bytes) -> bool:
    """Whether a file begins like one of the old form: a count, and the name of a tensor."""
    if len(start) < _OLD_HEAD.size:
        return False
    entries, length = _OLD_HEAD.unpack_from(start)
    name = start[_OLD_HEAD.size :][: max(length, 0)]
    return bool(0 < entries < 1 << 24 and len(name) == length and name.endswith(b".weight"))


class Imatrix(ImportanceFile):
    """An imatrix file. It does not tell which model it is of."""

    kind = KIND
    origin = None

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            header = read_gguf_header(path)
        except CheckpointError as error:
            raise UsageError(str(error), _AGAIN) from error
        if header.metadata.get("general.type") != KIND:
            raise UsageError(
                f"{path} is a GGUF file, but not an imatrix (general.type)",
                _GIVE,
            )
        self._tensors = {tensor.name: tensor for tensor in header.tensors}
        self._matrices = self._found()
        self.sizes = {layer: self._sizes(layer) for layer in sorted(self._matrices)}

    def damaged(self, why: str) -> UsageError:
        return UsageError(f"{self.path} cannot be used: {why}", _AGAIN)

    def _found(self) -> dict[int, dict[str, str]]:
        """Names of the weights of experts that it has sums of, by layer and matrix."""
        found: dict[int, dict[str, str]] = {}
        for tensor in self._tensors:
            name = tensor.removesuffix(_SUMS).removesuffix(_COUNTS)
            if match := _EXPERTS.fullmatch(name):
                found.setdefault(int(match["layer"]), {})[match["matrix"]] = name
        if not found:
            raise UsageError(
                f"{self.path} is an imatrix without tensors of experts (ffn_*_exps): of a dense "
                "model, or of one whose experts are not stacked",
                "record it with the GGUF file of an MoE model",
            )
        return found

    # ---- headers ----

    def _sizes(self, layer: int) -> Sizes:
        names = self._matrices[layer]
        inputs = [names[one] for one in ("gate", "up", "gate_up") if one in names]
        for there, what in ((inputs, "gate and up"), ("down" in names, "down")):
            if not there:
                raise self.damaged(f"layer {layer} has no sums of inputs of {what}")
        shapes = [self._shape(name) for name in inputs]
        if len(set(shapes)) > 1:
            raise self._contradiction(*inputs[:2])
        (experts, hidden), (same, intermediate) = shapes[0], self._shape(names["down"])
        if same != experts:
            raise self._contradiction(inputs[0], names["down"])
        return Sizes(experts, hidden, intermediate)

    def _shape(self, name: str) -> tuple[int, int]:
        """[E, K] of the sums of a tensor, whose counts have one for each of E."""
        shape = self._float32(name + _SUMS).shape
        if not (len(shape) == 2 and all(0 < size <= MAX_SIZE for size in shape)):
            raise self.damaged(f"tensor {name}{_SUMS} has shape {list(shape)}")
        experts, inputs = shape
        if experts == 1:  # as llama-imatrix converts the old form
            raise self.damaged(f"it has one number of tokens for all experts of {name}")
        counts = self._float32(name + _COUNTS).shape
        if counts != (experts, 1):
            raise self.damaged(
                f"tensor {name}{_COUNTS} has shape {list(counts)}, not {[experts, 1]}"
            )
        return experts, inputs

    def _float32(self, name: str) -> TensorRef:
        found = self._tensors.get(name)
        if found is None:
            raise self.damaged(f"it has no tensor {name}")
        if found.dtype != "F32":
            raise self.damaged(f"tensor {name} is {found.dtype}, not F32")
        return found

    def _contradiction(self, one: str, other: str) -> UsageError:
        return self.damaged(f"{one} and {other} contradict each other")

    # ---- values ----

    def layer(self, index: int) -> LayerImportance:
        names = self._matrices[index]
        inputs = [names[one] for one in ("gate", "up", "gate_up") if one in names]
        counts = self._counts([*inputs, names["down"]])
        gate_up = self._means(inputs[0], counts)
        for other in inputs[1:]:
            means = self._means(other, counts)
            if not np.allclose(gate_up, means, rtol=_TOLERANCE, atol=0):
                raise self._contradiction(inputs[0], other)
        return LayerImportance(gate_up, self._means(names["down"], counts), counts)

    def _counts(self, names: Iterable[str]) -> I64:
        """Tokens [E] of each expert, which all these tensors must agree on."""
        first, *others = names
        counts = self._array(first + _COUNTS)
        for other in others:
            if not np.array_equal(counts, self._array(other + _COUNTS)):
                raise self._contradiction(first + _COUNTS, other + _COUNTS)
        with np.errstate(invalid="ignore"):
            usable = (counts >= 0) & (counts <= _MOST_TOKENS) & (counts == np.floor(counts))
        if not usable.all():
            raise self.damaged(f"tensor {first}{_COUNTS} has values that are no numbers of tokens")
        whole: I64 = counts[:, 0].astype(np.int64)
        return whole

    def _means(self, name: str, counts: I64) -> F32:
        sums: F32 = self._array(name + _SUMS)
        self.check_values(name + _SUMS, sums, counts)
        # In float64, of which float32 has the nearest value: the order of magnitude of a sum and
        # of a count can differ by more than float32 has digits.
        means: F32 = (sums / np.maximum(counts, 1).astype(np.float64)[:, None]).astype(np.float32)
        return means

    def _array(self, name: str) -> Array:
        tensor = self._float32(name)
        array: Array = np.empty(tensor.shape, "<f4")
        with opened_regular(self.path) as fd, translated("read", self.path):
            read_exactly(fd, array.data.cast("B"), tensor.offset)
        return array
