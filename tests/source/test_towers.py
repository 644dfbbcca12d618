"""Models with several towers that have experts: the language model's, or the one of --tower."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cli import ktconv, refused
from helpers.cli import ktconv_done as done
from helpers.convert import read_model
from helpers.families import (
    Tensor,
    Weights,
    bf16,
    numbered,
    random_weights,
    read_matrix,
    write_checkpoint,
)

from ktconv.errors import CheckpointError, UsageError
from ktconv.source import PROJECTIONS, Checkpoint, ModelSource, open_checkpoint
from ktconv.source.reading.reader import SourceReader
from ktconv.verify.second_reader.names import SecondReader

HIDDEN = 128
ONE, OTHER = random_weights(HIDDEN, 128, 4, seed=1), random_weights(HIDDEN, 256, 2, seed=2)


def section(model_type: str, weights: Weights, **more: Any) -> dict[str, Any]:
    experts, inner, hidden = weights.gate.shape
    return {"model_type": model_type, "num_experts": experts, "moe_intermediate_size": inner,
            "hidden_size": hidden, "num_hidden_layers": 1, "num_experts_per_tok": 2,
            "norm_topk_prob": True, **more}  # fmt: skip


def omni(directory: Path) -> Path:
    tensors = numbered("thinker.model.layers.0.mlp.experts", ONE)
    tensors |= numbered("talker.model.layers.0.mlp.experts", OTHER)
    tensors["thinker.model.layers.0.mlp.gate.weight"] = bf16(np.ones((4, HIDDEN)))
    config = {
        "model_type": "qwen3_omni_moe",
        "thinker_config": {"text_config": section("qwen3_omni_moe_text", ONE)},
        "talker_config": {"text_config": section("qwen3_omni_moe_talker_text", OTHER)},
    }
    return write_checkpoint(directory, tensors, config)


def dots(directory: Path) -> Path:
    names = ("fc1", "fc3", "fc2")
    tensors = numbered("model.layers.0.mlp.experts", ONE)
    tensors |= numbered("vision_encoder.blocks.0.mlp.experts", OTHER, names)
    config = {
        **section("dots3_note", ONE),
        "vision_config": section("dots3_note_vision_encoder", OTHER),
    }
    return write_checkpoint(directory, tensors, config)


def ernie(directory: Path, layers: int = 1) -> Path:
    tensors: dict[str, Tensor] = {}
    for layer in range(layers):
        source = f"model.layers.{layer}.mlp.experts"
        tensors |= numbered(source, ONE)
        vision = (name.split(".") for name in numbered("x", OTHER))
        names = (f"{source}.{int(number) + 4}.{matrix}.weight" for _, number, matrix, _ in vision)
        tensors |= dict(zip(names, numbered("x", OTHER).values(), strict=True))
    config = section(
        "ernie4_5_vl_moe", ONE, num_experts=None, moe_num_experts=[4, 2],
        moe_intermediate_size=[128, 256], num_hidden_layers=layers,
        moe_layer_start_index=[0, 0], moe_layer_end_index=[layers - 1, layers - 1],
    )  # fmt: skip
    return write_checkpoint(directory, tensors, {k: v for k, v in config.items() if v is not None})


MODELS = {
    "omni": (omni, "thinker", "talker"),
    "dots": (dots, "model", "vision_encoder"),
    "ernie": (ernie, "text", "vision"),
}


def assert_has(checkpoint: Checkpoint, weights: Weights) -> None:
    second = SecondReader(checkpoint, SourceReader(checkpoint.files, checkpoint.sources))
    for layer in checkpoint.layers:
        assert len(layer.experts) == len(weights.gate)
        for expert, matrices in enumerate(layer.experts):
            for projection in PROJECTIONS:
                expected = getattr(weights, projection)[expert]
                np.testing.assert_array_equal(read_matrix(matrices[projection]), expected)
                rows, cols = (range(size) for size in expected.shape)
                again = second.expert(layer, expert, projection).values(rows, cols)
                np.testing.assert_array_equal(again, expected)


@pytest.mark.parametrize("kind", MODELS)
def test_the_language_model_or_the_one_that_is_named(kind: str, tmp_path: Path) -> None:
    write, usual, second = MODELS[kind]
    model = write(tmp_path)
    for tower, expected in ((None, ONE), (usual, ONE), (second, OTHER)):
        checkpoint = open_checkpoint(ModelSource(model, tower=tower))
        assert checkpoint.tower == (tower or usual)
        assert_has(checkpoint, expected)
        other = OTHER if expected is ONE else ONE
        experts = [one.name for one in checkpoint.other_tensors if "mlp.experts" in one.name]
        assert len(experts) == 3 * len(other.gate)
        left = second if expected is ONE else usual
        assert f"those of {left} are other tensors here (--tower" in checkpoint.notes[0]
    with pytest.raises(UsageError, match=f"--tower x: .* in the towers {usual}, {second}$"):
        open_checkpoint(ModelSource(model, tower="x"))


def test_nothing_says_which_is_the_language_model(tmp_path: Path) -> None:
    def edited(**changes: Any) -> Path:
        model = omni(tmp_path)
        config: dict[str, Any] = json.loads((model / "config.json").read_bytes()) | changes
        config = {key: value for key, value in config.items() if value is not None}
        (model / "config.json").write_text(json.dumps(config))
        return model

    own = section("never_heard_of", ONE)
    unknown = edited(model_type="new", thinker_config=None, text_config=own)
    with pytest.raises(CheckpointError, match="nothing says which of them is the") as caught:
        open_checkpoint(unknown)
    assert "--tower NAME" in str(caught.value.hint)
    assert "in the towers thinker, talker (thinker.model.layers.0" in str(caught.value)
    assert_has(open_checkpoint(ModelSource(unknown, tower="talker")), OTHER)
    with pytest.raises(CheckpointError, match=r"no section for the tower thinker \(looked for"):
        open_checkpoint(ModelSource(unknown, tower="thinker"))
    with pytest.raises(CheckpointError, match="no section for the tower talker"):
        open_checkpoint(ModelSource(edited(talker_config=None), tower="talker"))


def test_a_tower_of_one(tmp_path: Path) -> None:
    tensors = numbered("model.layers.0.mlp.experts", ONE)
    model = write_checkpoint(tmp_path, tensors, section("qwen3_moe", ONE))
    assert open_checkpoint(model).tower is None
    with pytest.raises(UsageError, match="--tower x: the experts of this model are all in one"):
        open_checkpoint(ModelSource(model, tower="x"))


@pytest.mark.parametrize("source", ["mtp.layers.0.mlp.experts", "thinker.mtp.0.mlp.experts"])
def test_mtp_layers_belong_to_the_language_model(source: str, tmp_path: Path) -> None:
    model = omni(tmp_path)
    stored = numbered("thinker.model.layers.0.mlp.experts", ONE)
    stored |= numbered("talker.model.layers.0.mlp.experts", OTHER) | numbered(source, ONE)
    config: Mapping[str, Any] = json.loads((model / "config.json").read_bytes())
    write_checkpoint(model, stored, dict(config))
    assert [layer.is_mtp for layer in open_checkpoint(model).layers] == [False, True]
    assert len(open_checkpoint(ModelSource(model, tower="talker")).layers) == 1


def test_ernie_with_as_many_layers_as_towers(tmp_path: Path) -> None:
    model = ernie(tmp_path, layers=2)
    assert_has(open_checkpoint(model), ONE)
    assert_has(open_checkpoint(ModelSource(model, tower="vision")), OTHER)
    stored = read_model(model)
    lacking = {name: one for name, one in stored.items() if "experts.5.up_proj" not in name}
    config: dict[str, Any] = json.loads((model / "config.json").read_bytes())
    write_checkpoint(model, dict(lacking), config)
    assert_has(open_checkpoint(model), ONE)
    with pytest.raises(CheckpointError, match=r"\.1\.up_proj\.weight is missing"):
        open_checkpoint(ModelSource(model, tower="vision"))
    surplus = stored | {"model.layers.0.mlp.experts.6.up_proj.weight": bf16(OTHER.up[0])}
    write_checkpoint(model, dict(surplus), config)
    with pytest.raises(CheckpointError, match=r"experts\.6\.up_proj\.weight is expert 6, but"):
        open_checkpoint(model)


# ---- commands ------------------------------------------------------------------------------


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("kind", MODELS)
def test_a_tower_from_end_to_end(kind: str, tmp_path: Path) -> None:
    """The manifest has the tower, and what follows takes it from there."""
    write, usual, second = MODELS[kind]
    model, folders, output = write(tmp_path / "model"), tmp_path / "folders", tmp_path / "out"
    chosen = ("--tower", second)
    assert json.loads(done("inspect", model, *chosen, "--json"))["intermediate_size"] == [256]
    done("quantize-cpu", model, folders, *chosen, "--layout=layers", "--threads=1")
    done("merge", folders, output, "--source", model, "--threads=1")
    done("quantize-cpu", model, tmp_path / "same", *chosen, "--threads=1")
    assert read_model(output) == read_model(tmp_path / "same")
    assert json.loads((output / "ktconv.json").read_text())["source"]["tower"] == second
    assert json.loads(done("inspect", output, "--json"))["tower"] == second
    assert f"of the tower {second}\n" in (output / "README.md").read_text()
    assert f" --tower {second}\n" in (tmp_path / "same" / "README.md").read_text()
    report = json.loads(
        done("verify", output, "--source", model, "--level=weights", "--json", "--threads=1")
    )
    assert report["passed"]
    result = ktconv("quantize-cpu", model, tmp_path / "same", "--threads=1")
    refused(result, 2, "was begun with other settings or another source")
    refused(ktconv("verify", output, "--tower", second), 2, "--tower belongs to --source")
    result = ktconv("verify", output, "--source", model, "--tower", usual, "--level=weights")
    refused(result, 2, f"contains the experts of the tower {second}, not {usual}")
    done("reshard", output, tmp_path / "cut", "--numa=2", "--source", model, "--threads=1")
    result = ktconv("reshard", tmp_path / "cut", tmp_path / "joined", "--numa=1", "--threads=1")
    assert "or run ktconv quantize-cpu MODEL OUTPUT --method int4 --numa 1" in result.stderr
    assert f" --tower {second}" in result.stderr
    kept = {name for name in read_model(output) if "mlp.experts" in name}
    assert len(kept) == 3 * len(ONE.gate)  # the other tower's, as they are


def test_no_gpu_output_of_several_towers(tmp_path: Path) -> None:
    """One pattern names the quantized modules to engines, and would fit the other tower's."""
    pytest.importorskip("llmcompressor")
    result = ktconv("quantize-gpu", omni(tmp_path / "model"), tmp_path / "out", "--method=rtn")
    refused(result, 2, "experts in several towers", "only those of thinker would be quantized")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["bf16", "rawint4", "fp8", "nvfp4"])
@pytest.mark.parametrize("kind", MODELS)
def test_checkpoints_of_one_tower(kind: str, method: str, tmp_path: Path) -> None:
    """Those of the other are no strays, and the way out is right."""
    write, usual, _ = MODELS[kind]
    model, output = write(tmp_path / "model"), tmp_path / "out"
    words = ("quantize-cpu", model, output, "--method", method, "--threads=1")
    result = ktconv(*words)
    refused(result, 2, "experts in several towers", f"only those of {usual} would be")
    assert "--experts-only" in result.stderr
    assert not output.exists()
    done(*words, "--experts-only")
    done("verify", output, "--source", model, "--level=weights", "--threads=1")
