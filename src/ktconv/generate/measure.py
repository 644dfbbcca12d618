"""Prompts read and tokens written by a model on the kernels, and by transformers alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from msgspec import Struct

from ktconv.bench.fingerprint import fingerprint
from ktconv.bench.limits import Meter
from ktconv.bench.run import Report
from ktconv.errors import MemoryShortError, UsageError
from ktconv.generate.decoding import Timing, generate
from ktconv.generate.loading import LoadedModel, OpenedModel
from ktconv.generate.outside import OnKernels
from ktconv.generate.request import Sampling
from ktconv.model.evaluate import load_model
from ktconv.model.load import running
from ktconv.model.sites import Site, find_experts
from ktconv.source.model_source import ModelSource
from ktconv.system.pool import Pool
from ktconv.system.text import Notify
from ktconv.system.threads import torch_threads
from ktconv.system.units import counted, format_size

_WARM_UP = 4  # tokens


class GenerateBench(Struct, frozen=True, kw_only=True):
    """A prompt of `prompt` random tokens, and `new` tokens after it."""

    output: Path
    source: ModelSource | None
    prompt: int
    new: int
    threads: int
    memory: str = "auto"
    seed: int = 0


class WholeRow(Struct):
    """Times of one engine: of the prompt in seconds, of a token in ms (median)."""

    engine: str  # ktconv or transformers
    method: str  # format of the experts
    threads: int
    prompt_tokens: int
    new_tokens: int
    prefill_s: float
    prefill_tokens_s: float
    prefill_experts_s: float
    decode_ms: float
    decode_tokens_s: float
    decode_experts_ms: float
    outside_bytes: int  # weights outside the experts that each token reads
    outside_floor_ms: float  # as long as reading those takes, at this machine's rate


def bench_whole(request: GenerateBench, notify: Notify) -> tuple[Report[WholeRow], list[str]]:
    """Rows, and why there is none of transformers. UsageError for more tokens than the model
    reads."""
    opened = OpenedModel(request.output, request.source)
    if request.prompt + request.new > opened.context:
        raise UsageError(
            f"--generate {request.prompt},{request.new} is more than {opened.name} reads: "
            f"{counted(opened.context, 'token')}",
            "use fewer",
        )
    report, notes = Report[WholeRow](fingerprint(), mode="generate"), list[str]()
    with Pool(request.threads) as pool:
        rate = Meter().measure(pool).read_gb_s
    notify(f"{counted(request.threads, 'thread')}: memory {rate:.1f} GB/s")
    spent: list[list[float]] = []

    def watch(seconds: float) -> None:
        if spent:
            spent[-1].append(seconds)

    with opened.loaded(notify, threads=request.threads, memory=request.memory, watch=watch) as one:
        report.rows.append(_row("ktconv", one, opened.name, request, rate, spent))
        del one
    gc.collect()
    checkpoint = opened.checkpoint
    notify(f"note: loading {opened.name} for transformers alone")
    try:
        if checkpoint.pruning is not None:
            raise MemoryShortError("a model that is pruned while it is converted is not loaded")
        model, _ = load_model(
            checkpoint.path,
            config_directory=checkpoint.side_directory,
            adapters=checkpoint.adapters,
        )
    except MemoryShortError as error:
        notes.append(f"transformers alone was not measured: {error}")
        return report, notes
    with torch_threads(request.threads):
        method = str(model.dtype).removeprefix("torch.")
        alone = LoadedModel(model, method, request.threads, None, OnKernels())
        report.rows.append(_row("transformers", alone, opened.name, request, rate, []))
    return report, notes


def _row(
    engine: str,
    loaded: LoadedModel,
    name: Path,
    request: GenerateBench,
    rate: float,
    spent: list[list[float]],
) -> WholeRow:
    """`spent`: where seconds of experts come to, in its last list."""
    model = loaded.model
    generator = torch.Generator().manual_seed(request.seed)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (request.prompt,), generator=generator).tolist()
    with running(name), _experts_timed(model, spent):
        _generated(loaded, ids[:_WARM_UP], _WARM_UP, spent)
        spent.clear()
        timing = _generated(loaded, ids, request.new, spent)
    experts = [sum(one) for one in spent]
    step, outside = median(timing.steps_s), _outside_bytes(model)
    return WholeRow(
        engine=engine,
        method=loaded.method,
        threads=request.threads,
        prompt_tokens=request.prompt,
        new_tokens=request.new,
        prefill_s=timing.prefill_s,
        prefill_tokens_s=request.prompt / timing.prefill_s,
        prefill_experts_s=experts[0],
        decode_ms=1e3 * step,
        decode_tokens_s=1 / step,
        decode_experts_ms=1e3 * median(experts[1:]),
        outside_bytes=outside,
        outside_floor_ms=outside / rate / 1e6,
    )


def _generated(loaded: LoadedModel, ids: list[int], count: int, spent: list[list[float]]) -> Timing:
    """Times of a run; `spent` gets a list for the prompt and one for each token."""
    spent.append([])

    def told(_: int) -> bool:
        spent.append([])
        return True

    _, timing = generate(
        loaded.model, ids, count, Sampling(), frozenset(), told, loaded.step_threads
    )
    spent.pop()  # of no token
    return timing


@contextmanager
def _experts_timed(model: Any, spent: list[list[float]]) -> Iterator[None]:
    """Seconds of each call of a layer's experts come to the end of the last of these lists."""
    began: list[float] = []

    def before(*_: Any) -> None:
        began.append(perf_counter())

    def after(*_: Any) -> None:
        spent[-1].append(perf_counter() - began.pop())

    with ExitStack() as stack:
        for site in find_experts(model).values():
            for hook in _hooked(site, before, after):
                stack.callback(hook.remove)
        yield


def _hooked(site: Site, before: Any, after: Any) -> list[Any]:
    """Hooks of a layer's experts, or of each of them where a model has a list."""
    modules = [site.module]
    if type(site.module).forward is torch.nn.Module.forward:  # a list of them
        modules = list(site.module.children())
    return [
        hook
        for module in modules
        for hook in (
            module.register_forward_pre_hook(before),
            module.register_forward_hook(after),
        )
    ]


def _outside_bytes(model: Any) -> int:
    """Bytes of weights that each token reads: all but experts and tables of embeddings."""
    left_out = {
        id(one) for site in find_experts(model).values() for one in site.module.parameters()
    }
    head = model.get_output_embeddings()
    kept = set() if head is None else {id(head.weight)}  # may be the table of the embeddings
    left_out |= {id(model.get_input_embeddings().weight)} - kept
    return sum(one.nbytes for one in model.parameters() if id(one) not in left_out)


def told_of_size(row: WholeRow) -> str:
    """A sentence about what binds outside the experts."""
    return (
        f"outside the experts a token reads {format_size(row.outside_bytes)} of weights, which "
        f"takes {row.outside_floor_ms:.1f} ms at this machine's rate of memory"
    )
