"""How far converted weights are from their source: python compare.py MODEL OUTPUT

Reads both with the safetensors library and NumPy, and unpacks with the readable reference of
the format: nothing here shares code with the packer.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from safetensors import safe_open

from ktconv.checkpoint import open_checkpoint
from ktconv.formats import FORMATS, parse_tensor_name, reference, split


def bf16_matrices(model: Path) -> dict[tuple[int, str, int], np.ndarray]:
    """(layer, projection, expert) -> float32 [out, in]."""
    found = {}
    for layer in open_checkpoint(model).layers:
        for expert, matrices in enumerate(layer.experts):
            for proj, matrix in matrices.items():
                tensor = matrix.tensor
                bits = np.fromfile(
                    tensor.file, np.uint16, matrix.rows * matrix.cols, offset=tensor.offset
                )
                values = (bits.astype(np.uint32) << 16).view(np.float32)
                found[layer.index, proj, expert] = values.reshape(matrix.rows, matrix.cols)
    return found


def converted_tensors(output: Path) -> dict[str, np.ndarray]:
    """Packed weights and scales by name."""
    index = json.loads((output / "model.safetensors.index.json").read_text())
    tensors = {}
    for shard in sorted(set(index["weight_map"].values())):
        with safe_open(output / shard, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if parse_tensor_name(name):
                    tensors[name] = file.get_tensor(name)
    return tensors


def main(model: Path, output: Path) -> None:
    manifest = json.loads((output / "ktconv.json").read_text())
    fmt, parts = FORMATS[manifest["options"]["method"]], manifest["options"]["numa"]
    sources, packed = bf16_matrices(model), converted_tensors(output)
    sums: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for name, weight in packed.items():
        tensor = parse_tensor_name(name)
        if tensor is None or tensor.kind != "weight":
            continue
        source = sources[tensor.layer, tensor.proj, tensor.expert]
        proj = tensor.proj
        hidden, intermediate = source.shape if proj == "down" else source.shape[::-1]
        share = source[split(proj, hidden, intermediate, tensor.part, parts).index]
        scale = packed[name.replace(".weight", ".scale")]
        codes = reference.unpack(fmt, weight.view(np.uint8), *share.shape)
        error = share - reference.dequantize(fmt, codes, scale)
        total = sums[tensor.layer, proj]
        total[0] += float(np.square(error, dtype=np.float64).sum())
        total[1] += float(np.square(share, dtype=np.float64).sum())
        total[2] = max(total[2], float((np.abs(error).max(axis=1) / fmt.step(1) / scale).max()))
    print(f"\nDequantized {fmt.name} weights against the source, unpacked by the NumPy reference:")
    print("layer  projection  relative RMS error  largest error in steps")
    for (layer, proj), (error_sum, source_sum, steps) in sorted(sums.items()):
        print(f"{layer:5}  {proj:10}  {(error_sum / source_sum) ** 0.5:18.4f}  {steps:22.4f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
