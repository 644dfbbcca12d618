"""compressed-tensors' pack-quantized experts as the target of a conversion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import TypeAlias

from ktconv import __version__
from ktconv.checkpoint import Checkpoint, ExpertMatrix, MoELayer, TensorRef
from ktconv.checkpoint.gguf.as_hub import hub_name, hub_names_of
from ktconv.checkpoint.side_files import find_side_files
from ktconv.conversion.plan import Plan as AnyPlan
from ktconv.conversion.target import BaseOptions, Target
from ktconv.errors import CheckpointError
from ktconv.families.config import family_of
from ktconv.placement.expert_sets import ExpertSet
from ktconv.targets.biases import refuse_biases
from ktconv.targets.pack_quantized.names import module_name
from ktconv.targets.pack_quantized.other_tensors import decoded_others
from ktconv.targets.pack_quantized.scheme import CHANNEL, Scheme
from ktconv.writer.shards import Tensor

FORMAT = "pack-quantized"
CONFIG, RECIPE = "config.json", "recipe.yaml"
RENAMED = "ignored_by_transformers"  # key in the manifest


@dataclass(frozen=True, slots=True)
class Calibration:
    """Which text GPTQ sees, and how much of it."""

    dataset: str  # FILE.jsonl, FILE.txt, or NAME[:CONFIG] of a dataset
    split: str = "train"
    samples: int = 512
    max_seq_len: int = 2048
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Options(BaseOptions):
    """The options that decide which bytes are written; a resumed run must have the same."""

    method: str = "rtn"  # or "gptq"
    scheme: str = "W4A16"
    group_size: int = 128
    mtp: bool = True
    max_shard_size: int = 5_000_000_000
    experts: ExpertSet = field(default_factory=ExpertSet)  # empty: all
    calibration: Calibration | None = None  # gptq
    dampening: float | None = None  # gptq

    def as_dict(self) -> dict[str, object]:
        """Only what the method has."""
        record = {"format": FORMAT} | asdict(self) | {"experts": self.experts.as_record()}
        return {name: value for name, value in record.items() if value not in (None, {})}


class PackQuantizedTarget(Target):
    """Experts under the names of the unfused model; everything else under its own name."""

    options: Options
    made_files = (CONFIG, RECIPE)
    copies_gguf = True

    def __init__(self, options: Options, checkpoint: Checkpoint) -> None:
        self.options = options
        self.scheme = Scheme(options.scheme, options.group_size)
        _refuse_family(checkpoint)
        self._hub_names = hub_names_of(checkpoint)
        # Matrices that only the source's engine could read are written decoded, by tensor name.
        self.decoded, self._dropped = decoded_others(checkpoint, self._hub_names)

    @property
    def name(self) -> str:
        return self.options.scheme

    @property
    def description(self) -> str:
        size = self.scheme.group_size
        groups = "one scale per row" if size == CHANNEL else f"groups of {size}"
        return f"{self.name} by {self.options.method}, {groups}"

    def facts(self) -> dict[str, object]:
        options = self.options
        return {
            "method": options.method,
            "scheme": options.scheme,
            "group_size": options.group_size,
        }

    def check(self, layers: Sequence[MoELayer]) -> None:
        refuse_biases(
            layers,
            "quantize-gpu does not write them",
            "Serve the original model on the GPU.",
        )
        self.scheme.check(layers)

    def sections(self, layer: MoELayer, experts: Sequence[int]) -> Sequence[Iterator[Tensor]]:
        return [self._packed(layer, experts)]

    def _packed(self, layer: MoELayer, experts: Sequence[int]) -> Iterator[Tensor]:
        for expert in experts:
            for proj in layer.projections:
                matrix = layer.experts[expert][proj]
                yield from self.scheme.tensors(
                    module_name(layer, expert, proj), matrix.rows, matrix.cols, weight_dtype(matrix)
                )

    def metadata(self) -> dict[str, str]:
        return {
            "format": "pt",
            "ktconv_version": __version__,
            "ktconv_method": self.options.method,
            "ktconv_scheme": self.options.scheme,
        }

    def rename(self, tensors: Sequence[TensorRef]) -> list[tuple[TensorRef, str]]:
        kept = (tensor for tensor in tensors if tensor.name not in self._dropped)
        return [(tensor, self.output_name(tensor.name)) for tensor in kept]

    def output_name(self, name: str) -> str:
        """Of a non-expert tensor: what is decoded is a plain weight. CheckpointError for one of a
        GGUF file that is not known."""
        if self._hub_names is not None:
            return hub_name(self._hub_names, name)
        return name.rpartition(".")[0] + ".weight" if name in self.decoded else name

    def copied(self, tensor: TensorRef, name: str) -> Tensor:
        decoded, shape = self.decoded.get(tensor.name), tensor.shape
        if self._hub_names is not None:
            shape = self._hub_names.shape(tensor.name, shape)
        elif decoded is not None:
            shape = decoded.matrix.rows, decoded.matrix.cols
        if decoded is None:
            return Tensor(name, tensor.dtype, shape, tensor.nbytes)
        return Tensor(name, "BF16", shape, 2 * prod(shape))

    def sidecars(self, directory: Path) -> list[Path]:
        return [path for path in find_side_files(directory) if str(path) not in self.made_files]


def _refuse_family(checkpoint: Checkpoint) -> None:
    """CheckpointError for a family whose experts no engine reads one by one."""
    family = family_of(checkpoint.config)
    if family is not None and family.no_gpu:
        raise CheckpointError(
            f"{checkpoint.path} is of type {family.types[0]}, whose experts inference engines read "
            "only unquantized, all of a layer in one tensor",
            "Serve the original model on the GPU.",
        )


def weight_dtype(matrix: ExpertMatrix) -> str:
    """The dtype of the weights that are quantized, and so of their scales: half precision as the
    model computes in it; everything else is rounded to bf16 first."""
    return "F16" if matrix.tensor.dtype == "F16" else "BF16"


Plan: TypeAlias = AnyPlan[PackQuantizedTarget]
