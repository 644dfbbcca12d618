"""Measures the encoders of GGUF types against ggml's own quantizer: errors, and weights per second.

    python benchmarks/ggml_types.py --ggml /path/to/libggml-base.so

One thread each, in turns, on the same rows. The library is that of llama.cpp, for example of the
package llama-cpp-python (llama_cpp/lib). Errors are relative, of squares that importance weighs.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable

import gguf
import numpy as np

from ktconv import native

TURNS = 51


def load_ggml(path: str) -> ctypes.CDLL:
    """The library, with the types of the two functions that are called."""
    library = ctypes.CDLL(path)
    library.ggml_quantize_init.argtypes = [ctypes.c_int]
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
        ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
    ]  # fmt: skip
    return library


def seconds(job: Callable[[], object]) -> float:
    """CPU time."""
    started = time.process_time()
    job()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ggml", required=True, help="libggml-base.so of llama.cpp")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--cols", type=int, default=2048)
    chosen = parser.parse_args()
    library, rng = load_ggml(chosen.ggml), np.random.default_rng(0)
    shape = chosen.rows, chosen.cols
    print("| type | weights | importance | error | ggml's | Mweights/s | ggml's | times |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for kind in native.BLOCK_TYPES:
        number = gguf.GGMLQuantizationType[kind]
        library.ggml_quantize_init(int(number))
        drawn = (("normal", rng.standard_normal(shape)), ("t, 4 degrees", rng.standard_t(4, shape)))
        for words, values in drawn:
            weights = np.ascontiguousarray(0.02 * values, np.float32)
            data = weights.reshape(-1).view(np.uint8)
            matrix = native.Matrix(data, "F32", *shape)
            for importance in (None, _importance(rng, chosen.cols)):
                ours = np.empty(native.blocks_bytes(kind, *shape), np.uint8)
                theirs = np.empty_like(ours)
                scratch = native.new_scratch(chosen.cols)

                def encode() -> None:
                    native.encode_blocks(kind, matrix, importance, ours, scratch)  # noqa: B023

                def quantize() -> None:
                    address = None if importance is None else importance.ctypes.data  # noqa: B023
                    library.ggml_quantize_chunk(
                        int(number), weights.ctypes.data, theirs.ctypes.data, 0, *shape, address  # noqa: B023
                    )  # fmt: skip

                times = [(seconds(encode), seconds(quantize)) for _ in range(TURNS)]
                fast, slow = (statistics.median(one) for one in zip(*times, strict=True))
                errors = [_error(kind, one, weights, importance) for one in (ours, theirs)]
                ratio = statistics.median(one[1] / one[0] for one in times)
                print(
                    f"| {kind} | {words} | {'yes' if importance is not None else 'no'} "
                    f"| {errors[0]:.5f} | {errors[1]:.5f} | {weights.size / fast / 1e6:.0f} "
                    f"| {weights.size / slow / 1e6:.0f} | {ratio:.2f} |"
                )


def _importance(rng: np.random.Generator, cols: int) -> np.ndarray:
    """Log-normal, of mean 1."""
    drawn = np.exp(1.5 * rng.standard_normal(cols))
    return (drawn / drawn.mean()).astype(np.float32)


def _error(
    kind: str, blocks: np.ndarray, weights: np.ndarray, importance: np.ndarray | None
) -> float:
    values = gguf.quants.dequantize(
        blocks.reshape(len(weights), -1), gguf.GGMLQuantizationType[kind]
    )
    counted = 1.0 if importance is None else importance.astype(np.float64)
    off = (values - weights).astype(np.float64)
    return float(np.sqrt((counted * off**2).sum() / (counted * weights.astype(float) ** 2).sum()))


if __name__ == "__main__":
    main()
