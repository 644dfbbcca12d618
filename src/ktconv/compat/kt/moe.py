"""`kt_kernel_ext.moe`: layers by the addresses of their weights, of inputs and of results.

    queue = CPUInfer(60)
    config = moe.MOEConfig(256, 8, 7168, 2048)
    config.pool, config.gate_proj = queue.backend_, gate.data_ptr()
    layer = moe.AMXInt4_MOE(config)
    queue.submit(layer.load_weights_task(mapping.data_ptr()))
    queue.sync()

Tasks read and write memory at addresses that the caller names, which must hold what the
configuration says: nothing can check that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from msgspec import Struct, field
from torch import Tensor

from ktconv.compat.kt.cpu_infer import CPUInfer, Task
from ktconv.compat.kt.gpu_buffers import checked_buffers, write_expert
from ktconv.compat.kt.model import Model
from ktconv.compat.kt.raw import raw_layer
from ktconv.compat.kt.settings import Settings, settings
from ktconv.compat.kt.weights import load_layer, pack_layer, slots_of
from ktconv.errors import UsageError
from ktconv.runtime import MoELayer
from ktconv.runtime.staging import tensor_at

_MATRICES = ("gate", "up", "down")
_FP8 = torch.float8_e4m3fn


class QuantConfig(Struct, dict=True):
    """The encoding of weights in memory."""

    bits: int = 0
    group_size: int = 0
    zero_point: bool = False
    per_channel: bool = False
    quant_method: str = ""


class MOEConfig(Struct, dict=True):
    """Sizes of a layer and addresses of its weights: of a stack of all experts, or of each expert
    (a list in a list, as kt_kernel has it). `max_len`, `save` and other fields change nothing."""

    expert_num: int
    num_experts_per_tok: int
    hidden_size: int
    intermediate_size: int
    gpu_experts_mask: int = 0  # of bytes [expert_num], True for experts that run elsewhere
    layer_idx: int = 0
    pool: CPUInfer | None = None
    max_len: int = 0
    path: str = ""
    load: bool = False  # from `path`
    save: bool = False
    gate_proj: int = 0
    up_proj: int = 0
    down_proj: int = 0
    gate_scale: int = 0
    up_scale: int = 0
    down_scale: int = 0
    gate_projs: Sequence[Sequence[int]] = ()
    up_projs: Sequence[Sequence[int]] = ()
    down_projs: Sequence[Sequence[int]] = ()
    gate_scales: Sequence[Sequence[int]] = ()
    up_scales: Sequence[Sequence[int]] = ()
    down_scales: Sequence[Sequence[int]] = ()
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 0.0
    quant_config: QuantConfig = field(default_factory=QuantConfig)


class MoE(ABC):
    """A layer by addresses; classes below name the encoding of its weights."""

    method = ""  # of KTMoEWrapper

    def __init__(self, config: MOEConfig) -> None:
        """Checks sizes; weights are loaded later. UsageError names what does not fit."""
        queue = config.pool
        if not isinstance(queue, CPUInfer):
            raise UsageError("MOEConfig.pool is not set", "give the backend_ of a CPUInfer")
        self._config, self._pool = config, queue.pool
        self._settings = _settings(self.method, config, queue)
        self._layer: MoELayer | None = None

    @property
    def layer(self) -> MoELayer:
        """The loaded layer. UsageError before that."""
        if self._layer is None:
            raise UsageError("the layer has no weights yet", "submit load_weights_task first")
        return self._layer

    # ---- tasks for CPUInfer.submit

    def load_weights_task(self, physical_to_logical_map: int = 0) -> Task:
        """A task that reads the weights; they may be freed once it is done. The map: int64
        [expert_num]."""
        return partial(self.load_weights, physical_to_logical_map)

    def warm_up_task(self) -> Task:
        """A task that brings the weights into memory."""
        return self.warm_up

    def forward_task(
        self,
        batch_size: int,
        num_experts_per_tok: int,
        expert_ids: int,
        weights: int,
        input: int,
        output: int,
        incremental: bool = False,
    ) -> Task:
        """A task that computes bf16 `output` [tokens, H] of `input`, expert_ids int64 and weights
        float32 [tokens, k]; int32 `batch_size` has the tokens when it runs. `incremental` adds to
        what `output` has."""
        return partial(
            self._forward, batch_size, int(num_experts_per_tok), expert_ids, weights, input, output,
            bool(incremental),
        )  # fmt: skip

    def write_weight_scale_to_buffer_task(
        self,
        gpu_tp_count: int,
        expert_id: int,
        w13_weight_ptrs: Sequence[int],
        w13_scale_ptrs: Sequence[int],
        w2_weight_ptrs: Sequence[int],
        w2_scale_ptrs: Sequence[int],
    ) -> Task:
        """A task that does what `KTMoEWrapper.submit_write_weight_scale_to_buffer` says."""
        experts = self.layer.packed
        buffers = checked_buffers(
            experts, self._settings.method, gpu_tp_count, expert_id,
            w13_weight_ptrs, w13_scale_ptrs, w2_weight_ptrs, w2_scale_ptrs,
        )  # fmt: skip
        return partial(write_expert, experts, int(expert_id), buffers, self._settings.threads)

    # ---- the same at once

    def load_weights(self, physical_to_logical_map: int = 0) -> None:
        """Reads the weights; see `load_weights_task`."""
        count, slots = self._settings.experts, None
        if physical_to_logical_map:
            mapping = _memory(physical_to_logical_map, torch.int64, (count,))
            slots = slots_of(mapping, count)
        if self._config.load:
            source = Model().source(self._settings.weight_path)
            self._layer = load_layer(self._settings, source, slots, self._pool, "auto")
        else:
            self._layer = self._from_memory(slots)

    def warm_up(self) -> None:
        """Brings the weights into memory."""
        self.layer.packed.layer.touch(self._pool)

    def forward(self, *given: Any) -> None:
        """Computes at once; see `forward_task`."""
        self.forward_task(*given)()

    def _forward(
        self, batch: int, top_k: int, ids: int, weights: int, x: int, y: int, incremental: bool
    ) -> None:
        tokens, hidden = int(_memory(batch, torch.int32, (1,))[0]), self._settings.hidden
        if tokens < 0:
            raise UsageError(f"batch_size points to {tokens}; a number of tokens is 0 or more")
        out, mask = _memory(y, torch.bfloat16, (tokens, hidden)), self._config.gpu_experts_mask
        self.layer(
            _memory(x, torch.bfloat16, (tokens, hidden)),
            _memory(ids, torch.int64, (tokens, top_k)),
            _memory(weights, torch.float32, (tokens, top_k)),
            skip=_memory(mask, torch.bool, (self._settings.experts,)) if mask else None,
            add_to=out.float() if incremental else None,
            out=out,
        )

    @abstractmethod
    def _from_memory(self, slots: list[int] | None) -> MoELayer:
        """A layer of the weights that the configuration has the addresses of."""

    def _stack(self, name: str, dtype: torch.dtype, shape: tuple[int, int]) -> list[Tensor]:
        """A matrix of each expert, or its scales, where the configuration says they are."""
        count = self._settings.experts
        lists, stack = getattr(self._config, f"{name}s"), getattr(self._config, name)
        if lists:
            own = lists[0]
            if len(lists) != 1 or len(own) != count or not all(own):
                raise UsageError(f"MOEConfig.{name}s must have one list of {count} addresses")
            return [_memory(address, dtype, shape) for address in own]
        if not stack:
            raise UsageError(f"MOEConfig has no {name}", f"set {name}, or {name}s of each expert")
        return list(_memory(stack, dtype, (count, *shape)))


class Quantized(MoE):
    """A layer that is quantized from bf16 weights as `ktconv quantize-cpu` does."""

    def _from_memory(self, slots: list[int] | None) -> MoELayer:
        own = self._settings
        stacks = {}
        for name in _MATRICES:
            shape = (own.intermediate, own.hidden)
            shape = shape[::-1] if name == "down" else shape
            key = f"{name}_proj"
            stacks[key] = torch.stack(self._stack(key, torch.bfloat16, shape))
        return pack_layer(own, stacks, slots, self._pool)


class Stored(MoE):
    """A layer whose codes and scales are in memory as checkpoints have them."""

    def _from_memory(self, slots: list[int] | None) -> MoELayer:
        own, given = self._settings, {}
        group = self._config.quant_config.group_size or 32
        for name in _MATRICES:
            rows, cols = own.intermediate, own.hidden
            rows, cols = (cols, rows) if name == "down" else (rows, cols)
            dtype, width = {
                "BF16": (torch.bfloat16, cols), "FP8": (_FP8, cols), "FP8_PERCHANNEL": (_FP8, cols),
                "MXFP8": (_FP8, cols),
            }.get(self.method, (torch.uint8, cols // 2))  # fmt: skip
            given[name] = self._stack(f"{name}_proj", dtype, (rows, width))
            if self.method != "BF16":
                grid = {"FP8": (rows // 128, cols // 128), "FP8_PERCHANNEL": (rows, 1)}
                shape = grid.get(self.method, (rows, cols // group))
                kind = torch.float32 if self.method in grid else torch.bfloat16
                if self.method == "MXFP8":
                    kind = torch.uint8
                given[f"{name}_scale"] = self._stack(f"{name}_scale", kind, shape)
        experts = raw_layer(self.method, own, given, slots, group)
        return MoELayer(experts, self._pool)


def _settings(method: str, config: MOEConfig, queue: CPUInfer) -> Settings:
    return settings(
        layer_idx=config.layer_idx,
        num_experts=config.expert_num,
        num_experts_per_tok=config.num_experts_per_tok,
        hidden_size=config.hidden_size,
        moe_intermediate_size=config.intermediate_size,
        cpuinfer_threads=queue.pool.threads,
        threadpool_count=queue.parts,
        numa_nodes=None,
        method=method,
        weight_path=config.path,
        swiglu_limit=config.swiglu_limit,
        swiglu_alpha=config.swiglu_alpha,
    )


def _memory(address: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The tensor at an address. UsageError for the address 0."""
    if not address:
        raise UsageError("the address of a tensor is 0", "give the tensor's data_ptr()")
    return tensor_at(address, dtype, shape)


def _kinds(base: type[MoE], method: str, *names: str) -> dict[str, type[MoE]]:
    return {
        name: type(name, (base,), {"method": method, "__doc__": base.__doc__}) for name in names
    }


# Kernels choose by CPU and format, so several names are one thing.
CLASSES: dict[str, type[MoE]] = {
    **_kinds(Quantized, "AMXINT4", "AMXInt4_MOE"),
    **_kinds(Quantized, "AMXINT8", "AMXInt8_MOE"),
    **_kinds(Stored, "BF16", "AMXBF16_MOE", "AVX2BF16_MOE"),
    **_kinds(Stored, "FP8", "AMXFP8_MOE", "AVX2FP8_MOE"),
    **_kinds(Stored, "FP8_PERCHANNEL", "AMXFP8PerChannel_MOE"),
    **_kinds(Stored, "MXFP4", "AMXFP4_KGroup_MOE", "AVX2MXFP4_MOE"),
    **_kinds(Stored, "MXFP8", "AMXMXFP8_KGroup_MOE", "AVX2MXFP8_MOE"),
    **_kinds(
        Stored, "RAWINT4", "AMXInt4_KGroup_MOE", "AMXInt4_KGroupBlocked_MOE", "AVX2RawInt4_MOE",
        "AVXVNNI256RawInt4_MOE",
    ),
}  # fmt: skip

_ABSENT = {
    "AMXInt4_1_MOE": "no kernel computes with INT4 that has zero points",
    "AMXInt4_1KGroup_MOE": "no kernel computes with INT4 that has zero points",
    "AVX2GPTQInt4_MOE": "use KTMoEWrapper with the method GPTQ_INT4",
    "AVXVNNI256GPTQInt4_MOE": "use KTMoEWrapper with the method GPTQ_INT4",
    "AVXVNNI256GPTQInt4Packed_MOE": "use KTMoEWrapper with the method GPTQ_INT4",
    "MOE": "use KTMoEWrapper with the method LLAMAFILE",
}


def __getattr__(name: str) -> Any:
    """A class of CLASSES; AttributeError names what is not here, and why."""
    if name in CLASSES:
        return CLASSES[name]
    reason = _ABSENT.get(name, "")
    if "SFT" in name:
        reason = 'use KTMoEWrapper with mode="sft"'
    raise AttributeError(f"ktconv has no kt_kernel_ext.moe.{name}{reason and ': '}{reason}")
