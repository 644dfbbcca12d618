#!/usr/bin/env python3
"""Whether kt-kernel loads and computes outputs of `quantize-cpu`, by its own loader.

    kt_methods.py MODEL [METHOD ...]

Converts MODEL by each method, loads the first MoE layer through kt_kernel.KTMoEWrapper, computes
some tokens, and prints the relative error against float64 arithmetic on the dequantized weights of
the output (rounding of activations remains) and on those of MODEL. kt-kernel must be importable;
`pip install --no-deps --target DIR kt-kernel` and PYTHONPATH=DIR do, beside any torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

METHODS = {
    "rawint4": "RAWINT4", "fp8": "FP8", "fp8-channel": "FP8_PERCHANNEL", "bf16": "BF16",
    "mxfp4": "MXFP4", "mxfp8": "MXFP8", "gptq-int4": "GPTQ_INT4", "nvfp4": "NVFP4",
}  # fmt: skip
TOKENS, TOP_K = 8, 2


def values(directory: Path) -> tuple[int, list[dict[str, Any]]]:
    """Layer number and matrices of the experts, as ktconv's reader decodes them."""
    from ktconv.source import open_checkpoint
    from ktconv.source.reading.matrices import MatrixReader, buffer_bytes
    from ktconv.source.reading.reader import BOUNCE_BYTES, SourceReader

    checkpoint = open_checkpoint(str(directory))
    reader = SourceReader(checkpoint.files, checkpoint.sources)
    layer = checkpoint.layers[0]
    found = []
    for expert in layer.experts:
        matrices = {}
        for proj, matrix in expert.items():
            buffer = np.empty(buffer_bytes(matrix, matrix.rows), np.uint8)
            source = MatrixReader(reader, matrix)
            rows = [rows for _, rows in source.decoded(buffer, np.empty(BOUNCE_BYTES, np.uint8))]
            matrices[str(proj)] = np.concatenate(rows)
        found.append(matrices)
    return layer.index, found


def inputs(hidden: int, experts: int) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((TOKENS, hidden)).astype(np.float32)
    x = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
    ids = np.stack([rng.permutation(experts)[:TOP_K] for _ in range(TOKENS)]).astype(np.int64)
    weights = rng.uniform(0.2, 1, (TOKENS, TOP_K)).astype(np.float32)
    return x, ids, weights


def reference(experts: list[dict[str, Any]], x: Any, ids: Any, weights: Any) -> Any:
    y = np.zeros(x.shape)
    for token in range(TOKENS):
        for k in range(TOP_K):
            one = {
                name: matrix.astype(np.float64) for name, matrix in experts[ids[token, k]].items()
            }
            gate, up = one["gate"] @ x[token], one["up"] @ x[token]
            y[token] += weights[token, k] * (one["down"] @ (gate / (1 + np.exp(-gate)) * up))
    return y


def _unpinned(make: Any) -> Any:
    return lambda *words, pin_memory=False, **more: make(*words, **more)


def computed(directory: str, method: str, sizes: list[int], target: str) -> None:
    """In a process of its own: importing kt-kernel makes denormals zero."""
    import torch

    for name in ("empty", "zeros", "tensor", "full"):  # there is no accelerator to pin memory for
        setattr(torch, name, _unpinned(getattr(torch, name)))
    from kt_kernel import KTMoEWrapper

    layer, experts, hidden, inner = sizes
    x, ids, weights = inputs(hidden, experts)
    mask = torch.zeros(experts, dtype=torch.bool)
    wrapper = KTMoEWrapper(
        layer_idx=layer, num_experts=experts, num_experts_per_tok=TOP_K, hidden_size=hidden,
        moe_intermediate_size=inner, gpu_experts_mask=mask, cpuinfer_threads=1, threadpool_count=1,
        weight_path=directory, chunked_prefill_size=64, method=method,
    )  # fmt: skip
    wrapper.load_weights(torch.arange(experts, dtype=torch.int64))
    bits = torch.from_numpy(x).to(torch.bfloat16).contiguous()
    y, count = torch.zeros_like(bits), torch.tensor([TOKENS], dtype=torch.int32)
    which, how = torch.from_numpy(ids), torch.from_numpy(weights)
    pointers = [one.data_ptr() for one in (which, how, bits, y)]
    wrapper.cpu_infer.submit(wrapper.moe.forward_task(count.data_ptr(), TOP_K, *pointers, False))
    wrapper.cpu_infer.sync()
    np.save(target, y.float().numpy())


def main() -> None:
    model, methods = Path(sys.argv[1]), sys.argv[2:] or list(METHODS)
    _, source = values(model)
    down = source[0]["down"].shape
    x, ids, weights = inputs(down[0], len(source))
    exact = reference(source, x, ids, weights)
    for method in methods:
        with tempfile.TemporaryDirectory() as room:
            output = Path(room) / "out"
            command = [sys.executable, "-m", "ktconv", "quantize-cpu", str(model), str(output)]
            options = ["--method", method, "--progress", "none"]
            converted = subprocess.run([*command, *options], capture_output=True, text=True)
            if converted.returncode:
                print(f"{method:12} not converted: {converted.stderr.strip()}")
                continue
            layer, stored = values(output)
            wanted = reference(stored, x, ids, weights)
            sizes = [layer, len(stored), *down]
            target = Path(room) / "y.npy"
            words = [str(output), METHODS[method], *map(str, sizes), str(target)]
            environment = {**os.environ, "KT_METHODS_CHILD": "1"}
            if method == "nvfp4":
                environment["KT_MXFP4_BACKEND"] = "avx2"
            done = subprocess.run(
                [sys.executable, __file__, *words], env=environment, capture_output=True, text=True
            )
            if done.returncode:
                print(f"{method:12} FAILED: {done.stderr.strip().splitlines()[-1:]}")
                continue
            y = np.load(target)
            errors = [np.linalg.norm(y - one) / np.linalg.norm(one) for one in (wanted, exact)]
            print(
                f"{method:12} kt-kernel against dequantized {errors[0]:.4f}, source {errors[1]:.4f}"
            )


if __name__ == "__main__":
    if os.environ.get("KT_METHODS_CHILD"):
        computed(sys.argv[1], sys.argv[2], [int(one) for one in sys.argv[3:7]], sys.argv[7])
    else:
        main()
