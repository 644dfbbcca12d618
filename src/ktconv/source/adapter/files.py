"""Adapters in directories, as PEFT and KTransformers write them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ktconv.errors import CheckpointError
from ktconv.families.family import Projection
from ktconv.formats.decode import bf16_to_f32
from ktconv.source.adapter.beside import CONFIG, FUSED, WEIGHTS
from ktconv.source.adapter.config import DAMAGED, SAVED_TO, AdapterConfig
from ktconv.source.adapter.names import (
    EMBEDDING_ENDS,
    ENDS,
    PREFIX,
    SIDES,
    LayerNames,
    Place,
    Side,
    is_of_unknown_layout,
    layer_of_experts,
    module_of,
    parameter_place,
    place_of,
)
from ktconv.source.adapter.parameters import (
    ExpertParameter,
    adapted_parameters,
    check_layout,
    chosen_layout,
    rank_of,
)
from ktconv.source.adapter.targets import TargetModules
from ktconv.source.reading.reader import SourceReader
from ktconv.source.safetensors_file import Header, read_header
from ktconv.source.types import TensorRef
from ktconv.system.arrays import F32, Array
from ktconv.system.regular_files import check_small
from ktconv.system.units import counted

_PICKLED = "adapter_model.bin"
_ANOTHER = "give the adapter of this model"
_NUMBERS = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}  # as NumPy reads them
_KEPT = 8  # tensors of all experts that stay in memory: those of two layers


class _Stack(NamedTuple):
    layer: int
    projection: Projection
    side: Side


class LowRank(NamedTuple):
    """LoRA of one matrix W, which counts as W + scale * b a."""

    a: F32  # [rank, inputs]
    b: F32  # [outputs, rank]
    scale: float


def headers_of(directory: Path) -> list[Header]:
    """The headers of all files of an adapter. CheckpointError where there are none, for a link that
    leaves the directory, and for a dtype that LoRA cannot have."""
    names = [name for name in (WEIGHTS, FUSED) if (directory / name).exists()]
    if not names:
        pickled = (directory / _PICKLED).exists()
        raise CheckpointError(
            f"{directory} has no {WEIGHTS}" + (f", but {_PICKLED}" if pickled else ""),
            "save it as safetensors; files of other kinds could run code" if pickled else SAVED_TO,
        )
    headers = []
    for name in names:
        check_small(directory, name, None)
        headers.append(read_header(directory / name))
        for tensor in headers[-1].tensors:
            if tensor.dtype not in _NUMBERS:
                raise CheckpointError(
                    f"{tensor.name} in {tensor.file} is {tensor.dtype}",
                    f"LoRA has {', '.join(sorted(_NUMBERS))}",
                )
    return headers


class Adapter:
    """An adapter in a directory, for the model with these layers. Headers are read at once,
    matrices when they are asked for, from any thread.

    `lora_b_layout`: of adapters of parameters, see `ktconv.source.adapter.parameters`. `opened`:
    config and headers, where somebody has read them.

    CheckpointError for files that are missing, damaged, or of another kind than LoRA, and for
    matrices of experts that the layers do not have; UsageError for an `alpha` that contradicts the
    files, and without one if no file has it.
    """

    def __init__(
        self,
        directory: Path,
        layers: Mapping[int, LayerNames],
        alpha: float | None = None,
        lora_b_layout: str | None = None,
        opened: tuple[AdapterConfig, Sequence[Header]] | None = None,
    ):
        self.directory, self._layers = directory, layers
        self.config, self.headers = opened or (AdapterConfig(directory, alpha), ())
        self.headers = self.headers or headers_of(directory)
        files = [header.file for header in self.headers]
        self._reader = SourceReader(files, [header.state for header in self.headers])
        self.others: dict[str, TensorRef] = {}  # of what is no expert, by PEFT's names
        self._stacks: dict[_Stack, dict[int | None, TensorRef]] = {}
        self._nested: dict[tuple[int, str], dict[tuple[int, Side], TensorRef]] = {}
        self._whole: OrderedDict[str, Array] = OrderedDict()
        self._lock = threading.Lock()
        self._by_source = {names.source: names for names in layers.values()}
        self._modules = {
            name: place
            for names in layers.values()
            for name, place in names.parameter_modules.items()
        }
        self._layout = chosen_layout(directory, self.config.content, lora_b_layout)
        for header in self.headers:
            for tensor in header.tensors:
                self._enter(tensor)
        self._parameters = {
            (layer, one): (of, depth)
            for layer, module in self._nested
            for depth, of in enumerate(self._adapted(layer, module))
            for one in of.projections
        }
        self._check_once()

    # ---- what it has

    def _adapted(self, layer: int, module: str) -> list[ExpertParameter]:
        """The parameters of a module that have adapters, in the order of their depth."""
        names, found = self._layers[layer], self._nested[layer, module]
        own = [one for one in names.parameters if one.module == module]
        count = len({depth for depth, _ in found})
        paths = list(map(names.parameter, own))
        these = adapted_parameters(own, paths, count, self.config.targets)
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
                    raise CheckpointError(f"{self.directory} does not contain {key}", DAMAGED)
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

    def _check_layer(self, tensor: TensorRef, layer: int) -> None:
        """CheckpointError where this layer of the model has no experts."""
        if layer not in self._layers:
            raise CheckpointError(
                f"{tensor.file} has {tensor.name}, but layer {layer} of the model has no experts",
                _ANOTHER,
            )

    def _enter(self, tensor: TensorRef) -> None:
        if (found := parameter_place(tensor.name, self._modules)) is not None:
            nested = self._nested.setdefault((found.layer, found.module), {})
            nested[found.depth, found.side] = tensor
            return
        place = self._place(tensor.name)
        if place is None:
            if is_of_unknown_layout(tensor.name):
                if (layer := layer_of_experts(tensor.name)) is not None:
                    self._check_layer(tensor, layer)
                raise CheckpointError(
                    f"{tensor.name} {list(tensor.shape)} in {tensor.file} is of experts, in a "
                    "layout that is not known",
                    "save it with PEFT: with matrices of each expert, such as "
                    "experts.0.up_proj.lora_A.weight, or as an adapter of target_parameters",
                )
            self.others[tensor.name] = tensor
            return
        self._check_layer(tensor, place.layer)
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

    def _place(self, key: str) -> Place | None:
        """Place of a matrix of an expert: by the model's own names, then by those of any family."""
        own = self._by_source.get(key.removeprefix(PREFIX).rsplit(".", 4)[0])
        if own is not None and (found := own.place(key)) is not None:
            return found
        others = (names.place(key) for names in self._layers.values())
        return place_of(key) or next(filter(None, others), None)

    @property
    def projections(self) -> dict[int, set[Projection]]:
        """Matrices of experts that it has, by layer."""
        found: dict[int, set[Projection]] = {}
        for stack in self._stacks:
            found.setdefault(stack.layer, set()).add(stack.projection)
        for layer, projection in self._parameters:
            found.setdefault(layer, set()).add(projection)
        return found

    @property
    def tensors(self) -> Iterator[TensorRef]:
        """All tensors of its files."""
        return (tensor for header in self.headers for tensor in header.tensors)

    @property
    def memory(self) -> int:
        """Bytes of what it keeps of tensors with the matrices of all experts, at most."""
        stacks = (stack[None] for stack in self._stacks.values() if None in stack)
        nested = (tensor for found in self._nested.values() for tensor in found.values())
        return sum(sorted((one.nbytes for one in (*stacks, *nested)), reverse=True)[:_KEPT])

    # ---- matrices

    def expert_scale(
        self, layer: int, projection: Projection, experts: int, shape: Sequence[int]
    ) -> float:
        """The factor of a projection of this many experts, whose own matrices are `shape`:
        [outputs, inputs]. CheckpointError where the adapter's are of other shapes, or missing."""
        outputs, inputs = shape
        if (layer, projection) in self._parameters:
            of, depth = self._parameters[layer, projection]
            rank = self._check_parameter(layer, of, depth, experts, (projection, outputs, inputs))
            return self.config.scale(self._layers[layer].parameter(of), rank)
        covered = len(self.covered(layer, projection, experts))
        a, b = (self._stack_shape(layer, projection, side) for side in SIDES)
        name = f"{projection} in layer {layer}"
        expect_shapes(self.directory, name, a, b, (covered, outputs, inputs))
        return self._scale_of_all(layer, projection, a[1])

    def covered(self, layer: int, projection: Projection, experts: int) -> Sequence[int]:
        """Numbers of the experts, of `experts` in all, whose matrix the adapter changes: all but
        those that its config leaves out. CheckpointError where other matrices are missing, and for
        one of an expert beyond them."""
        stacks = [self._stacks.get(_Stack(layer, projection, side), {}) for side in SIDES]
        if (layer, projection) in self._parameters or all(None in one for one in stacks):
            return range(experts)
        there = {expert: one for stack in stacks for expert, one in stack.items()
                 if expert is not None}  # fmt: skip
        for expert in range(experts):
            wanted = expert in there or self._is_target(layer, projection, expert, there)
            for side, stack in zip(SIDES, stacks, strict=True):
                if wanted and expert not in stack and None not in stack:
                    key = self._layers[layer].key(projection, side, expert)
                    raise CheckpointError(
                        f"{self.directory} does not contain {key}",
                        f"{_ANOTHER}; one of some experts only names them in target_modules",
                    )
        if more := there.keys() - set(range(experts)):
            raise CheckpointError(
                f"{self.directory} contains {there[max(more)].name}, but the model has "
                f"{counted(experts, 'expert')}",
                _ANOTHER,
            )
        return sorted(there)

    def _is_target(
        self, layer: int, projection: Projection, expert: int, there: Mapping[int, TensorRef]
    ) -> bool:
        """Whether the config says that the matrix of an expert has LoRA, by the names that others
        of its layer have in the file."""
        module = self._layers[layer].module(projection, expert)
        if there:
            other, tensor = next(iter(there.items()))
            found = module_of(tensor.name)
            before, number, word = found[0].rpartition(f".{other}.") if found else ("", "", "")
            module = f"{before}.{expert}.{word}" if number else module
        return self._targets.has(module)

    @cached_property
    def _targets(self) -> TargetModules:
        names = (tensor.name for stack in self._stacks.values() for tensor in stack.values())
        there = [found[0] for name in names if (found := module_of(name))]
        return TargetModules(self.directory / CONFIG, self.config.content, there)

    def _scale_of_all(self, layer: int, projection: Projection, rank: int) -> float:
        stack = self._stacks[_Stack(layer, projection, "a")]
        names = [self._layers[layer].module(projection, 0)]
        if None not in stack:
            of_each = [found[0] for one in stack.values() if (found := module_of(one.name))]
            names = of_each if self.config.by_module else of_each[:1]
        scales = {self.config.scale(name, rank): name for name in names}
        if len(scales) > 1:
            raise CheckpointError(
                f"{self.directory / CONFIG} has another alpha for {max(scales.values())} than for "
                f"{min(scales.values())}",
                "all experts of a layer must have the same alpha",
            )
        return next(iter(scales))

    def expert(
        self, layer: int, projection: Projection, expert: int, scale: float = 1.0
    ) -> LowRank:
        """LoRA of a matrix of one expert, for which `expert_scale` has given the scale."""
        if (layer, projection) in self._parameters:
            return LowRank(*self._of_parameter(layer, projection, expert), scale)
        a, b = (self._stack_matrix(_Stack(layer, projection, side), expert) for side in SIDES)
        return LowRank(a, b, scale)

    def experts(
        self, layer: int, projection: Projection, experts: int, shape: Sequence[int]
    ) -> Iterator[LowRank | None]:
        """LoRA of a projection of each of this many experts in turn, None for those that are not
        `covered`. Their own matrices are `shape`, [outputs, inputs]; experts may have ranks and
        alphas of their own (rank_pattern). CheckpointError as for `expert_scale`."""
        outputs, inputs = shape
        stacks = {side: self._stacks.get(_Stack(layer, projection, side), {}) for side in SIDES}
        if (layer, projection) in self._parameters or any(None in one for one in stacks.values()):
            scale = self.expert_scale(layer, projection, experts, shape)
            for expert in range(experts):
                yield self.expert(layer, projection, expert, scale)
            return
        covered = set(self.covered(layer, projection, experts))
        for expert in range(experts):
            if expert not in covered:
                yield None
                continue
            a, b = (stacks[side][expert] for side in SIDES)
            name = f"{projection} of expert {expert} in layer {layer}"
            sizes = (1, outputs, inputs)
            expect_shapes(self.directory, name, (1, *a.shape), (1, *b.shape), sizes)
            found = module_of(a.name)
            module = found[0] if found else self._layers[layer].module(projection, expert)
            yield LowRank(self.values(a), self.values(b), self.config.scale(module, a.shape[0]))

    def _stack_matrix(self, stack: _Stack, expert: int) -> F32:
        tensors = self._stacks[stack]
        if None in tensors:
            return _numbers(self._kept(tensors[None])[expert], tensors[None].dtype)
        return self.values(tensors[expert])

    def _of_parameter(self, layer: int, projection: Projection, expert: int) -> tuple[F32, F32]:
        """[rank, inputs] and [outputs, rank]."""
        of, depth = self._parameters[layer, projection]
        stored = self._nested[layer, of.module]
        a, b = (self._kept(stored[depth, side]) for side in SIDES)
        rank = rank_of(a.shape, of.entries)
        own_a = a[expert * rank : (expert + 1) * rank]
        if self._layout == "grouped_by_expert":
            own_b = b[:, expert * rank : (expert + 1) * rank]
        else:
            own_b = b[:, expert :: of.entries]
        dtypes = [stored[depth, side].dtype for side in SIDES]
        found = [_numbers(one, dtype) for one, dtype in zip((own_a, own_b), dtypes, strict=True)]
        if of.swapped:
            found = [found[1].T, found[0].T]
        outputs = len(found[1])
        return tuple(map(np.ascontiguousarray, (found[0], found[1][of.rows(projection, outputs)])))  # type: ignore[return-value]

    def _check_parameter(
        self,
        layer: int,
        of: ExpertParameter,
        depth: int,
        experts: int,
        sizes: tuple[Projection, int, int],
    ) -> int:
        """The rank of a parameter's adapter. CheckpointError for other shapes than the model's."""
        projection, outputs, inputs = sizes
        stored = self._nested[layer, of.module]
        a, b = (stored[depth, side].shape for side in SIDES)
        rank = rank_of(a, of.entries)
        check_layout(self.directory, self._layout, of.entries, rank)
        if not rank or len(b) != 2 or b[1] != a[0] or of.entries < experts:
            raise CheckpointError(
                f"{stored[depth, 'a'].name} and its lora_B in {self.directory} are {list(a)} "
                f"and {list(b)}, which is no adapter of {counted(experts, 'expert')}",
                _ANOTHER,
            )
        found_a, found_b = (rank, a[1]), (b[0], rank)
        if of.swapped:
            found_a, found_b = found_b[::-1], found_a[::-1]
        own = len(range(*of.rows(projection, found_b[0]).indices(found_b[0])))
        name = self._layers[layer].parameter(of)
        shapes = (experts, *found_a), (experts, own, found_b[1])
        expect_shapes(self.directory, name, *shapes, (experts, outputs, inputs))
        return rank

    def other(
        self, module: str, shape: Sequence[int], embedding: bool = False
    ) -> tuple[tuple[TensorRef, TensorRef], float]:
        """A and B of another module, whose own matrix is [outputs, inputs], and their factor; of an
        `embedding` [rows, width] A [rank, rows] and B [width, rank]."""
        a, b = (self._other(module, side, EMBEDDING_ENDS if embedding else ENDS) for side in SIDES)
        outputs, inputs = reversed(shape) if embedding else shape
        expect_shapes(self.directory, module, (1, *a.shape), (1, *b.shape), (1, outputs, inputs))
        return (a, b), self.config.scale(module, a.shape[0])

    def _other(self, module: str, side: Side, ends: Mapping[Side, str]) -> TensorRef:
        name = f"{PREFIX}{module}.{ends[side]}"
        found = self.others.get(name) or self.others.get(name.removeprefix(PREFIX))
        if found is None:
            raise CheckpointError(f"{self.directory} does not contain {name}", DAMAGED)
        return found

    def _stack_shape(self, layer: int, projection: Projection, side: Side) -> tuple[int, ...]:
        """[E, rows, cols], for E `covered` experts."""
        stack = self._stacks.get(_Stack(layer, projection, side), {})
        if None in stack:
            return stack[None].shape
        _expect_alike(list(stack.values()))
        return len(stack), *next(iter(stack.values())).shape

    def dtype_of(self, layer: int, projection: Projection, side: Side) -> str:
        """The dtype that one of the matrices is stored in."""
        if (layer, projection) in self._parameters:
            of, depth = self._parameters[layer, projection]
            return self._nested[layer, of.module][depth, side].dtype
        return next(iter(self._stacks[_Stack(layer, projection, side)].values())).dtype

    # ---- bytes

    def values(self, tensor: TensorRef) -> F32:
        """The numbers of a tensor, in its shape. CheckpointError for a NaN or an infinity."""
        return _numbers(self.stored(tensor), tensor.dtype)

    def stored(self, tensor: TensorRef) -> Array:
        """A tensor as it is stored, bf16 as its bits. CheckpointError for a NaN or an infinity."""
        data = np.empty(tensor.nbytes, np.uint8)
        with self._reader.open(tensor.file) as fd:
            self._reader.read(fd, tensor, data.data, 0)
        return checked(tensor, data).reshape(tensor.shape)

    def _kept(self, tensor: TensorRef) -> Array:
        """`stored` of a tensor with the matrices of all experts, which are asked for one by one."""
        with self._lock:
            if tensor.name not in self._whole:
                self._whole[tensor.name] = self.stored(tensor)
                if len(self._whole) > _KEPT:
                    self._whole.popitem(last=False)
            self._whole.move_to_end(tensor.name)
            return self._whole[tensor.name]


def checked(tensor: TensorRef, data: Array) -> Array:
    """Bytes of a tensor as its numbers, bf16 as their bits. CheckpointError for a NaN or an
    infinity."""
    found = data.view(_NUMBERS[tensor.dtype])
    finite = found & 0x7F80 != 0x7F80 if tensor.dtype == "BF16" else np.isfinite(found)
    if not finite.all():
        raise CheckpointError(
            f"{tensor.name} in {tensor.file} has a NaN or an infinity",
            "its training has diverged; give an adapter of an earlier step",
        )
    return found


def _numbers(stored: Array, dtype: str) -> F32:
    if dtype == "BF16":
        return bf16_to_f32(np.ascontiguousarray(stored))
    return np.ascontiguousarray(stored, np.float32)


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


def expect_shapes(
    directory: Path,
    name: str,
    a: Sequence[int],
    b: Sequence[int],
    sizes: tuple[int, int, int],
) -> None:
    """CheckpointError unless A and B have the shapes that this many experts, outputs and inputs
    need."""
    experts, outputs, inputs = sizes
    rank = a[1] if len(a) == 3 else 0
    for side, found, wanted in (
        ("A", a, (experts, rank, inputs)),
        ("B", b, (experts, outputs, rank)),
    ):
        if tuple(found) != wanted or not rank:
            raise CheckpointError(
                f"{side} of {name} in {directory} is {list(found)}, but the model needs "
                f"{list(wanted)}",
                _ANOTHER,
            )
