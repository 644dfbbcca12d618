"""Adapters in directories, as PEFT and KTransformers write them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from ktconv.errors import CheckpointError, UsageError
from ktconv.families.family import Projection
from ktconv.model.own import ExpertParameter
from ktconv.source.adapters import CONFIG as CONFIG
from ktconv.source.adapters import FUSED as FUSED
from ktconv.source.adapters import WEIGHTS as WEIGHTS
from ktconv.source.safetensors_file import read_header
from ktconv.source.strict_json import parse_object
from ktconv.source.types import TensorRef
from ktconv.system.files import translated
from ktconv.system.numbers import real
from ktconv.system.patterns import PatternError, Patterns
from ktconv.system.regular_files import MAX_CONFIG_BYTES, MissingFileError, read_small
from ktconv.system.units import counted
from ktconv.train.adapter_names import (
    PREFIX,
    SIDES,
    LayerNames,
    Side,
    is_of_unknown_layout,
    parameter_place,
    place_of,
)
from ktconv.train.parameters import (
    adapted_parameters,
    check_layout,
    chosen_layout,
    rank_of,
    unstacked,
)

_PICKLED = "adapter_model.bin"
_ANOTHER = "give the adapter of this model"
_LARGEST = float(torch.finfo(torch.float32).max)
_DTYPES = ("BF16", "F16", "F32")
_SAVED_TO = "give the directory that the adapter was saved to"
_DAMAGED = "The file is damaged; save or copy the adapter again."
# Kinds of LoRA that compute something else, by the settings that switch them on.
_OTHER_KINDS = ("use_dora", "use_qalora", "use_bdlora", "fan_in_fan_out", "lora_bias")


class _Stack(NamedTuple):
    layer: int
    projection: Projection
    side: Side


class Pair(NamedTuple):
    """The matrices of one projection of all experts of a layer: W counts as W + scale * B A."""

    a: Tensor  # [E, rank, inputs]
    b: Tensor  # [E, outputs, rank]
    scale: float


class Linear(NamedTuple):
    """LoRA of a linear layer that is no expert's."""

    a: Tensor  # [rank, inputs]
    b: Tensor  # [outputs, rank]
    scale: float


class Adapter:
    """An adapter in a directory, for the model with these layers. Headers are read at once,
    matrices when they are asked for.

    `lora_b_layout`: of adapters of parameters, see `ktconv.train.parameters`.

    CheckpointError for files that are missing, damaged, or of another kind than LoRA, and for
    matrices of experts that the layers do not have; UsageError for an `alpha` that contradicts the
    files, and without one if no file has it.
    """

    def __init__(
        self,
        directory: Path,
        layers: Mapping[int, LayerNames],
        alpha: float | None,
        lora_b_layout: str | None = None,
    ):
        self.directory, self._layers = directory, layers
        self._config = _read_config(directory)
        self._alpha = _checked_alpha(alpha)
        self.others: dict[str, TensorRef] = {}  # of what is no expert, by PEFT's names
        self._patterns: dict[str, Patterns] = {}  # by setting
        self._stacks: dict[_Stack, dict[int | None, TensorRef]] = {}
        self._nested: dict[tuple[int, str], dict[tuple[int, Side], TensorRef]] = {}
        self._modules = {
            name: place
            for names in layers.values()
            for name, place in names.parameter_modules.items()
        }
        targets = self._config.get("target_parameters")
        listed = targets if isinstance(targets, list) else []
        self._targets = frozenset(one for one in listed if isinstance(one, str))
        self._layout = chosen_layout(directory, self._config, lora_b_layout)
        for tensor in _tensors(directory):
            self._enter(tensor)
        self._parameters = {
            (layer, one): (of, depth)
            for layer, module in self._nested
            for depth, of in enumerate(self._adapted(layer, module))
            for one in of.projections
        }
        self._check_once()

    def _adapted(self, layer: int, module: str) -> list[ExpertParameter]:
        """The parameters of a module that have adapters, in the order of their depth."""
        names, found = self._layers[layer], self._nested[layer, module]
        own = [one for one in names.parameters if one.module == module]
        count = len({depth for depth, _ in found})
        paths = list(map(names.parameter, own))
        these = adapted_parameters(own, paths, count, self._targets)
        if these is None:
            raise CheckpointError(
                f"{self.directory / CONFIG} does not say which {count} of the parameters "
                f"{', '.join(paths)} the adapter is of",
                "save it with PEFT, whose target_parameters says that",
            )
        for depth, one in enumerate(these):
            for side in SIDES:
                if (depth, side) not in found:
                    key = names.parameter_key(one, depth, side)
                    raise CheckpointError(f"{self.directory} does not contain {key}", _DAMAGED)
        return these

    def _check_once(self) -> None:
        """CheckpointError for a matrix that has an adapter of its own and one of its parameter."""
        for stack, tensors in self._stacks.items():
            if (stack.layer, stack.projection) in self._parameters:
                one = next(iter(tensors.values()))
                raise CheckpointError(
                    f"{one.name} in {one.file} is of a matrix whose parameter has an adapter, too",
                    "remove one of them",
                )

    def _enter(self, tensor: TensorRef) -> None:
        if (found := parameter_place(tensor.name, self._modules)) is not None:
            nested = self._nested.setdefault((found.layer, found.module), {})
            nested[found.depth, found.side] = tensor
            return
        own = (names.place(tensor.name) for names in self._layers.values())
        place = next(filter(None, own), None) or place_of(tensor.name)
        if place is None:
            if is_of_unknown_layout(tensor.name):
                raise CheckpointError(
                    f"{tensor.name} {list(tensor.shape)} in {tensor.file} is of experts, in a "
                    "layout that is not known",
                    "save it with PEFT: with matrices of each expert, such as "
                    "experts.0.up_proj.lora_A.weight, or as an adapter of target_parameters",
                )
            self.others[tensor.name] = tensor
            return
        if place.layer not in self._layers:
            raise CheckpointError(
                f"{tensor.file} has {tensor.name}, but layer {place.layer} of the model has no "
                "experts",
                _ANOTHER,
            )
        stack = self._stacks.setdefault(_Stack(*place[:3]), {})
        alone = place.expert is None  # of all experts: there is no other
        other = next(iter(stack.values()), None) if alone else stack.get(place.expert)
        other = other or stack.get(None)
        stack[place.expert] = tensor
        if other is not None:
            raise CheckpointError(
                f"{tensor.name} in {tensor.file} and {other.name} in {other.file} are the same "
                "matrix",
                "remove one of them",
            )

    @property
    def projections(self) -> dict[int, set[Projection]]:
        """Matrices of experts that it has, by layer."""
        found: dict[int, set[Projection]] = {}
        for stack in self._stacks:
            found.setdefault(stack.layer, set()).add(stack.projection)
        for layer, projection in self._parameters:
            found.setdefault(layer, set()).add(projection)
        return found

    # ---- matrices

    def pair(self, layer: int, projection: Projection, experts: int, shape: Sequence[int]) -> Pair:
        """The matrices of this many experts, whose own are [outputs, inputs]."""
        outputs, inputs = shape
        if (layer, projection) in self._parameters:
            return self._of_parameter(layer, projection, experts, shape)
        a = self._stacked(layer, projection, "a", experts)
        b = self._stacked(layer, projection, "b", experts)
        name = f"{projection} in layer {layer}"
        _expect_shapes(self.directory, name, a, b, (experts, outputs, inputs))
        return Pair(a, b, self._scale(self._layers[layer].module(projection, 0), a.shape[1]))

    def _of_parameter(
        self, layer: int, projection: Projection, experts: int, shape: Sequence[int]
    ) -> Pair:
        of, depth = self._parameters[layer, projection]
        stored = self._nested[layer, of.module]
        a, b = (self.read(stored[depth, side]) for side in SIDES)
        check_layout(self.directory, self._layout, of.entries, rank_of(a, of.entries))
        found = unstacked(of, a, b, experts, self._layout)
        if found is None:
            raise CheckpointError(
                f"{stored[depth, 'a'].name} and its lora_B in {self.directory} are {list(a.shape)} "
                f"and {list(b.shape)}, which is no adapter of {counted(experts, 'expert')}",
                _ANOTHER,
            )
        one, name = found[projection], self._layers[layer].parameter(of)
        _expect_shapes(self.directory, name, one.a, one.b, (experts, shape[0], shape[1]))
        return Pair(one.a, one.b, self._scale(name, one.a.shape[1]))

    def linear(self, module: str, shape: Sequence[int]) -> Linear:
        """The matrices of another module, whose own is [outputs, inputs]."""
        a, b = (self._other(module, side) for side in ("A", "B"))
        outputs, inputs = shape
        _expect_shapes(self.directory, module, a[None], b[None], (1, outputs, inputs))
        return Linear(a, b, self._scale(module, a.shape[0]))

    def read(self, tensor: TensorRef) -> Tensor:
        """A tensor as it is stored."""
        with translated("read", tensor.file):
            found: Tensor = self._file(tensor.file).get_tensor(tensor.name)
        if not found.isfinite().all():
            raise CheckpointError(
                f"{tensor.name} in {tensor.file} has a NaN or an infinity",
                "its training has diverged; give an adapter of an earlier step",
            )
        return found

    def _other(self, module: str, side: str) -> Tensor:
        name = f"{PREFIX}{module}.lora_{side}.weight"
        if name not in self.others:
            raise CheckpointError(f"{self.directory} does not contain {name}", _DAMAGED)
        return self.read(self.others[name])

    def _stacked(self, layer: int, projection: Projection, side: Side, experts: int) -> Tensor:
        """[E, rows, cols]"""
        stack = self._stacks.get(_Stack(layer, projection, side), {})
        if None in stack:
            return self.read(stack[None])
        for expert in range(experts):
            if expert not in stack:
                key = self._layers[layer].key(projection, side, expert)
                raise CheckpointError(f"{self.directory} does not contain {key}", _ANOTHER)
        if more := stack.keys() - set(range(experts)):
            name = stack[max(more, key=str)].name
            raise CheckpointError(
                f"{self.directory} contains {name}, but the model has {counted(experts, 'expert')}",
                _ANOTHER,
            )
        _expect_alike(list(stack.values()))
        return torch.stack([self.read(stack[expert]) for expert in range(experts)])

    @cached_property
    def _files(self) -> dict[Path, Any]:
        return {}

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = safe_open(path, "pt")
        return self._files[path]

    # ---- settings

    def _scale(self, module: str, rank: int) -> float:
        """alpha / rank of a module."""
        alpha, stated = self._alpha, self._stated("lora_alpha", "alpha_pattern", module)
        of_rank = self._stated("r", "rank_pattern", module)
        fused = (self.directory / FUSED).exists()
        if of_rank not in (None, rank) and not fused:
            raise CheckpointError(
                f"{self.directory / CONFIG} says rank {of_rank:g} of {module}, whose matrices have "
                f"{rank}",
                _DAMAGED,
            )
        if stated is not None and of_rank == rank:
            if alpha not in (None, stated):
                raise UsageError(
                    f"{self.directory / CONFIG} says alpha {stated:g} of {module}, not {alpha:g}",
                    "leave alpha out",
                )
            alpha = stated
        if alpha is None:
            raise UsageError(
                f"{self.directory} does not say the alpha of {module}, whose rank is {rank}",
                "give the alpha that it was trained with",
            )
        return alpha / (sqrt(rank) if self._config.get("use_rslora") else rank)

    def _stated(self, setting: str, patterns: str, module: str) -> float | None:
        """A number of the config, by PEFT's rule for modules with one of their own."""
        own = self._config.get(patterns) or {}
        if not isinstance(own, dict):
            raise CheckpointError(
                f"{self.directory / CONFIG} says {patterns} {own!r:.60}, not an object", _DAMAGED
            )
        try:
            if patterns not in self._patterns:
                self._patterns[patterns] = Patterns(own)
            found = self._patterns[patterns].first(module)
        except PatternError as error:
            raise CheckpointError(
                f"{self.directory / CONFIG}: the patterns of {patterns} {error}",
                "write fewer or simpler ones, best names of modules; or merge it with PEFT",
            ) from None
        if found is not None:
            return _number(self.directory, f"{patterns} {found:.60}", own[found])
        if setting not in self._config:
            return None
        return _number(self.directory, setting, self._config[setting])


def _tensors(directory: Path) -> Iterator[TensorRef]:
    """Tensors of all files; CheckpointError for one whose dtype LoRA cannot have."""
    found = [directory / name for name in (WEIGHTS, FUSED) if (directory / name).exists()]
    if not found:
        pickled = (directory / _PICKLED).exists()
        raise CheckpointError(
            f"{directory} has no {WEIGHTS}" + (f", but {_PICKLED}" if pickled else ""),
            "save it as safetensors; files of other kinds could run code" if pickled else _SAVED_TO,
        )
    for path in found:
        for tensor in read_header(path).tensors:
            if tensor.dtype not in _DTYPES:
                raise CheckpointError(
                    f"{tensor.name} in {path} is {tensor.dtype}", f"LoRA has {', '.join(_DTYPES)}"
                )
            yield tensor


def _read_config(directory: Path) -> dict[str, Any]:
    """Empty where KTransformers' file is alone."""
    path = directory / CONFIG
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise CheckpointError(f"{directory} {what}", _SAVED_TO)
    try:
        config = parse_object(read_small(directory, CONFIG, MAX_CONFIG_BYTES), str(path), _DAMAGED)
    except MissingFileError:
        if (directory / FUSED).exists():
            return {}
        raise CheckpointError(f"{directory} has no {CONFIG}", _SAVED_TO) from None
    if config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{path} is of an adapter of type {config.get('peft_type')!r}, not LORA"
        )
    if other := next((name for name in _OTHER_KINDS if config.get(name)), None):
        raise CheckpointError(
            f"{path} says {other}, which experts cannot have", "train it without that option"
        )
    return config


def _number(directory: Path, name: str, value: Any) -> float:
    """Above 0, within float32."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if not plain or not 0 < value <= _LARGEST:
        raise CheckpointError(
            f"{directory / CONFIG} says {name} {value!r:.60}, not a number above 0", _DAMAGED
        )
    return float(value)


def _checked_alpha(alpha: float | None) -> float | None:
    if alpha is None:
        return None
    found = real("alpha", alpha)
    if not 0 < found <= _LARGEST:
        raise UsageError(f"alpha must be a number above 0, not {found:g}")
    return found


def _expect_alike(tensors: Sequence[TensorRef]) -> None:
    """CheckpointError for experts of a layer with matrices of several shapes or dtypes."""
    first = tensors[0]
    for one in tensors:
        if (one.shape, one.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"{one.name} in {one.file} is {one.dtype} {list(one.shape)}, but {first.name} "
                f"{first.dtype} {list(first.shape)}",
                "all experts of a layer must have the same rank and dtype",
            )


def _expect_shapes(
    directory: Path, name: str, a: Tensor, b: Tensor, sizes: tuple[int, int, int]
) -> None:
    experts, outputs, inputs = sizes
    rank = a.shape[1] if a.ndim == 3 else 0
    for side, found, wanted in (
        ("A", a, (experts, rank, inputs)),
        ("B", b, (experts, outputs, rank)),
    ):
        if tuple(found.shape) != wanted or not rank:
            raise CheckpointError(
                f"{side} of {name} in {directory} is {list(found.shape)}, but the model needs "
                f"{list(wanted)}",
                _ANOTHER,
            )
