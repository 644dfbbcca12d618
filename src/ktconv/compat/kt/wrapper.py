"""`KTMoEWrapper`: the experts of one layer on the CPU, called as KTransformers' callers do."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

from torch import Tensor

from ktconv.compat.kt import settings as arguments
from ktconv.compat.kt.calls import Running, Share, call
from ktconv.compat.kt.cpu_infer import CPUInfer
from ktconv.compat.kt.gpu_buffers import checked_buffers, write_expert
from ktconv.compat.kt.inputs import Inputs, checked
from ktconv.compat.kt.masks import gpu_mask
from ktconv.compat.kt.methods import sft_method
from ktconv.compat.kt.model import forget_deferred, join
from ktconv.compat.kt.settings import Settings
from ktconv.compat.kt.streams import begin, forget_graphs
from ktconv.compat.kt.weights import load_layer, pack_layer, slots_of
from ktconv.errors import UsageError
from ktconv.runtime import MoELayer, free_workspaces
from ktconv.system import machine
from ktconv.system.numbers import whole, wholes
from ktconv.system.pool import Pool

_capture_batch_sizes: list[int] = []


class KTMoEWrapper:
    """The routed experts of one layer.

        wrapper = KTMoEWrapper(0, 128, 8, 2048, 768, None, 32, 2, "OUTPUT", 4096, method="AMXINT4")
        wrapper.load_weights(torch.arange(128))
        y = wrapper.forward(x, ids, weights, 0)

    An expert of a token is computed if 0 <= id < num_experts and `gpu_experts_mask` is not True for
    it; others add nothing. Results are new tensors of the shape, dtype and device of the input.
    Several threads may call different wrappers; calls of one wrapper are for one thread at a time.

    With mode "sft" it is a `ktconv.compat.kt.sft.SFTWrapper`: LoRA of the experts, which is trained
    and served. `memory`, of the class or of a wrapper, is where `load_weights` puts the weights of
    an OUTPUT, as for `ktconv.runtime.MoELayer.load`.
    """

    memory = "auto"

    def __new__(cls, *given: Any, **named: Any) -> KTMoEWrapper:
        """An object of the class that the mode asks for."""
        kind = cls
        if cls is KTMoEWrapper and cls._arguments_of(given, named)["mode"] == "sft":
            from ktconv.compat.kt.sft import SFTWrapper

            kind = SFTWrapper
        return object.__new__(kind)

    @staticmethod
    def _arguments_of(given: Sequence[Any], named: dict[str, Any]) -> dict[str, Any]:
        """The constructor's arguments by their names. TypeError as for any other call."""
        bound = inspect.signature(KTMoEWrapper).bind(*given, **named)
        bound.apply_defaults()
        return bound.arguments

    def __init__(
        self,
        layer_idx: int,
        num_experts: int,
        num_experts_per_tok: int,
        hidden_size: int,
        moe_intermediate_size: int,
        gpu_experts_mask: Tensor | None,
        cpuinfer_threads: int,
        threadpool_count: int,
        weight_path: str,
        chunked_prefill_size: int,
        cpu_save: bool = False,
        max_deferred_experts_per_token: int | None = None,
        method: str = "AMXINT4",
        numa_nodes: Sequence[int] | None = None,
        mode: str = "inference",
        num_gpu_experts: int = 0,
        lora_rank: int = 16,
        lora_alpha: float = 32.0,
        lora_dropout: float = 0.0,
        max_cache_depth: int = 1,
        group_size: int = 128,
        zero_point: bool = True,
        full_weight_grad: bool = False,
        swiglu_limit: float = 0.0,
        swiglu_alpha: float = 0.0,
    ) -> None:
        """Checks the arguments and starts the threads; weights are loaded later.

        gpu_experts_mask: bool [num_experts], True for experts that run elsewhere; it is copied.
        threadpool_count: NUMA parts of the weights; cpuinfer_threads: threads of all nodes
        together; numa_nodes: the node of each part. max_deferred_experts_per_token: of each token,
        these experts of least weight are added by the next layer of the model. swiglu_limit and
        swiglu_alpha: where the files do not say. chunked_prefill_size and cpu_save change nothing,
        num_gpu_experts and what follows up to full_weight_grad belongs to mode "sft", in which
        experts below num_gpu_experts run elsewhere, too.

        Raises UsageError that names the argument.
        """
        arguments.check_mode(mode)
        self._settings = arguments.settings(
            layer_idx=layer_idx,
            num_experts=num_experts,
            num_experts_per_tok=num_experts_per_tok,
            hidden_size=hidden_size,
            moe_intermediate_size=moe_intermediate_size,
            cpuinfer_threads=cpuinfer_threads,
            threadpool_count=threadpool_count,
            numa_nodes=numa_nodes,
            method=sft_method(method) if mode == "sft" else method,
            weight_path=weight_path,
            swiglu_limit=swiglu_limit,
            swiglu_alpha=swiglu_alpha,
        )
        self.layer_idx, self.num_experts = self._settings.layer_idx, self._settings.experts
        self.num_experts_per_tok = self._settings.top_k
        self.hidden_size = self._settings.hidden
        self.moe_intermediate_size = self._settings.intermediate
        self.method, self.weight_path = method, weight_path
        self.chunked_prefill_size, self.cpu_save = chunked_prefill_size, cpu_save
        self.swiglu_limit, self.swiglu_alpha = float(swiglu_limit), float(swiglu_alpha)
        self.max_deferred_experts_per_token = whole(
            "max_deferred_experts_per_token", max_deferred_experts_per_token or 0, 0
        )
        self._mask = gpu_mask(gpu_experts_mask, self.num_experts)
        self._pool = pool_of(self._settings)
        self._layer: MoELayer | None = None
        self._submitted: deque[Running] = deque()
        self._writes: deque[Future[None]] = deque()
        self._model = join(self._settings.weight_path, self.hidden_size, self.layer_idx, self)

    # ---- which experts run elsewhere

    @property
    def gpu_experts_mask(self) -> Tensor:
        """bool [num_experts] on the CPU. What is written to it takes effect at the next call."""
        return self._mask

    @gpu_experts_mask.setter
    def gpu_experts_mask(self, mask: Tensor | None) -> None:
        self._mask.copy_(gpu_mask(mask, self.num_experts))

    @property
    def num_gpu_experts(self) -> int:
        """Number of experts that the mask has at the moment."""
        return int(self._mask.sum())

    # ---- weights

    @property
    def layer(self) -> MoELayer:
        """The loaded layer. UsageError before that."""
        if self._layer is None:
            raise UsageError(
                f"layer {self.layer_idx} has no weights yet",
                "call load_weights or load_weights_from_tensors first",
            )
        return self._layer

    def load_weights(self, physical_to_logical_map_cpu: Tensor | None = None) -> None:
        """Loads the layer from weight_path: an OUTPUT of `ktconv quantize-cpu` or of KTransformers'
        scripts, shards or .kt folders, which is mapped; else a checkpoint directory or GGUF file,
        whose experts are put into the kernels' order.

        Slot p, which is expert p of calls, gets expert map[p] of the files; a map of any integers
        [num_experts], by any method. None: expert p. Raises CheckpointError for files that are
        damaged or of another encoding than the method's, UsageError for a map or sizes that do not
        fit.
        """
        slots = slots_of(physical_to_logical_map_cpu, self.num_experts)
        source = self._model.source(self._settings.weight_path)
        self._layer = load_layer(self._settings, source, slots, self._pool, self.memory)

    def load_weights_from_tensors(
        self,
        gate_proj: Tensor,
        up_proj: Tensor,
        down_proj: Tensor,
        physical_to_logical_map_cpu: Tensor | None = None,
    ) -> None:
        """Packs the layer from gate and up [experts, intermediate, hidden] and down [experts,
        hidden, intermediate] in bf16, fp16 or fp32, which are not needed afterwards. Nothing is
        written to weight_path.

        INT4 and INT8 are quantized as `ktconv quantize-cpu` does. The map as for `load_weights`.
        Raises UsageError for tensors that do not fit, a NaN or an infinity.
        """
        slots = slots_of(physical_to_logical_map_cpu, self.num_experts)
        stacks = {"gate_proj": gate_proj, "up_proj": up_proj, "down_proj": down_proj}
        self._layer = pack_layer(self._settings, stacks, slots, self._pool)

    # ---- calls

    def submit_forward(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, cuda_stream: Any = None
    ) -> None:
        """Starts the layer in the background: y[t] = sum over k of weights[t, k] * expert ids[t, k]
        of x[t].

        hidden_states [..., hidden_size] of any float dtype; topk_ids (any integers) and
        topk_weights [tokens, num_experts_per_tok]. On CUDA, the current stream makes the call, in
        its order, and a graph that captures it repeats it; `cuda_stream` is not needed. All may
        change once this returns, on CUDA by work on the same stream. Several calls may be under
        way; `sync_forward` returns them in order. Raises UsageError for tensors that do not fit,
        without weights, and for a call on a stream that has failed since the last one.
        """
        inputs = self._inputs(hidden_states, topk_ids, topk_weights)
        self._submitted.append(self._start(inputs, self._share(inputs.tokens)))

    def sync_forward(self, hidden_states: Tensor, cuda_stream: Any = None) -> Tensor:
        """The result of the oldest `submit_forward` that has not been returned yet, on the device
        of its input. On CUDA nothing is waited for: the result is there for what follows on the
        current stream, and is NaN where its computation fails, which the next call of any layer
        with the same threads raises, or `cpu_infer.sync()`. On the CPU it raises that itself.
        UsageError where nothing, or something of another shape than `hidden_states`, was submitted.
        """
        if not self._submitted:
            raise UsageError(
                f"layer {self.layer_idx} has nothing to wait for", "call submit_forward first"
            )
        if self._submitted[0].like.shape != hidden_states.shape:
            raise UsageError(
                f"hidden_states is {list(hidden_states.shape)}, but what was submitted to layer "
                f"{self.layer_idx} is {list(self._submitted[0].like.shape)}"
            )
        return self._submitted.popleft().result()

    def forward(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, cuda_stream: Any = None
    ) -> Tensor:
        """`submit_forward` and its result. Calls that were submitted before stay under way."""
        inputs = self._inputs(hidden_states, topk_ids, topk_weights)
        share = self._share(inputs.tokens)
        if share.consumer is not None or not inputs.on_cpu:
            return self._start(inputs, share).result()
        return call(self.layer, inputs, self._mask, share)

    def _inputs(self, x: Any, ids: Any, weights: Any) -> Inputs:
        return checked(self.hidden_size, self.num_experts_per_tok, x, ids, weights)

    def _share(self, tokens: int) -> Share:
        """Share that the layer before has left to this call, and what it leaves. UsageError without
        weights."""
        _, deferred = self.layer, int(self.max_deferred_experts_per_token)
        carried = self._model.take(self.layer_idx, tokens)
        consumer = self._model.after(self.layer_idx) if deferred else None
        keep = max(0, self.num_experts_per_tok - deferred)
        return Share(carried, keep, self.layer_idx, consumer)

    def _start(self, inputs: Inputs, share: Share) -> Running:
        running, left = begin(self.layer, inputs, self._mask, share, f"layer {self.layer_idx}")
        self._model.leave(left)
        return running

    # ---- weights for GPUs

    def submit_write_weight_scale_to_buffer(
        self,
        gpu_tp_count: int,
        expert_id: int,
        w13_weight_ptrs: Sequence[int],
        w13_scale_ptrs: Sequence[int],
        w2_weight_ptrs: Sequence[int],
        w2_scale_ptrs: Sequence[int],
    ) -> None:
        """Starts writing slot `expert_id` into host memory, cut into `gpu_tp_count` ranks, each of
        whose addresses the lists have. A rank gets its rows of gate with those of up behind them
        (w13), and its columns of down (w2), row by row as checkpoints have them.

        Codes and scales are those of the method, bit for bit: see docs/kt-wrapper.md for their
        dtypes. AMXINT4, AMXINT8 and LLAMAFILE write BF16, with 0 as the addresses of scales.
        `sync_write_weight_scale_to_buffer` waits for it. Raises UsageError without weights and for
        arguments that do not fit; memory that is too small is not noticed.
        """
        experts = self.layer.packed
        buffers = checked_buffers(
            experts, self._settings.method, gpu_tp_count, expert_id,
            w13_weight_ptrs, w13_scale_ptrs, w2_weight_ptrs, w2_scale_ptrs,
        )  # fmt: skip
        threads, slot = self._settings.threads, int(expert_id)
        self._writes.append(
            self._pool.submit(lambda: write_expert(experts, slot, buffers, threads))
        )

    def sync_write_weight_scale_to_buffer(self) -> None:
        """Waits for what `submit_write_weight_scale_to_buffer` has started. Raises what writing
        raised."""
        while self._writes:
            self._writes.popleft().result()

    def run_layerwise_fp8_batch(self, *given: Any, **named: Any) -> NoReturn:
        """Raises UsageError: experts are written one by one."""
        raise UsageError(
            "ktconv has no FP8 layerwise transport, so run_layerwise_fp8_batch cannot be used",
            "use submit_write_weight_scale_to_buffer: in SGLang, "
            "SGLANG_KT_GLM5_NEXT_FP8_TRANSPORT=legacy",
        )

    @property
    def cpu_infer(self) -> CPUInfer:
        """The queue of this wrapper's threads, whose `sync` waits for all that was submitted."""
        return CPUInfer(self._pool)

    # ---- of all wrappers

    @staticmethod
    def set_capture_batch_sizes(capture_bs: Sequence[int]) -> None:
        """Remembers the batch sizes of CUDA graphs. Each graph has its own buffers, whatever its
        size."""
        _capture_batch_sizes[:] = wholes("capture_bs", capture_bs, 1)

    @staticmethod
    def get_capture_batch_sizes() -> list[int]:
        """The batch sizes that set_capture_batch_sizes was given last."""
        return list(_capture_batch_sizes)

    @staticmethod
    def clear_buffer_cache() -> None:
        """Returns workspace of threads to the system, and drops what layers have deferred."""
        for pool in Pool.all_shared():
            free_workspaces(pool)
        forget_deferred()
        forget_graphs()

    @staticmethod
    def clear_sft_buffer_cache() -> None:
        """Returns workspace of threads to the system. What forwards have saved stays."""
        for pool in Pool.all_shared():
            free_workspaces(pool)


def _constructor() -> inspect.Signature:
    """The signature of `__init__`, which `__new__` would hide."""
    own = inspect.signature(KTMoEWrapper.__init__)
    return own.replace(parameters=list(own.parameters.values())[1:])


KTMoEWrapper.__signature__ = _constructor()  # type: ignore[attr-defined]


def pool_of(settings: Settings) -> Pool:
    """The process's pool of these threads on these NUMA nodes. Wrappers with other settings have
    another one.

    Without `numa_nodes` there is a node for each part, as far as the machine has nodes and there
    are threads. UsageError for nodes that it does not have.
    """
    if settings.numa_nodes is not None:
        return Pool.shared(settings.threads, settings.numa_nodes)
    nodes = len({cpu.node for cpu in machine.topology()})
    return Pool.shared(settings.threads, max(1, min(settings.parts, nodes, settings.threads)))
