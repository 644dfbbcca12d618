"""A checkpoint with encoded experts as the target of a conversion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Literal, TypeAlias

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from ktconv import __version__
from ktconv.conversion.plan import Plan as AnyPlan
from ktconv.conversion.target import Target
from ktconv.errors import CheckpointError, UsageError
from ktconv.families.family import USUAL
from ktconv.source import Checkpoint, ExpertMatrix, MoELayer, Projection, TensorRef
from ktconv.source.encodings.base import BIAS
from ktconv.source.encodings.grids import NUMBERS
from ktconv.source.gguf.as_hub import hub_name, hub_names_of
from ktconv.source.others import OtherWeight
from ktconv.targets.consumers import Mismatch, mismatch_of, model_types, notes_of, refuse_biases
from ktconv.targets.encoded.engines import check_engine
from ktconv.targets.encoded.names import container_of, patterns_of, target_pattern
from ktconv.targets.encoded.naming import BLK, OWN
from ktconv.targets.encoded.other_tensors import decoded_others
from ktconv.targets.encoded.readers import TRANSFORMERS
from ktconv.targets.encoded.recipe import Method, parse_recipe
from ktconv.targets.encoded.scheme import MIXED, SCHEMES, Scheme
from ktconv.targets.encoded.stacking import (
    NUMBERED,
    STACKINGS,
    is_flat,
    places,
    stacked_tensor,
    together,
)
from ktconv.targets.expert_sets import ExpertSet
from ktconv.targets.renaming import rename_tensors
from ktconv.writer.shards import Tensor

CONFIG, RECIPE = "config.json", "recipe.yaml"
RECIPE_TOML = "ktconv_recipe.toml"
ScaleRule = Literal["amax", "search"]
RENAMED = "ignored_by_transformers"  # key in the manifest
Chosen = tuple[MoELayer, Sequence[int]]  # a layer, and ids of its experts


class Calibration(Struct, frozen=True):
    """Text that GPTQ sees, and how much of it."""

    dataset: str  # FILE.jsonl, FILE.txt, or NAME[:CONFIG] of a dataset
    split: str = "train"
    samples: int = 512
    max_seq_len: int = 2048
    seed: int = 0


class Options(Struct, frozen=True):
    """The options that decide which bytes are written; a resumed run must have the same."""

    method: str = "rtn"  # or "gptq"
    scheme: str = "W4A16"  # of SCHEMES
    group_size: int = 128
    mtp: bool = True
    max_shard_size: int = 5_000_000_000
    experts: ExpertSet = field(default_factory=ExpertSet)  # empty: all
    calibration: Calibration | None = None  # gptq
    dampening: float | None = None  # gptq
    exclude_experts: ExpertSet = field(default_factory=ExpertSet)
    experts_only: bool = False
    requantize: bool = False  # also what is in the format already
    scale: ScaleRule = "amax"  # of integers
    allow_activation_mismatch: bool = False  # experts of which KTransformers computes another thing
    recipe: str = ""  # of scheme "mixed": `Recipe.toml`
    expert_layout: str = NUMBERED  # or one of STACKINGS: a tensor for all experts of a layer

    def as_dict(self) -> dict[str, object]:
        """Only what the method has."""
        nested = {
            "experts": self.experts.as_record(),
            "exclude_experts": self.exclude_experts.as_record(),
            "calibration": asdict(self.calibration) if self.calibration else None,
            "recipe": self.recipe.split("\n") if self.recipe else None,
        }
        record = {"format": SCHEMES[self.scheme].layout.name} | asdict(self) | nested
        return {
            name: value
            for name, value in record.items()
            if value not in (None, {})
            and not (value is False and name in _RARE)
            and (name, value) not in (("scale", "amax"), ("expert_layout", NUMBERED))
        }


_RARE = ("experts_only", "requantize", "allow_activation_mismatch")


class EncodedTarget(Target):
    """Experts as codes and scales that engines load; everything else under its own name."""

    options: Options
    copies_gguf = True

    def __init__(self, options: Options, checkpoint: Checkpoint) -> None:
        self.options = options
        self.stacking = STACKINGS.get(options.expert_layout)
        flat = is_flat(options.expert_layout)
        self.scheme = Scheme(options.scheme, options.group_size, options.scale == "search", flat)
        self.row = self.scheme.row
        self.recipe = parse_recipe(options.recipe) if self.row is MIXED else None
        self._is_gpu = self.row.command == "quantize-gpu"
        self.made_files = (CONFIG, RECIPE) if self._is_gpu else (CONFIG,)
        if self.recipe is not None:
            self.made_files = (CONFIG, RECIPE_TOML)
        if self.row.naming is OWN:
            _refuse_family(checkpoint)
        self.mismatch: Mismatch | None = None
        if self.row.kt_method:
            layers = checkpoint.converted(options.mtp)
            self.mismatch = mismatch_of(layers, self.row.kt_method, model_types(checkpoint))
        if self.mismatch is None:
            self.options = replace(options, allow_activation_mismatch=False)
        self.notes = notes_of(self.mismatch)
        self._hub_names = hub_names_of(checkpoint)
        # Matrices that only the source's engine could read are written decoded, by tensor name.
        self.decoded: Mapping[str, OtherWeight] = {}
        self._dropped: frozenset[str] = frozenset()
        if not options.experts_only:
            self.decoded, self._dropped = decoded_others(checkpoint, self._hub_names)

    @property
    def name(self) -> str:
        return self.options.scheme

    @property
    def command(self) -> str:
        """Command that wrote or writes it."""
        return self.row.command

    @property
    def description(self) -> str:
        if self.recipe is not None:
            return "methods by recipe"
        if not self._is_gpu:
            return f"{self.name}, {self.scheme.grouping}"
        stacked = ", one tensor for all experts of a layer" if self.stacking else ""
        return f"{self.name} by {self.options.method}, {self.scheme.grouping}{stacked}"

    def facts(self) -> dict[str, object]:
        options = self.options
        if self.recipe is not None:
            return {"method": options.scheme, "recipe": options.recipe}
        if not self._is_gpu:
            return {"method": options.scheme, "group_size": options.group_size}
        return {
            "method": options.method,
            "scheme": options.scheme,
            "group_size": options.group_size,
        }

    def serving(self) -> str | None:
        """Command for serving with the loaders of KTransformers."""
        options = self.options
        subset = options.experts or options.exclude_experts
        if not self.row.kt_method or subset or options.allow_activation_mismatch:
            return None
        return f"--kt-method {self.row.kt_method} --kt-weight-path"

    def scheme_of(self, layer: MoELayer, expert: int, proj: Projection) -> Scheme:
        """Scheme of a matrix."""
        if self.recipe is None:
            return self.scheme
        return self._scheme(self.recipe.of(layer.index, expert, proj))

    def schemes_of(
        self, layer: MoELayer, experts: Sequence[int]
    ) -> dict[tuple[Projection, Scheme], Sequence[int]]:
        """The ids of a layer's experts by projection and scheme."""
        if self.recipe is None:
            return {(proj, self.scheme): experts for proj in layer.projections}
        assigned = self.recipe.assigned(layer, experts)
        return {(proj, self._scheme(method)): ids for (proj, method), ids in assigned.items()}

    def _scheme(self, method: Method) -> Scheme:
        return method.scheme(self.options.scale == "search")

    def alike(self, layer: MoELayer) -> object:
        return None if self.recipe is None else self.recipe.alike(layer.index)

    def check(self, layers: Sequence[MoELayer]) -> None:
        mixed = self.recipe is not None
        if self.options.scale == "search" and not (self.row.is_int or mixed):
            raise UsageError(
                f"--scale search does not apply to {self.name}, whose scales are those of its "
                "definition",
                "omit it",
            )
        if not self.row.kt_method:  # others follow `mismatch`: they are for our own kernels
            refuse_biases(
                layers,
                f"{self.command} {'' if self._is_gpu else f'--method {self.name} '}does not write "
                "them",
                "Serve the original model on the GPU."
                if self._is_gpu
                else "For ktconv's own runtime --method bf16, mxfp4, rawint4 and others do.",
            )
        if self.stacking is not None:
            self._check_stacks(layers)
        if self.recipe is None:
            self.scheme.check(layers)
        else:
            self._check_mix(layers)
        refused = self.mismatch is not None and self.scheme.encodes
        if refused and not self.options.allow_activation_mismatch:
            assert self.mismatch is not None
            raise CheckpointError(self.mismatch.sentence, self.mismatch.hint)

    def _check_mix(self, layers: Sequence[MoELayer]) -> None:
        """UsageError for a method that a layer cannot have, and for an engine that cannot mix."""
        assert self.recipe is not None
        chosen = [(layer, range(len(layer.experts))) for layer in layers]
        for layer, experts in chosen:
            for proj, scheme in self.schemes_of(layer, experts):
                try:
                    scheme.check([layer], [proj])
                except UsageError as error:
                    raise UsageError(
                        f"the recipe gives {proj} of layer {layer.index} a method that it cannot "
                        f"have: {error}",
                        "give it another one",
                    ) from None
        check_engine(self.recipe, chosen)

    def _check_stacks(self, layers: Sequence[MoELayer]) -> None:
        """UsageError for experts that cannot be in one tensor."""
        option = f"--expert-layout {self.options.expert_layout}"
        if self.options.experts or self.options.exclude_experts:
            raise UsageError(
                f"{option} has all experts of a layer in a tensor, in the order of their numbers, "
                "and --experts chooses some",
                f"omit one of them, or use --expert-layout {NUMBERED}",
            )
        if not self.scheme.row.is_int:
            return
        for layer in layers:
            if len({weight_dtype(matrix) for matrix in layer.kinds}) > 1:
                raise UsageError(
                    f"{option} needs scales of one dtype in a tensor, and layer {layer.index} has "
                    "some experts in half precision",
                    f"use --expert-layout {NUMBERED}",
                )

    def sections(self, layer: MoELayer, experts: Sequence[int]) -> Sequence[Iterator[Tensor]]:
        if self.stacking is None:
            return [self._packed(layer, experts)]
        return [(tensor for tensor, _ in self._stacks(layer, experts))]

    def slots(self, layer: MoELayer, experts: Sequence[int]) -> Mapping[str, tuple[str, int]]:
        if self.stacking is None:
            return {}
        found = places(self._stacks(layer, experts))
        return {name: (stacked, offset) for name, stacked, offset in found}

    def _stacks(
        self, layer: MoELayer, experts: Sequence[int]
    ) -> Iterator[tuple[Tensor, Iterator[str]]]:
        """Stacked tensors, each with the names of its parts in order."""
        assert self.stacking is not None
        for word, projections in together(layer.projections) if experts else ():
            matrix = layer.experts[experts[0]][projections[0]]
            sizes = matrix.rows, matrix.cols, weight_dtype(matrix)
            alike = self.scheme.tensors("", *sizes)
            for part, first in zip(self.scheme.parts, alike, strict=True):
                name = self.stacking.tensor(f"{container_of(layer)}.{word}", part)
                tensor = stacked_tensor(name, first, len(experts), len(projections))
                yield tensor, self._parts(layer, experts, projections, part)

    def _parts(
        self,
        layer: MoELayer,
        experts: Sequence[int],
        projections: Sequence[Projection],
        part: str,
    ) -> Iterator[str]:
        for expert in experts:
            for proj in projections:
                yield f"{self.module(layer, expert, proj)}.{part}"

    def _packed(self, layer: MoELayer, experts: Sequence[int]) -> Iterator[Tensor]:
        for expert in experts:
            for proj in layer.projections:
                matrix = layer.experts[expert][proj]
                module = self.module(layer, expert, proj)
                yield from self.scheme_of(layer, expert, proj).tensors(
                    module, matrix.rows, matrix.cols, weight_dtype(matrix)
                )
                yield from bias_tensors(module, matrix)

    def module(self, layer: MoELayer, expert: int, proj: Projection) -> str:
        """The name of a matrix without its last component; of a part of stacked tensors the one
        that it would have in tensors of its own."""
        if self.stacking is not None:
            return f"{container_of(layer)}.{expert}.{USUAL.of(proj)}"
        return self.row.naming.module(layer, expert, proj)

    def modules(self, layers: Sequence[MoELayer]) -> Iterator[str]:
        """Modules of expert 0 of each layer."""
        for layer in layers:
            for proj in layer.projections:
                yield self.module(layer, 0, proj)

    def patterns(self, chosen: Iterable[Chosen]) -> dict[Scheme, list[str]]:
        """Patterns by which engines find the modules of each scheme, for these experts."""
        chosen = list(chosen)
        if self.recipe is None:
            modules = self.modules([layer for layer, _ in chosen])
            return {self.scheme: [target_pattern(modules, self.stacking is not None)]}
        return patterns_of(
            (self.module(layer, expert, proj), proj, scheme)
            for layer, experts in chosen
            for (proj, scheme), ids in self.schemes_of(layer, experts).items()
            for expert in ids
        )

    def read_by_transformers(self, layers: Iterable[MoELayer]) -> bool:
        """Whether transformers knows the names and the numbers of the experts."""
        known = not (TRANSFORMERS.failure(self.row.name) or self.options.experts_only)
        known = known and self.stacking is None
        return known and all(self.row.naming.keeps(layer) and not layer.biased for layer in layers)

    def left_out(self) -> str | None:
        return "--experts-only" if self.options.experts_only else None

    def metadata(self) -> dict[str, str]:
        return {
            "format": "pt",
            "ktconv_version": __version__,
            "ktconv_method": self.options.method if self._is_gpu else self.options.scheme,
            **({"ktconv_scheme": self.options.scheme} if self._is_gpu else {}),
        }

    def rename(self, tensors: Sequence[TensorRef]) -> list[tuple[TensorRef, str]]:
        kept = [tensor for tensor in tensors if tensor.name not in self._dropped]
        if self.row.naming is BLK:
            return rename_tensors(kept)
        return [(tensor, self.output_name(tensor.name)) for tensor in kept]

    def output_name(self, name: str) -> str:
        """Name of a non-expert tensor in the output: what is decoded is a plain weight.
        CheckpointError for one of a GGUF file that is not known."""
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
        return [path for path in super().sidecars(directory) if str(path) not in self.made_files]


def _refuse_family(checkpoint: Checkpoint) -> None:
    """CheckpointError for a family whose experts no engine reads one by one."""
    family = checkpoint.config.family
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


def bias_tensors(module: str, matrix: ExpertMatrix) -> list[Tensor]:
    """Tensor of a matrix's bias [rows], in the source's dtype; none without a bias."""
    if matrix.bias is None:
        return []
    dtype = matrix.bias.number
    return [Tensor(f"{module}.{BIAS}", dtype, (matrix.rows,), NUMBERS[dtype].nbytes * matrix.rows)]


def matrix_kinds(matrices: Iterable[ExpertMatrix]) -> Counter[tuple[int, int, str]]:
    """The number of matrices by rows, columns, and dtype of weights."""
    return Counter((one.rows, one.cols, weight_dtype(one)) for one in matrices)


def encoded_bytes(scheme: Scheme, counts: Mapping[tuple[int, int, str], int]) -> int:
    """Bytes of the tensors that matrices of these kinds become."""
    return sum(
        count * sum(tensor.nbytes for tensor in scheme.tensors("m", *kind))
        for kind, count in counts.items()
    )


Plan: TypeAlias = AnyPlan[EncodedTarget]
