"""Speed of a layer by where its weights lie: python benchmarks/memory.py OUTPUT [--threads 1]

Mapped on pages of 4 KB, mapped on huge ones where the file system has some, copied to pages of 4 KB
and to transparent huge ones: calls take turns in one process, and each is compared with the mapped
one before it, so that other load on the machine meets all alike. OUTPUT: of `ktconv quantize-cpu`,
its first layer, larger than the caches. Each mapping has a copy of the files, as pages that a file
has once in memory stay as they are.

--cold: copies of all layers against reading their files alone, in turns, nothing of them in memory
before; and what of them the system still keeps afterwards.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
from measure import cached_share, drop_from_cache, read_all, timed, total_bytes

from ktconv.runtime import MoELayer, Pool
from ktconv.runtime.memory import Mapped
from ktconv.system import blocks

KINDS = ("mapped, 4 KB", "mapped", "copied, 4 KB", "copied")
TOKENS = {1: (64, 60), 64: (8, 12), 1024: (2, 5)}  # batches, and rounds of them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--cold", type=int, metavar="ROUNDS")
    options = parser.parse_args()
    if options.cold:
        with Pool(options.threads) as pool:
            copy_cold(options.output, pool, options.cold)
        return
    with (
        Pool(options.threads) as pool,
        tempfile.TemporaryDirectory(dir=options.output.parent) as at,
    ):
        layers = {kind: load(kind, options.output, Path(at), pool) for kind in KINDS}
        for kind, layer in layers.items():
            layer.touch()
            print(f"{kind:14} {layer.memory}")
        for tokens, (batches, rounds) in TOKENS.items():
            for kind, (median, ratio) in measure(
                layers, tokens, batches, rounds, options.top_k
            ).items():
                print(f"{tokens:5} tokens, {kind:14} {1e6 * median:9.0f} us  x {ratio:.3f}")


def load(kind: str, output: Path, at: Path, pool: Pool) -> MoELayer:
    """The first layer; huge pages are turned off for those of 4 KB."""
    small = kind.endswith("4 KB")
    advise, huge = blocks._advise, Mapped.huge
    try:
        if small:
            blocks._advise = lambda pages: pages.madvise(mmap.MADV_NOHUGEPAGE)
            Mapped.huge = mmap.MADV_NOHUGEPAGE
        if kind.startswith("copied"):
            return MoELayer.load(output, memory="copy", pool=pool)
        own = Path(shutil.copytree(output, at / kind.replace(" ", "-")))
        for file in own.glob("*.safetensors"):
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return MoELayer.load(own, memory="map", pool=pool)
    finally:
        blocks._advise, Mapped.huge = advise, huge


def copy_cold(output: Path, pool: Pool, rounds: int) -> None:
    """Prints GB/s of each round."""
    files = sorted(output.glob("*.safetensors"))
    size = total_bytes(files)
    for _ in range(rounds):
        drop_from_cache(files)
        read = timed(lambda: read_all(files, 8))
        drop_from_cache(files)
        start = time.perf_counter()
        layers = MoELayer.load_all(output, memory="copy", pool=pool)
        copy = time.perf_counter() - start
        weights = sum(layer.weight_bytes for layer in layers.values())
        print(
            f"reading {size / read / 1e9:.2f} GB/s, copying {weights / copy / 1e9:.2f} GB/s "
            f"({weights / copy * read / size:.2f}); {cached_share(files):.1%} of the files are in "
            f"memory, {sum(layer.memory.huge_bytes for layer in layers.values()) / weights:.0%} of "
            "the copies on huge pages",
            flush=True,
        )
        del layers


def measure(
    layers: dict[str, MoELayer], tokens: int, batches: int, rounds: int, top_k: int
) -> dict[str, tuple[float, float]]:
    """Median seconds of a call, and the median of how many times as fast as the first kind."""
    rng = np.random.default_rng(tokens)
    some = layers[KINDS[0]]
    given = []
    for _ in range(batches):
        x = rng.standard_normal((tokens, some.hidden)).astype(np.float16)
        ids = np.argsort(rng.random((tokens, some.experts)), 1)[:, :top_k].astype(np.int64)
        weights = np.full((tokens, top_k), 1 / top_k, np.float32)
        given.append((x, np.ascontiguousarray(ids), weights))
    calls = {kind: [layer.prepare(*one) for one in given] for kind, layer in layers.items()}
    times: dict[str, list[float]] = {kind: [] for kind in layers}
    for turn in range(rounds * batches):
        for kind in KINDS if turn % 2 else KINDS[::-1]:
            start = time.perf_counter()
            calls[kind][turn % batches]()
            times[kind].append(time.perf_counter() - start)
    base = np.array(times[KINDS[0]])
    return {
        kind: (float(np.median(own)), float(np.median(base / np.array(own))))
        for kind, own in times.items()
    }


if __name__ == "__main__":
    main()
