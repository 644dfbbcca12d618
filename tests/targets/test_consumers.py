"""Which methods of KTransformers compute a model's experts, and conversions that this refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from helpers.cli import done, refused, run
from helpers.convert import convert, read_json, read_model
from helpers.families import (
    Raw,
    Tensor,
    numbered,
    random_weights,
    simple_config,
    write_checkpoint,
)

from ktconv.cli.app import app
from ktconv.conversion.plan import plan_checkpoint
from ktconv.conversion.records import ErrorSummary
from ktconv.families.family import PLAIN, ExpertActivation
from ktconv.inspect.inspection import inspect_path
from ktconv.native import Activation
from ktconv.runtime.layers import open_experts
from ktconv.source import open_checkpoint
from ktconv.source.source_card import SourceCard
from ktconv.targets.consumers import METHODS, left_out, right_methods
from ktconv.targets.encoded.config import card
from ktconv.targets.encoded.target import EncodedTarget
from ktconv.targets.encoded.target import Options as EncodedOptions

LAYERS = 3
CLAMP = ExpertActivation(limit=10.0)
OAI = ExpertActivation(alpha=1.702, limit=7.0)


@pytest.mark.parametrize(
    ("activation", "types", "right"),
    [
        (PLAIN, [], [method.name for method in METHODS]),
        (CLAMP, ["deepseek_v4"], ["MXFP4", "MXFP8"]),
        (CLAMP, ["glm5_next_text", "glm5_next"], ["FP8"]),
        (OAI, ["minimax_m3_vl"], ["MXFP8"]),
        (ExpertActivation(alpha=1.702, limit=7.0, biases=True), ["gpt_oss"], []),
        (ExpertActivation(limit=7.0, limit_after=True), ["step3p5"], []),
        (ExpertActivation(gate_cap=4.0, up_cap=25.0), ["kimi_k3"], []),
        (ExpertActivation("relu2", gated=False), ["nemotron_h"], []),
        (ExpertActivation("gelu_tanh"), ["gemma4"], []),
        (ExpertActivation(weight_on_input=True), ["llama4"], []),
        (ExpertActivation(post_norm=True), ["muse_spark"], []),
    ],
)
def test_the_right_methods(
    activation: ExpertActivation, types: list[str], right: list[str]
) -> None:
    assert right_methods([activation], types) == right
    assert right_methods([PLAIN, activation], types) == right


def test_what_is_left_out() -> None:
    assert left_out(OAI, "AMXINT4") == {"alpha", "limit"}
    assert left_out(OAI, "MXFP4") == {"alpha"}
    assert not left_out(PLAIN, "AMXINT8", ["glm5_next"])


def model(directory: Path, **config: Any) -> Path:
    tensors: dict[str, Tensor] = {}
    for layer in range(LAYERS):
        tensors |= numbered(f"model.layers.{layer}.mlp.experts", random_weights(seed=layer))
    return write_checkpoint(directory, tensors, simple_config(num_hidden_layers=LAYERS, **config))


def succeeds(*words: object) -> None:
    result = CliRunner().invoke(app, list(map(str, words)))
    assert result.exit_code == 0, result.output


# config.json; which layers compute what, and KTransformers does; the way out
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"model_type": "glm5_next"},
        "layers 0-2 compute SiLU, gate and up clamped to 10; KTransformers' AMXINT4 computes "
        "plain SiLU, and its results would be wrong",
        "KTransformers computes it with weights in FP8; --allow-activation-mismatch converts it "
        "for ktconv's own runtime",
    ),
    (
        {"swiglu_limit": 7},
        "compute SiLU, gate and up clamped to 7;",
        "with weights in MXFP4 and MXFP8",
    ),
    ({"model_type": "minimax_m3_vl"}, "gate * sigmoid(1.702 * gate)", "with weights in MXFP8"),
    (
        {"model_type": "step3p5", "swiglu_limits": [0.0, None, 7.0]},
        "layer 2 compute SiLU, its result and up clamped to 7;",
        "No method of KTransformers computes it",
    ),
    ({"hidden_act": "gelu_pytorch_tanh"}, "compute GELU (tanh);", "No method of KTransformers"),
    (
        {"model_type": "kimi_k3"},
        "compute SiLU, gate within 4 by tanh, up within 25 by tanh;",
        "No method of KTransformers computes it",
    ),
    (
        {"model_type": "llama4"},
        "of inputs times the router's weight; KTransformers' AMXINT4 computes plain SiLU of inputs",
        "No method of KTransformers computes it",
    ),
    (
        {"hidden_act": "cubic"},
        "compute cubic; KTransformers' AMXINT4 computes plain SiLU",
        "Neither KTransformers nor ktconv's kernels compute it",
    ),
]


@pytest.mark.parametrize(("config", "says", "way_out"), REFUSED)
def test_refused_and_nothing_written(
    config: dict[str, Any], says: str, way_out: str, tmp_path: Path
) -> None:
    result = run(model(tmp_path / "model", **config), tmp_path / "out", "--method=int4")
    refused(result, 2, says)
    assert way_out in result.stderr
    assert not (tmp_path / "out").exists()


def test_weights_that_are_right_already(tmp_path: Path) -> None:
    """As DeepSeek-V4 stores them."""
    weights = random_weights()
    tensors = {
        f"layers.0.ffn.experts.{expert}.{name}.{kind}": one
        for expert in range(len(weights.gate))
        for name, values in (("w1", weights.gate), ("w3", weights.up), ("w2", weights.down))
        for kind, one in mxfp4(values[expert]).items()
    }
    config = simple_config(num_hidden_layers=1, model_type="deepseek_v4")
    source = write_checkpoint(tmp_path / "model", tensors, config)
    result = run(source, tmp_path / "out")
    refused(result, 2, "gate and up clamped to 10")
    assert "with weights in MXFP4, as this model's are; --allow" in result.stderr


def mxfp4(values: Any) -> dict[str, Raw]:
    """Any codes and scales."""
    rows, cols = values.shape
    rng = np.random.default_rng(rows + cols)
    codes, scales = rng.bytes(rows * cols // 2), bytes([120]) * (rows * cols // 32)
    return {
        "weight": Raw("I8", (rows, cols // 2), codes),
        "scale": Raw("F8_E8M0", (rows, cols // 32), scales),
    }


def test_allowed_it_is_noted_everywhere(tmp_path: Path) -> None:
    source = model(tmp_path / "model", swiglu_limit=7.0)
    allow = "--allow-activation-mismatch"
    words = source, tmp_path / "out", "--method=int8", allow
    assert re.search(
        r"^activation +SiLU, gate and up clamped to 7$", done(*words, "--dry-run"), re.M
    )
    facts, limit = json.loads(done(*words, "--json")), {"function": "silu", "limit": 7.0}
    assert facts["activation"] == "SiLU, gate and up clamped to 7"
    assert facts["activations"] == {"0-2": {"description": facts["activation"], **limit}}
    assert any("this output is for ktconv's own runtime" in note for note in facts["notes"])
    record = read_json(tmp_path / "out" / "ktconv.json")
    assert record["options"]["allow_activation_mismatch"] is True
    assert record["geometry"]["activation"] == facts["activations"]["0-2"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "- Activation of the experts: SiLU, gate and up clamped to 7" in card
    assert "computes plain SiLU, and its results would be wrong" in card
    assert allow in card and "library_name: ktconv\n" in card and "--kt-method" not in card
    assert inspect_path(str(tmp_path / "out"))["activation"] == facts["activation"]
    assert inspect_path(str(source))["activation"] == facts["activation"]
    # The codes are those of the same weights with another activation.
    convert(model(tmp_path / "plain"), tmp_path / "codes", method="int8")
    assert read_model(tmp_path / "out") == read_model(tmp_path / "codes")
    plain = read_json(tmp_path / "codes" / "ktconv.json")
    assert plain["geometry"]["activation"] == {"description": "SiLU", "function": "silu"}
    assert "allow_activation_mismatch" not in plain["options"]


def test_layers_that_differ(tmp_path: Path) -> None:
    source = model(tmp_path / "model", model_type="step3p5", swiglu_limits=[0.0, 0.0, 7.0])
    convert(source, tmp_path / "out", method="int8", allow_activation_mismatch=True)
    geometry = read_json(tmp_path / "out" / "ktconv.json")["geometry"]
    assert geometry["activation"]["function"] == "silu" and "limit" not in geometry["activation"]
    own = {index: one.get("activation") for index, one in geometry["layers"].items()}
    assert own["0"] is own["1"] is None
    assert own["2"]["limit"] == 7.0 and own["2"]["limit_after"] is True
    words = "SiLU (layers 0-1); SiLU, its result and up clamped to 7 (layer 2)"
    clamped = Activation("swiglu_clamped", limit=7.0)
    assert [open_experts(tmp_path / "out", n).activation for n in (1, 2)] == [Activation(), clamped]
    (tmp_path / "out" / "config.json").unlink()  # the manifest has it too
    assert [open_experts(tmp_path / "out", n).activation for n in (1, 2)] == [Activation(), clamped]
    assert inspect_path(str(tmp_path / "out"))["activation"] == words
    # --no-mtp, --layers and so on: only layers that are converted count.
    found = [layer.activation.limited for layer in open_checkpoint(source).layers]
    assert found == [False, False, True]


def test_merging_and_resharding_keep_it(tmp_path: Path) -> None:
    source = model(tmp_path / "model", swiglu_limit=7.0)
    allow: dict[str, Any] = {"allow_activation_mismatch": True}
    convert(source, tmp_path / "out", method="int8", **allow)
    convert(source, tmp_path / "folders", method="int8", layout="layers", **allow)
    expected = read_json(tmp_path / "out" / "ktconv.json")["geometry"]["activation"]
    made = {
        "merged": ("merge", tmp_path / "folders"),
        "with source": ("merge", tmp_path / "folders", "--source", source),
        "parts": ("reshard", tmp_path / "out", "--numa", "2"),
        "parts of source": ("reshard", tmp_path / "out", "--numa", "2", "--source", source),
    }
    for name, (command, directory, *options) in made.items():
        succeeds(command, directory, tmp_path / name, *options)
        record = read_json(tmp_path / name / "ktconv.json")
        assert record["geometry"]["activation"] == expected, name
        assert record["options"]["allow_activation_mismatch"] is True, name
        assert "library_name: ktconv\n" in (tmp_path / name / "README.md").read_text(), name


def test_a_manifest_from_before(tmp_path: Path) -> None:
    """It has no activation; config.json does, and verify does not refuse what was converted."""
    source = model(tmp_path / "model", swiglu_limit=7.0)
    convert(source, tmp_path / "out", method="int8", allow_activation_mismatch=True)
    path = tmp_path / "out" / "ktconv.json"
    record = read_json(path)
    del record["geometry"]["activation"], record["options"]["allow_activation_mismatch"]
    path.write_text(json.dumps(record))
    assert inspect_path(str(tmp_path / "out"))["activation"] == "SiLU, gate and up clamped to 7"
    succeeds("verify", tmp_path / "out", "--source", source, "--level", "weights")
    succeeds("reshard", tmp_path / "out", tmp_path / "new", "--numa", "2")
    new = read_json(tmp_path / "new" / "ktconv.json")
    assert new["geometry"]["activation"]["limit"] == 7.0


@pytest.mark.parametrize(("limit", "can"), [(None, "can"), (7.0, "cannot")])
def test_quantize_gpu_refuses_nothing(limit: float | None, can: str, tmp_path: Path) -> None:
    """Engines run each model's own code; KTransformers' RAWINT4 does not."""
    checkpoint = open_checkpoint(model(tmp_path, swiglu_limit=limit))
    options = EncodedOptions(scheme="W4A16", group_size=32)
    plan = plan_checkpoint(checkpoint, EncodedTarget(options, checkpoint))
    text = card(plan, SourceCard(), ErrorSummary())
    assert f"It {can} be the weights of `--kt-method RAWINT4` itself" in text
    assert ("KTransformers' RAWINT4 computes plain SiLU" in text) == (limit is not None)
    words = "SiLU, gate and up clamped to 7" if limit else "SiLU"
    assert f"- Activation of the experts: {words}\n" in text
