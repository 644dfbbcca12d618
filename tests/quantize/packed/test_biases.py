"""Experts with biases: converted on request, for our own kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from helpers.cli import ktconv
from helpers.convert import convert, read_json, read_model
from helpers.families import Raw, bf16, build_model, simple_config, write_checkpoint, write_family
from helpers.gpt_oss import EXPERTS, HIDDEN, INNER, SIZES, SOURCE, Blocks

from ktconv.errors import CheckpointError, UsageError
from ktconv.formats import PROJECTIONS, TensorId, kinds_of, parse_tensor_name, tensor_name
from ktconv.inspect.inspection import inspect_path
from ktconv.quantize.packed.run import Request, prepare
from ktconv.repack import reshard
from ktconv.source import open_checkpoint
from ktconv.targets.packed.target import Options
from ktconv.verify import Request as VerifyRequest
from ktconv.verify import verify
from ktconv.verify.compare import compare

pytestmark = pytest.mark.slow

ALLOW: dict[str, Any] = {"allow_activation_mismatch": True}


def gpt_oss(directory: Path, **changes: Any) -> tuple[Path, Blocks]:
    blocks = Blocks()
    config = simple_config(**SIZES, model_type="gpt_oss", num_experts_per_tok=2)
    return write_checkpoint(directory, {**blocks.mxfp4, **changes}, config), blocks


def test_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    model, _ = gpt_oss(tmp_path / "model")
    with pytest.raises(
        CheckpointError, match=r"compute gate .* with biases \(.*_proj_bias\)"
    ) as no:
        prepare(Request(str(model), tmp_path / "out", Options(method="int8")))
    assert "No method of KTransformers computes it; --allow-activation-mismatch" in str(
        no.value.hint
    )
    done = ktconv("quantize-cpu", model, tmp_path / "out", "--method", "int8", "--numa", "1",
                  "--allow-activation-mismatch", "--dry-run", "--json")  # fmt: skip
    assert done.exit_code == 0, done.stdout + done.stderr
    assert any(
        "computes plain SiLU without biases, and its results would be wrong" in n
        for n in json.loads(done.stdout)["notes"]
    )


@pytest.mark.parametrize("numa", [1, 3])
def test_biases_are_beside_the_codes(numa: int, tmp_path: Path) -> None:
    """The codes are those of the same weights without biases."""
    model, blocks = gpt_oss(tmp_path / "model")
    convert(model, tmp_path / "out", method="int8", numa=numa, **ALLOW)
    found = read_model(tmp_path / "out")
    plain = {name: one for name, one in blocks.mxfp4.items() if "bias" not in name}
    write_checkpoint(tmp_path / "plain", plain, simple_config(**SIZES))
    convert(tmp_path / "plain", tmp_path / "codes", method="int8", numa=numa)
    codes = read_model(tmp_path / "codes")
    assert {name: one for name, one in found.items() if not name.endswith(".bias")} == codes
    width = INNER // numa
    gate_up, down = blocks.biases
    expected = {}
    for expert in range(EXPERTS):
        for part in range(numa):
            rows = slice(part * width, (part + 1) * width)
            expected[tensor_name(0, "gate", expert, part, "bias")] = gate_up[expert, 0::2][rows]
            expected[tensor_name(0, "up", expert, part, "bias")] = gate_up[expert, 1::2][rows]
        expected[tensor_name(0, "down", expert, 0, "bias")] = down[expert]
    stored = {name: one for name, one in found.items() if name.endswith(".bias")}
    assert stored.keys() == expected.keys()
    for name, values in expected.items():
        assert stored[name] == Raw("F32", values.shape, values.astype("<f4").tobytes())
        tensor = parse_tensor_name(name)
        assert tensor is not None
        assert tensor.kind in kinds_of(tensor.proj, tensor.part, True)
    record = read_json(tmp_path / "out" / "ktconv.json")
    assert record["options"]["allow_activation_mismatch"] is True
    assert (
        "computes plain SiLU without biases, and its"
        in (tmp_path / "out" / "README.md").read_text()
    )
    assert (
        "allow_activation_mismatch" not in read_json(tmp_path / "codes" / "ktconv.json")["options"]
    )
    assert inspect_path(str(tmp_path / "out"))["complete"] is True


def test_the_option_changes_nothing_without_biases(tmp_path: Path) -> None:
    tensors = {
        f"{SOURCE}.{expert}.{name}.weight": bf16(np.ones((HIDDEN, HIDDEN)))
        for expert in range(2)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    config = simple_config(num_experts=2, moe_intermediate_size=HIDDEN)
    model = write_checkpoint(tmp_path / "model", tensors, config)
    plan = prepare(
        Request(str(model), tmp_path / "out", Options(allow_activation_mismatch=True))
    ).plan
    assert "allow_activation_mismatch" not in plan.target.options.as_dict()
    assert plan.target.serving() is not None


def test_one_bias_alone(tmp_path: Path) -> None:
    """Other matrices of the layer get zeros, which are the same as none."""
    tensors = {
        f"{SOURCE}.{expert}.{name}.weight": bf16(np.full((HIDDEN, HIDDEN), expert + 1))
        for expert in range(2)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    tensors[f"{SOURCE}.1.up_proj.bias"] = bf16(np.arange(HIDDEN))
    config = simple_config(num_experts=2, moe_intermediate_size=HIDDEN)
    model = write_checkpoint(tmp_path / "model", tensors, config)
    convert(model, tmp_path / "out", method="int4", **ALLOW)
    found = read_model(tmp_path / "out")
    for expert in range(2):
        for proj in PROJECTIONS:
            bias = np.frombuffer(found[tensor_name(0, proj, expert, 0, "bias")].data, "<f4")
            own = np.arange(HIDDEN) if (expert, proj) == (1, "up") else np.zeros(HIDDEN)
            np.testing.assert_array_equal(bias, own)
    done = ktconv("verify", tmp_path / "out", "--source", model, "--level", "weights")
    assert done.exit_code == 0, done.stdout + done.stderr


def test_layer_folders_have_no_place_for_them(tmp_path: Path) -> None:
    model, _ = gpt_oss(tmp_path / "model")
    with pytest.raises(UsageError, match="--layout layers has no files for biases"):
        convert(model, tmp_path / "out", method="int8", layout="layers", **ALLOW)
    assert not (tmp_path / "out").exists()


def test_a_bias_that_is_not_finite(tmp_path: Path) -> None:
    bias = np.zeros((EXPERTS, HIDDEN), np.float32)
    bias[2, 7] = np.inf
    model, _ = gpt_oss(tmp_path / "model", **{f"{SOURCE}.down_proj_bias": bias})
    with pytest.raises(CheckpointError, match=rf"down_proj_bias .* at number {2 * HIDDEN + 7}"):
        convert(model, tmp_path / "out", method="int8", **ALLOW)


def _flip(output: Path, name: str) -> None:
    """Another number, and the checksum of it in the manifest."""

    from safetensors.numpy import load_file, save_file

    for shard in output.glob("*.safetensors"):
        tensors = load_file(shard)
        if name in tensors:
            tensors[name] = tensors[name] + np.float32(1)
            save_file(tensors, shard, {"format": "pt"})
            text = (output / "ktconv.json").read_text()
            record = json.loads(text)
            digest = blake3(tensors[name].tobytes()).hexdigest()
            for unit in record["units"].values():
                if name in unit["tensors"]:
                    text = text.replace(unit["tensors"][name]["blake3"], digest)
            (output / "ktconv.json").write_text(text)


def test_verify_compares_biases(tmp_path: Path) -> None:
    model, _ = gpt_oss(tmp_path / "model")
    convert(model, tmp_path / "out", method="int8", numa=3, **ALLOW)
    words = ("verify", tmp_path / "out", "--source", model, "--level", "weights")
    sound = ktconv(*words)
    assert sound.exit_code == 0, sound.stdout + sound.stderr
    _flip(tmp_path / "out", tensor_name(0, "up", 1, 2, "bias"))
    wrong = ktconv(*words, "--json")
    assert wrong.exit_code == 1
    failures = json.loads(wrong.stdout)["failures"]
    assert [one["check"] for one in failures if one["level"] == "weights"] == ["bias"]


def test_comparing_outputs_sees_biases(tmp_path: Path) -> None:
    model, blocks = gpt_oss(tmp_path / "model")
    convert(model, tmp_path / "a", method="int8", **ALLOW)
    convert(model, tmp_path / "parts", method="int8", numa=3, **ALLOW)
    name = f"{SOURCE}.gate_up_proj_bias"
    changed = blocks.biases[0].copy()
    changed[1, 3] += 1
    other, _ = gpt_oss(tmp_path / "other", **{name: changed})
    convert(other, tmp_path / "b", method="int8", **ALLOW)
    [parts] = compare(tmp_path / "a", tmp_path / "parts").layers
    assert parts["different"]["gate"] == parts["different"]["up"] == 0
    [layer] = compare(tmp_path / "a", tmp_path / "b").layers
    assert layer["different"] == {"gate": 0, "up": 1, "down": 0}


def test_resharding_takes_them_from_the_source(tmp_path: Path) -> None:
    model, _ = gpt_oss(tmp_path / "model")
    convert(model, tmp_path / "out", method="int8", **ALLOW)
    request = reshard.Request(packed=tmp_path / "out", output=tmp_path / "new", numa=3)
    with pytest.raises(UsageError, match="experts with biases, which only the model has whole"):
        reshard.prepare(request)
    convert(model, tmp_path / "expected", method="int8", numa=3, **ALLOW)
    done = ktconv("reshard", tmp_path / "out", tmp_path / "new", "--numa", "3", "--source", model)
    assert done.exit_code == 0, done.stdout + done.stderr
    assert read_model(tmp_path / "new") == read_model(tmp_path / "expected")


@pytest.mark.usefixtures("tiles")  # the AMX level runs too, where it is emulated
def test_kernels_compute_what_transformers_does(tmp_path: Path) -> None:
    """From a checkpoint of transformers to its own model with packed experts."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from ktconv.model.replace import replace_experts

    write_family("gpt_oss", tmp_path / "model", "float32")
    convert(tmp_path / "model", tmp_path / "out", method="int8", numa=2, **ALLOW)
    request = VerifyRequest(output=tmp_path / "out", source=str(tmp_path / "model"), level="layers")
    found = verify(request)
    assert found.passed, found.failures
    model = build_model("gpt_oss", "float32")
    for layer in model.model.layers:  # so that they matter
        with torch.no_grad():
            layer.mlp.experts.gate_up_proj_bias.normal_()
            layer.mlp.experts.down_proj_bias.normal_()
    model.save_pretrained(tmp_path / "biased")
    convert(tmp_path / "biased", tmp_path / "packed", method="int8", **ALLOW)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        theirs = model(ids).logits
        with replace_experts(model, tmp_path / "packed", threads=1, keep=True):
            ours = model(ids).logits.float()
    assert float((ours - theirs).norm() / theirs.norm()) < 0.05


def test_identity_of_a_bias() -> None:
    name = tensor_name(3, "gate", 0, 1, "bias")
    assert name == "blk.3.ffn_gate_exps.0.numa.1.bias"
    assert parse_tensor_name(name) == TensorId(3, "gate", 0, 1, "bias")


def test_quantize_gpu_refuses_them(tmp_path: Path) -> None:
    from ktconv.targets.encoded.target import EncodedTarget
    from ktconv.targets.encoded.target import Options as EncodedOptions

    checkpoint = open_checkpoint(gpt_oss(tmp_path / "model")[0])
    with pytest.raises(CheckpointError, match="have biases; quantize-gpu does not write them"):
        EncodedTarget(EncodedOptions(), checkpoint).check(checkpoint.layers)
