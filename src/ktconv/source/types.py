"""The parts of a source checkpoint, as described by its headers.

Objects have the positions of bytes, never the bytes themselves. Of those with `gc=False` there are
very many: the collector of cycles does not see them, so no file's store may refer to its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from ktconv.families.family import PLAIN, ExpertActivation, Projection
from ktconv.source.elements import Element
from ktconv.source.gguf.hub_names import ExpertNames

if TYPE_CHECKING:
    from ktconv.source.mapped import Mapped
    from ktconv.source.pruning.kept import Pruning
    from ktconv.source.settings import ModelSettings
else:
    Mapped = Pruning = ModelSettings = Any  # help() evaluates annotations


class TensorRef(Struct, frozen=True, gc=False):
    """One tensor of one safetensors or GGUF file."""

    name: str
    file: Path
    dtype: str  # as safetensors spells it: BF16, F8_E4M3, U8 ..., or ggml: Q4_K
    shape: tuple[int, ...]  # in units of the dtype; for ggml's blocks, in elements
    offset: int  # of the first byte, from the start of the file
    nbytes: int


class OuterScale(Struct, frozen=True):
    """The second level of scales: one float32 for all of a matrix's block scales, which are
    multiplied with it, or divided by it."""

    tensor: TensorRef
    index: int = 0  # its place in `tensor`
    divides: bool = False


class BlockGrid(Struct, frozen=True):
    """Scales or zero points of a matrix: one per `block_rows` x `block_cols`.

    A block can be the whole tensor, a row, or a group of a row's columns.
    Element (n, k) of the matrix has grid entry
    ((row_origin + n) // block_rows, (col_origin + k) // block_cols). The unit with entry
    (row, col) is `start + row // unit_rows * row_stride + col // unit_cols * col_stride`
    units into `tensor`; `number` is the kind of unit, a name of encodings.grids.NUMBERS.
    The origins are not zero where a matrix is a slice of a fused tensor.
    """

    tensor: TensorRef
    number: str
    start: int
    row_stride: int
    col_stride: int
    block_rows: int
    block_cols: int
    row_origin: int
    col_origin: int
    outer: OuterScale | None = None  # of scales
    any_sign: bool = False  # scales may be negative: those of integers, and factors of weights


class GroupIndex(Struct, frozen=True):
    """The group of each input (g_idx): I32, from element `start` of `tensor` on."""

    tensor: TensorRef
    start: int = 0


class DeclaredShape(Struct, frozen=True):
    """Shape that a tensor (I64 or I32, from element `start` on) must say: outputs and inputs."""

    tensor: TensorRef
    start: int
    shape: tuple[int, int]


class Quantization(Struct, frozen=True):
    """Rule from stored numbers to weights: (number - zero point) * scale, each the one of the
    element's block, or of its row's block and its column's group."""

    scale: BlockGrid
    zero_point: BlockGrid | int | None = None  # blocks as `scale`; int: the same everywhere
    groups: GroupIndex | None = None
    declared: DeclaredShape | None = None


class ExpertMatrix(Struct, frozen=True, gc=False):
    """One projection of one expert as a strided [rows, cols] view (PyTorch [out, in]).

    The unit with element (n, k) is `start + n // unit_rows * row_stride + k // unit_cols *
    col_stride` units into `tensor`; for most encodings a unit is one element. One of the strides
    is 1: `col_stride` for weights stored [out, in], `row_stride` for those stored [in, out],
    except for every second output of the latter, whose `row_stride` is 2.
    `bias` has a block for each row, and one column.
    """

    tensor: TensorRef
    rows: int
    cols: int
    start: int
    row_stride: int
    col_stride: int
    element: Element
    quantization: Quantization | None = None
    bias: BlockGrid | None = None

    @property
    def scale(self) -> BlockGrid | None:
        return None if self.quantization is None else self.quantization.scale

    def nbytes(self, rows: int) -> int:
        """Bytes of `rows`, without scales."""
        return self.element.nbytes(rows, self.cols)

    @property
    def extent(self) -> tuple[int, int]:
        """First byte in the file, and bytes from there to the last of the matrix."""
        size = self.element.unit_bytes
        last_row = self.rows // self.element.unit_rows - 1
        last_col = self.cols // self.element.unit_cols - 1
        last = last_row * self.row_stride + last_col * self.col_stride
        return self.tensor.offset + self.start * size, (last + 1) * size


class MoELayer(Struct, frozen=True):
    """The routed experts of one layer."""

    index: int  # L of blk.{L}; MTP layers follow num_hidden_layers
    source: str  # the key prefix they were found under, e.g. "model.layers.3.mlp.experts"
    is_mtp: bool
    hidden_size: int
    intermediate_size: int
    encoding: str  # a name of checkpoint.encodings, or several, joined by "+"
    experts: Sequence[Mapping[Projection, ExpertMatrix]]  # by expert id
    biased: bool = False  # whether one at least of its matrices has a bias
    activation: ExpertActivation = PLAIN  # with the biases that tensors show
    first_expert: int = 0  # the number of expert 0 in names: above 0 for a model's second tower
    hub_names: ExpertNames | None = None  # of GGUF, where they are known: in safetensors models

    @property
    def projections(self) -> Sequence[Projection]:
        """Matrices of its experts, in the order of PROJECTIONS: some experts have no gate."""
        return tuple(self.experts[0])

    @property
    def gated(self) -> bool:
        return "gate" in self.experts[0]

    @property
    def encodings(self) -> Sequence[str]:
        return self.encoding.split("+")

    @property
    def kinds(self) -> Sequence[ExpertMatrix]:
        """Matrices of the layer: one at least of every shape and encoding."""
        if len(self.encodings) == 1:
            return list(self.experts[0].values())
        matrices = (matrix for expert in self.experts for matrix in expert.values())
        known = {(one.rows, one.cols, one.element, one.col_stride == 1): one for one in matrices}
        return list(known.values())


class SourceFile(Struct, frozen=True):
    """The state of one input file when its checkpoint was opened."""

    name: str  # as valid Unicode, see text.path_text
    nbytes: int
    mtime_ns: int | None  # None: `sha256` covers the whole file, so the time adds nothing
    sha256: str  # of a shard's header (without the length), of all of config.json
    etag: str | None = None  # of a remote file, in place of the time


class Checkpoint(Struct, frozen=True):
    """An opened checkpoint: its config, tensors and MoE layers."""

    path: Path  # its directory, or the first of its GGUF files
    config: ModelSettings  # as the converted experts' tower reads it
    files: Sequence[Path]  # safetensors shards or parts of a GGUF model, in name order
    layers: Sequence[MoELayer]  # ascending index
    other_tensors: Sequence[TensorRef]  # everything that is not a routed expert
    notes: Sequence[str]  # what a user should know: MTP layers, config oddities
    sources: Sequence[SourceFile] = ()  # for source_identity()
    side_directory: Path | None = None  # of config.json, tokenizer and so on; None: there is none
    made_files: Mapping[str, bytes] = field(default_factory=dict)  # in place of side files
    architecture: str | None = None  # of a GGUF model, as llama.cpp calls it
    tower: str | None = None  # that was chosen where several have experts
    pruning: Pruning | None = None  # the experts that stay, where some are dropped
    unpruned: Checkpoint | None = None  # with all experts, where some are dropped
    adapters: Sequence[str] = ()  # DIR:WEIGHT of those that are added to its weights
    # Names of weights that are no expert's, whose sums with adapters have new codes and scales.
    encoded_again: Sequence[str] = ()
    # Bytes that reading needs beside buffers: of each thread, and once.
    thread_memory: int = 0
    shared_memory: int = 0
    mapped: Mapped | None = None  # the names that a map gave to experts; None without a map
    unused_bytes: int = 0  # of tensors in `files` that the index has in others, or does not list
    # Whether a reader of the same files that disregards the index would find other tensors.
    index_decides: bool = False

    @property
    def aliases(self) -> Mapping[str, str]:
        """Names of other tensors by the usual ones, where a map says them."""
        return {} if self.mapped is None else self.mapped.aliases

    def converted(self, mtp: bool) -> list[MoELayer]:
        """The layers that are converted: without `mtp` not those for multi-token prediction."""
        return [layer for layer in self.layers if mtp or not layer.is_mtp]

    @property
    def nbytes(self) -> int:
        """Bytes of its files, without tensors that are not used."""
        return sum(source.nbytes for source in self.sources) - self.unused_bytes

    @property
    def is_gguf(self) -> bool:
        return self.architecture is not None
