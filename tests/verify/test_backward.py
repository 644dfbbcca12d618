"""Matrices of backward passes in finished outputs: verify, merge, reshard, inspect, the runtime."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from helpers.backward import expected_backward
from helpers.cli import ktconv_done, write_model
from helpers.convert import assert_same, convert, read_json, read_model, source_matrices
from helpers.corrupt import bytes_of, check, forget_manifest, found, overwrite, place_of, swap
from helpers.paths import EXAMPLE

from ktconv.errors import CheckpointError, UsageError
from ktconv.formats import kt_path, parse_tensor_name
from ktconv.inspect.inspection import inspect_path
from ktconv.merge import Request as MergeRequest
from ktconv.merge import merge
from ktconv.plan.sizes import open_model
from ktconv.repack.reshard import Request as ReshardRequest
from ktconv.repack.reshard import reshard
from ktconv.runtime import MoELayer
from ktconv.source import ModelSource
from ktconv.targets.packed.weights import open_packed
from ktconv.verify import Request, verify

pytestmark = pytest.mark.slow

LAYERS, EXPERTS, INNER = 2, 3, 256  # hidden size 128
MATRICES = LAYERS * EXPERTS * 3
NAME = "blk.1.ffn_{}_bwd_exps.2.numa.{}.{}"
Convert = Callable[..., Path]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source") / "model"
    return write_model(directory, layers=LAYERS, experts=EXPERTS, inner=INNER)


@pytest.fixture
def made(source: Path, tmp_path: Path) -> Convert:
    """A new output with backward matrices, to be damaged."""

    def make(method: str = "int8", numa: int = 2, **options: str | bool) -> Path:
        output = tmp_path / f"made-{len(list(tmp_path.iterdir()))}"
        convert(source, output, method=method, numa=numa, save_backward=True, **options)
        return output

    return make


def record_checksum(output: Path, name: str) -> None:
    """As a writer would that packed these bytes itself."""
    path = output / "ktconv.json"
    manifest = json.loads(path.read_text())
    digest = blake3(bytes_of(place_of(output, name))).hexdigest()
    for unit in manifest["units"].values():
        if name in unit["tensors"]:
            unit["tensors"][name]["blake3"] = digest
    path.write_text(json.dumps(manifest))


def flip(output: Path, name: str, at: int) -> None:
    """One code by one level."""
    byte = bytes_of(place_of(output, name))[at]
    overwrite(place_of(output, name), bytes([byte ^ 1]), at)


# ---- sound outputs ---------------------------------------------------------------------


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize(
    ("method", "numa", "options"),
    [
        ("int4", 1, {}),
        ("int4", 2, {"layout": "layers", "compat": True}),
        ("int8", 4, {"scale": "amax"}),
        ("int8", 2, {"importance": "weights"}),
    ],
)
def test_a_sound_output_passes(
    method: str,
    numa: int,
    options: dict[str, str | bool],
    manifest: bool,
    source: Path,
    made: Convert,
) -> None:
    output = made(method, numa, **options)
    if not manifest and "importance" not in options:
        forget_manifest(output)
    result = check(output, source)
    assert result.passed, result.failures
    weights, structure = result.facts["weights"], result.facts["structure"]
    assert structure["tensors_found"] == structure["tensors_expected"]
    assert weights["matrices"] == weights["backward"]["matrices"] == MATRICES
    assert 0.4 < weights["backward"]["max_error_steps"] <= weights["bound_steps"]
    assert check(output).passed


def test_its_figures_are_apart_from_those_of_forward_matrices(source: Path, made: Convert) -> None:
    output, alone = made(), made()
    shutil.rmtree(alone)
    convert(source, alone, method="int8", numa=2)
    both, forward = (check(one, source).facts["weights"] for one in (output, alone))
    backward = both.pop("backward")
    assert both == forward
    assert 0 < backward["relative_rms_error"] < 0.01
    text = ktconv_done("verify", output, "--source", source, "--level", "weights")
    assert f"{MATRICES} backward matrices, relative RMS error" in text


def test_a_sample_has_those_of_its_experts(source: Path, made: Convert) -> None:
    result = verify(Request(made(), str(source), "weights", sample=0.34))
    assert result.passed
    weights = result.facts["weights"]
    assert weights["matrices"] == weights["backward"]["matrices"] == LAYERS * 3


# ---- damage ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["safetensors", "layers"])
@pytest.mark.parametrize("proj", ["gate", "up", "down"])
def test_a_flipped_code(proj: str, layout: str, source: Path, made: Convert) -> None:
    """By its checksum; by its value where the manifest has the checksum of the damage, or none."""
    output, name = made(layout=layout), NAME.format(proj, 1, "weight")
    flip(output, name, 777)
    assert found(check(output), "structure", "checksum")[0]["tensor"] == name
    record_checksum(output, name)
    failure = found(check(output, source), "weights", "element")[0]
    assert failure["tensor"] == name
    assert failure["projection"] == f"{proj}_bwd" and failure["steps"] > 0.6
    forget_manifest(output)
    assert found(check(output, source), "weights", "element")[0]["tensor"] == name


@pytest.mark.parametrize("proj", ["gate", "up", "down"])
def test_the_element_that_is_named(proj: str, source: Path, made: Convert) -> None:
    """Row and column of the whole transposed matrix."""
    output = forget_manifest(made("int8", 2))
    name = NAME.format(proj, 1, "weight")
    flip(output, name, 0)  # of row 0 and column 0 of part 1
    failure = found(check(output, source), "weights", "element")[0]
    row, column = (INNER // 2, 0) if proj == "down" else (0, INNER // 2)
    assert (failure["row"], failure["column"]) == (row, column)
    value = source_matrices(source)[1, 2, proj].T[row, column]  # type: ignore[index]
    assert failure["source_value"] == pytest.approx(float(value))


def test_a_scale_of_another_rule(source: Path, made: Convert) -> None:
    output, name = made(), NAME.format("gate", 0, "scale")
    scale = np.frombuffer(bytes_of(place_of(output, name)), np.float32).copy()
    scale[5] = np.nextafter(scale[5], np.float32(1))
    overwrite(place_of(output, name), scale.tobytes())
    record_checksum(output, name)
    failure = found(check(output, source), "weights", "scale")[0]
    assert (failure["tensor"], failure["row"]) == (name, 5)


def test_matrices_of_another_expert(source: Path, made: Convert) -> None:
    output = forget_manifest(made())
    swap(output, "blk.1.ffn_up_bwd_exps.0.numa.0", "blk.1.ffn_up_bwd_exps.1.numa.0")
    names = {one["tensor"] for one in found(check(output, source), "weights", "element")}
    assert names == {f"blk.1.ffn_up_bwd_exps.{one}.numa.0.weight" for one in (0, 1)}


def test_a_recorded_error_that_is_not_the_measured_one(source: Path, made: Convert) -> None:
    output, name = made(), NAME.format("up", 0, "weight")
    manifest = read_json(output / "ktconv.json")
    manifest["units"]["layer-00001"]["tensors"][name]["relative_rms_error"] *= 2
    (output / "ktconv.json").write_text(json.dumps(manifest))
    assert found(check(output, source), "weights", "manifest")[0]["tensor"] == name


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("with_source", [True, False])
def test_a_lost_file(manifest: bool, with_source: bool, source: Path, made: Convert) -> None:
    output, name = made(layout="layers"), NAME.format("down", 1, "scale")
    if not manifest:
        forget_manifest(output)
    place_of(output, name).file.unlink()
    result = check(output, source if with_source else None, "structure")
    assert name in {one.get("tensor") for one in found(result, "structure", "missing tensor")}
    facts = inspect_path(str(output))
    assert not facts["complete"] and facts["first_missing"] == name
    with pytest.raises(CheckpointError, match="does not contain _layer_1/_numa_1/INT8_down_bwd_2"):
        merge(MergeRequest(output, output.parent / "merged"))


def test_all_lost(source: Path, made: Convert) -> None:
    """The manifest tells that there were some."""
    output = made(layout="layers")
    for file in output.rglob("*_bwd_*.kt"):
        file.unlink()
    assert found(check(output, source, "structure"), "structure", "missing tensor")
    with pytest.raises(CheckpointError, match="contains no backward matrices, but"):
        merge(MergeRequest(output, output.parent / "merged"))
    with pytest.raises(CheckpointError, match="contains no backward matrices, but"):
        reshard(ReshardRequest(output, output.parent / "cut", 4))


def test_a_scale_of_a_wrong_size(source: Path, made: Convert) -> None:
    output = forget_manifest(made("int8", 2, layout="layers"))
    file = place_of(output, NAME.format("up", 0, "scale")).file
    file.rename(file.with_name(file.name.replace("512Byte", "1024Byte")))
    with file.with_name(file.name.replace("512Byte", "1024Byte")).open("ab") as longer:
        longer.write(bytes(512))
    assert found(check(output, source, "structure"), "structure", "wrong shape")
    assert inspect_path(str(output))["wrong_sizes"] == 1


# ---- merge and reshard -----------------------------------------------------------------


def test_merged(source: Path, made: Convert) -> None:
    folders, shards = made("int4", 2, layout="layers"), made("int4", 2)
    output = folders.parent / "merged"
    merge(MergeRequest(folders, output, source=str(source)))
    assert_same(read_model(output), read_model(shards))
    result = check(output, source)
    assert result.passed and result.facts["weights"]["backward"]["matrices"] == MATRICES
    assert read_json(output / "ktconv.json")["options"]["save_backward"] is True
    flip(output, NAME.format("gate", 0, "weight"), 3)
    record_checksum(output, NAME.format("gate", 0, "weight"))
    assert found(check(output, source), "weights", "element")


@pytest.mark.parametrize("method", ["int4", "int8"])
def test_cut_anew(method: str, source: Path, made: Convert) -> None:
    """gate_bwd and up_bwd keep the scales of the one part that they were in, as down does."""
    output = made(method, 1)
    once, twice = output.parent / "two", output.parent / "four"
    reshard(ReshardRequest(output, once, 2))
    result = check(once, source)
    assert result.passed, result.failures
    assert result.facts["weights"]["backward"]["matrices"] == MATRICES
    if method == "int8":  # of which a part may have 64 columns
        reshard(ReshardRequest(once, twice, 4))
        assert check(twice, source).passed
    name = NAME.format("up", 1, "scale")
    scale = np.frombuffer(bytes_of(place_of(once, name)), np.float32) * np.float32(0.99)
    overwrite(place_of(once, name), scale.tobytes())
    record_checksum(once, name)
    assert found(check(once, source), "weights", "scale")[0]["tensor"] == name


def test_cut_anew_from_the_source(source: Path, made: Convert) -> None:
    output, fresh = made("int8", 1), made("int8", 4)
    target = output.parent / "cut"
    reshard(ReshardRequest(output, target, 4, source=str(source)))
    assert_same(read_model(target), read_model(fresh))


# ---- written by another tool -----------------------------------------------------------


def add_foreign(output: Path, source: Path, method: str, numa: int) -> None:
    """What kt-kernel adds: scales by amax, of values in bf16."""
    stored = expected_backward(source_matrices(source), method, numa, compat=True)
    for name, tensor in stored.items():
        key = parse_tensor_name(name)
        assert key is not None
        path = kt_path(
            method.upper(), key.layer, key.proj, key.expert, key.part, key.kind, len(tensor.data)
        )
        (output / path).write_bytes(tensor.data)


@pytest.mark.parametrize("merged", [False, True])
def test_matrices_beside_forward_ones_by_search(merged: bool, source: Path, tmp_path: Path) -> None:
    """Their own scales tell by which rule they were made."""
    output = tmp_path / "folders"
    convert(source, output, method="int8", numa=2, layout="layers")
    add_foreign(output, source, "int8", 2)
    if merged:
        merge(MergeRequest(output, tmp_path / "merged", source=str(source)))
        output = tmp_path / "merged"
    else:
        forget_manifest(output)
    result = check(output, source)
    assert result.passed, result.failures
    assert result.facts["weights"]["backward"]["matrices"] == MATRICES
    name = NAME.format("down", 0, "weight")
    flip(output, name, 9)
    assert {one.tensor for one in check(output, source).failures} == {name}


def test_matrices_that_a_manifest_does_not_know(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "folders"
    convert(source, output, method="int8", numa=2, layout="layers")
    add_foreign(output, source, "int8", 2)
    assert found(check(output, source, "structure"), "structure", "unexpected tensor")


# ---- readers of forward passes ---------------------------------------------------------


@pytest.mark.usefixtures("tiles")
def test_forward_passes_do_not_read_them(source: Path, made: Convert, tmp_path: Path) -> None:
    output, alone = made("int4", 2), tmp_path / "alone"
    convert(source, alone, method="int4", numa=2)
    x = np.random.default_rng(1).standard_normal((5, 128)).astype(np.float32)
    ids = np.array([[0, 1], [2, 0], [1, 2], [0, 2], [1, 0]])
    weights = np.full(ids.shape, 0.5, np.float32)
    for packed in open_packed(output).tensors.items():
        if packed[0].proj.endswith("_bwd"):
            overwrite(packed[1], bytes(64))
    both, forward = (MoELayer.load(one, 1)(x, ids, weights) for one in (output, alone))
    assert np.array_equal(both, forward)


def test_inspect(made: Convert) -> None:
    facts = inspect_path(str(made("int4", 1)))
    assert facts["backward"] is True and facts["complete"]
    assert "backward" in ktconv_done("inspect", made("int4", 1))


@pytest.mark.usefixtures("tiles")
def test_level_layers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    convert(EXAMPLE, tmp_path / "out", save_backward=True)
    result = check(tmp_path / "out", EXAMPLE, "layers")
    assert result.passed and result.facts["weights"]["backward"]


def test_folding_beside_another_tools_matrices(source: Path, tmp_path: Path) -> None:
    """They are of weights that are not folded, and belong to other forward matrices."""
    output = tmp_path / "folders"
    convert(source, output, method="int8", numa=1, layout="layers", fold="up-down")
    add_foreign(output, source, "int8", 1)
    merge(MergeRequest(output, tmp_path / "merged", source=str(source)))
    assert found(check(tmp_path / "merged", source), "structure", "unexpected tensor")
    with pytest.raises(UsageError, match="--save-backward cannot be combined with --fold"):
        reshard(ReshardRequest(output, tmp_path / "cut", 2, source=str(source)))


def test_plans_of_servers_do_not_count_them(source: Path, made: Convert, tmp_path: Path) -> None:
    convert(source, tmp_path / "alone", method="int8", numa=2)
    both, forward = (open_model(ModelSource(one)) for one in (made(), tmp_path / "alone"))
    assert both.part_bytes == forward.part_bytes
    assert both.count == forward.count == LAYERS * EXPERTS
