"""Speed of packing alone: source weights in memory to packed weights in memory, one core.

    python benchmarks/packing.py --markdown
    KTCONV_ISA is ignored: every level that this machine has is measured, interleaved.

GB/s are of the weights in bf16 (2 bytes each), whatever the source's encoding, so that
rows compare. Each pass works through more matrices than the caches hold.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import measure
import numpy as np

from ktconv import native

SHAPES = {"qwen3-30b": (768, 2048), "deepseek-v3": (2048, 7168)}
SOURCES = ("BF16", "F16", "F32", "F8_E4M3", "BF16 [in, out]")
WORKING_SET = 256 << 20  # bytes of source per pass


@dataclass
class Row:
    """One measured case."""

    method: str
    source: str
    shape: str
    isa: str
    pack_gb_s: float
    measure_gb_s: float


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values as stored bytes of a safetensors dtype (FP8: random codes)."""
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    if dtype == "F16":
        return values.astype(np.float16)
    if dtype == "F32":
        return values
    return np.random.default_rng(1).integers(0, 0x7F, values.shape, dtype=np.uint8)


def make_matrices(source: str, rows: int, cols: int) -> list[native.Matrix]:
    """As many matrices as fill the working set."""
    dtype, _, transposed = source.partition(" ")
    shape = (cols, rows) if transposed else (rows, cols)
    values = np.random.default_rng(0).standard_normal(shape, dtype=np.float32) * 0.02
    stored = encode(values, dtype).reshape(-1).view(np.uint8)
    grid = np.full((-(-rows // 128), -(-cols // 128)), 1e-3, np.float32)
    fp8 = {"block_scale": grid, "block": (128, 128)} if dtype == "F8_E4M3" else {}
    strides = {"row_stride": 1, "col_stride": rows} if transposed else {}
    count = max(1, WORKING_SET // stored.nbytes)
    return [native.Matrix(stored.copy(), dtype, rows, cols, **fp8, **strides) for _ in range(count)]


def gb_per_second(work: Callable[[], None], nbytes: int, repeats: int) -> float:
    """Median over the repeats."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return nbytes / 1e9 / statistics.median(times)


def run_case(method: str, source: str, shape: str, repeats: int) -> list[Row]:
    """All levels of one case, one after the other on the same data."""
    rows, cols = SHAPES[shape]
    matrices = make_matrices(source, rows, cols)
    packed = [np.zeros(native.packed_size(method, rows, cols), np.uint8) for _ in matrices]
    scale = [np.zeros(rows, np.float32) for _ in matrices]
    scratch = native.new_scratch(cols)
    nbytes = 2 * rows * cols

    def pack(count: int) -> None:
        for matrix, out, factors in list(zip(matrices, packed, scale, strict=True))[:count]:
            native.quantize_pack(method, matrix, out, factors, scratch)

    def compare(count: int) -> None:
        for matrix, out, factors in list(zip(matrices, packed, scale, strict=True))[:count]:
            native.measure(method, matrix, out, factors, scratch)

    results = []
    for isa in native.isa_available():
        native.use_isa(isa)
        count = len(matrices) if isa != "scalar" else max(1, len(matrices) // 8)
        pack(count)
        pack_rate = gb_per_second(lambda count=count: pack(count), nbytes * count, repeats)
        compare_rate = gb_per_second(lambda count=count: compare(count), nbytes * count, repeats)
        results.append(Row(method, source, shape, isa, pack_rate, compare_rate))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    before = measure.machine_cpu_seconds()
    started, own = time.perf_counter(), time.process_time()
    limit = measure.memory_bandwidth(1) / 1e9
    print(f"{measure.cpu_model()}, one core reads {limit:.1f} GB/s from memory")
    print("\n| method | source | shape | level | pack GB/s | unpack and compare GB/s |")
    print("| --- | --- | --- | --- | --- | --- |")
    found = []
    for method in native.FORMATS:
        for source in SOURCES:
            for shape in SHAPES:
                for row in run_case(method, source, shape, options.repeats):
                    found.append(row)
                    print(
                        f"| {row.method} | {row.source} | {row.shape} | {row.isa} "
                        f"| {row.pack_gb_s:.2f} | {row.measure_gb_s:.2f} |",
                        flush=True,
                    )
    others = measure.machine_cpu_seconds() - before - (time.process_time() - own)
    print(f"\n{time.perf_counter() - started:.0f} s; others used {others:.1f} CPU s meanwhile.")
    if options.json:
        rows = [asdict(row) for row in found]
        options.json.write_text(json.dumps({"memory_gb_s": limit, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
