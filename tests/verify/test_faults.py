"""Planted faults: each must be found, by the level that is there to find it."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import reference
from helpers.convert import convert, read_header, read_json
from helpers.corrupt import bytes_of, check, forget_manifest, found, overwrite, place_of, swap
from helpers.families import bf16, fused, numbered, random_weights, simple_config, write_checkpoint
from helpers.reference import Choice

from ktconv import native
from ktconv.formats import FORMATS
from ktconv.repack.reshard import Request as ReshardRequest
from ktconv.repack.reshard import reshard
from ktconv.targets.packed.weights import open_packed
from ktconv.verify import Request, reading, verify
from ktconv.verify.command import in_json

pytestmark = pytest.mark.slow

Convert = Callable[..., Path]
METHODS = ["int4", "int8"]


# ---- nothing is wrong ------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("numa", [1, 2])
@pytest.mark.parametrize("layout", ["safetensors", "layers"])
def test_a_sound_cpu_output_passes(
    method: str, numa: int, layout: str, model: Path, converted: Convert
) -> None:
    result = check(converted(method, numa, layout), model)
    assert result.passed and not result.failures
    facts = result.facts
    assert facts["structure"]["tensors_found"] == facts["structure"]["tensors_expected"]
    assert facts["structure"]["checksums"] == facts["structure"]["tensors_found"]
    weights = facts["weights"]
    assert weights["matrices"] == 2 * 3 * 3
    assert weights["elements"] == 2 * 3 * 3 * 256 * 256
    assert 0.45 < weights["max_error_steps"] <= weights["bound_steps"]
    assert weights["cosine"] > 0.98
    assert facts["structure"]["copied_tensors"] == (3 if layout == "safetensors" else 0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", ["safetensors", "layers"])
def test_sound_without_manifest(method: str, layout: str, model: Path, damaged: Convert) -> None:
    result = check(forget_manifest(damaged(method, 2, layout)), model)
    assert result.passed
    assert result.facts["numa"] == 2 and result.facts["method"] == method
    assert any(
        "has no ktconv.json: there are no checksums" in note for note in result.facts["notes"]
    )


def test_figures_are_those_of_numpy(model: Path, converted: Convert) -> None:
    """One matrix by the readable reference."""
    output = converted("int8", 1)
    facts = check(output, model).facts["weights"]
    weights = random_weights(256, 256, 3, seed=1)
    source = weights.up[2]
    codes, scale = reference.quantize(FORMATS["int8"], source, Choice("search"))
    values = reference.dequantize(FORMATS["int8"], codes, scale).astype(np.float64)
    exact = source.astype(np.float64)  # norms in float32 differ from machine to machine
    error = np.linalg.norm(exact - values) / np.linalg.norm(exact)
    cosine = (exact * values).sum() / np.linalg.norm(exact) / np.linalg.norm(values)
    mine = [
        one
        for one in facts["worst"]
        if (one["layer"], one["expert"], one["projection"]) == (1, 2, "up")
    ]
    assert mine and mine[0]["relative_rms_error"] == pytest.approx(error, rel=1e-5)
    assert mine[0]["cosine"] == pytest.approx(cosine, rel=1e-6)
    assert mine[0]["zero_share"] == np.mean(codes == 0)


# ---- structure -------------------------------------------------------------------------


def test_one_bit_of_a_weight_by_its_checksum(model: Path, damaged: Convert) -> None:
    output = damaged()
    name = "blk.1.ffn_up_exps.2.numa.1.weight"
    place = place_of(output, name)
    overwrite(place, bytes([bytes_of(place)[77] ^ 1]), 77)
    assert found(check(output), "structure", "checksum")[0]["tensor"] == name


def test_one_bit_of_a_copied_tensor(model: Path, damaged: Convert) -> None:
    output = damaged()
    ref = open_packed(output).others["blk.1.input_layernorm.weight"]
    overwrite(ref, b"\xff", 5)
    result = check(output, model, "structure")
    assert found(result, "structure", "copied tensor")[0]["tensor"] == ref.name
    assert found(result, "structure", "checksum")


def test_one_byte_of_any_piece_of_a_copied_tensor(
    model: Path, damaged: Convert, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large tensors are read piece by piece; without checksums only the source tells."""
    monkeypatch.setattr(reading, "COPY_BYTES", 128)
    output = forget_manifest(damaged())
    ref = open_packed(output).others["blk.1.input_layernorm.weight"]
    place = ref
    right = bytes_of(place)
    for at in (0, 300, ref.nbytes - 1):
        overwrite(place, bytes([right[at] ^ 4]), at)
        result = check(output, model, "structure")
        assert found(result, "structure", "copied tensor")[0]["tensor"] == ref.name
        overwrite(place, right)
    assert check(output, model, "structure").passed


def test_one_bit_of_a_header(damaged: Convert) -> None:
    output = damaged()
    shard = min(output.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[data.index(b"ffn_gate") + 4] ^= 1  # "ffn_fate": sound JSON, another name
    shard.write_bytes(data)
    result = check(output)
    assert found(result, "structure", "changed file")[0]["file"] == shard.name
    assert found(result, "structure", "missing tensor")
    assert found(result, "structure", "unexpected tensor")


def test_output_with_a_truncated_shard(model: Path, damaged: Convert) -> None:
    output = damaged()
    shard = max(output.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    os.truncate(shard, shard.stat().st_size - 1)
    result = check(output, model)
    assert found(result, "structure", "damaged file")[0]["file"] == shard.name
    assert found(result, "structure", "missing tensor")


def test_missing_shard(model: Path, damaged: Convert) -> None:
    output = damaged()
    shard = min(output.glob("*.safetensors"))
    shard.unlink()
    assert found(check(output, model), "structure", "changed file")[0]["file"] == shard.name


def test_truncated_kt_file(model: Path, damaged: Convert) -> None:
    output = damaged("int4", 2, "layers")
    file = next(output.glob("_layer_1/_numa_1/*_up_2_*quant_.kt"))
    os.truncate(file, file.stat().st_size - 4)
    name = file.relative_to(output).as_posix()
    assert found(check(output, model), "structure", "damaged file")[0]["file"] == name


@pytest.mark.parametrize("manifest", [True, False])
def test_output_without_a_part(manifest: bool, model: Path, damaged: Convert) -> None:
    output = damaged("int4", 2, "layers")
    shutil.rmtree(output / "_layer_1/_numa_1")
    if not manifest:
        forget_manifest(output)
    missing = found(check(output, model), "structure", "missing tensor")
    assert {failure["part"] for failure in missing} == {1}
    assert {failure["layer"] for failure in missing} == {1}
    assert len(missing) == 3 * 3 * 2


def test_tensor_twice(damaged: Convert) -> None:
    """A shard left over from another run: loaders would take whichever they read last."""
    output = damaged()
    shard = min(output.glob("*.safetensors"))
    shutil.copy(shard, output / "model-zz.safetensors")
    assert found(check(output), "structure", "double tensor")[0]["file"] == "model-zz.safetensors"


def test_index_that_names_a_wrong_shard(damaged: Convert) -> None:
    output = damaged()
    path = output / "model.safetensors.index.json"
    index = read_json(path)
    name = "blk.0.ffn_down_exps.1.numa.0.scale"
    index["weight_map"][name] = max(index["weight_map"].values())
    path.write_text(json.dumps(index))
    assert found(check(output), "structure", "index")[0]["tensor"] == name


@pytest.mark.parametrize("change", ["total_size", "no total_size", "extra", "lost", "garbage"])
def test_output_with_a_damaged_index(change: str, damaged: Convert) -> None:
    output = damaged()
    path = output / "model.safetensors.index.json"
    index = read_json(path)
    if change == "total_size":
        index["metadata"]["total_size"] += 1
    elif change == "no total_size":
        del index["metadata"]
    elif change == "extra":
        index["weight_map"]["blk.9.ffn_up_exps.0.numa.0.weight"] = "model-00009.safetensors"
    elif change == "lost":
        del index["weight_map"]["embed_tokens.weight"]
    path.write_text("{" if change == "garbage" else json.dumps(index))
    assert found(check(output), "structure", "index")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_missing_side_file(name: str, model: Path, damaged: Convert) -> None:
    output = damaged()
    (output / name).unlink()
    assert found(check(output, model), "structure", "missing file")[0]["file"] == name


def test_output_with_a_damaged_manifest(damaged: Convert) -> None:
    output = damaged()
    (output / "ktconv.json").write_text("{")
    assert found(check(output), "structure", "manifest")


def test_source_that_changed(model: Path, converted: Convert, tmp_path: Path) -> None:
    """One weight of the source, same size and header: no identity tells, level weights does."""
    changed = tmp_path / "changed"
    shutil.copytree(model, changed)
    shard = next(changed.glob("*.safetensors"))
    start, header = read_header(shard)
    entry = header["model.layers.0.mlp.experts.1.up_proj.weight"]
    with shard.open("r+b") as file:
        file.seek(start + entry["data_offsets"][0] + 2 * (256 * 3 + 7))
        file.write(np.array([0x4080], "<u2").tobytes())  # 4.0, larger than all others
    result = check(converted(), changed)
    failure = found(result, "weights", "element")[0]
    where = {key: failure[key] for key in ("layer", "expert", "projection", "row", "column")}
    assert where == {"layer": 0, "expert": 1, "projection": "up", "row": 3, "column": 7}
    assert failure["source_value"] == 4.0
    assert found(result, "weights", "scale")


def test_verifying_against_another_source(converted: Convert, tmp_path: Path) -> None:
    other = tmp_path / "other"
    weights = random_weights(256, 256, 4, seed=9)
    config = simple_config(hidden_size=256, moe_intermediate_size=256, num_experts=4)
    write_checkpoint(other, numbered("model.layers.0.mlp.experts", weights), config)
    result = check(converted(), other)
    assert not result.passed
    checks = {failure.check for failure in result.failures}
    assert {"changed source", "missing tensor", "unexpected tensor"} <= checks


# ---- weights ---------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_one_bit_of_a_weight(method: str, model: Path, damaged: Convert) -> None:
    """Without checksums: the element itself is named."""
    output = forget_manifest(damaged(method))
    place = place_of(output, "blk.1.ffn_down_exps.2.numa.1.weight")
    overwrite(place, bytes([bytes_of(place)[0] ^ 2]))  # row 0, column 0 of part 1: two levels
    failure = found(check(output, model), "weights", "element")[0]
    where = {
        key: failure[key] for key in ("layer", "expert", "projection", "part", "row", "column")
    }
    assert where == {
        "layer": 1, "expert": 2, "projection": "down", "part": 1, "row": 0, "column": 128,
    }  # fmt: skip
    source = random_weights(256, 256, 3, seed=1).down[2][0, 128]
    assert failure["source_value"] == pytest.approx(float(source))
    assert failure["steps"] > 1.4


@pytest.mark.parametrize("method", METHODS)
def test_one_level_off(method: str, model: Path, damaged: Convert) -> None:
    """Less than a step from the source, but not where rounding takes it; named by its row of the
    whole matrix."""
    output, fmt = forget_manifest(damaged(method)), FORMATS[method]
    source = random_weights(256, 256, 3, seed=1).gate[2][128:]  # part 1
    codes, scale = reference.quantize(fmt, source, Choice("search"))
    above = source / (scale * fmt.traits.scale_units)[:, None] - codes
    row, column = (int(i) for i in np.argwhere((above > 0.25) & (above < 0.35) & (codes < 7))[0])
    codes[row, column] += 1
    packed = native.pack(method, codes).tobytes()
    overwrite(place_of(output, "blk.1.ffn_gate_exps.2.numa.1.weight"), packed)
    (failure,) = found(check(output, model), "weights", "element")
    assert (failure["row"], failure["column"]) == (128 + row, column)
    assert 0.6 < failure["steps"] < 0.8


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bit", [0, 23, 31])
def test_one_bit_of_a_scale(method: str, bit: int, model: Path, damaged: Convert) -> None:
    """Even the last one: scales follow from the largest weight of a row."""
    output = forget_manifest(damaged(method))
    name = "blk.0.ffn_gate_exps.0.numa.1.scale"
    place = place_of(output, name)
    scale = np.frombuffer(bytes_of(place), "<u4").copy()
    scale[17] ^= np.uint32(1 << bit)
    overwrite(place, scale.tobytes())
    failure = found(check(output, model), "weights", "scale")[0]
    assert failure["tensor"] == name and failure["row"] == 17


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, 1e-40])
def test_impossible_scale(value: float, model: Path, damaged: Convert) -> None:
    output = forget_manifest(damaged())
    place = place_of(output, "blk.0.ffn_up_exps.1.numa.0.scale")
    overwrite(place, np.array([value], "<f4").tobytes(), 4 * 9)
    failure = found(check(output, model), "weights", "scale")[0]
    assert failure["row"] == 9
    text = json.dumps(in_json(check(output, model).facts), allow_nan=False)
    assert math.isfinite(value) or f'"{value}"' in text


@pytest.mark.parametrize("ulps", [1, -1])
def test_scale_of_parts_that_were_cut_anew(
    ulps: int, model: Path, converted: Convert, tmp_path: Path
) -> None:
    """They have the scale of the wider part: of both halves together, to the last bit."""
    reshard(ReshardRequest(converted("int8", 1), tmp_path / "two", numa=2, threads=1))
    assert check(tmp_path / "two", model).passed
    for part in (0, 1):
        place = place_of(tmp_path / "two", f"blk.0.ffn_down_exps.1.numa.{part}.scale")
        bits = np.frombuffer(bytes_of(place), "<i4").copy()
        bits[5] += ulps
        overwrite(place, bits.tobytes())
    failures = {(one.check, one.part, one.row) for one in check(tmp_path / "two", model).failures}
    assert {("scale", 0, 5), ("scale", 1, 5)} <= failures


def test_level_of_minus_eight(model: Path, damaged: Convert) -> None:
    """An AVX-512 kernel of KTransformers gets its sign wrong."""
    output = forget_manifest(damaged("int4"))
    place = place_of(output, "blk.0.ffn_up_exps.1.numa.0.weight")
    overwrite(place, bytes([bytes_of(place)[4] & 0xF0 | 8]), 4)  # row 1, column 0
    failure = found(check(output, model), "weights", "level")[0]
    assert (failure["row"], failure["column"], failure["value"]) == (1, 0, -8.0)


def test_level_of_minus_128(model: Path, damaged: Convert) -> None:
    output = forget_manifest(damaged("int8"))
    overwrite(place_of(output, "blk.0.ffn_up_exps.1.numa.0.weight"), b"\x80", 4)
    assert found(check(output, model), "weights", "level")[0]["value"] == -128.0


def test_codes_under_a_zero_scale(model: Path, damaged: Convert) -> None:
    output = forget_manifest(damaged("int8"))
    overwrite(place_of(output, "blk.0.ffn_up_exps.1.numa.0.scale"), bytes(4), 4 * 9)
    failure = found(check(output, model), "weights", "level")[0]
    assert failure["row"] == 9 and failure["value"] != 0
    assert "0 where the scale is 0" in failure["message"]


def test_output_with_swapped_experts(model: Path, damaged: Convert) -> None:
    output = forget_manifest(damaged())
    for proj in ("gate", "up", "down"):
        for part in (0, 1):
            swap(output, *(f"blk.1.ffn_{proj}_exps.{e}.numa.{part}" for e in (0, 2)))
    failures = found(check(output, model), "weights", "element")
    assert {(failure["layer"], failure["expert"]) for failure in failures} == {(1, 0), (1, 2)}


def test_swapped_gate_and_up(model: Path, damaged: Convert) -> None:
    output = forget_manifest(damaged())
    for part in (0, 1):
        swap(output, *(f"blk.0.ffn_{proj}_exps.1.numa.{part}" for proj in ("gate", "up")))
    failures = found(check(output, model), "weights", "element")
    assert {failure["projection"] for failure in failures} == {"gate", "up"}
    assert {(failure["layer"], failure["expert"]) for failure in failures} == {(0, 1)}


def test_swapped_parts(model: Path, damaged: Convert) -> None:
    output = forget_manifest(damaged())
    swap(output, "blk.0.ffn_down_exps.1.numa.0", "blk.0.ffn_down_exps.1.numa.1")
    assert {one["part"] for one in found(check(output, model), "weights", "element")} == {0, 1}


def test_transposed_fused_tensor(tmp_path: Path) -> None:
    """Experts stored [in, out] that a converter took for [out, in]."""
    weights = random_weights(256, 128, 2, seed=3)
    config = simple_config(hidden_size=256, moe_intermediate_size=128, num_experts=2)
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    tensors = fused("model.layers.0.mlp.experts", weights, transposed=True)
    write_checkpoint(right, tensors, config)
    misread = {
        name: bf16(_values(tensor).reshape(2, tensor.shape[2], tensor.shape[1]))
        for name, tensor in tensors.items()
    }
    write_checkpoint(wrong, misread, config)
    convert(wrong, tmp_path / "out", method="int8")
    result = check(forget_manifest(tmp_path / "out"), right)
    assert found(result, "weights", "element")
    convert(right, tmp_path / "sound", method="int8")
    assert check(tmp_path / "sound", right).passed


def _values(tensor: Any) -> Any:
    bits = np.frombuffer(tensor.data, "<u2").astype(np.uint32) << 16
    return bits.view(np.float32).reshape(tensor.shape)


def test_wrong_method_of_one_layer(model: Path, damaged: Convert, converted: Convert) -> None:
    output = damaged("int4", 2, "layers")
    shutil.rmtree(output / "_layer_1")
    shutil.copytree(converted("int8", 2, "layers") / "_layer_1", output / "_layer_1")
    assert "dimensions" in {one.check for one in check(output, model).failures}


# ---- what the manifest says of errors --------------------------------------------------


@pytest.mark.parametrize("claim", ["relative_rms_error", "max_error_steps", "zero_share"])
@pytest.mark.parametrize("layout", ["safetensors", "layers"])
def test_manifest_with_another_error_of_a_matrix(
    claim: str, layout: str, model: Path, damaged: Convert
) -> None:
    output, name = damaged("int4", 2, layout), "blk.1.ffn_down_exps.2.numa.1.weight"
    manifest = read_json(output / "ktconv.json")
    about = manifest["units"]["layer-00001"]["tensors"][name]
    about[claim] *= 1.01
    (output / "ktconv.json").write_text(json.dumps(manifest))
    assert check(output).passed  # nothing to measure it by
    failures = found(check(output, model), "weights", "manifest")
    assert [failure["tensor"] for failure in failures] == [name]
    assert claim in failures[0]["message"]


# ---- samples and limits ----------------------------------------------------------------


def test_a_sample_is_the_same_for_the_same_seed(model: Path, converted: Convert) -> None:
    request = Request(converted(), str(model), "weights", sample=0.4, seed=3)
    one, two = verify(request).facts, verify(request).facts
    assert one["weights"] == two["weights"]
    assert one["weights"]["matrices"] == 2 * 3  # one expert of three per layer
    assert {layer["layer"] for layer in one["weights"]["layers"]} == {0, 1}
    sampled = [layer["experts"] for layer in one["weights"]["layers"]]
    assert [sum(error is not None for error in row) for row in sampled] == [1, 1]


def test_failures_are_cut_and_counted(model: Path, damaged: Convert) -> None:
    output = forget_manifest(damaged())
    for shard in output.glob("*.safetensors"):
        start, _ = read_header(shard)
        with shard.open("r+b") as file:
            file.seek(start)
            file.write(bytes(shard.stat().st_size - start))
    result = check(output, model)
    assert result.facts["failure_count"] > len(result.failures)
    assert (
        max(len([f for f in result.failures if f.check == c]) for c in ("element", "scale")) <= 50
    )
