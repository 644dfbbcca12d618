"""`KTMoEWrapper` with mode "sft": LoRA of the experts of a layer, trained and served."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from ktconv.compat.kt.calls import Running, Share
from ktconv.compat.kt.gradients import (
    CheckpointOutput,
    OptimizerGrad,
    OptimizerGrads,
    bf16_matrix,
    checked_scale,
)
from ktconv.compat.kt.model import Model
from ktconv.compat.kt.raw import raw_layer
from ktconv.compat.kt.sft_names import StoredExperts
from ktconv.compat.kt.streams import begin
from ktconv.compat.kt.weights import load_layer, slots_of
from ktconv.compat.kt.wrapper import KTMoEWrapper
from ktconv.errors import UsageError
from ktconv.native.training import LORA_MATRICES
from ktconv.runtime import MoELayer
from ktconv.runtime.adapters import DEFAULT, LayerAdapter, LayerAdapters, packed_pair
from ktconv.runtime.layers import Experts
from ktconv.system.numbers import real, whole
from ktconv.train import LoRAExperts

_NAMES = {f"{name[:-2]}_lora_{name[-1]}": name for name in LORA_MATRICES}  # of arguments


class Saved(NamedTuple):
    """A forward that waits for its backward: what it has read, and its result in torch's graph."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    y: Tensor


class SFTWrapper(KTMoEWrapper):
    """The routed experts of one layer with LoRA, in the interface of KTransformers' fine-tuning.

        wrapper = KTMoEWrapper(..., method="AMXINT8_SFT", mode="sft", lora_rank=16)
        wrapper.load_weights()
        wrapper.init_lora_weights(*matrices, *gradients)
        y = wrapper.forward(x, ids, weights)
        dx, dweights = wrapper.backward(dy)

    A forward that saves keeps what its backward needs; a second one takes its place. Serving reads
    LoRA as `init_lora_weights` and `update_lora_weights` found it, training as it is. docs/kt-
    wrapper.md has what differs from kt_kernel.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        """The arguments of `KTMoEWrapper`."""
        super().__init__(*given, **named)
        options = self._arguments_of(given, named)
        least = 0 if options["full_weight_grad"] else 1
        self.lora_rank = whole("lora_rank", options["lora_rank"], least)
        self.lora_alpha = real("lora_alpha", options["lora_alpha"])
        self.lora_dropout = real("lora_dropout", options["lora_dropout"])
        self.lora_scaling = self.lora_alpha / self.lora_rank if self.lora_rank else 0.0
        self.max_cache_depth = whole("max_cache_depth", options["max_cache_depth"], 1)
        self.group_size, self.zero_point = options["group_size"], options["zero_point"]
        first = whole("num_gpu_experts", options["num_gpu_experts"], 0)
        if first > self.num_experts:
            raise UsageError(
                f"num_gpu_experts is {first}, more than the {self.num_experts} of num_experts"
            )
        self._mask[:first] = True
        self._full = bool(options["full_weight_grad"])
        if self._full and self._settings.method.formats[:1] != ("bf16",):
            raise UsageError(
                f"full_weight_grad is for AMXBF16_SFT, not {self.method}",
                "weights of other formats are frozen",
            )
        self.share_backward_bb = False  # what callers set: there are no copies to share
        self.reuse_checkpoint_forward = False
        self._skips_lora = self.method.endswith("_SkipLoRA")
        self._matrices: dict[str, Tensor] = {}  # by the names of LORA_MATRICES
        self._buffers: dict[str, Tensor] = {}  # of their gradients
        self._grads, self._checkpoint = OptimizerGrads(), CheckpointOutput()
        self._module: LoRAExperts | None = None
        self._served: tuple[MoELayer, tuple[int, ...]] | None = None
        self._saved: Saved | None = None
        self._forwards: deque[tuple[Future[Tensor], bool]] = deque()
        self._backward: Future[tuple[Tensor, Tensor]] | None = None
        self.gate_proj_buf: nn.Parameter | None = None
        self.up_proj_buf: nn.Parameter | None = None
        self.down_proj_buf: nn.Parameter | None = None

    # ---- weights

    def load_weights(self, physical_to_logical_map_cpu: Tensor | None = None) -> None:
        """Read the weights from files, as at inference."""
        super().load_weights(physical_to_logical_map_cpu)
        self._renew()

    def load_weights_from_tensors(self, *given: Any, **named: Any) -> None:
        """Take the weights from tensors, as at inference."""
        super().load_weights_from_tensors(*given, **named)
        self._renew()

    def load_rawint4_weights(self, weights: Any, physical_to_logical_map_cpu: Any = None) -> None:
        """Loads packed group-32 integers: an object with gate_proj, up_proj and down_proj uint8
        [experts, outputs, inputs / 2], an even column in the lower four bits, number + 8, and their
        bf16 scales [experts, outputs, inputs / 32] as gate_scale and so on; or `StoredExperts`.
        Nothing is rounded."""
        self._load_raw("RAWINT4", _stacks(weights), physical_to_logical_map_cpu)

    def load_block_fp8_weights(self, weights: Any, physical_to_logical_map_cpu: Any = None) -> None:
        """Loads E4M3 weights as they are: an object with lists of matrices gate_proj, up_proj and
        down_proj, and of their fp32 scales of blocks of 128 x 128 as gate_scale and so on; or
        `StoredExperts`."""
        self._load_raw("FP8", _stacks(weights), physical_to_logical_map_cpu)

    def load_mxfp4_weights(
        self, experts_data: Mapping[str, Any], physical_to_logical_map_cpu: Any = None
    ) -> None:
        """Loads MXFP4 weights as they are: lists of uint8 [outputs, inputs / 2] as "gate", "up" and
        "down", and of their scales, powers of two in bf16 [outputs, inputs / 32], as "gate_scale"
        and so on."""
        self._load_raw("MXFP4", dict(experts_data), physical_to_logical_map_cpu)

    def _load_raw(self, kind: str, weights: dict[str, Any] | StoredExperts, mapping: Any) -> None:
        if self._settings.method.name != kind:
            raise UsageError(f"{kind} weights cannot be loaded by {self.method}")
        slots = slots_of(mapping, self.num_experts)
        if isinstance(weights, StoredExperts):
            own = replace(self._settings, weight_path=weights.path, layer_idx=weights.layer)
            source = Model().source(weights.path)
            self._layer = load_layer(own, source, slots, self._pool, self.memory)
        else:
            packed: Experts = raw_layer(kind, self._settings, weights, slots)
            self._layer = MoELayer(packed, self._pool)
        self._renew()

    def save_backward_weights_from_tensors(
        self,
        gate_proj: Tensor,
        up_proj: Tensor,
        down_proj: Tensor,
        physical_to_logical_map: Tensor,
        output_path: str,
    ) -> None:
        """Writes nothing: backwards read the weights that forwards read. UsageError without
        weights."""
        _ = self.layer

    # ---- LoRA

    def init_lora_weights(
        self,
        gate_lora_a: Tensor,
        gate_lora_b: Tensor,
        up_lora_a: Tensor,
        up_lora_b: Tensor,
        down_lora_a: Tensor,
        down_lora_b: Tensor,
        grad_gate_lora_a: Tensor,
        grad_gate_lora_b: Tensor,
        grad_up_lora_a: Tensor,
        grad_up_lora_b: Tensor,
        grad_down_lora_a: Tensor,
        grad_down_lora_b: Tensor,
    ) -> None:
        """Takes matrices, and the buffers of their gradients, without a copy: bf16 on the CPU, A
        [experts, rank, inputs] and B [experts, outputs, rank].

        If the six matrices are parameters, a backward makes the buffers their `grad`, and the next
        ones add to it until `release_authoritative_optimizer_grads`; else it overwrites the
        buffers. UsageError for tensors that do not fit.
        """
        given = dict(locals())
        shapes = self._shapes()
        matrices = {
            one: bf16_matrix(name, given[name], shapes[one]) for name, one in _NAMES.items()
        }
        buffers = {
            one: bf16_matrix(f"grad_{name}", given[f"grad_{name}"], shapes[one])
            for name, one in _NAMES.items()
        }
        parameters = [one for one in matrices.values() if isinstance(one, nn.Parameter)]
        if len(parameters) not in (0, len(matrices)):
            raise UsageError("the six matrices of LoRA must all be nn.Parameters, or none of them")
        self._grads = OptimizerGrads()
        if parameters:
            for name, one in _NAMES.items():
                self._grads.register(f"lora.{name}", matrices[one], buffers[one])
        self._matrices, self._buffers = matrices, buffers
        self._renew()

    def update_lora_weights(self) -> None:
        """Says that the matrices have changed, for serving; training reads them as they are.
        UsageError without weights or matrices."""
        self._expect_ready()
        self._served = None

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        e, r = self.num_experts, self.lora_rank
        h, i = self.hidden_size, self.moe_intermediate_size
        wide, tall = (e, r, h), (e, i, r)
        shapes = (wide, tall, wide, tall, (e, r, i), (e, h, r))
        return dict(zip(LORA_MATRICES, shapes, strict=True))

    def _renew(self) -> None:
        """Weights or matrices are others: what was made of them is made again when it is needed."""
        self._module = self._served = self._saved = None

    def _expect_ready(self) -> None:
        _ = self.layer
        if self.lora_rank and not self._skips_lora and not self._matrices:
            raise UsageError(
                f"layer {self.layer_idx} has no matrices of LoRA", "call init_lora_weights first"
            )

    def _trained(self) -> LoRAExperts:
        """LoRA on the layer, whose parameters are the given matrices."""
        self._expect_ready()
        if self._module is None:
            adapts = bool(self._matrices) and not self._skips_lora
            rank = self.lora_rank if adapts else None
            module = LoRAExperts(
                self.layer, rank, self.lora_alpha, self.lora_dropout, dtype=torch.bfloat16
            )
            for name, one in self._matrices.items() if adapts else ():
                parameter = one if isinstance(one, nn.Parameter) else nn.Parameter(one)
                setattr(module, name, parameter)
            self._module = module
        return self._module

    def _serving(self) -> MoELayer:
        """The layer with LoRA next to its weights, as it was when it changed last."""
        self._expect_ready()
        if not self._matrices or self._skips_lora:
            return self.layer
        versions = tuple(one._version for one in self._matrices.values())
        if self._served is None or self._served[1] != versions:
            # Matrices are those of slots, whichever experts these have.
            adapters = LayerAdapters(
                np.arange(self.num_experts), {DEFAULT: self._adapter()}, DEFAULT
            )
            self._served = MoELayer(self.layer.packed, self._pool, adapters), versions
        return self._served[0]

    def _adapter(self) -> LayerAdapter:
        bits = {
            name: one.detach().view(torch.int16).numpy().view("uint16")
            for name, one in self._matrices.items()
        }
        return LayerAdapter(
            [
                tuple(
                    packed_pair(bits[f"{one}_a"][slot], bits[f"{one}_b"][slot], self.lora_scaling)
                    for one in ("gate", "up", "down")
                )  # type: ignore[misc]
                for slot in range(self.num_experts)
            ]
        )

    # ---- calls that a backward may follow

    def forward(
        self,
        hidden_states: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        save_for_backward: bool = True,
        output_device: torch.device | None = None,
    ) -> Tensor:
        """The layer's output, on `output_device` (default: the CPU), like hidden_states [tokens,
        hidden_size]. A forward that saves takes the place of the one before."""
        self.submit_forward(hidden_states, expert_ids, weights, save_for_backward)
        return self.sync_forward(output_device)

    def submit_forward(
        self,
        hidden_states: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        save_for_backward: bool = True,
    ) -> None:
        """Starts a forward in the background; the arguments may change once this returns."""
        given = self._inputs(hidden_states.detach(), expert_ids, weights.detach())
        module, mask = self._trained().train(bool(save_for_backward)), self._mask.clone()
        x, ids, w = (one.cpu().clone() for one in (given.x, given.ids, given.weights))

        def run() -> Tensor:
            if save_for_backward:
                self._saved = None  # a backward is not of an earlier one, if this one fails
            with torch.set_grad_enabled(bool(save_for_backward)):
                if save_for_backward:
                    x.requires_grad_()
                    w.requires_grad_()
                y = module(x, ids, w, skip=mask)
            if save_for_backward:
                self._saved = Saved(x, ids, w, y)
            return y.detach().reshape(hidden_states.shape)  # type: ignore[no-any-return]

        self._forwards.append((_started(self._pool, run), bool(save_for_backward)))

    def sync_forward(  # type: ignore[override]
        self, output_device: torch.device | None = None
    ) -> Tensor:
        """The result of the oldest forward that was submitted. UsageError where there is none."""
        if not self._forwards:
            raise UsageError(
                f"layer {self.layer_idx} has nothing to wait for", "call submit_forward first"
            )
        y = self._forwards.popleft()[0].result()
        return y if output_device is None else y.to(output_device)

    def backward(
        self,
        grad_output: Tensor,
        output_device: torch.device | None = None,
        optimizer_grad_scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Gradients of hidden_states and of the weights (fp32) of the last forward that saved.
        Those of LoRA, and of the weights with full_weight_grad, go to their buffers, times
        `optimizer_grad_scale`. UsageError where no forward was saved, or of other tokens."""
        self.submit_backward_async(grad_output, output_device, optimizer_grad_scale)
        return self.sync_backward()

    def submit_backward_async(
        self,
        grad_output: Tensor,
        output_device: torch.device | None = None,
        optimizer_grad_scale: float = 1.0,
    ) -> None:
        """Starts `backward` in the background. UsageError where one is under way."""
        scale = checked_scale(optimizer_grad_scale)
        if self._backward is not None:
            raise UsageError("a backward is under way", "call sync_backward first")
        for pending, saves in self._forwards:
            if saves:
                pending.result()
        saved = self._saved
        if saved is None:
            raise UsageError(
                f"layer {self.layer_idx} has no forward to go back from",
                "call forward with save_for_backward=True first",
            )
        if grad_output.numel() != saved.y.numel():
            raise UsageError(
                f"grad_output is {list(grad_output.shape)}, but the forward was "
                f"{list(saved.y.shape)}"
            )
        self._grads.state()
        self._saved = None
        dy = grad_output.detach().cpu().reshape(saved.y.shape).to(saved.y.dtype).clone()

        def run() -> tuple[Tensor, Tensor]:
            dx, dw = self._gradients(saved, dy, scale)
            return tuple(
                one if output_device is None else one.to(output_device) for one in (dx, dw)
            )  # type: ignore[return-value]

        self._backward = _started(self._pool, run)

    def _gradients(self, saved: Saved, dy: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        module = self._trained()
        named = dict(module.named_parameters())
        leaves = [saved.x, saved.weights, *named.values()]
        dx, dw, *rest = torch.autograd.grad(saved.y, leaves, dy)
        found = dict(zip(named, rest, strict=True))
        buffers = dict(self._buffers)
        if self._full and self.gate_proj_buf is not None:
            mask = self._mask
            x, w = saved.x.detach(), saved.weights.detach()
            for name, one in module.base_gradients(x, saved.ids, w, dy, skip=mask).items():
                found[name] = one
                buffers[name] = getattr(self, f"grad_{name}_proj_buf")
        self._grads.write(found, buffers, scale)
        return dx, dw

    def sync_backward(self) -> tuple[Tensor, Tensor]:
        """The results of `submit_backward_async`. UsageError where none was submitted."""
        if self._backward is None:
            raise UsageError("no backward is under way", "call submit_backward_async first")
        pending, self._backward = self._backward, None
        return pending.result()

    def submit_backward_repack(self) -> None:
        """Does nothing: backwards read the weights that forwards read."""

    def wait_backward_repack(self) -> None:
        """Does nothing, as `submit_backward_repack`."""

    # ---- serving

    def submit_forward_inference(
        self,
        hidden_states: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        cuda_stream: Any = None,
    ) -> None:
        """Starts a forward of serving, without dropout, as `submit_forward` of inference. LoRA is
        next to the packed weights: `MoELayer` with an adapter (docs/runtime.md)."""
        inputs = self._inputs(hidden_states, expert_ids, weights)
        running, _ = begin(self._serving(), inputs, self._mask, Share(), f"layer {self.layer_idx}")
        self._submitted.append(running)

    def sync_forward_inference(self, cuda_stream: Any = None) -> Tensor:
        """The result of the oldest `submit_forward_inference`, a new tensor on the device of its
        input. UsageError where nothing was submitted."""
        if not self._submitted:
            raise UsageError(
                f"layer {self.layer_idx} has nothing to wait for",
                "call submit_forward_inference first",
            )
        running: Running = self._submitted.popleft()
        return running.result()

    # ---- gradients of parameters

    @property
    def authoritative_optimizer_grads(self) -> tuple[OptimizerGrad, ...]:
        """Parameters, and the buffers that become their gradients."""
        return tuple(self._grads.registered)

    def register_authoritative_optimizer_grad(
        self, name: str, parameter: nn.Parameter, grad_view: Tensor
    ) -> None:
        """Makes a buffer the gradient of a parameter; see `init_lora_weights`."""
        self._grads.register(name, parameter, grad_view)

    def validate_authoritative_optimizer_grad_state(self) -> str:
        """ "empty", "closed" or "open": whether parameters have their gradients. UsageError where
        only some have."""
        return self._grads.state()

    def release_authoritative_optimizer_grads(self) -> None:
        """Takes the gradients from the parameters, after a step of the optimizer."""
        if self._backward is not None:
            raise UsageError("a backward is under way", "call sync_backward first")
        self._grads.release()

    # ---- weights that are trained themselves

    def init_full_weight_grad_buffers(
        self, gate_proj: Tensor, up_proj: Tensor, down_proj: Tensor
    ) -> None:
        """Makes parameters of bf16 weights (gate_proj_buf and so on), and buffers of their
        gradients (grad_gate_proj_buf and so on)."""
        for name, given in (("gate", gate_proj), ("up", up_proj), ("down", down_proj)):
            parameter = nn.Parameter(given.detach().to("cpu", torch.bfloat16).contiguous())
            buffer = torch.zeros_like(parameter, requires_grad=False)
            setattr(self, f"{name}_proj_buf", parameter)
            setattr(self, f"grad_{name}_proj_buf", buffer)
            if self._grads.registered or not self._matrices:
                self._grads.register(f"base.{name}_proj", parameter, buffer)

    def update_base_weights(self) -> None:
        """Packs the parameters of `init_full_weight_grad_buffers` as the layer's weights, after a
        step of the optimizer. Does nothing without full_weight_grad."""
        _ = self.layer
        if not self._full:
            return
        if self.gate_proj_buf is None or self.up_proj_buf is None or self.down_proj_buf is None:
            raise UsageError(
                f"layer {self.layer_idx} has no weights to train",
                "call init_full_weight_grad_buffers first",
            )
        stacks = (self.gate_proj_buf, self.up_proj_buf, self.down_proj_buf)
        self.load_weights_from_tensors(*(one.detach() for one in stacks))

    # ---- gradient checkpointing

    @property
    def checkpoint_cache_state(self) -> str:
        """ "EMPTY", "READY" or "POISONED"."""
        return self._checkpoint.state

    def cache_checkpoint_output(self, output_cpu: Tensor, qlen: int) -> None:
        """Keeps the output of a forward that will be asked for again."""
        self._checkpoint.put(output_cpu, qlen)

    def get_checkpoint_output(self, qlen: int, output_device: torch.device | None = None) -> Tensor:
        """The output that was kept."""
        found = self._checkpoint.get(qlen)
        return found if output_device is None else found.to(output_device)

    def validate_checkpoint_output(self, qlen: int) -> None:
        """Refuse a backward unless an output of `qlen` tokens is kept (UsageError)."""
        self._checkpoint.get(qlen)

    def validate_checkpoint_cache_empty(self) -> None:
        """UsageError where an output is kept."""
        self._checkpoint.expect_empty()

    def poison_checkpoint_output(self, error: BaseException | str) -> None:
        """Refuses what was kept from now on, with this error."""
        self._checkpoint.poison(error)

    def clear_checkpoint_output(self) -> None:
        """Forgets the output that was kept."""
        self._checkpoint.clear()


def _stacks(weights: Any) -> dict[str, Any] | StoredExperts:
    """gate, gate_scale and so on of an object that has gate_proj, gate_scale and so on."""
    if isinstance(weights, StoredExperts):
        return weights
    found = {}
    for name in ("gate", "up", "down"):
        found[name] = getattr(weights, f"{name}_proj", None)
        found[f"{name}_scale"] = getattr(weights, f"{name}_scale", None)
    return found


def _started(pool: Any, run: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = pool.submit(run)
    return future
