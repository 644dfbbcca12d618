"""gpt-oss: outputs of gate and up that alternate, MXFP4 blocks, and biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import gguf_files
from helpers.encoded import of_gptq
from helpers.families import Raw, Tensor, bf16, raw, simple_config, write_checkpoint, write_family
from helpers.gpt_oss import EXPERTS, HIDDEN, INNER, SIZES, SOURCE, Blocks
from numpy.typing import NDArray

from ktconv.errors import CheckpointError
from ktconv.source import PROJECTIONS, Checkpoint, ExpertMatrix, open_checkpoint
from ktconv.source.reading.buffers import Buffers
from ktconv.source.reading.matrices import MatrixReader, buffers_of
from ktconv.source.reading.reader import SourceReader

F32 = NDArray[np.float32]


def values_and_bias(checkpoint: Checkpoint, matrix: ExpertMatrix) -> tuple[F32, F32 | None]:
    reader = MatrixReader(SourceReader(checkpoint.files, checkpoint.sources), matrix)
    buffers = Buffers(buffers_of([matrix]))
    rows = [values.copy() for _, values in reader.decoded(buffers.source, buffers.bounce)]
    return np.concatenate(rows), reader.load_bias()


def assert_experts(directory: Path, blocks: Blocks) -> None:
    checkpoint = open_checkpoint(directory)
    (gate_up, down), biases = blocks.values, blocks.biases
    for index, expert in enumerate(checkpoint.layers[0].experts):
        whole = {
            "gate": (gate_up[index, 0::2], biases[0][index, 0::2]),
            "up": (gate_up[index, 1::2], biases[0][index, 1::2]),
            "down": (down[index], biases[1][index]),
        }
        for proj in PROJECTIONS:
            values, bias = values_and_bias(checkpoint, expert[proj])
            np.testing.assert_array_equal(values, whole[proj][0])
            np.testing.assert_array_equal(bias, whole[proj][1])


@pytest.mark.parametrize("model_type", ["gpt_oss", "a_copy_of_it"])
def test_mxfp4_blocks(model_type: str, tmp_path: Path) -> None:
    """The blocks themselves show what they are."""
    blocks = Blocks()
    config = simple_config(**SIZES, model_type=model_type)
    write_checkpoint(tmp_path / "model", blocks.mxfp4, config)
    checkpoint = open_checkpoint(tmp_path / "model")
    assert checkpoint.layers[0].encoding == "mxfp4"
    assert "the experts of layer 0 have biases" in checkpoint.notes
    assert_experts(tmp_path / "model", blocks)


def test_bf16_of_the_same(tmp_path: Path) -> None:
    """Stored [in, out], so neither stride of gate and up is 1."""
    blocks = Blocks()
    config = simple_config(**SIZES, model_type="gpt_oss")
    write_checkpoint(tmp_path / "model", blocks.bf16, config)
    assert_experts(tmp_path / "model", blocks)


def test_blocks_against_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = Blocks()
    for values, name in zip(blocks.values, ("gate_up_proj", "down_proj"), strict=True):
        stored = [
            torch.from_numpy(np.array(blocks.mxfp4[f"{SOURCE}.{name}_{part}"]))
            for part in ("blocks", "scales")
        ]
        theirs = mxfp4.convert_moe_packed_tensors(*stored, dtype=torch.float32)
        np.testing.assert_array_equal(theirs.numpy().swapaxes(1, 2), values)


def test_as_transformers_computes_it(tmp_path: Path) -> None:
    """Which outputs are gate, and where its biases are, by the model's own forward."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from helpers.families import build_model

    write_family("gpt_oss", tmp_path, "float32")
    with torch.no_grad():
        model = build_model("gpt_oss", "float32")
        experts = model.model.layers[1].mlp.experts
        x = torch.randn((5, 128), generator=torch.Generator().manual_seed(1))
        ids = torch.full((5, 1), 2)
        theirs = experts(x, ids, torch.ones(5, 1)).numpy()
    checkpoint = open_checkpoint(tmp_path)
    assert [layer.index for layer in checkpoint.layers] == [0, 1]
    expert = checkpoint.layers[1].experts[2]
    found = {proj: values_and_bias(checkpoint, expert[proj]) for proj in PROJECTIONS}

    def product(proj: Any, inputs: F32) -> F32:
        values, bias = found[proj]
        assert bias is not None
        result: F32 = inputs @ values.T + bias
        return result

    gate = np.minimum(product("gate", x.numpy()), 7)
    up = np.clip(product("up", x.numpy()), -7, 7)
    ours = product("down", gate / (1 + np.exp(-1.702 * gate)) * (up + 1))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_biases_without_interleaving(tmp_path: Path) -> None:
    """openai-privacy-filter: gate is before up."""
    blocks = Blocks()
    config = simple_config(**SIZES, model_type="openai_privacy_filter")
    write_checkpoint(tmp_path / "model", blocks.bf16, config)
    checkpoint = open_checkpoint(tmp_path / "model")
    values, bias = values_and_bias(checkpoint, checkpoint.layers[0].experts[1]["up"])
    np.testing.assert_array_equal(values, blocks.values[0][1, INNER:])
    np.testing.assert_array_equal(bias, blocks.biases[0][1, INNER:])


def test_gguf(tmp_path: Path) -> None:
    """llama.cpp parts gate and up, and biases too."""
    tensors = gguf_files.experts() | gguf_files.around() | gguf_files.biases()
    metadata = gguf_files.metadata()
    path = gguf_files.write_gguf(tmp_path / "m.gguf", tensors, metadata, architecture="gpt-oss")
    checkpoint = open_checkpoint(path)
    for number, expert in enumerate(checkpoint.layers[0].experts):
        for proj in PROJECTIONS:
            values, bias = values_and_bias(checkpoint, expert[proj])
            np.testing.assert_array_equal(values, tensors[f"blk.0.ffn_{proj}_exps.weight"][number])
            np.testing.assert_array_equal(bias, tensors[f"blk.0.ffn_{proj}_exps.bias"][number])


def test_numbered_experts_with_biases(tmp_path: Path) -> None:
    """As llm-compressor stores gpt-oss, one expert after the other."""
    rng = np.random.default_rng(1)
    tensors: dict[str, Tensor] = {}
    for expert in range(EXPERTS):
        for name in ("gate_proj", "up_proj", "down_proj"):
            shape = (HIDDEN, INNER) if name == "down_proj" else (INNER, HIDDEN)
            tensors[f"{SOURCE}.{expert}.{name}.weight"] = bf16(rng.standard_normal(shape))
            tensors[f"{SOURCE}.{expert}.{name}.bias"] = bf16(rng.standard_normal(shape[0]))
    write_checkpoint(tmp_path / "model", tensors, simple_config(**SIZES))
    checkpoint = open_checkpoint(tmp_path / "model")
    _, bias = values_and_bias(checkpoint, checkpoint.layers[0].experts[2]["down"])
    stored = np.frombuffer(raw(tensors[f"{SOURCE}.2.down_proj.bias"]).data, "<u2")
    np.testing.assert_array_equal(bias, (stored.astype(np.uint32) << 16).view(np.float32))


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("gate_up_proj_scales", np.ones((EXPERTS, 2 * INNER, 3), np.uint8), "fits no way to scale"),
        ("gate_up_proj_scales", np.ones((EXPERTS, 2 * INNER, 4), np.float32), "is F32, which is"),
        ("gate_up_proj_blocks", np.ones((EXPERTS, 2 * INNER, 5, 16), np.uint8), "fit neither"),
        ("gate_up_proj_bias", np.ones((EXPERTS, INNER), np.float32), "is no bias of its weight"),
        ("down_proj_bias", Raw("F64", (EXPERTS, HIDDEN), bytes(8 * EXPERTS * HIDDEN)), "no bias"),
        ("down_proj", bf16(np.ones((EXPERTS, INNER, HIDDEN))), "down_proj are two ways"),
    ],
)
def test_damaged(name: str, tensor: Tensor, reason: str, tmp_path: Path) -> None:
    tensors = {**Blocks().mxfp4, f"{SOURCE}.{name}": tensor}
    write_checkpoint(tmp_path / "model", tensors, simple_config(**SIZES, model_type="gpt_oss"))
    with pytest.raises(CheckpointError, match=reason) as error:
        open_checkpoint(tmp_path / "model")
    assert f"{SOURCE}.{name.removesuffix('_blocks')}" in str(error.value)


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_a_bias_that_is_missing(name: str, tmp_path: Path) -> None:
    tensors = Blocks().mxfp4
    del tensors[f"{SOURCE}.{name}_bias"]
    write_checkpoint(tmp_path / "model", tensors, simple_config(**SIZES, model_type="gpt_oss"))
    with pytest.raises(CheckpointError, match=f"{name}_blocks has no bias, but all experts of gpt"):
        open_checkpoint(tmp_path / "model")


def test_a_bias_that_is_not_finite(tmp_path: Path) -> None:
    tensors = Blocks().mxfp4
    bias = np.array(tensors[f"{SOURCE}.gate_up_proj_bias"])
    bias[1, 5] = np.nan
    tensors[f"{SOURCE}.gate_up_proj_bias"] = bias
    write_checkpoint(tmp_path / "model", tensors, simple_config(**SIZES, model_type="gpt_oss"))
    checkpoint = open_checkpoint(tmp_path / "model")
    with pytest.raises(CheckpointError, match=rf"gate_up_proj_bias .* number {2 * INNER + 5}"):
        values_and_bias(checkpoint, checkpoint.layers[0].experts[1]["up"])


@pytest.mark.parametrize("bits", [3, 4])
def test_alternating_outputs_in_packed_words(bits: int, tmp_path: Path) -> None:
    """No known checkpoint: words and packed zero points with outputs of gate and up together."""
    rng = np.random.default_rng(bits)
    tensors: dict[str, Tensor] = {}
    for name, rows, cols in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
        parts = [of_gptq(rng, rows, cols, bits, v2=True)[0] for _ in range(EXPERTS)]
        for part in parts[0]:
            stack = np.stack([np.asarray(one[part]) for one in parts])
            tensors[f"{SOURCE}.{name}.{part}"] = stack
        tensors[f"{SOURCE}.{name}.bias"] = np.zeros((EXPERTS, rows), np.float32)
    quantization = {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}
    config = simple_config(**SIZES, model_type="gpt_oss", quantization_config=quantization)
    write_checkpoint(tmp_path / "model", tensors, config)
    with pytest.raises(CheckpointError, match=f"{SOURCE}.gate_up_proj"):
        open_checkpoint(tmp_path / "model")
