"""Where the time of a streamed pass goes, and how fast it could be.

    python benchmarks/streamed.py MODEL --windows 40 --length 512

Passes random tokens through a checkpoint layer by layer. A thread looks every few milliseconds at
what the main thread and those that decode are doing, so nothing is changed in what is measured.
Then, with the same threads: the experts' matrix products alone, for as many tokens as each expert
had; reading the source alone; and with --in-memory the same windows through transformers. CPU
seconds are compared as well: they say more on a machine that is not idle.
"""

from __future__ import annotations

import argparse
import json
import linecache
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import measure
import numpy as np
import torch
from torch import Tensor

from ktconv.model import load_model
from ktconv.model.streamed.calls import ExpertRunner
from ktconv.model.streamed.experts import SourceExperts
from ktconv.model.streamed.packed import BothExperts
from ktconv.model.streamed.parts import PartedModel
from ktconv.model.streamed.run import StreamedPass
from ktconv.model.streamed.states import Scratch, States
from ktconv.source import Checkpoint, open_checkpoint
from ktconv.system.arrays import Array

SAMPLE_SECONDS = 0.004
SCRATCH_BYTES = 8 << 30
RATE_REPEATS = 3
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# The innermost frame that is in this table says what a thread does: (file, function) -> what.
PLACES = {
    ("one_expert.py", "__call__"): "experts",
    ("experts.py", "_run_rows"): "gathering and adding rows",
    ("experts.py", "run"): "sorting tokens by expert",
    ("ahead.py", "_in_turn"): "waiting for weights",
    ("ahead.py", "filled"): "waiting for weights",
    ("packed.py", "run"): "converted experts",
    ("cut.py", "called"): "attention, router",
    ("cut.py", "_forward"): "the model around its layers",
    ("cut.py", "check"): "proof that layers can be cut",
    ("states.py", "put"): "states between layers",
    ("states.py", "get"): "states between layers",
    ("states.py", "commit"): "making states durable",
    ("parts.py", "layer"): "dense weights",
    ("parts.py", "load_module"): "dense weights",
    ("states.py", "empty"): "room for experts' inputs",
    ("run.py", "run"): "rest of the pass",
    ("reader.py", "read"): "reading",
    ("filling.py", "_check"): "looking for NaN",
    ("filling.py", "fill"): "decoding",
    ("ahead.py", "upto"): "advice to the disk",
}


class Sampler(threading.Thread):
    """Counts what threads are seen doing; `main` and `decoders` by their share of time."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.finished = threading.Event()
        self.main: Counter[str] = Counter()
        self.decoders: Counter[str] = Counter()
        self._watched = threading.main_thread().ident

    def run(self) -> None:
        while not self.finished.wait(SAMPLE_SECONDS):
            frames = sys._current_frames()
            names = {one.ident: one.name for one in threading.enumerate()}
            for ident, frame in frames.items():
                if ident == self._watched:
                    self.main[place_of(frame)] += 1
                elif names.get(ident, "").startswith("ktconv-expert"):
                    self.decoders[place_of(frame)] += 1

    def stop(self) -> None:
        self.finished.set()
        self.join()


def place_of(frame: FrameType | None) -> str:
    inner = frame
    while frame is not None:
        code = frame.f_code
        place = PLACES.get((Path(code.co_filename).name, code.co_name))
        if place == "experts" and inner is not None:
            line = linecache.getline(inner.f_code.co_filename, inner.f_lineno)
            return "experts: products" if "linear(" in line else "experts: all else"
        if place is not None:
            return place
        frame = frame.f_back
    return "idle"


class Counts:
    """A Tap that counts the tokens of each expert: (layer, expert) -> tokens."""

    wants_inputs = False

    def __init__(self) -> None:
        self.tokens: Counter[tuple[int, int]] = Counter()

    def chosen(self, layer: int, window: int, ids: Tensor, weights: Tensor) -> None:
        experts, tokens = torch.unique(ids[ids >= 0], return_counts=True)
        for expert, count in zip(experts.tolist(), tokens.tolist(), strict=True):
            self.tokens[layer, expert] += count

    def inputs(
        self, layer: int, expert: int, rows: Tensor, inner: Tensor, weights: Tensor
    ) -> None: ...

    def layer_done(self, layer: int) -> None: ...

    def state(self) -> dict[str, Array]:
        return {}

    def restore(self, state: Mapping[str, Array]) -> None: ...


def run_pass(
    checkpoint: Checkpoint, windows: list[Tensor], options: argparse.Namespace
) -> dict[str, Any]:
    """Figures of one pass."""
    counts, sampler = Counts(), Sampler()
    cpu, started = time.process_time(), time.perf_counter()
    parted = PartedModel(checkpoint, DTYPES.get(options.dtype, options.dtype))
    built = time.perf_counter() - started
    read: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        place, sides = Path(folder), 1 if options.converted is None else 2
        states, scratch = States(place, sides, len(windows)), Scratch(place, SCRATCH_BYTES)
        with states, scratch:
            one = StreamedPass(parted, windows, states, scratch, sides=sides)

            def tell(nbytes: int) -> None:
                read["bytes"] += nbytes
                one.read(nbytes)

            source = SourceExperts(
                checkpoint, parted.dtype, threads=options.decoders, taps=[counts], read=tell
            )
            runner: ExpertRunner = source
            if options.converted is not None:
                settings = json.loads((options.model / "config.json").read_text())
                runner = BothExperts(
                    source, options.converted, parted.experts, settings, options.threads
                )
            sampler.start()
            one.run(runner, [], head=True)
            sampler.stop()
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "build_seconds": built,
        "cpu_seconds": time.process_time() - cpu,
        "bytes_read": read["bytes"],
        "peak_memory_bytes": peak_memory(),
        "main": dict(sampler.main),
        "decoders": dict(sampler.decoders),
        "tokens_of_experts": sorted(counts.tokens.values()),
    }


def products_alone(checkpoint: Checkpoint, tokens: list[int], dtype: torch.dtype) -> float:
    """CPU seconds of the experts' matrix products for these numbers of tokens, in the blocks of
    the pass, at the rate that a few of them have."""
    layer = checkpoint.layers[0]
    hidden, inner = layer.hidden_size, layer.intermediate_size
    numbers = torch.Generator().manual_seed(0)
    matrices = [
        [torch.randn(shape, generator=numbers).to(dtype) for shape in shapes]
        for shapes in [((2 * inner, hidden), (hidden, inner))] * RATE_REPEATS
    ]

    @cache
    def seconds(rows: int) -> float:
        x = torch.randn((rows, hidden), generator=numbers).to(dtype)
        times = []
        for first, last in matrices:  # others each time, as in the pass
            started = time.process_time()
            half = torch.nn.functional.linear(x, first)[:, :inner]
            torch.nn.functional.linear(half, last)
            times.append(time.process_time() - started)
        return min(times)

    def of_block(rows: int) -> float:
        measured = 1 << (rows - 1).bit_length()
        return seconds(measured) * rows / measured

    whole = sum(count // 1024 for count in tokens)
    with torch.inference_mode():
        return whole * seconds(1024) + sum(of_block(n % 1024) for n in tokens if n % 1024)


def in_memory(
    model: Path, windows: list[Tensor], dtype: str, implementation: str
) -> tuple[float, float]:
    """Seconds and CPU seconds of the windows through transformers, without loading."""
    loaded, _ = load_model(model, dtype)
    loaded.set_experts_implementation(implementation)
    with torch.inference_mode():
        cpu, started = time.process_time(), time.perf_counter()
        for ids in windows:
            loaded(input_ids=ids, use_cache=False)
    return time.perf_counter() - started, time.process_time() - cpu


def peak_memory() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def timed(files: list[Path], cold: bool, work: Callable[[], Any]) -> tuple[float, Any]:
    if cold:
        measure.drop_from_cache(files)
    else:
        measure.read_all(files, 2)
    started = time.perf_counter()
    found = work()
    return time.perf_counter() - started, found


def print_shares(title: str, found: Mapping[str, int], seconds: float) -> None:
    total = sum(found.values()) or 1
    print(f"\n| {title} | seconds | share |\n| --- | ---: | ---: |")
    for place, count in sorted(found.items(), key=lambda one: -one[1]):
        print(f"| {place} | {count / total * seconds:.2f} | {count / total:.1%} |")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--dtype", default="auto", choices=["auto", *DTYPES])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--decoders", type=int, default=1, help="threads that decode experts")
    parser.add_argument("--work", type=Path, help="disk for states (the system's for temporaries)")
    parser.add_argument("--cold", action="store_true", help="with nothing of the source cached")
    parser.add_argument(
        "--in-memory", nargs="*", default=[], help="implementations of experts, such as eager"
    )
    parser.add_argument(
        "--converted", type=Path, help="both sides: what quantize-cpu made of the model"
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    checkpoint, files = open_checkpoint(options.model), measure.source_files(options.model)
    vocabulary = json.loads((options.model / "config.json").read_text())["vocab_size"]
    ids = np.random.default_rng(0).integers(0, vocabulary, (options.windows, 1, options.length))
    windows = [torch.from_numpy(one) for one in ids]
    tokens, nbytes = options.windows * options.length, measure.total_bytes(files)
    busy = measure.machine_cpu_seconds()
    _, found = timed(files, options.cold, lambda: run_pass(checkpoint, windows, options))
    seconds = found["seconds"]
    found["other_cpu_seconds"] = measure.machine_cpu_seconds() - busy - found["cpu_seconds"]
    reading, _ = timed(files, options.cold, lambda: measure.read_all(files, options.decoders))
    dtype = DTYPES.get(options.dtype, torch.bfloat16)
    products = products_alone(checkpoint, found["tokens_of_experts"], dtype)
    print(f"{measure.cpu_model()}, {options.threads} threads and {options.decoders} that decode")
    print(f"{nbytes / 1e9:.2f} GB, {tokens} tokens: {seconds:.1f} s, "
          f"{nbytes / seconds / 1e9:.2f} GB/s, {tokens / seconds:.0f} tokens/s; "
          f"{found['cpu_seconds']:.1f} CPU s, others' {found['other_cpu_seconds']:.1f} CPU s, "
          f"peak memory {found['peak_memory_bytes'] / 1e9:.2f} GB")  # fmt: skip
    print(f"building the model {found['build_seconds']:.1f} s; reading alone {reading:.1f} s, "
          f"{nbytes / reading / 1e9:.2f} GB/s; experts' products alone {products:.1f} CPU s, "
          f"{products / found['cpu_seconds']:.0%} of the pass")  # fmt: skip
    print_shares("main thread", found["main"], seconds - found["build_seconds"])
    print_shares("threads that decode", found["decoders"], seconds - found["build_seconds"])
    found |= {"reading_seconds": reading, "products_cpu_seconds": products, "bytes": nbytes}
    for implementation in options.in_memory:
        passed, cpu = in_memory(options.model, windows, options.dtype, implementation)
        found[f"in_memory_{implementation}"] = {"seconds": passed, "cpu_seconds": cpu}
        print(f"in memory, {implementation}: {passed:.1f} s, {tokens / passed:.0f} tokens/s, "
              f"{cpu:.1f} CPU s")  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps({"schema": 1, "tokens": tokens, **found}, indent=1))


if __name__ == "__main__":
    main()
