"""GPTQ of experts through llm-compressor's `oneshot` and its sequential pipeline.

Layer by layer: all samples run through the layer, each expert's weights are rounded so that its
outputs change least, and the samples go on through the rounded layer. A finished layer is handed
over at once in its packed form, so that an interrupted run loses only the layer under way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ktconv.quantize_gpu.llm_compressor import causal_attention, quiet  # before what it silences

# isort: split
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.offload import update_offload_parameter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor import oneshot
from llmcompressor.entrypoints.oneshot import Oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.gptq.helpers import assign_batches
from llmcompressor.pipelines.sequential import pipeline as sequential
from pydantic import PrivateAttr
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ktconv.checkpoint import Projection
from ktconv.errors import CheckpointError, ResourceError
from ktconv.model.load import first_line, replaced
from ktconv.quantize_gpu.gptq.calibration import Samples
from ktconv.quantize_gpu.gptq.calibration_model import OF_LIBRARIES, LinearExperts, linear_experts
from ktconv.quantize_gpu.gptq.coverage import Counter, LayerCoverage
from ktconv.quantize_gpu.gptq.memory import ROUNDING_BYTES

# Fractions of the time that a layer takes, for the ETA.
_CALIBRATING, _ROUNDING, _PROPAGATING = 0.4, 0.4, 0.2


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """One projection of one expert in compressed-tensors' packed form.

    `tensors`: weight_packed int32, weight_scale bf16 [rows, groups], weight_shape int64 [2].
    """

    expert: int
    projection: Projection
    tensors: Mapping[str, Tensor]


class Events(Protocol):
    """What happens while layers are quantized."""

    def layer_started(self, layer: int) -> None: ...

    def progressed(self, layer: int, share: float) -> None:
        """Another `share` of the work on a layer, which sums up to 1, is done."""

    def layer_done(
        self, layer: int, matrices: Iterator[QuantizedMatrix], coverage: LayerCoverage
    ) -> None:
        """All chosen experts of a layer. Later layers are calibrated on exactly these weights."""


def packed_scheme(weights: QuantizationArgs, targets: Sequence[str] = ()) -> QuantizationScheme:
    """Weights only, packed into int32."""
    return QuantizationScheme(targets=list(targets), weights=weights, format="pack-quantized")


def quantize_layers(
    model: Any,
    samples: Samples,
    chosen: Mapping[int, Sequence[int]],
    weights: QuantizationArgs,
    dampening: float,
    events: Events,
    device: str = "cpu",
) -> None:
    """Quantize, in place, the experts `chosen` (layer -> expert ids) of a model.

    `model` is of `load_linear_model`, and its layers are computed on `device` one by one.
    Everything else in it stays as it is and computes as it is, also layers that were quantized
    before and whose weights were put back by `put_back`. The result depends on the arguments, the
    machine's kernels and the number of threads, not on chance. Raises CheckpointError where an
    expert would stay unquantized.
    """
    present = linear_experts(model)
    wanted = {layer: sorted(ids) for layer, ids in chosen.items() if ids}
    for layer in wanted:
        if layer not in present:
            raise CheckpointError(
                f"transformers builds no experts for layer {layer}, so they cannot be calibrated"
            )
    if not wanted:
        return
    run = _Run(present, wanted, weights, len(samples.ids), events)
    modifier = ExpertGPTQ(
        config_groups={"experts": packed_scheme(weights, run.targets())},
        dampening_frac=dampening,
        batched_quantization=_batch(next(iter(run.layers.values())), device),
    )
    modifier._run = run
    batches = [{"input_ids": torch.tensor([list(ids)])} for ids in samples.ids]
    on_device = replaced(sequential, "get_main_device", lambda: torch.device(device))
    # By config.json of the source the library refuses what ktconv has decoded by now.
    decoded = replaced(Oneshot, "validate_model", lambda *_: None)
    with quiet(), causal_attention(), on_device, decoded, _errors_translated():
        oneshot(
            model=model,
            processor=_NoProcessor(),
            recipe=modifier,
            dataset=DataLoader(batches, batch_size=None),  # type: ignore[arg-type]
            pipeline="sequential",
            moe_calibrate_all_experts=True,
        )
    if missing := sorted(set(wanted) - run.done):
        raise CheckpointError(f"the experts of layer {missing[0]} stayed unquantized")


def put_back(experts: LinearExperts, matrices: Iterator[QuantizedMatrix], weights: Any) -> None:
    """Give a layer the weights that an earlier run left, as that run computed with them."""
    for matrix in matrices:
        linear = experts.linear(matrix.expert, matrix.projection)
        update_offload_parameter(linear, "weight", dequantized(matrix.tensors, weights))


def dequantized(tensors: Mapping[str, Tensor], weights: QuantizationArgs) -> Tensor:
    """Weights [rows, cols] of the packed form, in the dtype of the scales."""
    scheme = packed_scheme(weights)
    found: Tensor = PackedQuantizationCompressor.decompress(dict(tensors), scheme)["weight"]
    return found


def _batch(layer: LinearExperts, device: str) -> int | str:
    """How many matrices are rounded at once. On a GPU the library goes by the memory that is free;
    on the CPU it would take one at a time, though a column of many costs little more."""
    if torch.device(device).type == "cuda":
        return "auto"
    up = layer.linear(0, "up")
    longest = max(up.in_features, up.out_features)
    each = 4 * (4 * longest**2 + 5 * up.in_features * up.out_features)
    return max(1, min(layer.count, ROUNDING_BYTES // each))


class _NoProcessor:
    """Samples are tokens already; without an object llm-compressor would look for a tokenizer."""


class _Run:
    """State of one call: which experts to quantize, what routers chose, what is done."""

    def __init__(
        self,
        present: Mapping[int, LinearExperts],
        wanted: Mapping[int, Sequence[int]],
        weights: QuantizationArgs,
        batches: int,
        events: Events,
    ) -> None:
        self.layers = {layer: present[layer] for layer in sorted(wanted)}
        self.wanted, self.weights, self.batches, self.events = wanted, weights, batches, events
        self.counters = {n: Counter(layer.count) for n, layer in self.layers.items()}
        self.started: set[int] = set()
        self.done: set[int] = set()
        self.rounded: set[nn.Module] = set()
        self.leaders: dict[nn.Module, nn.Module] = {}
        self.layer_of: dict[nn.Module, int] = {}
        for number, layer in self.layers.items():
            inputs = []
            for expert, projection, linear in layer.linears():
                if expert in wanted[number]:
                    self.layer_of[linear] = number
                    if projection != "down":
                        inputs.append(linear)
            self.leaders |= dict.fromkeys(inputs, inputs[0])

    def targets(self) -> list[str]:
        """A pattern per layer: with a name per matrix the library's matching takes minutes."""
        return [
            f"re:^{re.escape(layer.path)}\\.({'|'.join(map(str, self.wanted[number]))})\\."
            "(gate|up|down)_proj$"
            for number, layer in self.layers.items()
        ]

    def called(self, layer: int, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """A batch reaches the experts of a layer: `args` are hidden states, ids and weights."""
        if layer not in self.started:
            self.started.add(layer)
            self.events.layer_started(layer)
        ids = args[1].reshape(-1, args[1].shape[-1])
        self.counters[layer].add(ids.to("cpu", torch.int64).numpy())
        self.events.progressed(layer, _CALIBRATING / self.batches)

    def answered(self, layer: int, *_: Any) -> None:
        if layer in self.done:  # the batch runs on through the rounded layer
            self.events.progressed(layer, _PROPAGATING / self.batches)

    def finish(self, number: int, fell_back: Mapping[nn.Module, str]) -> None:
        """Hand a layer over, and let it compute with exactly what was handed over."""
        layer = self.layers[number]
        names = [
            f"{expert}.{projection}"
            for expert, projection, linear in layer.linears()
            if linear in fell_back
        ]
        coverage = self.counters[number].result(names)
        self.events.layer_done(number, self._matrices(layer), coverage)
        self.done.add(number)

    def _matrices(self, layer: LinearExperts) -> Iterator[QuantizedMatrix]:
        for expert, projection, linear in layer.linears():
            if expert not in self.wanted[layer.layer]:
                continue
            if linear not in self.rounded:
                raise CheckpointError(
                    f"the {projection} projection of expert {expert} in layer {layer.layer} "
                    "stayed unquantized"
                )
            tensors = _packed(linear, self.weights)
            update_offload_parameter(linear, "weight", dequantized(tensors, self.weights))
            yield QuantizedMatrix(expert, projection, {n: t.cpu() for n, t in tensors.items()})


def _packed(linear: nn.Module, weights: QuantizationArgs) -> dict[str, Tensor]:
    names = ("weight", "weight_scale", "weight_zero_point")
    state = {name: getattr(linear, name).detach() for name in names if hasattr(linear, name)}
    packed = PackedQuantizationCompressor.compress(state, packed_scheme(weights))
    return {name: packed[name].contiguous() for name in sorted(packed)}


class ExpertGPTQ(GPTQModifier):  # type: ignore[misc]
    """llm-compressor's GPTQ with three additions: layers are handed over as they are done, what
    routers choose is counted, and what is the same for all experts is computed once.

    While calibrating every expert of a layer sees every token, so that the input products of all
    its gate and up projections are one matrix: kept apart they would take H x H floats each, 100
    GB for a layer of DeepSeek-V3.
    """

    _run: Any = PrivateAttr(None)
    _last_input: Any = PrivateAttr(None)

    def on_calibration_start(self, state: Any, event: Any, **kwargs: Any) -> None:
        super().on_calibration_start(state, event, **kwargs)
        for number, layer in self._run.layers.items():
            self.register_hook(layer.module, partial(self._run.called, number), "forward_pre")
            self._hooks.add(layer.module.register_forward_hook(partial(self._run.answered, number)))

    def calibrate_module(self, module: nn.Module, args: tuple[Tensor, ...], _output: Any) -> None:
        leader = self._run.leaders.get(module, module)
        if leader is module:
            super().calibrate_module(module, args, _output)
            self._last_input = args[0] if module in self._run.leaders else self._last_input
            return
        if args[0] is not self._last_input:
            raise CheckpointError("experts of one layer saw different tokens while calibrating")
        self._hessians[module] = self._hessians[leader]
        self._num_samples[module] = self._num_samples[leader]

    def compress_module_list(self, module_list: list[nn.Module]) -> None:
        """In the library's own batches, to report progress between them."""
        batches = assign_batches(module_list, self.batched_quantization, self.block_size)
        for batch in batches:
            super().compress_module_list(batch)
            self._run.rounded.update(batch)
            layer = self._run.layer_of[batch[0]]
            share = _ROUNDING * len(batch) / len(module_list)
            self._run.events.progressed(layer, share)

    def on_sequential_epoch_end(
        self, state: Any, event: Any, modules: list[nn.Module], **kwargs: Any
    ) -> None:
        before = len(self._rtn_fallback_module_names)
        super().on_sequential_epoch_end(state, event, modules, **kwargs)
        self._last_input = None
        names = set(self._rtn_fallback_module_names[before:])
        fell_back = {m: name for m, name in self._module_names.items() if name in names}
        inside = set(modules)
        for number, layer in self._run.layers.items():
            if layer.module in inside:
                self._run.finish(number, fell_back)


@contextmanager
def _errors_translated() -> Iterator[None]:
    """Errors of libraries and of the model's code as KtconvErrors."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ResourceError(
            "out of memory while calibrating",
            "use fewer --samples or a smaller --max-seq-len; layers that are done are kept",
        ) from error
    except OF_LIBRARIES as error:
        raise CheckpointError(
            f"llm-compressor cannot calibrate this model: {first_line(error)}",
            "--method rtn works on the checkpoint itself; layers that are done are kept",
        ) from error
