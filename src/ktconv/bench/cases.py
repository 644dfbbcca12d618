"""The request of a benchmark, and the list of cases that are measured for it.

The list decides which rows an old report must have, what is packed, measured and shown. Impossible
requests are refused before anything is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from ktconv import native
from ktconv.bench.fingerprint import largest_cache
from ktconv.bench.limits import Meter, read_size
from ktconv.bench.measure import Effort, batch_bytes, kept_routings
from ktconv.bench.presets import Shape
from ktconv.bench.routing import Routing, check_replay, check_trace, only_here, parse_routing
from ktconv.bench.rows import Case
from ktconv.errors import UsageError
from ktconv.families.config import USUAL_TOP_K
from ktconv.formats import Format
from ktconv.runtime.layers import Experts, experts_per_token, native_experts, open_stored
from ktconv.runtime.layers.experts import check_shape
from ktconv.runtime.layers.load import ConvertedModel, Hold, expert_activation_of, open_layer
from ktconv.runtime.memory import residence_of
from ktconv.runtime.sources import holder
from ktconv.source.config import CONFIG_NAME
from ktconv.system import machine
from ktconv.system.arrays import I64
from ktconv.system.pool import Pool
from ktconv.system.text import Notify, path_text, printable, silent
from ktconv.system.units import counted, format_size

_DIFFERENT = 4  # experts with weights of their own; the others are copies of them
_DIFFERENT_IF_LARGE, _LARGE = 2, 1 << 22  # elements of a matrix
_WORKING_COPIES = 4  # of an expert as float32, while it is quantized
_SHARE_OF_MEMORY = 0.8
_CACHES = 2  # a layer larger than so many last-level caches is read from memory


class Request(Struct, frozen=True):
    """The settings of `ktconv bench`."""

    methods: tuple[Format, ...]
    shapes: tuple[Shape, ...]
    tokens: tuple[int, ...]
    threads: tuple[int, ...]
    isas: tuple[str, ...]  # of native.isa_available()
    routing: Routing = field(default_factory=lambda: parse_routing("balanced"))
    model: Path | None = None  # measure this converted model's layer instead of random weights
    layer: int | None = None
    top_k: int | None = None  # of `model`
    experts: int | None = None
    memory: str = "auto"  # of `model`
    parts: int = 1
    effort: Effort = field(default_factory=Effort)
    seed: int = 0
    skip: bool = False  # leave out methods that do not support a shape, instead of refusing
    peers: bool = False  # other implementations too, where they are installed


class Layer(Struct, frozen=True):
    """The weights of one layer, and the cases that are measured with them."""

    method: Format
    shape: Shape  # of the experts that are here
    parts: int
    cases: tuple[Case, ...]
    experts: Experts | None = None  # of a model; others are made when they are measured
    here: I64 | None = None  # the experts of a model that does not have all

    def routings(self, request: Request, tokens: int) -> Iterator[I64]:
        """Chosen among the experts that are here; recorded ids of others are -1, i.e. skipped."""
        shape, here, routing = self.shape, self.here, request.routing
        if here is not None:
            routing = only_here(routing, here)
        ids = routing.iterations(tokens, shape.experts, shape.top_k, request.seed)
        return ids if here is None or routing.trace is not None else (here[drawn] for drawn in ids)

    def scratch_bytes(self, tokens: int, pool: Pool) -> int:
        """Bytes that a forward of `tokens` needs in addition to its arrays."""
        shape = self.shape
        if self.experts is not None:
            return self.experts.layer.scratch_size(tokens, shape.top_k, pool)
        none: list[native.Expert | None] = [None] * shape.experts
        sizes = (shape.hidden, shape.intermediate)
        layer = native.Layer(self.method.layout, shape.activation, *sizes, [none] * self.parts)
        return layer.scratch_size(tokens, shape.top_k, pool)


class Plan(Struct, frozen=True):
    """Rows that will be measured, in order. Those of peers come after the rows of each shape."""

    request: Request
    layers: list[Layer]

    @property
    def cases(self) -> list[Case]:
        return [case for layer in self.layers for case in layer.cases]


class Session(Struct, frozen=True):
    """State that the rows of a run share."""

    request: Request
    pools: dict[int, Pool]  # by their number of threads
    meter: Meter
    notify: Notify


def prepare(request: Request, notify: Notify = silent) -> Plan:
    """Raises UsageError for what is impossible, or does not fit into this machine's memory."""
    with Pool(max(request.threads)) as pool:  # the largest: it needs the most scratch
        if request.model is not None:
            return Plan(request, [_layer_of_model(request, request.model, pool, notify)])
        shapes = [_sized(shape, request.experts) for shape in request.shapes]
        layers = [_layers_of(request, shape, pool, notify) for shape in shapes]
    return Plan(request, [layer for group in layers for layer in group])


def _cases(
    request: Request, method: Format, shape: Shape, parts: int, number: int | None = None
) -> tuple[Case, ...]:
    gated = shape.activation.gated
    each = method.expert_bytes(shape.hidden, shape.intermediate, parts, gated=gated)
    return tuple(
        Case(
            engine="ktconv",
            method=method.key,
            unit=method.activations,
            shape=shape,
            routing=request.routing.text,
            tokens=tokens,
            threads=threads,
            isa=isa,
            parts=parts,
            expert_bytes=each,
            in_cache=from_cache(each, shape),
            layer=number,
        )
        for tokens, isa, threads in product(request.tokens, request.isas, request.threads)
    )


def from_cache(expert_bytes: int, shape: Shape) -> bool:
    """Whether the layer is so small that it stays in the caches."""
    return expert_bytes * shape.experts < _CACHES * largest_cache()


def different_experts(shape: Shape) -> int:
    """Number of experts with weights of their own."""
    large = shape.hidden * shape.intermediate > _LARGE
    return min(shape.experts, _DIFFERENT_IF_LARGE if large else _DIFFERENT)


# ---- random weights ----


def _layers_of(request: Request, shape: Shape, pool: Pool, notify: Notify) -> list[Layer]:
    """One layer per method; with `skip` only for methods that support the shape."""
    check_trace(request.routing, shape.experts, shape.top_k)
    _check_replays(request, request.routing, shape)
    sizes = (shape.hidden, shape.intermediate, request.parts)
    methods = [method for method in request.methods if method.multiplies(*sizes)]
    if not (request.skip and methods):
        methods = list(request.methods)
    left_out = [method.key for method in request.methods if method not in methods]
    if left_out:
        notify(f"{shape.name} is not supported by {', '.join(left_out)}: left out")
    for method in methods:
        check_shape(method, *sizes)
    layers = [
        Layer(method, shape, request.parts, _cases(request, method, shape, request.parts))
        for method in methods
    ]
    _check_memory(request, layers, pool)
    return layers


def _check_replays(request: Request, routing: Routing, shape: Shape) -> None:
    for tokens in request.tokens:
        kept = kept_routings(tokens, shape.top_k, request.effort)
        check_replay(routing, tokens * kept)


def _sized(shape: Shape, experts: int | None) -> Shape:
    if experts is None:
        return shape
    if experts < shape.top_k:
        raise UsageError(
            f"--experts {experts} is less than the {shape.top_k} that each token of "
            f"{shape.name} goes to",
            f"give at least {shape.top_k}",
        )
    if experts > shape.experts:
        raise UsageError(
            f"--experts {experts} is more than the {shape.experts} of {shape.name}",
            "leave it out to use them all",
        )
    return replace(shape, experts=experts)


# ---- a converted model ----


def _layer_of_model(request: Request, model: Path, pool: Pool, notify: Notify) -> Layer:
    if request.peers:
        raise UsageError("peers cannot read converted models", "leave --model or --peers out")
    number, experts, usual = _opened(model, request.layer, holder(pool, request.memory, notify))
    if request.memory in ("map", "shared") and experts.held != request.memory:
        raise UsageError(
            f"--memory {request.memory} is for converted models, and {model} is a checkpoint",
            "convert it with ktconv quantize-cpu, or leave --memory out",
        )
    name = printable(path_text(model.resolve().name))
    here = np.flatnonzero(experts.origins >= 0)
    count = len(here)
    top_k = request.top_k or min(usual, count)
    if top_k > count:
        raise UsageError(
            f"--top-k {top_k} is more than the {counted(count, 'expert')} of {model}",
            f"give at most {count}",
        )
    shape = Shape(name, experts.hidden, experts.intermediate, count, top_k, experts.activation)
    check_trace(request.routing, experts.count, shape.top_k, of_model=True)
    _check_replays(request, only_here(request.routing, here), shape)
    cases = _cases(request, experts.format, shape, experts.parts, number)
    present = here if count < experts.count else None
    layer = Layer(experts.format, shape, experts.parts, cases, experts, present)
    if _room_for_experts(request, [layer], pool, read_size()) < 0:
        raise UsageError(
            f"measuring memory takes {format_size(read_size())}, more than this machine has free"
        )
    notify(
        f"{name}: {experts.format.key}, {counted(count, 'expert')}, "
        f"{counted(experts.parts, 'part')}, "
        f"{expert_activation_of(experts.activation)}"
    )
    notify(f"{name}: {residence_of(experts.layer, pool, experts.held)}")
    return layer


def _opened(model: Path, layer: int | None, hold: Hold | None = None) -> tuple[int, Experts, int]:
    """The number and the experts of a layer, and how many of them a token has: `hold` puts packed
    ones into memory, those of a checkpoint whose numbers the kernels compute with are put into
    their order."""
    if ConvertedModel(model).layers or not (
        any(model.glob("*.gguf")) or (model / CONFIG_NAME).exists()
    ):
        number, experts = open_layer(model, layer, hold=hold)
        return number, experts, experts_per_token(model, number)
    checkpoint = open_stored(model)
    number = checkpoint.layers[0].index if layer is None else layer
    top_k = checkpoint.config.top_k(number) or USUAL_TOP_K
    return number, native_experts(checkpoint, number), top_k


# ---- memory ----


def _check_memory(request: Request, layers: Sequence[Layer], pool: Pool) -> None:
    """The layer of every method must fit, with what a batch of the most tokens needs."""
    shape = layers[0].shape
    as_numbers = shape.activation.products * 4 * shape.hidden * shape.intermediate
    working = as_numbers * (different_experts(shape) + _WORKING_COPIES) + read_size()
    room = _room_for_experts(request, layers, pool, working)
    largest = max(layers, key=lambda layer: layer.cases[0].expert_bytes)
    each, drawn = largest.cases[0].expert_bytes, _drawn_bytes(request)
    if (each + drawn) * shape.experts > room:
        fitting = max(0, room // (each + drawn))
        way = f"--experts {fitting} would" if fitting >= shape.top_k else "no useful number would"
        raise UsageError(
            f"{counted(shape.experts, 'expert')} of {shape.name} in {largest.method.key} take "
            f"{format_size(each * shape.experts)}, more than this machine has free",
            f"{way} fit",
        )


def _room_for_experts(request: Request, layers: Sequence[Layer], pool: Pool, working: int) -> int:
    """Bytes left besides `working` and the largest batch; UsageError if that does not fit."""
    free = int(_SHARE_OF_MEMORY * machine.available_memory()) - working
    tokens, shape = max(request.tokens), layers[0].shape
    batch = batch_bytes(tokens, shape.hidden, shape.top_k, request.effort)
    batch += max(layer.scratch_bytes(tokens, pool) for layer in layers)
    routing = _drawn_bytes(request) * shape.experts
    if batch + routing > free and batch + routing > working:
        raise UsageError(
            f"{counted(tokens, 'token')} of {shape.name} take {format_size(batch + routing)}, "
            "more than "
            "this machine has free",
            "give fewer --tokens",
        )
    return free - batch


def _drawn_bytes(request: Request) -> int:
    """Per expert: a routing is drawn by sorting random numbers, one per token and expert."""
    draws = request.routing.kind in ("balanced", "zipf")
    return 3 * 8 * max(request.tokens) if draws else 0
