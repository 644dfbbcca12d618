"""Planted faults in checkpoints for GPUs: each found, by the level that is there to find it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.corrupt import check, forget_manifest, found, record_again
from helpers.encoded import KINDS, SOURCE, encoded_model
from helpers.gpu_corrupt import U8, change, edit_config, find, flip, group, read, rename, swap
from helpers.paths import EXAMPLE

from ktconv.errors import CheckpointError, UsageError
from ktconv.source import PROJECTIONS
from ktconv.source.encodings import grids
from ktconv.source.reading import matrices
from ktconv.verify import Request, verify
from ktconv.verify.encoded.output import is_gpu_output
from ktconv.verify.encoded.quantization import Group
from ktconv.verify.encoded.rounding import bound_steps

pytestmark = pytest.mark.slow

Copy = Callable[..., Path]
EXPERT = "model.layers.1.mlp.experts.2"
UP = f"{EXPERT}.up_proj"
SCHEMES = ["W4A16", "W8A16"]


@pytest.fixture(scope="module")
def quantized_example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that ships here: it has attention and routers beside its experts."""
    from helpers.gpu import quantize

    pytest.importorskip("llmcompressor")
    output = tmp_path_factory.mktemp("example") / "out"
    quantize(EXAMPLE, output)
    return output


def of(failures: list[dict[str, Any]], **wanted: Any) -> bool:
    return any(wanted.items() <= failure.items() for failure in failures)


# ---- nothing is wrong ------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_sound_gpu_output_passes(
    scheme: str, model: Path, for_gpu: Callable[[str], Path]
) -> None:
    result = check(for_gpu(scheme), model)
    assert result.passed and not result.failures
    facts = result.facts
    assert (facts["method"], facts["scheme"], facts["group_size"]) == ("rtn", scheme, 128)
    structure, weights = facts["structure"], facts["weights"]
    assert structure["tensors_found"] == structure["tensors_expected"] == 2 * 3 * 3 * 3 + 3
    assert structure["checksums"] == structure["tensors_found"]
    assert structure["copied_tensors"] == 3
    assert (weights["matrices"], weights["elements"]) == (18, 18 * 256 * 256)
    assert 0.5 < weights["max_error_steps"] <= weights["bound_steps"]
    low, high = (0.08, 0.13) if scheme == "W4A16" else (0.004, 0.009)
    assert low < weights["relative_rms_error"] < high
    assert facts["mapping"]["slots"] == 2 * 3 * 3 * 3


def test_errors_are_those_of_compressed_tensors(model: Path, for_gpu: Callable[..., Path]) -> None:
    """One matrix dequantized by the library that engines use."""
    compressor = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    import torch
    from helpers.convert import read_model
    from helpers.families import Raw

    def tensor(raw: Raw, dtype: Any) -> Any:
        return torch.frombuffer(bytearray(raw.data), dtype=dtype).reshape(raw.shape)

    stored, source = read_model(for_gpu()), read_model(model)
    level = compressor.unpack_from_int32(
        tensor(stored[f"{UP}.weight_packed"], torch.int32), 4, torch.Size([256, 256])
    )
    scale = tensor(stored[f"{UP}.weight_scale"], torch.bfloat16).float()
    value = level.reshape(256, 2, 128).float() * scale[:, :, None]
    wanted = tensor(source[f"{UP}.weight"], torch.bfloat16).float()
    error = float((value.reshape(256, 256) - wanted).norm() / wanted.norm())
    worst = check(for_gpu(), model).facts["weights"]["worst"]
    mine = next(row for row in worst if (row["layer"], row["expert"]) == (1, 2)
                and row["projection"] == "up")  # fmt: skip
    assert mine["relative_rms_error"] == pytest.approx(error, rel=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_another_tools_checkpoint(scheme: str, model: Path, copied: Copy) -> None:
    """Without a manifest the recipe tells how it was rounded; without both, codes and scales do."""
    output = forget_manifest(copied(scheme))
    result = check(output, model)
    assert result.passed and result.facts["method"] == "rtn"
    (output / "recipe.yaml").unlink()
    result = check(output, model)
    assert result.passed and result.facts["method"] == "rtn"
    assert result.facts["weights"]["bound_steps"] > 0.5
    assert check(output).passed  # level structure, without the source


def test_the_packed_experts_of_cpus_are_no_gpu_output(converted: Copy) -> None:
    assert not is_gpu_output(converted())


# ---- weights ---------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_any_one_wrong_level_is_found(scheme: str, model: Path, copied: Copy) -> None:
    """Also those that the bound on errors would let pass; without the manifest's checksums."""
    output = copied(scheme)
    checks, name = 0, f"{UP}.weight_packed"
    before = read(output, name)
    forget_manifest(output)
    step = 1 if scheme == "W8A16" else 16  # the low bit of a level in the high half of a byte

    for place in np.random.default_rng(1).integers(0, len(before), 12):

        def lower_or_raise(data: U8, place: int = int(place)) -> None:
            data[place] = before[place] ^ step

        change(output, name, lower_or_raise)
        failures = found(check(output, model), "weights", "element")
        column = int(place) % (256 if scheme == "W8A16" else 128)
        column = column if scheme == "W8A16" else 2 * column + 1
        assert of(failures, tensor=name, layer=1, expert=2, projection="up", column=column)
        checks += len(failures)
        change(output, name, lambda data: np.copyto(data, before))
    assert checks == 12
    assert check(output, model).passed


def test_a_flipped_bit_breaks_the_checksum_too(model: Path, copied: Copy) -> None:
    output = copied()

    def flip(data: U8) -> None:
        data[77] ^= 4

    change(output, f"{UP}.weight_packed", flip)
    result = check(output, model)
    assert {(f.level, f.check) for f in result.failures} == {
        ("structure", "checksum"), ("weights", "element")
    }  # fmt: skip


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize(("bits", "words"), [
    (0x7FC0, "is nan at [1, 0]"), (0x0000, "is 0.0 at [1, 0]"), (0xBF80, "is -1.0 at [1, 0]"),
    (0x7F80, "is inf at [1, 0]"), (0x3F80, "the largest weight of the group makes"),
])  # fmt: skip
def test_wrong_scales(bits: int, words: str, method: str, model: Path, copied: Copy) -> None:
    output = copied(method=method)

    def spoil(data: U8) -> None:
        data.view(np.uint16)[2] = bits  # row 1, group 0

    change(output, f"{UP}.weight_scale", spoil)
    result = check(output, model)
    failures = [f.as_dict() for f in result.failures if f.check == "scale"]
    assert of(failures, level="weights", layer=1, expert=2, projection="up", row=1, column=0)
    assert words in failures[0]["message"]


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize("other", [f"{EXPERT}.gate_proj", "model.layers.0.mlp.experts.2.up_proj"])
def test_swapped_matrices(other: str, method: str, model: Path, copied: Copy) -> None:
    output = forget_manifest(copied(method=method))
    if method == "gptq":
        recipe = output / "recipe.yaml"
        recipe.write_text(recipe.read_text().replace("QuantizationModifier", "GPTQModifier"))
    swap(output, UP, other)
    result = check(output, model)
    assert result.facts["method"] == method
    failures = found(result, "weights", "element" if method == "rtn" else "error")
    assert of(failures, layer=1, expert=2, projection="up")


def test_gptq_may_move_weights_but_not_at_will(model: Path, copied: Copy) -> None:
    """One level apart for a tenth of the weights passes; noise does not."""
    output = copied(method="gptq")
    rng = np.random.default_rng(2)

    def nudge(data: U8) -> None:
        low = data & 15
        moved = np.where((rng.random(len(data)) < 0.1) & (low < 15), low + 1, low)
        data[:] = (data & 0xF0) | moved.astype(np.uint8)

    change(output, f"{UP}.weight_packed", nudge)
    found(check(output, model), "structure", "checksum")  # and nothing else
    change(output, f"{UP}.weight_packed", lambda data: np.copyto(data, rng.permutation(data)))
    assert ("weights", "error") in {(f.level, f.check) for f in check(output, model).failures}


def test_bounds_are_those_of_the_rule() -> None:
    """Every bf16 weight of a group, rounded as compressed-tensors does it, stays within."""
    torch = pytest.importorskip("torch")
    for bits in (4, 8):
        rules = Group("", ["Linear"], bits, None, "")
        largest = torch.arange(0x3F80, 0x4000, dtype=torch.int16).view(torch.bfloat16)[:, None]
        weights = torch.cat([largest * (k / 512) for k in range(-512, 513)], dim=1)
        scale = largest / (rules.half_range)
        level = torch.clamp(weights / scale, -rules.max_level - 1, rules.max_level).round()
        off = (weights.double() / scale.double() - level.double()).abs().max().item()
        assert bound_steps(rules) * 0.7 < off <= bound_steps(rules)


# ---- structure -------------------------------------------------------------------------


def test_a_missing_expert(model: Path, copied: Copy) -> None:
    output = copied()
    rename(output, f"{UP}.weight_scale", f"{UP}.weight_scald")
    failures = [f.as_dict() for f in check(output, model).failures]
    assert of(failures, level="structure", check="missing tensor", tensor=f"{UP}.weight_scale")
    assert of(failures, level="structure", check="unexpected tensor")
    assert of(failures, level="mapping", check="slot", layer=1, expert=2, projection="up")


def test_two_tensors_for_one_slot(model: Path, copied: Copy) -> None:
    """Expert 1's up under the name of expert 2's: engines would load one over the other."""
    output = copied()
    name = "model.layers.1.mlp.experts.1.up_proj.weight_packed"
    rename(output, name, name.replace("experts.1", "experts.2"))
    failures = [f.as_dict() for f in check(output, model).failures]
    assert of(failures, level="structure", check="damaged file")  # one header names it twice
    assert of(failures, level="structure", check="missing tensor", tensor=name)


def test_an_ignored_expert(model: Path, copied: Copy) -> None:
    output = copied()
    edit_config(output, lambda c: c["quantization_config"]["ignore"].append("re:.*layers.1.*up"))
    failures = found(check(output, model), "structure", "config")
    assert of(failures, file="config.json", layer=1, expert=0, projection="up")


@pytest.mark.parametrize("manifest", [True, False])
def test_a_plain_layer_that_is_not_ignored(
    manifest: bool, quantized_example: Path, tmp_path: Path
) -> None:
    """Engines take it for packed; where the class is no target, some of them refuse it."""
    output = tmp_path / "copy"
    shutil.copytree(quantized_example, output)
    if not manifest:
        (output / "ktconv.json").unlink()

    def failed(message: str) -> bool:
        failures = found(check(output, EXAMPLE), "structure", "config")
        return any(message in failure["message"] for failure in failures)

    lost = "model.layers.1.self_attn.o_proj"
    edit_config(output, lambda c: c["quantization_config"]["ignore"].remove(lost))
    assert failed(f"says that {lost} is packed, but it is BF16")
    edit_config(output, lambda c: group(c)["targets"].remove("Linear"))
    assert failed(f"neither quantizes nor ignores {lost}: SGLang")
    edit_config(output, lambda c: c["quantization_config"].update(ignore=[]))
    assert failed("ignores lm_head and 8 more: SGLang")


def test_a_target_that_misses_an_expert(model: Path, copied: Copy) -> None:
    output = copied()
    edit_config(output, lambda c: group(c).update(targets=["re:.*experts.*(gate|up)_proj"]))
    failures = found(check(output, model), "structure", "config")
    assert of(failures, layer=1, expert=2, projection="down")


@pytest.mark.parametrize("target", ["Linear", "re:.*q_proj", "model.layers.0.self_attn.q_proj"])
def test_a_target_that_means_a_plain_weight(target: str, tmp_path: Path) -> None:
    """By class, pattern or name; an ignore list can take it back."""
    from helpers.families import bf16, numbered, random_weights, simple_config, write_checkpoint
    from helpers.gpu import quantize

    pytest.importorskip("llmcompressor")
    weights = random_weights(128, 128, 2, seed=3)
    plain = "model.layers.0.self_attn.q_proj"
    tensors = numbered("model.layers.0.mlp.experts", weights)
    tensors[f"{plain}.weight"] = bf16(np.ones((128, 128)))
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 2}
    config = simple_config(num_hidden_layers=1, **sizes)
    write_checkpoint(tmp_path / "model", tensors, config)
    quantize(tmp_path / "model", tmp_path / "out")
    forget_manifest(tmp_path / "out")  # of ours, the whole section must be what ktconv writes
    edit_config(tmp_path / "out", lambda c: group(c)["targets"].append(target))
    edit_config(tmp_path / "out", lambda c: c["quantization_config"].update(ignore=[]))
    result = check(tmp_path / "out", tmp_path / "model")
    assert of(found(result, "structure", "config"), tensor=f"{plain}.weight")
    edit_config(tmp_path / "out", lambda c: c["quantization_config"].update(ignore=[plain]))
    assert check(tmp_path / "out", tmp_path / "model").passed


@pytest.mark.parametrize("size", [64, 32, -1, 96])
def test_a_wrong_group_size(size: int, model: Path, copied: Copy) -> None:
    output = copied()
    strategy = "channel" if size == -1 else "group"
    value = None if size == -1 else size
    edit_config(output, lambda c: group(c)["weights"].update(group_size=value, strategy=strategy))
    result = check(output, model)
    failures = [f.as_dict() for f in result.failures]
    assert {f["level"] for f in failures} <= {"structure", "mapping"}
    assert of(failures, check="config", file="config.json")  # the manifest says another
    what = "config" if size == 96 else "wrong shape"
    assert of(failures, check=what, layer=1, expert=2, projection="down")


@pytest.mark.parametrize("change_it", [
    lambda c: c.pop("quantization_config"),
    lambda c: group(c)["weights"].update(num_bits=3),
    lambda c: group(c)["weights"].update(symmetric=False),
    lambda c: group(c).update(targets=["re:("]),
    lambda c: group(c).update(format="naive-quantized"),
    lambda c: c["quantization_config"].update(config_groups={}),
])  # fmt: skip
def test_a_config_that_engines_could_not_use(
    change_it: Callable[[dict[str, Any]], Any], model: Path, copied: Copy
) -> None:
    """Our own output fails; another tool's cannot be verified."""
    output = copied()
    edit_config(output, change_it)
    found(check(output, model), "structure", "config")
    forget_manifest(output)
    with pytest.raises((CheckpointError, UsageError)):
        check(output, model)


def test_a_config_of_another_model(model: Path, copied: Copy) -> None:
    output = copied()
    edit_config(output, lambda c: c.update(rope_theta=12345.0))
    failures = found(check(output, model), "structure", "config")
    assert "rope_theta" in failures[0]["message"]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 9},
        {"num_experts": 4},
        {"hidden_size": 512},
        {"moe_intermediate_size": 128},
    ],
)
def test_sizes_of_another_model(changes: dict[str, int], model: Path, copied: Copy) -> None:
    """Other tools change what they like in config.json, but not these."""
    output = forget_manifest(copied())
    edit_config(output, lambda c: c.update(changes))
    assert found(check(output, model), "structure", "config")
    if changes != {"num_hidden_layers": 9}:  # which layers have experts is not told there
        assert found(check(output), "structure", "dimensions")


def test_tensors_tell_what_it_is(copied: Copy) -> None:
    output = forget_manifest(copied())
    edit_config(output, lambda c: c.pop("quantization_config"))
    with pytest.raises(CheckpointError, match=r"has no quantization_config of compressed-tensors"):
        check(output)


def test_an_unfinished_output(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("llmcompressor")
    from helpers.gpu import quantize

    quantize(model, tmp_path / "out", layers=[0])
    with pytest.raises(CheckpointError, match="is incomplete"):
        check(tmp_path / "out", model)


@pytest.mark.parametrize("geometry", [5, {}, {"layers": 5}, {"layers": {"1": 5, "x": {}}}])
def test_a_manifest_with_odd_geometry(geometry: Any, model: Path, copied: Copy) -> None:
    output = copied()
    manifest = json.loads((output / "ktconv.json").read_text())
    (output / "ktconv.json").write_text(json.dumps(manifest | {"geometry": geometry}))
    check(output)
    check(output, model)


def test_a_dense_tensor_that_changed(model: Path, copied: Copy) -> None:
    output = copied()

    change(output, "model.embed_tokens.weight", flip)
    failures = found(check(output, model), "structure", "copied tensor")
    assert of(failures, tensor="model.embed_tokens.weight")


def test_a_wrong_weight_shape(model: Path, copied: Copy) -> None:
    output = copied()

    def longer(data: U8) -> None:
        data.view(np.int64)[1] = 260

    change(output, f"{UP}.weight_shape", longer)
    failures = found(check(output, model), "structure", "wrong shape")
    assert "says [256, 260], but the matrix is [256, 256]" in failures[0]["message"]


def test_a_truncated_shard(model: Path, copied: Copy) -> None:
    output = copied()
    shard = find(output, f"{UP}.weight_packed").file
    shard.write_bytes(shard.read_bytes()[:-1])
    failures = [f.as_dict() for f in check(output, model).failures]
    assert of(failures, level="structure", check="damaged file", file=shard.name)


def test_an_index_that_names_a_wrong_shard(model: Path, copied: Copy) -> None:
    output = copied()
    path = output / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    content["weight_map"][f"{UP}.weight_packed"] = "model-00009-of-00009.safetensors"
    path.write_text(json.dumps(content))
    assert of(found(check(output, model), "structure", "index"), tensor=f"{UP}.weight_packed")


# ---- sources ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["deepseek_v3_fp8", "fused"])
def test_fp8_and_fused_sources(name: str, tmp_path: Path) -> None:
    from helpers.families import bf16, fp8, fused, random_weights, simple_config, write_checkpoint
    from helpers.gpu import quantize

    pytest.importorskip("llmcompressor")
    rng, prefix = np.random.default_rng(4), "model.layers.0.mlp"
    sizes = {"hidden_size": 128, "moe_intermediate_size": 256, "num_experts": 2}
    config = simple_config(num_hidden_layers=1, **sizes)
    if name == "fused":
        tensors = fused(f"{prefix}.experts", random_weights(128, 256, 2, seed=1), False)
    else:
        tensors = {}
        shapes = {"gate_proj": (256, 128), "up_proj": (256, 128), "down_proj": (128, 256)}
        modules = {f"{prefix}.experts.{e}.{p}": s for e in (0, 1) for p, s in shapes.items()}
        modules["model.layers.0.self_attn.o_proj"] = (128, 128)
        for module, (rows, cols) in modules.items():
            codes = rng.integers(0, 0x78, (rows, cols)) | (rng.integers(0, 2, (rows, cols)) << 7)
            tensors[f"{module}.weight"] = fp8(codes.astype(np.uint8))
            scale = rng.uniform(0.01, 0.02, (rows // 128, cols // 128))
            tensors[f"{module}.weight_scale_inv"] = bf16(scale)
        config["quantization_config"] = {
            "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]
        }  # fmt: skip
    write_checkpoint(tmp_path / "model", tensors, config)
    quantize(tmp_path / "model", tmp_path / "out")
    result = check(tmp_path / "out", tmp_path / "model")
    assert result.passed, result.failures
    assert result.facts["weights"]["matrices"] == 6
    if name != "fused":
        change(
            tmp_path / "out", "model.layers.0.self_attn.o_proj.weight",
            lambda data: data.__setitem__(9, data[9] ^ 1),
        )  # fmt: skip
        found(check(tmp_path / "out", tmp_path / "model"), "structure", "copied tensor")


@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_other_dtypes_tiny_and_zero_weights(
    dtype: str, scheme: str, group_size: int, tmp_path: Path
) -> None:
    """Scales of half precision that are denormal or replaced by eps; one scale per row."""
    from helpers.families import Raw, numbered, random_weights, simple_config, write_checkpoint
    from helpers.gpu import quantize

    def encode(matrix: Any) -> Raw:
        kind = {"F16": np.float16, "F32": np.float32}[dtype]
        return Raw(dtype, matrix.shape, matrix.astype(kind).tobytes())

    pytest.importorskip("llmcompressor")
    weights = random_weights(128, 128, 1, seed=2)
    weights.gate[0, 0] *= 1e-4
    weights.gate[0, 1] = 0
    weights.up[0] *= 1e-6
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 1}
    config = simple_config(num_hidden_layers=1, **sizes)
    tensors = numbered("model.layers.0.mlp.experts", weights, encode=encode)
    write_checkpoint(tmp_path / "model", tensors, config)
    quantize(tmp_path / "model", tmp_path / "out", scheme=scheme, group_size=group_size)
    result = check(tmp_path / "out", tmp_path / "model")
    assert result.passed, result.failures
    about = result.facts["weights"]
    assert 0.4 < about["max_error_steps"] <= about["bound_steps"]
    name = "model.layers.0.mlp.experts.0.up_proj.weight_packed"
    change(tmp_path / "out", name, lambda data: data.__setitem__(40, data[40] ^ 1))
    (tmp_path / "out" / "ktconv.json").unlink()
    assert of(found(check(tmp_path / "out", tmp_path / "model"), "weights", "element"), tensor=name)


def test_some_experts_only(model: Path, tmp_path: Path) -> None:
    """What --experts left out is not missed; what it named is."""
    from helpers.gpu import quantize

    pytest.importorskip("llmcompressor")
    chosen = tmp_path / "hot.json"
    chosen.write_text('{"schema": 1, "experts": {"0": [1], "1": [0, 2]}}')
    quantize(model, tmp_path / "out", experts=chosen)
    result = check(tmp_path / "out", model)
    assert result.passed, result.failures
    assert result.facts["weights"]["matrices"] == 9
    assert result.facts["mapping"]["experts"] == 3
    rename(tmp_path / "out", f"{UP}.weight_packed", f"{UP}.weight_packet")
    failures = [f.as_dict() for f in check(tmp_path / "out", model).failures]
    assert of(failures, check="missing tensor", tensor=f"{UP}.weight_packed")


def test_with_is_turned_around(model: Path, for_gpu: Copy, converted: Copy) -> None:
    with pytest.raises(UsageError, match="--with is for an output of quantize-cpu"):
        verify(Request(for_gpu(), str(model), beside=converted()))


# ---- config.json and the other side files ------------------------------------------------

EXTRA: dict[str, Any] = {
    "kv_cache_scheme": {
        "num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True
    },
    "transform_config": {"config_groups": {"u": {"type": "hadamard", "apply": []}}},
    "quantization_status": "frozen",
    "never_heard_of": 1,
}  # fmt: skip


@pytest.mark.parametrize("manifest", ["kept", "forged", "removed"])
@pytest.mark.parametrize("key", EXTRA)
def test_a_key_that_ktconv_does_not_write(
    key: str, manifest: str, model: Path, copied: Copy
) -> None:
    """Engines act on quantization_config as a whole."""
    output = copied()
    edit_config(output, lambda c: c["quantization_config"].update({key: EXTRA[key]}))
    if manifest == "forged":
        record_again(output)
    elif manifest == "removed":
        forget_manifest(output)
    for source, level in ((None, None), (model, "structure"), (model, "weights")):
        failures = found(check(output, source, level), "structure", "config")
        assert any(f"quantization_config.{key}" in one["message"] for one in failures)


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("where", ["text_config", "compression_config", "group", "weights"])
def test_quantization_in_other_places(where: str, manifest: bool, copied: Copy) -> None:
    def add(config: dict[str, Any]) -> None:
        if where == "text_config":
            config["text_config"] = {"quantization_config": {"quant_method": "fp8"}}
        elif where == "compression_config":
            config["compression_config"] = config["quantization_config"]
        else:
            place = group(config) if where == "group" else group(config)["weights"]
            place["never_heard_of"] = {"a": 1}

    output = copied()
    edit_config(output, add)
    record_again(output) if manifest else forget_manifest(output)
    failures = found(check(output), "structure", "config")
    words = "never_heard_of" if where in ("group", "weights") else "also describes quantization"
    assert any(words in failure["message"] for failure in failures)


def test_what_other_tools_say_of_quantization(model: Path, copied: Copy) -> None:
    """llm-compressor's own spelling of the same."""
    output = forget_manifest(copied())

    def rewrite(config: dict[str, Any]) -> None:
        section = config["quantization_config"]
        (about,) = section["config_groups"].values()
        about["weights"] |= {
            "observer": "memoryless_minmax", "observer_kwargs": {}, "actorder": None,
            "block_structure": None, "zp_dtype": "torch.int8", "scale_dtype": None,
        }  # fmt: skip
        section |= {
            "config_groups": {"group_0": about}, "version": "0.12.2", "sparsity_config": {},
            "global_compression_ratio": 1.4, "transform_config": None,
        }  # fmt: skip
        config["torch_dtype"] = config.pop("dtype", config.pop("torch_dtype", "bfloat16"))

    edit_config(output, rewrite)
    result = check(output)
    assert result.passed, result.failures


def test_ignore_lists_that_differ(model: Path, copied: Copy) -> None:
    def ignore(content: dict[str, Any], names: list[str]) -> None:
        content["quantization_config"]["ignore"] = names

    lists: list[list[str]] = [[], ["lm_head", "model.layers.9.never"]]
    for names in lists:
        output = copied("W8A16" if names else "W4A16")
        edit_config(output, partial(ignore, names=names))
        record_again(output)
        assert of(found(check(output), "structure", "config"), file="config.json")


@pytest.mark.parametrize("key", ["num_experts_per_tok", "rms_norm_eps", "rope_theta"])
@pytest.mark.parametrize("manifest", ["kept", "forged", "removed"])
def test_keys_that_change_what_is_computed(
    key: str, manifest: str, model: Path, copied: Copy
) -> None:
    output = copied()
    edit_config(output, lambda c: c.update({key: 1}))
    if manifest == "kept":
        assert found(check(output), "structure", "changed file")
    record_again(output) if manifest == "forged" else None
    forget_manifest(output) if manifest == "removed" else None
    failures = found(check(output, model), "structure", "config")
    assert any(f"{key} is 1, but" in failure["message"] for failure in failures)


@pytest.mark.parametrize("name", ["config.json", "recipe.yaml"])
def test_files_that_were_made_are_recorded(name: str, copied: Copy) -> None:
    output = copied()
    (output / name).write_bytes((output / name).read_bytes() + b"\n")
    assert of(found(check(output), "structure", "changed file"), file=name)
    (output / name).unlink()
    failures = [failure.as_dict() for failure in check(output).failures]
    assert of(failures, check="missing file", file=name)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("claim", ["relative_rms_error", "max_error_steps", "zero_share"])
def test_manifest_with_another_error_of_a_gpu_matrix(
    claim: str, scheme: str, model: Path, copied: Copy
) -> None:
    output, name = copied(scheme), f"{UP}.weight_packed"
    manifest = json.loads((output / "ktconv.json").read_text())
    manifest["units"]["layer-00001"]["tensors"][name][claim] *= 1.01
    (output / "ktconv.json").write_text(json.dumps(manifest))
    failures = found(check(output, model), "weights", "manifest")
    assert of(failures, tensor=name, file="ktconv.json")


# ---- reading the source ----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fp8 block", "int4 packed, asymmetric"])
def test_a_source_that_was_read_wrongly(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts, and another weight, which is decoded in the output."""
    from helpers.gpu import quantize

    pytest.importorskip("llmcompressor")
    attention = "model.layers.0.self_attn.o_proj"
    parts, _ = KINDS[kind].of(np.random.default_rng(3), 256, 384)
    others = {f"{attention}.{name}": one for name, one in parts.items()}
    model, _, _ = encoded_model(tmp_path / "model", kind, **others)
    quantize(model, tmp_path / "sound")
    assert check(tmp_path / "sound", model).passed

    right = grids.load_block_scale
    monkeypatch.setattr(matrices, "load_block_scale", lambda *about: 2 * np.flip(right(*about)))
    quantize(model, tmp_path / "out")
    result = check(tmp_path / "out", model)
    assert {failure.check for failure in result.failures} == {"reading"}
    experts = {f"{SOURCE}.{e}.{proj}_proj" for e in range(2) for proj in PROJECTIONS}
    modules = {str(failure.tensor).rpartition(".")[0] for failure in result.failures}
    assert modules == {*experts, attention}
