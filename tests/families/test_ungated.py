"""Experts without a gate through every command: a model like Nemotron-3, made by hand."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from helpers.convert import (
    all_files,
    assert_same,
    assert_shards,
    convert,
    expected_experts,
    kt_files_of,
    read_folders,
    read_json,
    read_model,
)
from helpers.corrupt import bytes_of, check, forget_manifest, found, overwrite, place_of, swap
from helpers.disk_calls import Commands
from helpers.families import bf16, write_checkpoint
from helpers.gguf_files import write_gguf
from helpers.nemotron import BLOCK, EXPERTS, HIDDEN, INNER, LAYERS, LIST, config, write_nemotron
from helpers.paths import EXAMPLE
from safetensors import deserialize
from safetensors.numpy import save_file

from ktconv.cli.app import app
from ktconv.errors import CheckpointError
from ktconv.inspect.inspection import inspect_path
from ktconv.merge import Request as MergeRequest
from ktconv.merge import merge
from ktconv.quantize.packed.run import Request, prepare, quantize_cpu
from ktconv.reshard import Request as ReshardRequest
from ktconv.reshard import reshard
from ktconv.runtime.layers.experts import expert_output
from ktconv.runtime.layers.load import kernel_activation, open_experts
from ktconv.source import open_checkpoint
from ktconv.source.reading.tensors import SourceTensors
from ktconv.targets.expert_sets import expert_set, write_expert_set
from ktconv.targets.packed.target import Options
from ktconv.targets.packed.weights import open_packed
from ktconv.verify import Request as VerifyRequest
from ktconv.verify import verify
from ktconv.verify.compare import compare

# The AMX level runs too, where it is emulated.
pytestmark = [pytest.mark.usefixtures("tiles"), pytest.mark.slow]

LATENT = 128
OWN = ("README.md", "ktconv.json")
Convert = Callable[..., Path]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ungated")


@pytest.fixture(scope="module")
def model(room: Path) -> Path:
    """Experts in bf16, with inputs narrower than the model's hidden size."""
    return write_nemotron(room / "model", latent=LATENT)[0]


@pytest.fixture(scope="module")
def converted(model: Path, room: Path) -> Convert:
    """Conversions of `model`, each made once; nobody may change them."""
    made: dict[tuple[str, int, str], Path] = {}

    def get(method: str = "int4", numa: int = 1, layout: str = "safetensors") -> Path:
        key = method, numa, layout
        if key not in made:
            made[key] = room / "-".join(map(str, key))
            convert(model, made[key], method=method, numa=numa, layout=layout, **ALLOWED)
        return made[key]

    return get


@pytest.fixture
def damaged(converted: Convert, tmp_path: Path) -> Convert:
    """A copy of a conversion, to be damaged."""

    def get(*key: Any) -> Path:
        return Path(shutil.copytree(converted(*key), tmp_path / "copy"))

    return get


ALLOWED: dict[str, Any] = {"allow_activation_mismatch": True}


def without(model: Path, output: Path, experts: Path) -> None:
    """A conversion to INT4 that leaves out a set of experts."""
    options = Options("int4", 3, **ALLOWED)
    request = Request(
        str(model), output, options, exclude_experts=experts, allow_partial=True, threads=1
    )
    quantize_cpu(request)


def packed_of(directory: Path) -> dict[str, Any]:
    return {name: one for name, one in read_model(directory).items() if "_exps." in name}


# ---- quantize-cpu ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "method", "numa", "latent"),
    [
        (None, "int4", 1, None),
        (None, "int8", 2, LATENT),
        ("fp8 block", "int4", 3, None),
        ("nvfp4, ModelOpt", "int8", 1, LATENT),
    ],
)
def test_bytes(
    kind: str | None, method: str, numa: int, latent: int | None, tmp_path: Path
) -> None:
    model, matrices = write_nemotron(tmp_path / "model", kind, latent, shards=2)
    convert(model, tmp_path / "out", method=method, numa=numa, **ALLOWED)
    expected = expected_experts(matrices, method, numa)
    assert len(expected) == LAYERS * EXPERTS * 2 * numa * 2
    assert_same(packed_of(tmp_path / "out"), expected)
    assert_shards(tmp_path / "out", method, numa)
    layers = read_json(tmp_path / "out/ktconv.json")["geometry"]["layers"].values()
    assert [layer["gated"] for layer in layers] == [False] * LAYERS


@pytest.mark.parametrize("numa", [1, 3])
def test_layer_folders(numa: int, converted: Convert, room: Path) -> None:
    _, matrices = write_nemotron(room / "again", latent=LATENT)
    expected = kt_files_of(expected_experts(matrices, "int4", numa), "int4")
    assert_same(read_folders(converted("int4", numa, "layers")), expected)


def test_mtp(tmp_path: Path) -> None:
    """Two layers for multi-token prediction, of which the second has experts."""
    model, matrices = write_nemotron(tmp_path / "model")
    content = read_model(model)
    mtp = {
        name.replace(f"{LIST}.0.", "mtp.layers.1."): one
        for name, one in content.items()
        if name.startswith(f"{LIST}.0.")
    }
    mtp["mtp.layers.0.eh_proj.weight"] = content[f"{LIST}.0.{BLOCK}.gate.weight"]
    write_checkpoint(model, {**content, **mtp}, config(num_nextn_predict_layers=1))
    convert(model, tmp_path / "out", **ALLOWED)
    copied = {(LAYERS + 1, *rest): one for (layer, *rest), one in matrices.items() if not layer}
    expected = expected_experts({**matrices, **copied}, "int4", 1)
    assert_same(packed_of(tmp_path / "out"), expected)
    assert check(tmp_path / "out", model, "weights").passed
    convert(model, tmp_path / "without", mtp=False, **ALLOWED)
    assert_same(packed_of(tmp_path / "without"), expected_experts(matrices, "int4", 1))
    assert not any(name.startswith("mtp.") for name in read_model(tmp_path / "without"))


def test_stacked_experts_are_the_same(converted: Convert, tmp_path: Path) -> None:
    model, _ = write_nemotron(tmp_path / "model", latent=LATENT, stacked=True)
    convert(model, tmp_path / "out", **ALLOWED)
    assert_same(packed_of(tmp_path / "out"), packed_of(converted()))


def test_stacks_stored_in_out(tmp_path: Path) -> None:
    """As NeMo has them; the second reader of verify reads them by its own rule."""
    model, matrices = write_nemotron(tmp_path / "model", latent=LATENT, stacked=True)
    content = dict(read_model(model))
    for layer in range(LAYERS):
        for proj in ("up", "down"):
            stack = np.stack([matrices[layer, e, proj].T for e in range(EXPERTS)])
            content[f"{LIST}.{layer}.{BLOCK}.experts.{proj}_proj"] = bf16(stack)
    write_checkpoint(model, content, config(LATENT))
    convert(model, tmp_path / "out", **ALLOWED)
    assert_same(packed_of(tmp_path / "out"), expected_experts(matrices, "int4", 1))
    result = check(tmp_path / "out", model, "weights")
    assert result.passed, result.failures


def test_sizes_of_the_plan_are_those_of_the_output(converted: Convert, model: Path) -> None:
    options = Options("int4", 1, **ALLOWED)
    plan = prepare(Request(str(model), model.parent / "never", options)).plan
    files = {path.name: path.stat().st_size for path in converted().glob("*.safetensors")}
    planned = {shard.name: shard.size for unit in plan.units for shard in unit.shards}
    assert planned == files
    assert plan.output_bytes == sum(files.values())
    assert plan.source_bytes == sum(
        len(one["data"])
        for path in model.glob("*.safetensors")
        for _, one in deserialize(path.read_bytes())
    )


def test_a_run_in_two_halves(converted: Convert, model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "out", layers=[1], **ALLOWED)
    assert inspect_path(str(tmp_path / "out"))["layers_missing"] == "0"
    convert(model, tmp_path / "out", **ALLOWED)
    assert_same(all_files(tmp_path / "out"), all_files(converted()))


def test_killed_until_done(converted: Convert, model: Path, tmp_path: Path) -> None:
    """Each run is given a call more than the one before, and goes on from what that left."""
    output = tmp_path / "out"
    options = ["--method=int4", "--numa=3", "--threads=1", "--allow-activation-mismatch"]
    command = ["quantize-cpu", str(model), str(output), *options]
    commands, done = Commands(tmp_path), set()
    try:
        for call in count(14):
            ended = commands.run(command, call)
            if ended.returncode == 0:
                break
            assert ended.returncode == -signal.SIGKILL, ended.stderr
            done.add(inspect_path(str(output)).get("layers_done"))
    finally:
        commands.close()
    assert "none" in done and done & {"0", "1"}, "not killed often enough to show anything"
    assert_same(all_files(output), all_files(converted("int4", 3)))


def test_a_set_of_experts(model: Path, tmp_path: Path) -> None:
    """Left out by quantize-cpu; the others are found by their two projections."""
    chosen = {0: [1], 1: [0, 3]}
    for name, ids in (("out", chosen), ("rest", {0: [0, 2, 3], 1: [1, 2]})):
        write_expert_set(expert_set(ids), tmp_path / f"{name}.json")
        without(model, tmp_path / name, tmp_path / f"{name}.json")
    here = open_packed(tmp_path / "out").layers
    assert {index: set(layer.elsewhere) for index, layer in here.items()} == {0: {1}, 1: {0, 3}}
    result = verify(
        VerifyRequest(tmp_path / "out", str(model), "weights", beside=tmp_path / "rest", threads=1)
    )
    assert result.passed, result.failures


@pytest.mark.parametrize("latent", [None, LATENT])
def test_gguf(latent: int | None, tmp_path: Path) -> None:
    """Of four layers the second and the last have experts; the others have no MLP at all."""

    _, matrices = write_nemotron(tmp_path / "model", latent=latent)
    width = latent or HIDDEN
    tensors: dict[str, Any] = {}
    for layer in range(4):
        norm = np.ones(HIDDEN, np.float32)
        tensors |= {f"blk.{layer}.attn_norm.weight": norm, f"blk.{layer}.ssm_d": norm[:, None]}
    for source, layer in ((0, 1), (1, 3)):
        for proj in ("up", "down"):
            one = np.stack([matrices[source, e, proj] for e in range(EXPERTS)])
            tensors[f"blk.{layer}.ffn_{proj}_exps.weight"] = one
    settings = {
        "block_count": 4, "embedding_length": HIDDEN, "feed_forward_length": [0, INNER, 0, INNER],
        "expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": INNER,
        **({"moe_latent_size": latent} if latent else {}),
    }  # fmt: skip
    path = write_gguf(tmp_path / "n.gguf", tensors, settings, architecture="nemotron_h_moe")
    convert(path, tmp_path / "out", numa=3, **ALLOWED)
    moved = {(2 * layer + 1, *rest): one for (layer, *rest), one in matrices.items()}
    assert_same(packed_of(tmp_path / "out"), expected_experts(moved, "int4", 3))
    assert inspect_path(str(path))["hidden_size"] == [width]
    assert check(tmp_path / "out", path, "weights").passed
    del tensors["blk.3.ffn_up_exps.weight"], tensors["blk.3.ffn_down_exps.weight"]
    path = write_gguf(tmp_path / "less.gguf", tensors, settings, architecture="nemotron_h_moe")
    with pytest.raises(CheckpointError, match="layer 3 has no experts"):
        convert(path, tmp_path / "never", **ALLOWED)


# ---- inspect, compare, merge, reshard --------------------------------------------------


def test_inspect(converted: Convert, model: Path) -> None:
    source = inspect_path(str(model))
    assert (source["hidden_size"], source["intermediate_size"]) == ([LATENT], [INNER])
    assert source["activation"] == "squared ReLU without a gate"
    for layout in ("safetensors", "layers"):
        facts = inspect_path(str(converted("int4", 3, layout)))
        assert facts["complete"], facts
        assert facts["numa_parts"] == [3]
        assert (facts["hidden_size"], facts["intermediate_size"]) == ([LATENT], [INNER])


def test_merge(converted: Convert, model: Path, tmp_path: Path) -> None:
    merge(MergeRequest(converted("int4", 3, "layers"), tmp_path / "with", str(model), threads=1))
    expected = all_files(converted("int4", 3))
    got = all_files(tmp_path / "with")
    assert_same({n: d for n, d in got.items() if n not in OWN},
                {n: d for n, d in expected.items() if n not in OWN})  # fmt: skip
    merge(MergeRequest(converted("int4", 3, "layers"), tmp_path / "alone", threads=1))
    assert_same(packed_of(tmp_path / "alone"), packed_of(converted("int4", 3)))
    assert check(tmp_path / "alone", model, "weights").passed


def test_merge_of_other_tools_folders(converted: Convert, model: Path, tmp_path: Path) -> None:
    """Tensors alone say that there are no gates, and a config.json beside them agrees or not."""
    folders = Path(shutil.copytree(converted("int4", 1, "layers"), tmp_path / "folders"))
    for path in folders.iterdir():
        if path.is_file():
            path.unlink()
    merge(MergeRequest(folders, tmp_path / "out", threads=1))
    assert_same(packed_of(tmp_path / "out"), packed_of(converted()))
    assert inspect_path(str(tmp_path / "out"))["activation"] == "squared ReLU without a gate"
    assert open_experts(tmp_path / "out").activation.function == "relu2"
    assert "sglang-kt" not in (tmp_path / "out/README.md").read_text()
    (folders / "config.json").write_text(json.dumps(config(LATENT)))
    merge(MergeRequest(folders, tmp_path / "beside", threads=1))
    wrong = config(None, model_type="qwen3_moe", hidden_size=LATENT, mlp_hidden_act=None)
    (folders / "config.json").write_text(json.dumps(wrong))
    with pytest.raises(CheckpointError, match="layer 0 have no gate projection, but those of this"):
        merge(MergeRequest(folders, tmp_path / "never", threads=1))
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("source", [False, True])
def test_reshard(source: bool, converted: Convert, model: Path, tmp_path: Path) -> None:
    request = ReshardRequest(
        converted("int4", 1), tmp_path / "out", 3, str(model) if source else None, threads=1
    )
    reshard(request)
    result = check(tmp_path / "out", model, "weights")
    assert result.passed, result.failures
    ups = {name: one for name, one in packed_of(tmp_path / "out").items() if "_up_" in name}
    fresh = packed_of(converted("int4", 3))
    assert_same(ups, {name: one for name, one in fresh.items() if "_up_" in name})
    if source:
        assert_same(packed_of(tmp_path / "out"), fresh)


def test_compare(converted: Convert) -> None:
    same = compare(converted("int4", 3), converted("int4", 3, "layers"))
    assert (same.verdict, same.matrices) == ("equal bytes", LAYERS * EXPERTS * 2)
    other = compare(converted("int4", 1), converted("int4", 3))
    assert other.verdict == "different" and other.expected
    assert other.layers[0]["different"] == {"up": 0, "down": EXPERTS}


# ---- verify ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["safetensors", "layers"])
def test_structure_and_weights(layout: str, converted: Convert, model: Path) -> None:
    for source, level in ((None, "structure"), (model, "weights")):
        result = check(converted("int4", 3, layout), source, level)
        assert result.passed, result.failures


def test_a_changed_byte(damaged: Convert, model: Path) -> None:
    output = damaged("int4", 3)
    place = place_of(output, "blk.1.ffn_up_exps.2.numa.1.weight")
    overwrite(place, bytes([bytes_of(place)[100] ^ 0x33]), 100)
    checks = {one.check for one in check(output, model).failures}
    assert "checksum" in checks
    failures = check(forget_manifest(output), model).failures
    assert {(one.layer, one.expert, one.projection, one.part) for one in failures} == {
        (1, 2, "up", 1)
    }


def test_experts_that_changed_places(damaged: Convert, model: Path) -> None:
    output = forget_manifest(damaged("int4", 3))
    swap(output, "blk.0.ffn_up_exps.0.numa.0", "blk.0.ffn_up_exps.3.numa.0")
    places = {(one.expert, one.projection) for one in check(output, model).failures}
    assert places == {(0, "up"), (3, "up")}


@pytest.mark.parametrize("manifest", [True, False])
def test_a_missing_matrix(manifest: bool, damaged: Convert, model: Path) -> None:
    output = damaged("int4", 1, "layers")
    for path in output.glob("_layer_1/_numa_0/INT4_up_2_*"):
        path.unlink()
    if not manifest:
        forget_manifest(output)
    missing = found(check(output), "structure", "missing tensor")
    assert {one["tensor"].rpartition(".")[0] for one in missing} == {"blk.1.ffn_up_exps.2.numa.0"}
    assert not inspect_path(str(output))["complete"]


def test_gates_that_do_not_belong_there(damaged: Convert, model: Path) -> None:
    """Copies of the up projections: KTransformers would compute with them."""
    output = damaged("int4", 1, "layers")
    for path in sorted(output.glob("_layer_0/_numa_0/INT4_up_*")):
        shutil.copy(path, path.with_name(path.name.replace("_up_", "_gate_")))
    extra = {one["tensor"] for one in found(check(output), "structure", "unexpected tensor")}
    assert extra == {
        f"blk.0.ffn_gate_exps.{expert}.numa.0.{kind}"
        for expert in range(EXPERTS)
        for kind in ("weight", "scale")
    }
    result = check(forget_manifest(output), model, "weights")
    assert "dimensions" in {failure.check for failure in result.failures}


def test_gates_that_were_removed(tmp_path: Path) -> None:
    """All of a model that has some: its manifest, its source or its config.json shows it."""
    from helpers.cli import write_model

    model = write_model(tmp_path / "model", layers=2, inner=INNER)
    convert(model, tmp_path / "out", layout="layers")
    for path in (tmp_path / "out").glob("_layer_*/_numa_0/INT4_gate_*"):
        path.unlink()
    missing = found(check(tmp_path / "out"), "structure", "missing tensor")
    assert {".ffn_gate_exps." in one["tensor"] for one in missing} == {True}
    output = forget_manifest(tmp_path / "out")
    (output / "config.json").write_bytes((model / "config.json").read_bytes())
    [first, *_] = found(check(output), "structure", "dimensions")
    assert "have no gate projection, but those of this model have one" in first["message"]
    result = check(output, model, "weights")
    assert {"missing tensor", "dimensions"} <= {failure.check for failure in result.failures}


@pytest.mark.parametrize("latent", [None, LATENT])
def test_layers(latent: int | None, tmp_path: Path) -> None:
    """With the model's router, on hidden states that may be wider than what the experts get."""
    model, _ = write_nemotron(tmp_path / "model", latent=latent)
    convert(model, tmp_path / "out", method="int8", numa=3, **ALLOWED)
    result = check(tmp_path / "out", model, "layers")
    assert result.passed, result.failures
    rows = result.facts["layers"]["layers"]
    assert [row["layer"] for row in rows] == list(range(LAYERS))
    for row in rows:
        assert row["routing"] == "router"
        assert 0.001 < row["quantization_error"] < 0.03
        assert (row["quantization_error_with_shared"] is None) == bool(latent)
    left_out = "layers, layers 0-1: shared experts are left out, because their inputs are"
    assert any(left_out in note for note in result.facts["notes"]) == bool(latent)
    manifest = read_json(tmp_path / "out/ktconv.json")
    assert "without a gate" in json.dumps(manifest["geometry"])


def test_experts_of_a_source_are_computed_without_a_gate(tmp_path: Path) -> None:
    """The reference of level layers against the formula: down(relu(up x)^2)."""
    model, matrices = write_nemotron(tmp_path / "model", latent=LATENT)
    checkpoint = open_checkpoint(model)
    [layer, *_] = checkpoint.layers
    x = np.random.default_rng(1).standard_normal((5, LATENT), np.float32)
    streams = SourceTensors(checkpoint).expert(layer, 2)
    inner = np.maximum(x @ matrices[0, 2, "up"].T, 0) ** 2
    expected = inner @ matrices[0, 2, "down"].T
    found = expert_output(streams, kernel_activation(layer.activation), x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_a_damaged_projection_changes_the_layer(damaged: Convert, model: Path) -> None:
    """Of up, whose damage must reach the layer's output."""
    output = forget_manifest(damaged("int8", 3))
    place = place_of(output, "blk.1.ffn_up_exps.2.numa.1.weight")
    overwrite(place, bytes(255 - one for one in bytes_of(place)))
    sound, broken = (
        check(one, model, "layers").facts["layers"]["layers"][1]["worst_expert"]
        for one in (converted_again(model, output.parent), output)
    )
    assert broken["expert"] == 2
    assert broken["error"] > 10 * sound["error"]


def converted_again(model: Path, room: Path) -> Path:
    convert(model, room / "sound", method="int8", numa=3, **ALLOWED)
    return room / "sound"


@pytest.mark.parametrize("activation", [{"hidden_act": "silu"}, {"model_type": "mixtral"}])
def test_a_config_of_gated_experts(
    activation: dict[str, str], damaged: Convert, tmp_path: Path
) -> None:
    """Beside weights without gates: no layer is computed with the wrong formula. The manifest has
    the activation that was converted."""
    output = damaged("int4", 1)
    content = json.loads((output / "config.json").read_text())
    content = {key: value for key, value in content.items() if key != "mlp_hidden_act"}
    (output / "config.json").write_text(json.dumps({**content, "model_type": None, **activation}))
    assert open_experts(output).activation.function == "relu2"
    with pytest.raises(CheckpointError, match=r"layer 0 of .* have no gate, but the activation"):
        open_experts(forget_manifest(output))


def test_another_model(damaged: Convert, tmp_path: Path) -> None:
    other, _ = write_nemotron(tmp_path / "other", "fp8 block", LATENT)
    checks = {failure.check for failure in check(damaged("int4", 1), other).failures}
    assert "changed source" in checks


# ---- outputs for GPUs ------------------------------------------------------------------


def gpu_output(directory: Path, names: tuple[str, ...]) -> Path:
    tensors = {
        f"{LIST}.{layer}.{BLOCK}.experts.{expert}.{name}.{kind}": np.zeros((2, 2), np.int32)
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
        for name in names
        for kind in ("weight_packed", "weight_scale", "weight_shape")
    }
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_cover_by_two_projections(model: Path, tmp_path: Path) -> None:
    """A checkpoint beside it has an expert whole if it has the projections that experts have."""
    write_expert_set(expert_set({0: [0], 1: [0]}), tmp_path / "set.json")
    without(model, tmp_path / "out", tmp_path / "set.json")
    for names, whole in ((("up_proj", "down_proj"), True), (("up_proj",), False)):
        beside = gpu_output(tmp_path / "-".join(names), names)
        result = verify(VerifyRequest(tmp_path / "out", None, "structure", beside=beside))
        checks = {failure.check for failure in result.failures}
        assert checks == ({"experts in both"} | (set() if whole else {"incomplete expert"}))


@pytest.mark.parametrize(
    ("kind", "latent", "stacked"), [("nvfp4, ModelOpt", LATENT, False), (None, None, True)]
)
def test_quantize_gpu(kind: str | None, latent: int | None, stacked: bool, tmp_path: Path) -> None:
    pytest.importorskip("llmcompressor")
    from helpers.gpu import experts_of, quantize

    model, matrices = write_nemotron(tmp_path / "model", kind, latent, stacked)
    output = tmp_path / "out"
    quantize(model, output, scheme="W8A16", group_size=128)
    found = experts_of(output)
    names = {
        f"{LIST}.{layer}.{BLOCK}.experts.{expert}.{proj}_proj": values
        for (layer, expert, proj), values in matrices.items()
    }
    assert found.keys() == names.keys()
    for name, values in names.items():
        assert np.abs(found[name] - values).max() <= 0.02 * np.abs(values).max()
    result = verify(VerifyRequest(output, str(model), "layers", tp=[1, 3], ep=[2], threads=2))
    assert result.passed, result.failures
    structure = verify(VerifyRequest(output, None, "structure", threads=2))
    assert structure.facts["mapping"]["slots"] == LAYERS * EXPERTS * 2 * 3
    assert inspect_path(str(output))["complete"]
    alone = forget_manifest(output)
    assert verify(VerifyRequest(alone, None, "structure", threads=2)).passed
    gone = f"{LIST}.1.{BLOCK}.experts.2.up_proj.weight_packed"
    shards = [path for path in output.glob("*.safetensors") if gone.encode() in path.read_bytes()]
    for path in shards:
        path.write_bytes(
            path.read_bytes().replace(gone.encode(), gone.replace("2.up", "2.xy").encode())
        )
    checks = {one.message for one in verify(VerifyRequest(alone, None, "structure")).failures}
    assert any("nothing fills w13 (w1) (weight_packed" in message for message in checks)


def test_bench(converted: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two matrices count as read, and as computed with."""
    monkeypatch.setattr("ktconv.bench.limits.read_size", lambda: 4 << 20)  # no figure is judged
    output = converted("int8", 3)
    words = ["bench", "--model", output, "--tokens", 1, "--threads", 1, "--seconds", 0.01]
    result = CliRunner().invoke(app, [*map(str, words), "--format", "json"])
    assert result.exit_code == 0, result.output
    [row, *_] = json.loads(result.stdout)["rows"]
    read = 2 * open_experts(output).expert_bytes  # two experts for the token
    assert read == 2 * sum(
        len(one.data)
        for name, one in packed_of(output).items()
        if name.startswith("blk.0.") and "_exps.0." in name
    )
    seconds = row["median_us"] / 1e6
    assert row["weight_gb_s"] == pytest.approx(read / seconds / 1e9, rel=1e-3)
    assert row["gops"] == pytest.approx(2 * 2 * 2 * LATENT * INNER / seconds / 1e9, rel=1e-3)


# ---- through transformers --------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(room: Path) -> Path:
    """A model of transformers' own class, with a tokenizer and layers of every kind."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    if not EXAMPLE.is_dir():
        pytest.skip("the example model is not here")
    settings = transformers.NemotronHConfig(
        vocab_size=read_json(EXAMPLE / "config.json")["vocab_size"],
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
        hidden_size=256, moe_latent_size=LATENT, moe_intermediate_size=128,
        moe_shared_expert_intermediate_size=128, n_routed_experts=4, num_experts_per_tok=2,
        intermediate_size=128, num_attention_heads=2, num_key_value_heads=2, head_dim=64,
        ssm_state_size=16, mamba_num_heads=4, mamba_head_dim=32, n_groups=1, chunk_size=16,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.logging.disable_progress_bar()
    model = transformers.NemotronHForCausalLM(settings).to(torch.bfloat16)
    model.save_pretrained(room / "saved")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EXAMPLE / name, room / "saved")
    return room / "saved"


def test_every_level_on_the_model(saved: Path, tmp_path: Path) -> None:
    convert(saved, tmp_path / "out", method="int8", **ALLOWED)
    request = VerifyRequest(tmp_path / "out", str(saved), "model", windows=1, threads=2)
    result = verify(request)
    assert result.passed, result.failures
    layers = result.facts["layers"]
    assert layers["states"] == "captured"
    assert [row["layer"] for row in layers["layers"]] == [1, 3]
    # Experts see latent states, from which the router's choice does not follow.
    assert {row["router_agreement"] for row in layers["layers"]} == {None}
    assert result.facts["model"]["kl_mean"] < 1e-4


def test_gptq(saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("llmcompressor")
    from ktconv.quantize.encoded.request import Request as EncodedRequest
    from ktconv.quantize.llm_compressor.run import quantize_gpu
    from ktconv.targets.encoded.target import Calibration
    from ktconv.targets.encoded.target import Options as EncodedOptions

    (tmp_path / "text.txt").write_text(" ".join(f"{n} boats and {n * 7} sacks" for n in range(900)))
    calibration = Calibration(str(tmp_path / "text.txt"), samples=8, max_seq_len=64)
    options = EncodedOptions(method="gptq", calibration=calibration, dampening=0.1)
    output = tmp_path / "out"
    quantize_gpu(
        EncodedRequest(str(saved), output, options, threads=1, self_test=False, device="cpu")
    )
    result = verify(VerifyRequest(output, str(saved), "model", windows=1, threads=2))
    assert result.passed, result.failures
    assert result.facts["mapping"]["slots"] == 2 * 4 * 2 * 3
    assert result.facts["model"]["loaded_by"] == "transformers"
