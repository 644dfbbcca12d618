"""One MoE layer that can be called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ktconv.errors import KtconvError, UsageError
from ktconv.families.config import USUAL_TOP_K
from ktconv.native import Activation, Task
from ktconv.runtime import sources
from ktconv.runtime.adapter_files import (
    AdapterDirectory,
    ModelSizes,
    by_name,
    expect_layer,
    sizes_of,
)
from ktconv.runtime.adapters import DEFAULT, OWN, LayerAdapter, LayerAdapters
from ktconv.runtime.arguments import (
    Arguments,
    arguments,
    expect_in_place,
    expect_not_within,
)
from ktconv.runtime.compiled import uncompiled
from ktconv.runtime.compute import compute, prepared, working_bytes
from ktconv.runtime.handle import Handle
from ktconv.runtime.layers import Experts
from ktconv.runtime.memory import Residence, residence_of
from ktconv.runtime.queued import task_of
from ktconv.source.adapter.layers import LayerSizes
from ktconv.system.arrays import Array
from ktconv.system.numbers import whole
from ktconv.system.pool import Pool
from ktconv.system.units import counted

_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}


class MoELayer:
    """The routed experts of one layer, in memory or mapped, on the kernels.

    Calls change nothing in it: any threads may call it, and any other layer, at the same time. On
    one pool calls are computed one after the other, each by all threads; on several pools at the
    same time. `experts` are its slots, whose numbers are the ids of calls.

    Without `pool` calls use the process's own, in a child process the child's own.

    Adapters (LoRA) lie next to the weights, each under a name; a call uses one of them, none, or
    for each of its tokens another. Adding and removing one changes no call that has begun.
    """

    def __init__(
        self, packed: Experts, pool: Pool | None = None, adapters: LayerAdapters | None = None
    ) -> None:
        self._packed, self._pool = packed, pool
        self._adapters = adapters or LayerAdapters(packed.origins, {})
        self._model: tuple[ModelSizes, int] | None = None  # and the number of this layer

    # ---- where weights come from

    @classmethod
    def load(
        cls,
        path: str | Path,
        layer: int | None = None,
        *,
        slots: Sequence[int] | Array | None = None,
        method: str | None = None,
        parts: int | None = None,
        pool: Pool | None = None,
        adapter: str | Path | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        memory: str = "auto",
    ) -> MoELayer:
        """Layer `layer` (None: the first with experts) of what `path` is:

        - an OUTPUT of `ktconv quantize-cpu`, shards or layer folders, or of KTransformers' scripts:
          mapped, so that processes share its pages, or as `memory` says;
        - a checkpoint, as for `ktconv quantize-cpu`, with weights that a kernel computes with as
          they are (BF16, FP8 by 128 x 128 blocks, rows or tensors, MXFP4, INT4 by groups): codes
          and scales are copied into the kernels' order, bit for bit, and cut into `parts` (default:
          one for each NUMA node of the pool, where sizes allow it). `method` chooses where several
          formats have the same numbers.

        `slots` [P]: slot p has the weights of expert slots[p], of which there may be several;
        default: expert p. `adapter`: the directory of a LoRA adapter, of PEFT or KTransformers,
        that calls use unless they name another one; `adapters`: several by name, for calls to
        choose from (docs/runtime.md).

        `memory`, of an OUTPUT; where there are several NUMA nodes, each part comes to the node
        whose threads compute it:
        - "map": mapped, its pages moved as far as the system does it;
        - "copy": copied, on huge pages where the system has some;
        - "shared": a copy that all processes of this user share, gone with the last of them;
        - "auto": "map", or "copy" where pages cannot be moved and there is memory.
        What was not possible is a warning, and in `memory`'s answer.

        Raises CheckpointError for weights that are damaged or that no kernel has exactly, and for
        adapters that do not fit them, UsageError for a layer, slots or options that do not fit,
        ResourceError where there is no memory for a copy.
        """
        source = sources.opened(Path(path), layer)
        number = layer if layer is not None else sources.first_layer(source)
        sizes = sizes_of(source, number)
        given = _opened(adapter, adapters, sizes)  # before weights are read
        found = sources.loaded(source, layer, slots, method, parts, pool or Pool.shared(), memory)
        made = cls(found, pool)
        made._model = sizes, number
        for name, opened in given.items():
            there = expect_layer(opened.layer(number), opened.directory, number)
            made._adapters = made._adapters.with_adapter(name, there, own=adapter is not None)
        return made

    @classmethod
    def load_all(
        cls,
        path: str | Path,
        *,
        method: str | None = None,
        parts: int | None = None,
        pool: Pool | None = None,
        adapter: str | Path | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        memory: str = "auto",
    ) -> Mapping[int, MoELayer]:
        """Every layer of `path`, by its number; as `load`, but headers are read once, and memory
        for copies of all layers is looked for before the first is read. A layer that an adapter has
        nothing for has it all the same, without matrices, so that names and numbers of adapters are
        the same in all layers. Raises as `load`, and CheckpointError for an output of which shards
        or layers are missing."""
        source = sources.opened(Path(path))
        sizes = sizes_of(source)
        opened = _opened(adapter, adapters, sizes)
        layers = {}
        for number, packed in sources.loaded_all(
            source, method, parts, pool or Pool.shared(), memory
        ):
            made = layers[number] = cls(packed, pool)
            made._model = sizes, number
            for name, one in opened.items():
                there = one.layer(number) or LayerAdapter([], one.others)
                made._adapters = made._adapters.with_adapter(name, there, own=adapter is not None)
        return layers

    @classmethod
    def pack(
        cls,
        gate: Any,
        up: Any,
        down: Any,
        method: str = "int4",
        *,
        activation: Activation | None = None,
        biases: tuple[Any, Any, Any] | None = None,
        scale: str = "search",
        slots: Sequence[int] | Array | None = None,
        parts: int | None = None,
        pool: Pool | None = None,
    ) -> MoELayer:
        """Packs weights that are in memory; they are not needed afterwards.

        gate and up [E, I, H], down [E, H, I]: NumPy arrays or torch tensors of bf16, fp16 or fp32
        on the CPU, or lists of E matrices; gate is None for an `activation` (default: SiLU) without
        a gate. `method` is a key of `ktconv.formats.FORMATS`. int4, int8 and gint4-32, -64 and -128
        are quantized as `quantize-cpu` does, to the same bytes, with `scale` "search" or "amax".
        `biases` of gate, up and down: fp32 [E, I], [E, I] and [E, H]. `slots` and `parts` as for
        `load`. Raises UsageError for weights that do not fit each other or the method, a NaN or an
        infinity.
        """
        found = sources.packed(
            gate, up, down, method, activation, biases, scale, slots, parts, pool or Pool.shared()
        )
        return cls(found, pool)

    # ---- what it is

    @property
    def hidden(self) -> int:
        """H, elements of an input and of an output."""
        return self._packed.hidden

    @property
    def intermediate(self) -> int:
        """I, of all parts together."""
        return self._packed.intermediate

    @property
    def experts(self) -> int:
        """E, the number of slots."""
        return self._packed.count

    @property
    def parts(self) -> int:
        """NUMA parts that I is cut into."""
        return self._packed.parts

    @property
    def method(self) -> str:
        """The key of its format."""
        return self._packed.format.key

    @property
    def packed(self) -> Experts:
        """Experts as kernels and references have them."""
        return self._packed

    @property
    def activation(self) -> Activation:
        """Between the products of gate and up and that of down."""
        return self._packed.activation

    @property
    def slots(self) -> Array:
        """[E] the expert of each slot; -1: its weights are not here, so it must be skipped."""
        return np.array(self._packed.origins)

    # ---- adapters

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of its adapters; `adapter_ids` are positions in it."""
        return self._adapters.names

    @property
    def adapter_bytes(self) -> int:
        """Memory of the matrices of all adapters."""
        return sum(one.nbytes for one in self._adapters.adapters.values())

    def add_adapter(
        self,
        name: str,
        adapter: str | Path | LayerAdapter,
        *,
        layer: int | None = None,
        alpha: float | None = None,
        lora_b_layout: str | None = None,
    ) -> None:
        """Adds an adapter, whose number is that of those before it: a directory, or what another
        layer has. `layer`: the layer of the adapter, where this one was made of arrays; `alpha` and
        `lora_b_layout`: what its files do not say (docs/fine-tuning.md). Raises CheckpointError and
        UsageError, as `load` does, and then nothing has changed."""
        if not isinstance(adapter, LayerAdapter):
            sizes, number = self._sizes(layer)
            opened = AdapterDirectory(adapter, sizes, alpha, lora_b_layout)
            opened.warn_of_others()
            adapter = expect_layer(opened.layer(number), adapter, number)
        self._adapters = self._adapters.with_adapter(name, adapter)

    def remove_adapter(self, name: str) -> None:
        """Removes an adapter. The numbers of those after it go down by one. UsageError
        for a name that is not there."""
        self._adapters = self._adapters.without(name)

    def adapter(self, name: str) -> LayerAdapter:
        """An adapter as it is here, for `add_adapter` of a layer with the same experts. UsageError
        for a name that is not there."""
        self._adapters.chosen(name, None, ())
        return self._adapters.adapters[name]

    def _sizes(self, layer: int | None) -> tuple[ModelSizes, int]:
        """Sizes of the model, and the number of this layer. UsageError where neither is known."""
        if self._model is not None:
            sizes, number = self._model
            if layer not in (None, number):
                raise UsageError(f"this is layer {number}, not {layer}", "leave layer out")
            return sizes, number
        if layer is None:
            raise UsageError(
                "which layer of the adapter belongs to arrays is not known", "give it as layer=3"
            )
        packed = self._packed
        one = LayerSizes(
            whole("layer", layer), "", int(packed.origins.max()) + 1, packed.hidden,
            packed.intermediate, packed.activation.gated,
        )  # fmt: skip
        return ModelSizes({one.number: one}, None, whole=False), one.number

    @property
    def weight_bytes(self) -> int:
        """Codes and scales, once for each expert."""
        return len(np.unique(self._packed.origins[self._packed.origins >= 0])) * (
            self._packed.expert_bytes
        )

    def __repr__(self) -> str:
        return (
            f"MoELayer({counted(self.experts, 'expert')} of {self.method}, hidden {self.hidden}, "
            f"intermediate {self.intermediate}, {self.parts} parts)"
        )

    # ---- calls

    @property
    def pool(self) -> Pool:
        """The threads of its calls."""
        return self._pool or Pool.shared()

    @uncompiled
    def __call__(
        self,
        x: Any,
        ids: Any,
        weights: Any,
        *,
        skip: Any = None,
        add_to: Any = None,
        out: Any = None,
        adapter: str | None = OWN,
        adapter_ids: Any = None,
    ) -> Any:
        """y[t] = add_to[t] + sum over k of weights[t, k] * expert ids[t, k] of x[t].

        x [..., H] and the result have any leading dimensions, ids and weights [..., K] the same.
        x       bf16, fp16 or fp32 (NumPy: uint16 for the bits of bf16); is rounded to bf16
        ids     int64, int32 (other integers are converted); those of no expert contribute nothing
        weights fp32 (fp16 and bf16 are converted)
        skip    bool [E]: experts that contribute nothing, whatever the ids; read when the call is
                computed
        add_to  like x, any of its dtypes, itself not changed
        out     where the result goes, of any dtype of x; it may be x or add_to. Default: new
                memory of the kind and dtype of x
        adapter the name of an adapter for all tokens, None for none; default: the one that the
                layer was loaded with as `adapter`
        adapter_ids
                instead of it, for each token: integers [...], positions in `adapters`, -1 for none

        Sums are fp32, rounded once; the bits do not depend on other tokens, threads or placement.
        Returns out. Raises UsageError for arrays that do not fit, or on another device, and where a
        token goes to an expert whose weights are not here; `out` is untouched then.
        """
        found = self._arguments(x, ids, weights, skip, add_to, out, adapter, adapter_ids)
        compute(self._packed, self.pool, found)
        return found.y.owner

    def task(
        self,
        name: str,
        x: Any,
        ids: Any,
        weights: Any,
        out: Any,
        *,
        skip: Any,
        mask: Any = None,
        add_to: Any = None,
        split: tuple[Any, Any, int] | None = None,
    ) -> Task:
        """A call as a task of the pool's queue, for CUDA streams to start; `name` is for messages.

        All arrays are used where they lie, each time that it runs: x, ids, weights, skip, add_to
        and out as for a call. `mask`, bool [E], is copied to `skip` first. `split`: int64 arrays
        like ids, which get the ids of each token's experts of largest weight, as many as the number
        says, and of the others; the former are computed. Work that fails fills out with NaN. Raises
        as a call, and where one would be copied.
        """
        found = self._arguments(x, ids, weights, skip, add_to, out, OWN, None)
        given = {"x": x, "ids": ids, "weights": weights, "skip": skip, "add_to": add_to}
        expect_in_place(found, given)
        return task_of(self._packed, self.pool, name, found, mask, split)

    @uncompiled
    def submit(
        self,
        x: Any,
        ids: Any,
        weights: Any,
        *,
        skip: Any = None,
        add_to: Any = None,
        out: Any = None,
        adapter: str | None = OWN,
        adapter_ids: Any = None,
    ) -> Handle:
        """Call in a background thread of the pool, in the order of submissions. The arguments must
        not change until `wait()` has returned, which raises what the call would have."""
        pool, packed = self.pool, self._packed
        try:
            found = self._arguments(x, ids, weights, skip, add_to, out, adapter, adapter_ids)

            def run() -> Any:
                compute(packed, pool, found)
                return found.y.owner

            return Handle(pool.submit(run))
        except KtconvError as error:
            return Handle.failed(error)

    def prepare(
        self,
        x: Any,
        ids: Any,
        weights: Any,
        *,
        skip: Any = None,
        add_to: Any = None,
        out: Any = None,
        adapter: str | None = OWN,
        adapter_ids: Any = None,
    ) -> Callable[[], Any]:
        """A function that makes this call each time it is called, without the checks of a call: for
        loops whose arguments stay in the same memory, such as decoding token by token.

        It computes with what is in the arguments then, writes to the same result, and returns it.
        One thread at a time may call it. UsageError also for arguments that a call would copy.
        """
        found = self._arguments(x, ids, weights, skip, add_to, out, adapter, adapter_ids)
        given = {"x": x, "ids": ids, "weights": weights, "skip": skip, "add_to": add_to}
        expect_in_place(found, given)
        if adapter_ids is not None and found.adapter_ids is not adapter_ids:
            raise UsageError(
                "adapter_ids would be copied once, so that later calls would not see it change",
                "give it contiguous, in int32",
            )
        return uncompiled(prepared(self._packed, self.pool, found))

    def plan_bytes(self, tokens: int, top_k: int = USUAL_TOP_K, dtype: str = "bf16") -> int:
        """Bytes that a call of `tokens` takes besides its arguments: the result, and workspace of
        the pool, which does not grow beyond 2048 tokens; a bound where a model has norms of
        experts' outputs or weights on inputs. `top_k`: experts of a token, of most models 8.
        UsageError for impossible numbers."""
        if dtype not in _SIZES:
            raise UsageError(f"dtype {dtype!r} is none of {', '.join(_SIZES)}")
        size = working_bytes(self._packed, self.pool, tokens, top_k, self._adapters.largest)
        return size + tokens * self.hidden * _SIZES[dtype]

    @staticmethod
    def plan_load(
        path: str | Path,
        layer: int | None = None,
        *,
        memory: str = "auto",
        pool: Pool | None = None,
    ) -> dict[int | None, int]:
        """Bytes that the weights of an OUTPUT take on each NUMA node, by the system's number; None:
        on any. `layer`: None for all. Mapped ones ("map") are memory that the system takes back
        when it needs some, copies stay. Nothing but headers is read. UsageError for a checkpoint
        and for a layer that it does not have."""
        source = sources.opened(Path(path), layer)
        return dict(sources.needs(source, layer, memory, pool or Pool.shared()))

    @property
    def memory(self) -> Residence:
        """The memory that its weights are in now: kind, huge pages, and how many pages lie on the
        node whose threads compute them. Asks the system page by page: 10 ms for each GB or so."""
        packed = self._packed
        return residence_of(packed.layer, self.pool, packed.held, packed.note)

    def touch(self) -> None:
        """Reads a byte of each page of the weights by the threads that will use them: those of
        mapped files come into memory, on the right NUMA nodes. UsageError if the pool is closed."""
        try:
            self._packed.layer.touch(self.pool)
        except ValueError as error:
            raise UsageError(str(error)) from None

    def _arguments(
        self,
        x: Any,
        ids: Any,
        weights: Any,
        skip: Any,
        add_to: Any,
        out: Any,
        adapter: str | None,
        adapter_ids: Any,
    ) -> Arguments:
        packed, adapters = self._packed, self._adapters
        found = arguments(packed.hidden, packed.count, x, ids, weights, skip, add_to, out)
        if adapter_ids is None and (adapter is None or (adapter == OWN and adapters.own is None)):
            return found
        chosen, numbers = adapters.chosen(adapter, adapter_ids, tuple(x.shape[:-1]))
        if out is not None and numbers is not None:
            expect_not_within("adapter_ids", numbers, found.y)
        return found._replace(adapters=chosen, adapter_ids=numbers)


def _opened(
    adapter: str | Path | None, adapters: Mapping[str, str | Path] | None, sizes: ModelSizes
) -> dict[str, AdapterDirectory]:
    """Adapters by name; warns of parts that a layer cannot have. UsageError for both arguments."""
    if adapter is not None and adapters:
        raise UsageError(
            "give adapter or adapters, not both", "name all of them: adapters={'one': DIR, …}"
        )
    given = {DEFAULT: adapter} if adapter is not None else by_name(adapters or {})
    found = {name: AdapterDirectory(one, sizes) for name, one in given.items()}
    for opened in found.values():
        opened.warn_of_others()
    return found
