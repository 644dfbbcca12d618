"""Experts of any encoding, decoded one after the other: the same values, each byte read once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import gguf_files
from helpers.encoded import HIDDEN, INNER, KINDS, encoded_model
from helpers.families import Weights, fused, random_weights, simple_config, write_checkpoint
from helpers.ggml import HALVES, blocks_of
from helpers.gpt_oss import SIZES, Blocks
from helpers.streamed import experts_module, on_meta, site_of

from ktconv import native
from ktconv.source import Checkpoint, open_checkpoint
from ktconv.system import files

pytestmark = [pytest.mark.slow, pytest.mark.torch]

DTYPES = ["bfloat16", "float32", "float16"]


class Reads:
    """How often each byte of a file was read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: dict[str, np.ndarray[Any, Any]] = {}
        own, own_map = files.read_exactly, native.map_file

        def count(fd: int, nbytes: int, offset: int) -> None:
            path = str(Path(f"/proc/self/fd/{fd}").readlink())
            counts = self.counts.setdefault(path, np.zeros(os.fstat(fd).st_size, np.int64))
            counts[offset : offset + nbytes] += 1

        def read_exactly(fd: int, target: memoryview, offset: int) -> None:
            count(fd, len(target), offset)
            own(fd, target, offset)

        def map_file(fd: int, nbytes: int, offset: int) -> Any:
            if (mapped := own_map(fd, nbytes, offset)) is not None:
                count(fd, nbytes, offset)
            return mapped

        monkeypatch.setattr("ktconv.system.opened.read_exactly", read_exactly)
        monkeypatch.setattr(native, "map_file", map_file)

    def of(self, checkpoint: Checkpoint, expert: int) -> set[int]:
        """How often bytes of an expert's matrices were read, their scales left out."""
        found: set[int] = set()
        for matrix in checkpoint.layers[0].experts[expert].values():
            start, nbytes = matrix.extent
            counts = self.counts.get(str(matrix.tensor.file.resolve()))
            part = [0] if counts is None else counts[start : start + nbytes]
            found |= {int(count) for count in np.unique(part)}
        return found


def run(
    checkpoint: Checkpoint, module: Any, dtype: Any, chosen: Sequence[int] | None = None
) -> tuple[Any, Any, list[int]]:
    """What streamed experts give, what the filled module gives, and the bytes told."""
    import torch

    from ktconv.model.streamed.calls import Call, ExpertLayer
    from ktconv.model.streamed.experts import SourceExperts

    layer, site = checkpoint.layers[0], site_of(module)
    count = len(layer.experts)
    rows = torch.randn((9, layer.hidden_size), generator=torch.Generator().manual_seed(1))
    rows = rows.to(dtype)
    ids = torch.arange(18).reshape(9, 2) % count
    if chosen is not None:
        ids = torch.where(torch.isin(ids, torch.tensor(chosen)), ids, -1)
    weights = torch.rand((9, 2), generator=torch.Generator().manual_seed(2)).to(dtype)
    read: list[int] = []
    runner = SourceExperts(checkpoint, dtype, threads=2, read=read.append)
    output = torch.zeros_like(rows)
    with torch.inference_mode():
        call = Call(0, 0, rows, ids, weights)
        runner.run(ExpertLayer.at(0, on_meta(site), layer), [call], [output])
        there = ids >= 0
        expected = module(rows, ids.clamp(0), torch.where(there, weights, 0))
    return output, expected, read


def filled(module: Any, weights: Weights, dtype: Any) -> Any:
    """The module with these values."""
    import torch

    from ktconv.model.stored import stored_in

    module.to(dtype)
    own = stored_in(module)
    assert own is not None
    for expert in range(own.count):
        for projection, view in own.matrices(expert).items():
            stack = weights._asdict()[projection]
            view.copy_(torch.from_numpy(np.ascontiguousarray(stack[expert])))
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_encodings(kind: str, torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, weights, nbytes = encoded_model(tmp_path / "model", kind)
    checkpoint, dtype = open_checkpoint(path), torch.bfloat16
    module = filled(experts_module(2, HIDDEN, INNER), weights, dtype)
    reads = Reads(monkeypatch)
    found, expected, read = run(checkpoint, module, dtype)
    assert torch.equal(found, expected)
    assert found.any()
    assert reads.of(checkpoint, 0) == reads.of(checkpoint, 1) == {1}
    assert len(read) == 2
    assert sum(read) <= nbytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["bf16", "fp8 block", "transposed"])
def test_dtypes(
    kind: str, dtype: str, torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are exact in each."""
    if kind == "fp8 block":
        path, weights, _ = encoded_model(tmp_path / "model", kind)
    else:
        weights = random_weights(HIDDEN, INNER, 2)
        tensors = fused("model.layers.0.mlp.experts", weights, kind == "transposed")
        sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": 2}
        path = write_checkpoint(tmp_path / "model", tensors, simple_config(**sizes))
    checkpoint, kept = open_checkpoint(path), getattr(torch, dtype)
    module = filled(experts_module(2, HIDDEN, INNER), weights, kept)
    reads = Reads(monkeypatch)
    found, expected, _ = run(checkpoint, module, kept)
    assert torch.equal(torch.nan_to_num(found), torch.nan_to_num(expected))  # beyond float16
    assert reads.of(checkpoint, 0) == reads.of(checkpoint, 1) == {1}


@pytest.mark.parametrize("name", [name for name in HALVES if name not in ("TQ1_0", "TQ2_0")])
def test_blocks_of_ggml(
    name: str, torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    experts, hidden, inner = 3, 256, 512
    stacks, tensors = [], {}
    for word, rows, cols in (
        ("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)
    ):  # fmt: skip
        data = np.stack([blocks_of(rng, name, rows, cols) for _ in range(experts)])
        tensor = gguf_files.Blocks(name, data)
        tensors[f"blk.0.ffn_{word}_exps.weight"] = tensor
        stacks.append(tensor.values)
    sizes = {
        "expert_count": experts, "embedding_length": hidden, "expert_feed_forward_length": inner
    }  # fmt: skip
    path = gguf_files.write_gguf(tmp_path / "m.gguf", tensors, gguf_files.metadata(**sizes))
    checkpoint, dtype = open_checkpoint(path), torch.float32
    module = filled(experts_module(experts, hidden, inner), Weights(*stacks), dtype)
    reads = Reads(monkeypatch)
    found, expected, _ = run(checkpoint, module, dtype, chosen=[0, 2])
    # The whole module computes expert 0 for more tokens, and products of another size may add up
    # in another order.
    assert torch.equal(found.isnan(), expected.isnan())
    found, expected = torch.nan_to_num(found).double(), torch.nan_to_num(expected).double()
    assert ((found - expected).norm(dim=1) <= 1e-5 * expected.norm(dim=1)).all()
    assert reads.of(checkpoint, 0) == reads.of(checkpoint, 2) == {1}
    assert reads.of(checkpoint, 1) == {0}  # nobody chose it


@pytest.mark.parametrize("encoding", ["mxfp4", "bf16"])
def test_gpt_oss(
    encoding: str, torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases, and outputs of gate and up that alternate: all of them are read together."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    blocks, dtype = Blocks(), torch.bfloat16
    config = simple_config(**SIZES, model_type="gpt_oss")
    write_checkpoint(tmp_path, getattr(blocks, encoding), config)
    checkpoint = open_checkpoint(tmp_path)
    sizes = GptOssConfig(
        hidden_size=SIZES["hidden_size"],
        intermediate_size=SIZES["moe_intermediate_size"],
        num_local_experts=SIZES["num_experts"],
    )
    sizes._experts_implementation = "eager"
    module = filled(GptOssExperts(sizes).requires_grad_(False), blocks.weights, dtype)
    for name, values in zip(("gate_up_proj", "down_proj"), blocks.biases, strict=True):
        getattr(module, f"{name}_bias").copy_(torch.from_numpy(values))
    reads = Reads(monkeypatch)
    found, expected, _ = run(checkpoint, module, dtype)
    assert torch.equal(found, expected)
    assert reads.of(checkpoint, 0) == reads.of(checkpoint, 2) == {1}
