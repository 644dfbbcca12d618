"""A GGUF model, or its experts alone, as the target of a conversion.

Experts of a layer are one tensor for each projection, as llama.cpp and KTransformers' LLAMAFILE
name them: blk.L.ffn_{gate,up,down}_exps.weight [E, rows, cols], and .bias [E, rows] in F32 where
experts have biases. Each layer is a part of the split model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from msgspec import Struct, field

from ktconv import native
from ktconv.conversion.plan import Plan as AnyPlan
from ktconv.conversion.target import Target
from ktconv.errors import UsageError
from ktconv.formats.gguf import GGUF_FORMATS, BlockFormat
from ktconv.source import Checkpoint, ExpertMatrix, MoELayer, Projection
from ktconv.source.gguf.architectures import ARCHITECTURES, SETTINGS
from ktconv.targets.card import model_name
from ktconv.targets.consumers import mismatch_of, model_types
from ktconv.targets.gguf.beside import Beside
from ktconv.targets.packed.target import ImportanceRecord
from ktconv.writer.gguf_shards import number_pair, plan_gguf, split_pairs, text_pair
from ktconv.writer.shards import Shard, Tensor

FORMAT = "gguf"  # in the options of a manifest
_LLAMAFILE = "LLAMAFILE"  # of KTransformers
_LLAMAFILE_COLS = 256  # that intermediate sizes are a multiple of
_LLAMAFILE_LACKS = ("IQ4_NL",)  # types: its kernels end the process (kt-kernel 0.7.2)
_SMALL = ", ".join(
    row.method for row in GGUF_FORMATS.values() if native.stored_unit(row.type)[2] == 32
)
_QUANTIZATION_VERSION = 2


class Options(Struct, frozen=True):
    """The options that decide which bytes are written; a resumed run must have the same."""

    method: str = "gguf-q4_k"  # of GGUF_FORMATS
    mtp: bool = True
    max_shard_size: int = 5_000_000_000
    requantize: bool = False
    importance: ImportanceRecord | None = None  # of the errors that the search makes small
    # The files of `--with`, as `source_identity` has them; empty: experts only.
    beside: Sequence[Mapping[str, Any]] = field(default_factory=tuple)

    def as_dict(self) -> dict[str, object]:
        record: dict[str, object] = {
            "format": FORMAT,
            "method": self.method,
            "mtp": self.mtp,
            "max_shard_size": self.max_shard_size,
        }
        if self.requantize:
            record["requantize"] = True
        if self.importance is not None:
            record["importance"] = self.importance.as_dict()
        if self.beside:
            record["with"] = {str(file["name"]): dict(file) for file in self.beside}
        return record


class GgufTarget(Target):
    """Stacked experts in blocks of ggml; other tensors are those of `beside`, under their names."""

    options: Options
    has_index = False
    copies_gguf = True

    def __init__(self, options: Options, checkpoint: Checkpoint, beside: Beside | None) -> None:
        self.options, self.beside = options, beside
        self._checkpoint = checkpoint
        self._shards, self._tensors = 1, 0
        layers = checkpoint.converted(options.mtp)
        self.mismatch = mismatch_of(layers, _LLAMAFILE, model_types(checkpoint))
        self._pairs = self._all_pairs(layers)

    @property
    def format(self) -> BlockFormat:
        return GGUF_FORMATS[self.options.method]

    @property
    def name(self) -> str:
        return self.options.method

    @property
    def description(self) -> str:
        return self.format.words

    @property
    def notes(self) -> Sequence[str]:
        """Sentences on KTransformers' LLAMAFILE, where it cannot compute the experts."""
        layers = self._checkpoint.layers
        if self.mismatch is not None:
            return [f"{self.mismatch.sentence}; llama.cpp computes what the model does"]
        if self.format.type in _LLAMAFILE_LACKS:
            return [
                f"KTransformers' {_LLAMAFILE} does not compute {self.format.type}: the output is "
                "for llama.cpp"
            ]
        odd = next((one for one in layers if one.intermediate_size % _LLAMAFILE_COLS), None)
        if odd is None:
            return []
        return [
            f"KTransformers' {_LLAMAFILE} wants intermediate sizes that are a multiple of "
            f"{_LLAMAFILE_COLS}; layer {odd.index} has {odd.intermediate_size}: the output is for "
            "llama.cpp"
        ]

    def serving(self) -> str | None:
        """Command for serving with KTransformers' LLAMAFILE."""
        gated = all(layer.gated for layer in self._checkpoint.layers)
        if self.notes or not gated:
            return None
        return f"--kt-method {_LLAMAFILE} --kt-weight-path"

    def facts(self) -> dict[str, object]:
        return {"method": self.options.method}

    def check(self, layers: Sequence[MoELayer]) -> None:
        block = native.stored_unit(self.format.type)[2]
        for layer in layers:
            for proj, matrix in layer.experts[0].items():
                if matrix.cols % block:
                    raise UsageError(
                        f"--method {self.name} has blocks of {block} columns, and {proj} of layer "
                        f"{layer.index} has {matrix.cols}",
                        f"use a type with blocks of 32 columns: --method {_SMALL}"
                        if matrix.cols % 32 == 0
                        else "no type of ggml with blocks has such rows",
                    )
        if self.beside is not None:
            self.beside.check(layers, _architectures(self._checkpoint))

    def tensor(self, layer: MoELayer, proj: Projection) -> Tensor:
        """The tensor of a projection of all experts."""
        matrix, count = layer.experts[0][proj], len(layer.experts)
        return Tensor(
            f"blk.{layer.index}.ffn_{proj}_exps.weight",
            self.format.type,
            (count, matrix.rows, matrix.cols),
            count * self.matrix_bytes(matrix),
        )

    def bias(self, layer: MoELayer, proj: Projection) -> Tensor | None:
        """The tensor of a projection's biases of all experts; None where no expert has one."""
        if not layer.biased or all(expert[proj].bias is None for expert in layer.experts):
            return None
        shape = len(layer.experts), layer.experts[0][proj].rows
        name = f"blk.{layer.index}.ffn_{proj}_exps.bias"
        return Tensor(name, "F32", shape, 4 * shape[0] * shape[1])

    def matrix_bytes(self, matrix: ExpertMatrix) -> int:
        """Bytes of an expert's matrix."""
        return native.blocks_bytes(self.format.type, matrix.rows, matrix.cols)

    def sections(self, layer: MoELayer, experts: Sequence[int]) -> Sequence[Iterator[Tensor]]:
        weights = [self.tensor(layer, proj) for proj in layer.projections]
        biases = (self.bias(layer, proj) for proj in layer.projections)
        return [iter([*weights, *(one for one in biases if one is not None)])]

    def metadata(self) -> dict[str, str]:
        return {}

    def left_out(self) -> str | None:
        return None if self.beside else "--with FILE.gguf takes them from a GGUF file of the model"

    def sidecars(self, directory: Path) -> list[Path]:
        return []

    # ---- files ----

    def shard_name(self, number: int, count: int) -> str:
        return f"model-{number:05d}-of-{count:05d}.gguf"

    def begin(self, shards: int, tensors: int) -> int:
        self._shards, self._tensors = shards, tensors
        first = plan_gguf("", (), [*self._pairs, *split_pairs(0, 1, 0)])
        return first.size - self.plan_shard("", ()).size

    def plan_shard(self, name: str, tensors: Sequence[Tensor]) -> Shard:
        """The first part has all pairs, as llama.cpp wants it; others the architecture alone."""
        number = int(name.split("-")[1]) - 1 if name else self._shards
        pairs = self._pairs if number == 0 else self._pairs[:1]
        return plan_gguf(name, tensors, [*pairs, *split_pairs(number, self._shards, self._tensors)])

    def _all_pairs(self, layers: Sequence[MoELayer]) -> list[bytes]:
        """Key-value pairs: the architecture first."""
        own = [
            number_pair("general.quantization_version", _QUANTIZATION_VERSION),
            number_pair("general.file_type", self.format.file_type),
        ]
        if self.beside is not None:
            name = str(self.beside.checkpoint.architecture)
            own_name = text_pair("general.architecture", name)
            return [own_name, *(one for one in self.beside.pairs if one != own_name), *own]
        settings, name = self._checkpoint.config, _architecture(self._checkpoint)
        pairs = [
            text_pair("general.architecture", name),
            text_pair("general.type", "model"),
            text_pair("general.name", model_name(self._checkpoint.path)),
        ]
        first = layers[0]
        own_keys = {ours: key for key, ours in SETTINGS.items()}
        numbers = {
            "block_count": max((settings.num_layers or 0), *(layer.index + 1 for layer in layers)),
            "nextn_predict_layers": sum(layer.is_mtp for layer in layers),
            own_keys["hidden_size"]: first.hidden_size,
            own_keys["moe_intermediate_size"]: first.intermediate_size,
            own_keys["num_experts"]: max(len(layer.experts) for layer in layers),
            own_keys["num_experts_per_tok"]: settings.top_k(first.index) or 0,
            "leading_dense_block_count": first.index,
        }
        named = [number_pair(f"{name}.{key}", value) for key, value in numbers.items() if value]
        return [*pairs, *named, *own]


def _architectures(checkpoint: Checkpoint) -> list[str]:
    """llama.cpp's names of the model's family; none where it is not known there."""
    if checkpoint.architecture is not None:
        return [checkpoint.architecture]
    types = [str(one) for one in checkpoint.config.model_types]
    return [key for key, row in ARCHITECTURES.items() if row.model_type in types]


def _architecture(checkpoint: Checkpoint) -> str:
    """llama.cpp's name of the model's family; that of config.json where it has none."""
    types = [str(one) for one in checkpoint.config.model_types]
    return next(iter([*_architectures(checkpoint), *types]), "unknown")


Plan: TypeAlias = AnyPlan[GgufTarget]
