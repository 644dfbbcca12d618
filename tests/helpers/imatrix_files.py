"""imatrix files in GGUF form, as llama-imatrix writes them, by the `gguf` package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ktconv.stats.importance_file import LayerImportance


def tensors_of(
    layers: Mapping[int, LayerImportance], matrices: Sequence[str] = ("gate", "up", "down")
) -> dict[str, Any]:
    """Sums, counts and those of dense tensors, which nobody reads."""
    found: dict[str, Any] = {
        "blk.0.attn_q.weight.in_sum2": np.ones((1, 24), np.float32),
        "blk.0.attn_q.weight.counts": np.full((1, 1), 512, np.float32),
    }
    for index, layer in layers.items():
        counts = layer.counts.astype(np.float32)[:, None]
        for matrix in matrices:
            name = f"blk.{index}.ffn_{matrix}_exps.weight"
            means = layer.down if matrix == "down" else layer.gate_up
            found[f"{name}.in_sum"] = np.full_like(means, np.nan)
            found[f"{name}.in_sum2"] = means * counts
            found[f"{name}.counts"] = counts
    return found


def write_imatrix(path: Path, tensors: Mapping[str, Any], general_type: str = "imatrix") -> Path:
    """Float32 tensors [E, K] or [E, 1], whose last dimension is the first of GGUF."""
    import gguf

    writer = gguf.GGUFWriter(path, "none")
    writer.kv_data[0].clear()  # such files have no architecture
    writer.add_string("general.type", general_type)
    writer.add_array("imatrix.datasets", ["prose.txt"])
    writer.add_uint32("imatrix.chunk_count", 3)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
