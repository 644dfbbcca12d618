"""Writes the first inputs of each reader: python tests/fuzz/seeds.py

They are small files as ktconv and others write them. Inputs of a reader that broke it once lie
beside them, under names that say what was wrong.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from helpers.cli import done, write_model
from helpers.encoded import KINDS
from helpers.families import raw, simple_config
from helpers.gguf_files import experts, metadata, write_gguf
from helpers.imatrix_files import tensors_of, write_imatrix
from helpers.importance_files import importance_of, write_importance
from helpers.paths import DOCS, EXAMPLE

from fuzz.readers import CORPUS
from ktconv.source import open_checkpoint
from ktconv.stats.files import write_trace

CONFIGS = ("fp8 block, Qwen", "mxfp4, DeepSeek-V4", "int4 packed by activation", "awq")
MAP = DOCS.parent / "docs/maps.md"
RECIPE = DOCS / "recipes.md"


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        model = write_model(directory / "model", layers=1, experts=2, inner=32, shards=1)
        safetensors(model)
        documents(model, directory)
        numbers(model, directory)
        ggufs(directory)
        tables()


def keep(reader: str, name: str, data: bytes) -> None:
    (CORPUS / reader).mkdir(parents=True, exist_ok=True)
    (CORPUS / reader / name).write_bytes(data)


def safetensors(model: Path) -> None:
    text = json.dumps({"a": {"dtype": "BF16", "shape": [2, 4], "data_offsets": [0, 16]},
                       "b": {"dtype": "F32", "shape": [], "data_offsets": [16, 20]},
                       "__metadata__": {"format": "pt"}}).encode()  # fmt: skip
    keep("safetensors", "small", len(text).to_bytes(8, "little") + text + bytes(20))
    for number, kind in enumerate(CONFIGS):
        config, header = _of_kind(kind)
        document = {"config": config, "header": header}
        keep("checkpoint", f"kind-{number}", json.dumps(document).encode())
    path = next(model.glob("*.safetensors"))
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    document = {"config": json.loads((model / "config.json").read_bytes()), "header": header}
    keep("checkpoint", "bf16", json.dumps(document).encode())


def _of_kind(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and header of one layer with one quantized expert."""
    header: dict[str, Any] = {}
    end = 0
    for name in ("gate_proj", "up_proj", "down_proj"):
        shape = (128, 64) if name == "down_proj" else (64, 128)
        parts, _ = KINDS[kind].of(np.random.default_rng(1), *shape)
        for part, tensor in parts.items():
            dtype, dims, data = raw(tensor)
            entry = {"dtype": dtype, "shape": list(dims), "data_offsets": [end, end + len(data)]}
            header[f"model.layers.0.mlp.experts.0.{name}.{part}"] = entry
            end += len(data)
    config = simple_config(
        num_hidden_layers=1, num_experts=1, num_experts_per_tok=1, moe_intermediate_size=64
    )
    return config | {"quantization_config": dict(KINDS[kind].quantization)}, header


def documents(model: Path, directory: Path) -> None:
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    index = {
        "metadata": {"total_size": 8},
        "weight_map": {"tensor.0": names[0], "tensor.1": names[1]},
    }
    keep("index", "two", json.dumps(index).encode())
    keep("config", "tiny", (EXAMPLE / "config.json").read_bytes())
    keep("config", "quantized", json.dumps(_of_kind(CONFIGS[0])[0]).encode())
    wide = write_model(directory / "wide", layers=1, experts=1, shards=1)
    done(wide, directory / "output", "--numa", "1", "--experts-only")
    keep("manifest", "int4", (directory / "output/ktconv.json").read_bytes())
    state = {path.name: path for path in (directory / "output").rglob("*.json")}
    keep("journal", "run", (directory / "output/ktconv.json").read_bytes())
    manifest = json.loads(state["ktconv.json"].read_bytes())
    unit = next(iter(manifest["units"].values()))
    keep("journal", "unit", json.dumps(unit).encode())
    keep("experts", "set", b'{"schema": 1, "experts": {"0": [0, 1], "3": [7]}}')


def numbers(model: Path, directory: Path) -> None:
    """Statistics of a model: importance, traces, counts."""
    checkpoint = open_checkpoint(model)
    layers = importance_of(checkpoint)
    small = {index: type(one)(one.gate_up[:, :4], one.down[:, :4], one.counts)
             for index, one in layers.items()}  # fmt: skip
    keep(
        "importance", "one-layer", write_importance(directory / "i", small, checkpoint).read_bytes()
    )
    keep("imatrix", "one-layer", write_imatrix(directory / "m", tensors_of(small)).read_bytes())
    ids = np.array([[0, 1], [1, 0], [1, 0]], np.int32)
    write_trace(directory / "t.safetensors", {0: ids}, {0: 2})
    keep("trace", "safetensors", (directory / "t.safetensors").read_bytes())
    keep("statistics", "safetensors", (directory / "t.safetensors").read_bytes())
    np.savez(directory / "t.npz", ids=ids)
    keep("trace", "npz", (directory / "t.npz").read_bytes())
    layer = {"layer": 0, "tokens": 3, "counts": [3, 3]}
    facts = {"schema": 1, "model": "m", "text": "t", "tokens": 3, "layers": [layer]}
    keep("counts", "one-layer", json.dumps(facts).encode())


def ggufs(directory: Path) -> None:
    """Without the tensors' bytes: the reader gets a hole in their place."""
    path = write_gguf(directory / "g.gguf", experts(), metadata(1), vocabulary=["a", "b"])
    data = path.read_bytes()
    end = data.rfind(b"_exps.weight") + 12 + 4 + 3 * 8 + 4 + 8
    keep("gguf", "experts", data[: -(-end // 32) * 32])


def tables() -> None:
    """Examples of the documentation."""
    for reader, page in (("map", MAP), ("recipe", RECIPE)):
        blocks = page.read_text("utf-8").split("```")[1::2]
        for number, block in enumerate(blocks):
            if block.startswith("toml\n"):
                keep(reader, f"docs-{number}", block.removeprefix("toml\n").encode())


if __name__ == "__main__":
    main()
