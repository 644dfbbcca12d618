"""`--save-backward`: the bytes of transposed matrices, and what the option means beside others."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.backward import expected_backward
from helpers.cli import contents, done, refused, run, words, write_model
from helpers.convert import (
    all_files,
    assert_same,
    assert_shards,
    convert,
    expected_experts,
    kt_files_of,
    matrices_of,
    read_folders,
    read_json,
    read_model,
    source_matrices,
)
from helpers.disk_calls import Commands
from helpers.encoded import encoded_model, halves
from helpers.families import bf16, fused, numbered, random_weights, simple_config, write_checkpoint
from helpers.second_moments import record

from ktconv.conversion.pipeline import Observer
from ktconv.errors import CheckpointError, OutputError, UsageError
from ktconv.formats import parse_tensor_name
from ktconv.quantize.packed.backward import BackwardTask
from ktconv.quantize.packed.run import QuantizeCpu, Request, prepare
from ktconv.source import open_checkpoint
from ktconv.source.reading import transposed as panels
from ktconv.source.reading.buffers import Buffers
from ktconv.targets.expert_sets import expert_set, write_expert_set
from ktconv.targets.packed.target import Options, options_of_record
from ktconv.writer.staging import ShardStaging

pytestmark = pytest.mark.slow

LAYERS, EXPERTS, INNER = 2, 2, 512


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hidden size 128."""
    directory = tmp_path_factory.mktemp("source") / "model"
    return write_model(directory, layers=LAYERS, experts=EXPERTS, inner=INNER)


@pytest.fixture(scope="module")
def output(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("backward") / "output"
    convert(model, directory, numa=2, save_backward=True)
    return directory


def backward_of_model(directory: Path) -> dict[str, Any]:
    return {name: one for name, one in read_model(directory).items() if "_bwd_exps." in name}


# ---- bytes -----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["safetensors", "layers"])
@pytest.mark.parametrize(
    ("method", "numa", "rule"),
    [("int4", 1, "search"), ("int4", 4, "amax"), ("int8", 2, "search"), ("int8", 8, "amax")],
)
def test_bytes_are_those_of_numpy(
    model: Path, tmp_path: Path, method: str, numa: int, rule: Any, layout: str
) -> None:
    options = {"method": method, "numa": numa, "layout": layout, "scale": rule}
    convert(model, tmp_path / "out", save_backward=True, **options)
    truth = source_matrices(model)
    expected = expected_experts(truth, method, numa, scale=rule)
    expected |= expected_backward(truth, method, numa, scale=rule)
    assert len(expected) == LAYERS * EXPERTS * numa * 6 * 2
    if layout == "layers":
        assert_same(read_folders(tmp_path / "out"), kt_files_of(expected, method))
        return
    assert_shards(tmp_path / "out", method, numa)
    found = read_model(tmp_path / "out")
    assert_same({name: one for name, one in found.items() if "_exps." in name}, expected)


@pytest.mark.parametrize(("panel", "step"), [(1, 1), (200_000, 70_000), (300_000, 1 << 30)])
def test_bytes_do_not_depend_on_panels(
    model: Path,
    output: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    panel: int,
    step: int,
) -> None:
    monkeypatch.setattr(panels, "PANEL_BYTES", panel)
    monkeypatch.setattr(panels, "STEP_BYTES", step)
    convert(model, tmp_path / "out", numa=2, save_backward=True, threads=3)
    assert_same(all_files(tmp_path / "out"), all_files(output))


def test_a_width_that_panels_do_not_divide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """INT8 takes widths that are odd multiples of 64."""
    monkeypatch.setattr(panels, "PANEL_BYTES", 1)
    weights = random_weights(192, 320, 1, seed=4)
    config = simple_config(hidden_size=192, moe_intermediate_size=320, num_experts=1)
    tensors = numbered("model.layers.0.mlp.experts", weights)
    model = write_checkpoint(tmp_path / "model", tensors, config)
    convert(model, tmp_path / "out", method="int8", numa=5, save_backward=True)
    expected = expected_backward(matrices_of({0: weights}), "int8", 5)
    assert_same(backward_of_model(tmp_path / "out"), expected)


@pytest.mark.parametrize(
    "kind",
    [
        "fp8 block",
        "gptq by activation",
        "awq",
        "mxfp4, Quark",
        "mxint4, AutoRound",
        "nvfp4, ModelOpt",
    ],
)
def test_encoded_sources(kind: str, tmp_path: Path) -> None:
    model, weights, _ = encoded_model(tmp_path / "model", kind)
    convert(model, tmp_path / "out", method="int8", numa=2, save_backward=True)
    expected = expected_backward(matrices_of({0: weights}), "int8", 2)
    assert_same(backward_of_model(tmp_path / "out"), expected)


@pytest.mark.parametrize("compat", [False, True])
def test_fused_source(compat: bool, tmp_path: Path) -> None:
    """Stored [in, out], in float16, which the reference converter rounds to bf16 first."""
    weights = random_weights(128, 256, 2, seed=8)
    weights = type(weights)(*(one.astype(np.float16).astype(np.float32) for one in weights))
    tensors = fused("model.layers.0.mlp.experts", weights, True, encode=halves)
    config = simple_config(moe_intermediate_size=256, num_experts=2)
    model = write_checkpoint(tmp_path / "model", tensors, config)
    convert(model, tmp_path / "out", numa=2, save_backward=True, compat=compat)
    stored = source_matrices(model)
    assert_same(backward_of_model(tmp_path / "out"), expected_backward(stored, "int4", 2, compat))


def test_integers_that_forward_matrices_keep(tmp_path: Path) -> None:
    """Their scales belong to rows, which are columns here: transposes are quantized anew."""
    model, weights, _ = encoded_model(tmp_path / "model", "int8 channel")
    convert(model, tmp_path / "out", method="int8", save_backward=True)
    expected = expected_backward(matrices_of({0: weights}), "int8", 1)
    assert_same(backward_of_model(tmp_path / "out"), expected)
    records = read_json(tmp_path / "out" / "ktconv.json")["units"]["layer-00000"]["tensors"]
    assert "lossless_rows" in records["blk.0.ffn_up_exps.0.numa.0.weight"]
    assert "lossless_rows" not in records["blk.0.ffn_up_bwd_exps.0.numa.0.weight"]


# ---- beside other options --------------------------------------------------------------


def test_forward_matrices_do_not_change(model: Path, output: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "out", numa=2)
    alone, both = read_model(tmp_path / "out"), read_model(output)
    assert_same({name: one for name, one in both.items() if "_bwd_exps." not in name}, alone)


def test_importance_changes_forward_scales_only(model: Path, output: Path, tmp_path: Path) -> None:
    """All columns of a transposed row have the importance of the one input that the row is."""
    convert(model, tmp_path / "out", numa=2, save_backward=True, importance="weights")
    here, plain = read_model(tmp_path / "out"), read_model(output)
    assert backward_of_model(tmp_path / "out") == backward_of_model(output)
    assert any(here[name] != plain[name] for name in here if "_down_exps." in name)
    request = Request(str(model), tmp_path / "x", Options(save_backward=True), importance="weights")
    assert any("--importance knows inputs" in note for note in prepare(request).plan.notes)


def test_calibrated_codes_are_those_of_forward_matrices(
    model: Path, output: Path, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    rng = np.random.default_rng(3)

    def inputs(layer: Any, expert: int) -> Any:
        sizes = (layer.hidden_size, layer.intermediate_size)
        return tuple(rng.standard_normal((700, size)).astype(np.float32) for size in sizes)

    moments = record(tmp_path / "moments", open_checkpoint(model), inputs=inputs)
    convert(model, tmp_path / "out", numa=2, save_backward=True, calibrate=moments)
    assert backward_of_model(tmp_path / "out") == backward_of_model(output)
    records = read_json(tmp_path / "out" / "ktconv.json")["units"]["layer-00000"]["tensors"]
    assert records["blk.0.ffn_up_exps.0.numa.0.weight"]["codes"] == "gptq"
    assert "codes" not in records["blk.0.ffn_up_bwd_exps.0.numa.0.weight"]


def test_folding_is_refused(model: Path, tmp_path: Path) -> None:
    result = run(model, tmp_path / "out", "--save-backward", "--fold", "up-down")
    refused(result, 2, "--save-backward cannot be combined with --fold", "adapter")
    assert not (tmp_path / "out").exists()


def test_excluded_experts_have_none(model: Path, tmp_path: Path) -> None:
    write_expert_set(expert_set({0: [1]}), tmp_path / "set.json")
    done(
        model, tmp_path / "out", "--save-backward", "--exclude-experts", tmp_path / "set.json",
        "--allow-partial",
    )  # fmt: skip
    found = map(parse_tensor_name, backward_of_model(tmp_path / "out"))
    assert {(one.layer, one.expert) for one in found if one} == {(0, 0), (1, 0), (1, 1)}


def test_experts_without_gates(tmp_path: Path) -> None:
    weights = random_weights(128, 256, 2, seed=8)
    tensors = {
        name.replace(".mlp.", ".mixer."): one
        for name, one in numbered("backbone.layers.0.mlp.experts", weights).items()
        if "gate_proj" not in name
    }
    config = simple_config(
        model_type="nemotron_h", moe_intermediate_size=256, num_experts=2,
        num_hidden_layers=1, hybrid_override_pattern="E", mlp_hidden_act="relu2",
    )  # fmt: skip
    model = write_checkpoint(tmp_path / "model", tensors, config)
    convert(
        model, tmp_path / "out", method="int8", save_backward=True, allow_activation_mismatch=True
    )
    expected = expected_backward(matrices_of({0: weights}), "int8", 1)
    without = {name: one for name, one in expected.items() if "_gate_" not in name}
    assert_same(backward_of_model(tmp_path / "out"), without)


# ---- plans, records, resuming ----------------------------------------------------------


@pytest.mark.parametrize("layout", ["safetensors", "layers"])
def test_a_plan_counts_them(model: Path, tmp_path: Path, layout: str) -> None:
    options = ("--save-backward", f"--layout={layout}")
    plan = json.loads(done(model, tmp_path / "out", "--dry-run", "--json", *options))
    without = json.loads(done(model, tmp_path / "out", "--dry-run", "--json", f"--layout={layout}"))
    assert plan["backward"] is True and "backward" not in without
    assert plan["output_bytes"] > 1.8 * without["output_bytes"]
    more = plan["output_bytes"] - without["output_bytes"]
    assert plan["disk_needed_bytes"] >= without["disk_needed_bytes"] + more
    assert plan["peak_memory_bytes"] > without["peak_memory_bytes"]
    assert any("backward matrices are quantized from the source" in one for one in plan["notes"])
    assert "backward matrices too" in done(model, tmp_path / "out", "--dry-run", *options)
    report = json.loads(done(model, tmp_path / "out", "--json", *options))
    files = [*(tmp_path / "out").rglob("*.safetensors"), *(tmp_path / "out").rglob("*.kt")]
    assert sum(file.stat().st_size for file in files) == plan["output_bytes"]
    assert report["source_bytes_read"] == plan["source_bytes"]


def test_memory_of_large_matrices_is_that_of_a_panel() -> None:
    for rows, cols in ((14336, 4096), (4096, 14336), (28672, 8192), (64, 1 << 20)):
        most = panels.PANEL_BYTES + max(panels.STEP_BYTES, 4 * 128 * rows)
        assert 0 < panels.transposed_bytes(rows, cols) <= most


def test_manifest_and_card(output: Path) -> None:
    manifest = read_json(output / "ktconv.json")
    assert manifest["options"]["save_backward"] is True
    assert options_of_record(manifest["options"]) == Options(numa=2, save_backward=True)
    for unit in ("layer-00000", "layer-00001"):
        records = manifest["units"][unit]["tensors"]
        backward = {name: one for name, one in records.items() if "_bwd_exps." in name}
        assert len(backward) == EXPERTS * 2 * 3 * 2
        weights = [one for name, one in backward.items() if name.endswith("weight")]
        assert all(0 < one["relative_rms_error"] < 0.2 for one in weights)
        assert all(len(one["blake3"]) == 64 for one in backward.values())
    card = (output / "README.md").read_text()
    assert "ffn_up_bwd_exps" in card and "--save-backward" in card
    assert options_of_record({**manifest["options"], "fold": "up-down"}) is None


@pytest.mark.parametrize("layout", ["safetensors", "layers"])
@pytest.mark.parametrize("call", [25, 60])
def test_resumed_after_a_kill(
    commands: Commands, model: Path, tmp_path: Path, call: int, layout: str
) -> None:
    options = ("--save-backward", f"--layout={layout}", "--threads=1")
    done(model, tmp_path / "clean", *options)
    output = tmp_path / "output"
    ended = commands.run(words(model, output, *options), call)
    assert ended.returncode == -signal.SIGKILL
    refused(run(model, output, *options[1:]), 2, "was begun with other settings", "save_backward")
    done(model, output, *options)
    assert contents(output) == contents(tmp_path / "clean")


def test_neither_added_nor_removed_later(model: Path, output: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"other settings.*save_backward"):
        convert(model, output, numa=2)
    convert(model, tmp_path / "out", numa=2)
    with pytest.raises(OutputError, match=r"other settings.*save_backward"):
        convert(model, tmp_path / "out", numa=2, save_backward=True)


# ---- bad sources -----------------------------------------------------------------------


def test_a_value_that_is_not_finite_is_named(tmp_path: Path) -> None:
    """By its place in the source, also where the transpose finds it."""
    tensors = numbered("model.layers.0.mlp.experts", random_weights(128, 256, 1, seed=8))
    values = random_weights(128, 256, 1, seed=8).down[0]
    values[77, 200] = np.inf
    tensors["model.layers.0.mlp.experts.0.down_proj.weight"] = bf16(values)
    config = simple_config(moe_intermediate_size=256, num_experts=1)
    model = write_checkpoint(tmp_path / "model", tensors, config)
    options = Options(numa=2, save_backward=True)
    preflight = prepare(Request(str(model), tmp_path / "out", options, threads=1))
    job = QuantizeCpu(preflight, Observer())
    (unit,) = preflight.plan.layers
    (task,) = (
        task
        for task in job.expert_tasks(unit, job.reader())
        if isinstance(task, BackwardTask) and task.proj == "down"
    )
    (tmp_path / "staging").mkdir()
    staging = ShardStaging(unit.shards, tmp_path / "staging", tmp_path)
    with pytest.raises(CheckpointError, match=r"NaN or an infinity at \[77, 200\]"):
        task.run(staging, Buffers(job.buffers()), lambda _: None)
    staging.abandon()


def test_options_exclude_one_another() -> None:
    with pytest.raises(UsageError, match="--save-backward cannot be combined with --fold"):
        Options(fold="up-down", save_backward=True)
