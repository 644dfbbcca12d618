"""Encodings that go by other names, several in one model, and those that are refused by name."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cli import ktconv_done as done
from helpers.convert import assert_output, convert, matrices_of
from helpers.encoded import KINDS, of_fp8, of_int8, of_msmodelslim, of_nvfp4, of_packed
from helpers.families import (
    Raw,
    Tensor,
    Weights,
    bf16,
    fp8,
    fp8_values,
    numbered,
    random_weights,
    raw,
    read_matrix,
    simple_config,
    write_checkpoint,
    write_safetensors,
)

from ktconv.errors import CheckpointError
from ktconv.source import PROJECTIONS, open_checkpoint
from ktconv.source.reading.reader import SourceReader
from ktconv.verify import Request, verify
from ktconv.verify.second_reader import SecondReader

SOURCE = "model.layers.0.mlp.experts"
HIDDEN, INNER = 128, 192
SIZES = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": 2}
NAMES = ("gate_proj", "up_proj", "down_proj")


def shape_of(name: str) -> tuple[int, int]:
    return (HIDDEN, INNER) if name == "down_proj" else (INNER, HIDDEN)


def experts(of: Any) -> tuple[dict[str, Tensor], Weights]:
    """Two experts, each matrix what `of(expert, name)` makes of a generator and its shape."""
    rng = np.random.default_rng(2)
    tensors: dict[str, Tensor] = {}
    stacks = []
    for name in NAMES:
        values = []
        for expert in range(2):
            parts, value = of(expert, name)(rng, *shape_of(name))
            tensors |= {f"{SOURCE}.{expert}.{name}.{part}": one for part, one in parts.items()}
            values.append(value)
        stacks.append(np.stack(values))
    return tensors, Weights(*stacks)


def converted(directory: Path, tensors: dict[str, Tensor], weights: Weights, **config: Any) -> None:
    model = write_checkpoint(directory / "model", tensors, simple_config(**SIZES, **config))
    convert(model, directory / "out", method="int8", requantize=True)
    assert_output(directory / "out", matrices_of({0: weights}), {}, method="int8", numa=1)


def refusal(
    directory: Path, tensors: dict[str, Tensor], changes: dict[str, Tensor], **config: Any
) -> str:
    """What opening says after changes; a tensor of no elements is removed."""
    changed = {**tensors, **{f"{SOURCE}.{name}": one for name, one in changes.items()}}
    kept = {name: one for name, one in changed.items() if raw(one).shape != (0,)}
    write_checkpoint(directory / "model", kept, simple_config(**SIZES, **config))
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(directory / "model")
    return f"{error.value} {error.value.hint}"


# ---- several encodings in one model -----------------------------------------------------


def test_mixed_precision_of_modelopt(tmp_path: Path) -> None:
    """MIXED_PRECISION: each weight says for itself what it is."""

    def of(expert: int, name: str) -> Any:
        if name == "down_proj":
            return lambda rng, n, k: with_inputs(of_fp8(rng, n, k, lambda *_: (1, 1)))
        return lambda rng, n, k: with_inputs(
            of_nvfp4(rng, n, k, ("weight", "weight_scale_2"), False)
        )

    def with_inputs(made: Any) -> Any:
        return {**made[0], "input_scale": np.ones(1, np.float32)}, made[1]

    tensors, weights = experts(of)
    converted(
        tmp_path, tensors, weights,
        quantization_config={"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
    )  # fmt: skip
    assert open_checkpoint(tmp_path / "model").layers[0].encoding == "nvfp4+fp8-tensor"


def test_modelopt_without_quantization_config(tmp_path: Path) -> None:
    """Older exports have hf_quant_config.json instead, which may say less than the tensors."""
    tensors, weights = experts(
        lambda *_: lambda rng, n, k: of_nvfp4(rng, n, k, ("weight", "weight_scale_2"), False)
    )
    (tmp_path / "model").mkdir()
    quantization = {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    text = json.dumps({"producer": {"name": "modelopt"}, "quantization": quantization})
    (tmp_path / "model" / "hf_quant_config.json").write_text(text)
    converted(tmp_path, tensors, weights)


def test_naive_quantized(tmp_path: Path) -> None:
    tensors, weights = experts(lambda *_: of_int8)
    converted(
        tmp_path, tensors, weights,
        quantization_config={"quant_method": "compressed-tensors", "format": "naive-quantized"},
    )  # fmt: skip


def test_blocks_of_compressed_tensors(tmp_path: Path) -> None:
    """float-quantized, strategy block: the size is in the group of config.json."""
    tensors, weights = experts(
        lambda *_: lambda rng, n, k: of_fp8(rng, n, k, lambda a, b: (a // 64, b // 64))
    )
    group = {"weights": {"strategy": "block", "block_structure": [64, 64], "num_bits": 8}}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
    }
    converted(tmp_path, tensors, weights, quantization_config=quantization)
    assert open_checkpoint(tmp_path / "model").layers[0].encoding == "fp8-block"


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_stacked_pack_quantized(bits: int, asymmetric: bool, tmp_path: Path) -> None:
    """All experts of a layer in one tensor, gate before up also in packed zero points."""
    rng = np.random.default_rng(bits)
    tensors: dict[str, Tensor] = {}
    values = []
    for name, rows, cols in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
        made = [of_packed(rng, rows, cols, bits, 64, asymmetric) for _ in range(2)]
        for part in made[0][0]:
            of_each = [raw(parts[part]) for parts, _ in made]
            data = b"".join(one.data for one in of_each)
            suffix = part.removeprefix("weight")
            tensors[f"{SOURCE}.{name}{suffix}"] = Raw(
                of_each[0].dtype, (2, *of_each[0].shape), data
            )
        values.append(np.stack([value for _, value in made]))
    gate, up = np.split(values[0], 2, axis=1)
    converted(tmp_path, tensors, Weights(gate, up, values[1]))


@pytest.mark.parametrize("asymmetric", [False, True])
def test_projections_stacked_by_themselves(asymmetric: bool, tmp_path: Path) -> None:
    """experts.gate_proj.weight_packed [E, I, words]: gate and up in tensors of their own."""
    rng = np.random.default_rng(1)
    tensors: dict[str, Tensor] = {}
    stacks = []
    for name in NAMES:
        made = [of_packed(rng, *shape_of(name), 4, 64, asymmetric) for _ in range(2)]
        for part in made[0][0]:
            of_each = [raw(parts[part]) for parts, _ in made]
            data = b"".join(one.data for one in of_each)
            shape = (2, *of_each[0].shape)
            tensors[f"{SOURCE}.{name}.{part}"] = Raw(of_each[0].dtype, shape, data)
        stacks.append(np.stack([value for _, value in made]))
    converted(tmp_path, tensors, Weights(*stacks))


@pytest.mark.parametrize("shape", [(2, 2), (2, 2, 1)])
@pytest.mark.parametrize("method", ["bf16", "nvfp4", "int8"])
def test_second_scales_of_gate_and_up(method: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Stacked NVFP4 of Qwen3.5 (sgl-project/sglang#18965): gate_up_proj_scale_2 is [E, 2]."""
    rng = np.random.default_rng(9)
    made = {
        name: [of_nvfp4(rng, *shape_of(name), ("weight", "weight_scale_2"), False) for _ in "12"]
        for name in NAMES
    }
    stacks = Weights(*(np.stack([value for _, value in made[name]]) for name in NAMES))
    tensors: dict[str, Tensor] = {}
    for word, names in (("gate_up_proj", NAMES[:2]), ("down_proj", NAMES[2:])):
        for part, suffix in (("weight", ""), ("weight_scale", "_scale")):
            own = [[raw(made[name][expert][0][part]) for name in names] for expert in range(2)]
            data = b"".join(one.data for expert in own for one in expert)
            rows, cols = own[0][0].shape
            stored = (2, rows * len(names), cols)
            tensors[f"{SOURCE}.{word}{suffix}"] = Raw(own[0][0].dtype, stored, data)
        outer = [[made[name][expert][0]["weight_scale_2"] for name in names] for expert in range(2)]
        size = shape if len(names) == 2 else (2,)
        tensors[f"{SOURCE}.{word}_scale_2"] = np.array(outer, np.float32).reshape(size)
    model = write_checkpoint(tmp_path / "model", tensors, simple_config(**SIZES))
    checkpoint = open_checkpoint(model)
    [layer] = checkpoint.layers
    assert layer.encoding == "nvfp4"
    second = SecondReader(checkpoint, SourceReader(checkpoint.files, checkpoint.sources))
    for expert, proj in product(range(2), PROJECTIONS):
        values = getattr(stacks, proj)[expert]
        found = second.expert(layer, expert, proj).values(*map(range, values.shape))
        np.testing.assert_array_equal(found, values)
    parts = ("--numa=1",) if method == "int8" else ()
    done("quantize-cpu", model, tmp_path / "out", "--method", method, "--threads=1", *parts)
    if method == "int8":
        assert_output(tmp_path / "out", matrices_of({0: stacks}), {}, method=method, numa=1)
    assert verify(Request(tmp_path / "out", source=str(model), level="weights")).passed


@pytest.mark.parametrize("stacked", ["[E, 2I, H]", "[E, H, 2I]", "each [2I, H]"])
@pytest.mark.parametrize("method", ["bf16", "int8"])
def test_fp8_with_a_scale_for_each_of_gate_and_up(
    method: str, stacked: str, tmp_path: Path
) -> None:
    """vLLM's name for it is a scale per shard: gate_up_proj_scale is [E, 2], of gate and of up."""
    rng = np.random.default_rng(11)
    codes = {name: rng.integers(0, 0x7E, (2, *shape_of(name)), np.uint8) for name in NAMES}
    scales = {name: rng.random(2, np.float32) + np.float32(0.5) for name in NAMES}
    stacks = Weights(*(fp8_values()[codes[name]] * scales[name][:, None, None] for name in NAMES))
    tensors: dict[str, Tensor] = {}
    for word, names in (("gate_up_proj", NAMES[:2]), ("down_proj", NAMES[2:])):
        whole = np.concatenate([codes[name] for name in names], axis=1)
        factors = np.stack([scales[name] for name in names], axis=1)
        if stacked.startswith("each"):
            for expert in range(2):
                tensors[f"{SOURCE}.{expert}.{word}.weight"] = fp8(whole[expert])
                tensors[f"{SOURCE}.{expert}.{word}.weight_scale"] = factors[expert]
            continue
        turned = whole.transpose(0, 2, 1) if stacked == "[E, H, 2I]" else whole
        tensors[f"{SOURCE}.{word}"] = fp8(np.ascontiguousarray(turned))
        tensors[f"{SOURCE}.{word}_scale"] = factors
    model = write_checkpoint(tmp_path / "model", tensors, simple_config(**SIZES))
    checkpoint = open_checkpoint(model)
    [layer] = checkpoint.layers
    assert layer.encoding == "fp8-tensor"
    second = SecondReader(checkpoint, SourceReader(checkpoint.files, checkpoint.sources))
    for expert, proj in product(range(2), PROJECTIONS):
        values = getattr(stacks, proj)[expert]
        np.testing.assert_array_equal(read_matrix(layer.experts[expert][proj]), values)
        found = second.expert(layer, expert, proj).values(*map(range, values.shape))
        np.testing.assert_array_equal(found, values)
    done("quantize-cpu", model, tmp_path / "out", "--method", method, "--threads=1")
    assert verify(Request(tmp_path / "out", source=str(model), level="weights")).passed


@pytest.mark.parametrize("shape", [(3,), (2, 3), (4,), (1, 4)])
def test_second_scales_of_nothing(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Nothing says what four scales in a row are."""
    tensors: dict[str, Tensor] = {
        f"{SOURCE}.gate_up_proj": np.zeros((2, 2 * INNER, HIDDEN // 2), np.uint8),
        f"{SOURCE}.gate_up_proj_scale": fp8(np.ones((2, 2 * INNER, HIDDEN // 16), np.uint8)),
        f"{SOURCE}.gate_up_proj_scale_2": np.ones(shape, np.float32),
        f"{SOURCE}.down_proj": np.zeros((2, HIDDEN, INNER // 2), np.uint8),
        f"{SOURCE}.down_proj_scale": fp8(np.ones((2, HIDDEN, INNER // 16), np.uint8)),
        f"{SOURCE}.down_proj_scale_2": np.ones(2, np.float32),
    }
    assert f"gate_up_proj_scale_2 {list(shape)}" in refusal(tmp_path, tensors, {})


@pytest.mark.parametrize("part", ["base_layer.weight", "lora_A.weight", "lora_B.default.weight"])
def test_an_adapter_that_is_not_merged(part: str, tmp_path: Path) -> None:
    """As PEFT saves a whole model."""
    tensors, _ = experts(lambda *_: of_int8)
    said = refusal(tmp_path, tensors, {f"1.up_proj.{part}": np.zeros((4, HIDDEN), np.float32)})
    assert f"1.up_proj.{part}: the model was saved with a LoRA adapter" in said
    assert "Merge it" in said


# ---- msModelSlim ------------------------------------------------------------------------


def described(directory: Path, tensors: dict[str, Tensor], kind: str) -> Path:
    """Shards as msModelSlim names them, without an index, and its description."""
    write_checkpoint(directory, {}, simple_config(**SIZES))
    (directory / "model.safetensors").unlink()
    names = list(tensors)
    for number in range(2):
        part = {name: tensors[name] for name in names[number::2]}
        write_safetensors(
            directory / f"quant_model_weights-0000{number + 1}-of-00002.safetensors", part
        )
    description = {"model_quant_type": kind, "version": "1.0.0", **dict.fromkeys(names, kind)}
    (directory / "quant_model_description.json").write_text(json.dumps(description))
    return directory


@pytest.mark.parametrize("kind", ["W8A8", "W8A8_DYNAMIC"])
def test_msmodelslim(kind: str, tmp_path: Path) -> None:
    def of(rng: Any, rows: int, cols: int) -> Any:
        parts, values = of_msmodelslim(rng, rows, cols, asymmetric=True)
        if kind == "W8A8":  # of static activations
            parts |= {"input_scale": np.ones(1, np.float32), "input_offset": np.ones(1, np.float32)}
            parts |= {"quant_bias": np.ones(rows, np.int32), "deq_scale": np.ones(rows, np.float32)}
        return parts, values

    tensors, weights = experts(lambda *_: of)
    model = described(tmp_path / "model", tensors, kind)
    convert(model, tmp_path / "out", method="int8")
    assert_output(tmp_path / "out", matrices_of({0: weights}), {}, method="int8", numa=1)
    (model / "quant_model_weights-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="1 of the 2 shards"):
        open_checkpoint(model)


@pytest.mark.parametrize("kind", ["W4A8_DYNAMIC", "W4A16", "W8A8S"])
def test_other_types_of_msmodelslim(kind: str, tmp_path: Path) -> None:
    tensors, _ = experts(lambda *_: of_msmodelslim)
    described(tmp_path, tensors, kind)
    with pytest.raises(CheckpointError, match=f"0.gate_proj.weight is {kind} in quant_model_desc"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("text", "reason"), [("{", "is not valid JSON"), ("[]", "not a JSON obj")])
def test_a_description_that_is_damaged(text: str, reason: str, tmp_path: Path) -> None:
    tensors, _ = experts(lambda *_: of_msmodelslim)
    (described(tmp_path, tensors, "W8A8") / "quant_model_description.json").write_text(text)
    with pytest.raises(CheckpointError, match=reason) as error:
        open_checkpoint(tmp_path)
    assert "quant_model_description.json" in str(error.value)


# ---- MXINT4 and MXFP4 -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data_types", "encoding"),
    [
        (["mx_fp"], "mxfp4"),
        (["mx_int4"], "mxint4"),
        (["mx_int", "int"], "mxint4"),
        (["mx_int", "mx_fp"], None),
    ],
)
def test_config_tells_mxint4_from_mxfp4(
    data_types: list[str], encoding: str | None, tmp_path: Path
) -> None:
    tensors, _ = experts(lambda *_: KINDS["mxint4, AutoRound"].of)
    extra = {f"model.layers.{n}": {"data_type": one} for n, one in enumerate(data_types[1:])}
    quantization = {
        "quant_method": "auto-round", "data_type": data_types[0], "extra_config": extra,
    }  # fmt: skip
    config = simple_config(**SIZES, quantization_config=quantization)
    write_checkpoint(tmp_path / "model", tensors, config)
    if encoding is None:
        with pytest.raises(CheckpointError, match=r"may be MXINT4 or MXFP4: .* mx_fp, mx_int"):
            open_checkpoint(tmp_path / "model")
    else:
        assert open_checkpoint(tmp_path / "model").layers[0].encoding == encoding


# ---- what is refused by name ------------------------------------------------------------

GONE = np.zeros(0, np.float32)
ONE = np.ones(1, np.float32)
BYTES = np.ones((HIDDEN * INNER // 2, 1), np.uint8)
WORDS = np.ones((16, 16), np.int32)

# Tensors of expert 1's up_proj that replace its weight, and the name of what they are.
FOREIGN: dict[str, tuple[dict[str, Tensor], str]] = {
    "bitsandbytes": (
        {
            "weight": BYTES, "weight.absmax": ONE, "weight.quant_map": ONE,
            "weight.quant_state.bitsandbytes__nf4": np.ones(1, np.uint8),
        },
        "weight.absmax (F32): bitsandbytes",
    ),
    "bitsandbytes int8": (
        {"weight": np.ones((INNER, HIDDEN), np.int8), "SCB": ONE, "weight_format": ONE},
        "SCB (F32): bitsandbytes",
    ),
    "HQQ": ({"weight": GONE, "W_q": BYTES, "scale": ONE, "zero": ONE}, "W_q (U8): HQQ or SINQ"),
    "EETQ": (
        {"weight": np.ones((HIDDEN, INNER), np.int8), "weight_scales": np.ones(INNER, np.float16)},
        "weight_scales (F16): EETQ",
    ),
    "EXL2": ({"weight": GONE, "q_weight": WORDS, "q_scale": WORDS}, "q_weight (I32): EXL2"),
    "EXL3": ({"weight": GONE, "trellis": WORDS, "suh": ONE, "svh": ONE}, "trellis (I32): EXL3"),
    "torchao": ({"weight": GONE, "weight:_data": WORDS, "weight:_scale": ONE}, "_data (I32): torc"),
    "torchao, flattened": (
        {"weight": GONE, "_weight_qdata": BYTES, "_weight_scale": ONE}, "(U8): torchao is not",
    ),
    "quanto": ({"weight": GONE, "weight._data": BYTES}, "_data (U8): torchao or quanto"),
    "Quark INT4": (
        {"weight": WORDS, "weight_scale": ONE, "weight_zero_point": WORDS},
        "weight (I32): integers in words as Quark packs them are not supported",
    ),
    "Quark MXFP6": (
        {
            "weight": np.ones((INNER, HIDDEN * 3 // 4), np.uint8),
            "weight_scale": np.full((INNER, HIDDEN // 32), 127, np.uint8),
        },
        "up_proj.weight [192, 96]: MXFP6 is only supported as compressed-tensors writes it",
    ),
    "Quark's rotation": (
        {"input_rotation": np.ones((HIDDEN, HIDDEN), np.int8)},
        "input_rotation (I8): a rotation of the inputs while the",
    ),
    "MLX by transformers": (
        {"weight": Raw("U32", (INNER, 16), bytes(64 * INNER)), "scales": ONE, "qbiases": ONE},
        "qbiases (F32): MLX quantization",
    ),
    "Gemma": (
        {"weight": BYTES, "weight_scale": ONE, "input_activation_scale": ONE},
        "input_activation_scale (F32): a static scale of inputs and outputs (Gemma)",
    ),
    "NVFP4 of transformers": (
        {"weight": BYTES, "weight_sf": WORDS, "weight_global_scale": ONE},
        "weight_sf (I32): NVFP4 in the order of kernels (transformers)",
    ),
    "HIGGS": ({"weight": WORDS, "scales": ONE, "tables2": ONE}, "tables2 (F32): HIGGS"),
    "SpQR": ({"weight": GONE, "dense_weights": WORDS}, "dense_weights (I32): SpQR"),
    "FP-Quant": ({"weight": GONE, "qweight": BYTES, "act_global_scale": ONE}, "(F32): FP-Quant"),
    "Four Over Six": (
        {"weight": GONE, "quantized_weight_values": BYTES}, "values (U8): Four Over Six",
    ),
    "VPTQ": ({"weight": GONE, "centroids.weight": ONE, "indices": WORDS}, "weight (F32): VPTQ"),
    "AQLM": ({"weight": GONE, "codes": WORDS, "codebooks": ONE, "scales": ONE}, "(F32): AQLM"),
    "QuIP#": ({"weight": GONE, "Qidxs": WORDS, "SU": ONE}, "Qidxs (I32): QuIP#"),
    "MLX": (
        {"weight": Raw("U32", (INNER, 16), bytes(64 * INNER)), "scales": ONE, "biases": ONE},
        "biases (F32): MLX quantization",
    ),
    "marlin-24": (
        {"weight": GONE, "weight_packed": WORDS, "scale_packed": ONE, "meta": WORDS},
        "scale_packed (F32): 2:4 sparse compression (marlin-24)",
    ),
    "sparse-24-bitmask": (
        {"weight": GONE, "compressed": ONE, "bitmask": BYTES},
        "compressed (F32): sparse compression (sparse-24-bitmask)",
    ),
    "Marlin": ({"weight": GONE, "B": WORDS, "s": ONE}, "B (I32): Marlin packing"),
    "QQQ": ({"weight": GONE, "s_group": ONE, "s_channel": ONE}, "s_group (F32): QQQ"),
    "BitBLAS": (
        {"weight": GONE, "qweight": WORDS, "scales": ONE, "zeros": ONE},
        "zeros (F32): BitBLAS packing",
    ),
    "SpinQuant": (
        {"spinquant_R4_type": ONE}, "spinquant_R4_type (F32): a rotation of the inputs while the",
    ),
    "AWQ of ModelOpt": (
        {"weight": np.ones((INNER, HIDDEN), np.int8), "weight_scale": ONE, "pre_quant_scale": ONE},
        "pre_quant_scale (F32): a scale of the inputs",
    ),
    "msModelSlim W4A8": (
        {
            "weight": np.ones((INNER // 2, HIDDEN), np.int8), "weight_scale": ONE,
            "weight_offset": ONE, "scale_bias": ONE,
        },
        "scale_bias (F32): msModelSlim's W4A8, whose order of nibbles is not specified,",
    ),
    "E5M2": ({"weight": Raw("F8_E5M2", (1,), b"0"), "weight_scale": ONE}, "has dtype F8_E5M2"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FOREIGN)
def test_refused_by_name(kind: str, tmp_path: Path) -> None:
    parts, reason = FOREIGN[kind]
    tensors, _ = experts(
        lambda *_: lambda rng, n, k: ({"weight": bf16(np.ones((n, k)))}, np.ones(1))
    )
    message = refusal(tmp_path, tensors, {f"1.up_proj.{part}": one for part, one in parts.items()})
    assert f"{SOURCE}.1.up_proj." in message
    assert reason in message
    assert "use a version of this model" in message


@pytest.mark.parametrize(
    "packing", ["gptq_p", "marlin", "qqq", "bitblas", "exl3", "gemv", "gemv_fast"]
)
def test_packings_refused_by_name(packing: str, tmp_path: Path) -> None:
    key, kind = ("version", "awq") if "gemv" in packing else ("checkpoint_format", "gptq int4, v1")
    tensors, _ = experts(lambda *_: KINDS[kind].of)
    message = refusal(tmp_path, tensors, {}, quantization_config={key: packing})
    assert f"{SOURCE}.0.gate_proj.qweight is packed as {packing!r}" in message


def test_autoround_without_a_packing_format(tmp_path: Path) -> None:
    """Zero points may then be stored in two ways."""
    tensors, _ = experts(lambda *_: KINDS["gptq int4, v1"].of)
    message = refusal(tmp_path, tensors, {}, quantization_config={"quant_method": "auto-round"})
    assert "0.gate_proj.qweight is GPTQ, but quantization_config in config.json has no" in message


@pytest.mark.parametrize("key", ["checkpoint_format", "packing_format"])
def test_a_packing_that_is_no_name(key: str, tmp_path: Path) -> None:
    tensors, _ = experts(lambda *_: KINDS["gptq int4, v1"].of)
    message = refusal(tmp_path, tensors, {}, quantization_config={key: 5})
    assert f"quantization_config.{key} is 5, not a name" in message


def test_a_quantize_config_of_its_own(tmp_path: Path) -> None:
    """Without quantization_config, GPTQ is the first version, which this file may contradict."""
    tensors, _ = experts(lambda *_: KINDS["gptq int4, v1"].of)
    model = write_checkpoint(tmp_path / "model", tensors, simple_config(**SIZES))
    path = model / "quantize_config.json"
    for content in ("{}", '{"bits": 4, "checkpoint_format": "gptq"}'):
        path.write_text(content)
        open_checkpoint(model)
    for key in ("checkpoint_format", "format"):
        path.write_text(f'{{"{key}": "gptq_v2"}}')
        with pytest.raises(CheckpointError, match=rf"has {key} 'gptq_v2', but config\.json"):
            open_checkpoint(model)
    path.write_text("{")
    with pytest.raises(CheckpointError, match=r"quantize_config\.json"):
        open_checkpoint(model)
    quantization = {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}
    write_checkpoint(model, tensors, simple_config(**SIZES, quantization_config=quantization))
    open_checkpoint(model)


def test_a_damaged_quantize_config_matters_to_gptq_alone(tmp_path: Path) -> None:
    """It is read with config.json, and refused only where integers need it."""
    model = write_checkpoint(tmp_path, numbered(SOURCE, random_weights()), simple_config())
    (model / "quantize_config.json").write_text("{")
    assert open_checkpoint(model).layers[0].encoding == "bf16"


def test_group_sizes_that_are_not_the_scales(tmp_path: Path) -> None:
    """In config.json, and in the file that GPTQ had before."""
    tensors, _ = experts(lambda *_: KINDS["gptq int4, v1"].of)
    model = write_checkpoint(tmp_path / "model", tensors, simple_config(**SIZES))
    scale = open_checkpoint(model).layers[0].experts[0]["up"].scale
    assert scale is not None
    own = scale.block_cols
    for size, odd in ((own, False), (2 * own, True), (-1, False)):
        (model / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": size}))
        notes = [note for note in open_checkpoint(model).notes if "group" in note]
        assert notes == (
            [
                f"the scales of experts are for groups of {own}, but group_size in the "
                f"quantization_config (or quantize_config.json) is {size} (layer 0)"
            ]
            if odd
            else []
        )
        quantization = {"quant_method": "gptq", "group_size": size}
        config = simple_config(**SIZES, quantization_config=quantization)
        other = write_checkpoint(tmp_path / "other", tensors, config)
        assert [note for note in open_checkpoint(other).notes if "group" in note] == notes


@pytest.mark.parametrize("kind", ["int4 packed, group 32", "int8 channel"])
def test_zero_points_that_are_missing(kind: str, tmp_path: Path) -> None:
    tensors, _ = experts(lambda *_: KINDS[kind].of)
    groups = {"a": {"weights": {"symmetric": False}}, "b": {"weights": {"symmetric": False}}}
    message = refusal(tmp_path, tensors, {}, quantization_config={"config_groups": groups})
    assert "0.gate_proj.weight" in message
    assert "has no zero points (weight_zero_point), but quantization_config" in message
    groups["b"]["weights"]["symmetric"] = True  # the experts may be in this one
    config = simple_config(**SIZES, quantization_config={"config_groups": groups})
    open_checkpoint(write_checkpoint(tmp_path / "model", tensors, config))


@pytest.mark.parametrize("location", ["input", "output", "weight_input"])
def test_rotations_of_compressed_tensors(location: str, tmp_path: Path) -> None:
    tensors, weights = experts(lambda *_: of_int8)
    group = {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": location}]}
    quantization = {
        "quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R4": group}},
    }  # fmt: skip
    if location == "weight_input":  # inside the weights
        converted(tmp_path, tensors, weights, quantization_config=quantization)
        return
    message = refusal(tmp_path, tensors, {}, quantization_config=quantization)
    assert f"{SOURCE}.0.gate_proj.weight: a rotation of the inputs while the model runs" in message
    assert "quantization_config.transform_config" in message


@pytest.mark.parametrize(
    ("rotation", "online"),
    [
        ({"name": "rotation", "r1": True, "r2": True, "r4": False}, False),
        ({"name": "rotation", "r1": True, "online_r1_rotation": True}, True),
        ({"name": "rotation", "r4": True}, True),
        ({"name": "quarot"}, True),
        ({"name": "awq"}, False),
    ],
)
def test_rotations_of_quark(rotation: dict[str, Any], online: bool, tmp_path: Path) -> None:
    """Of which the matrices may be in one tensor for all layers of a width."""
    tensors, weights = experts(lambda *_: KINDS["mxfp4, Quark"].of)
    quantization = {"quant_method": "quark", "algo_config": [rotation]}
    if not online:
        converted(tmp_path, tensors, weights, quantization_config=quantization)
        return
    message = refusal(tmp_path, tensors, {}, quantization_config=quantization)
    assert f"{SOURCE}.0.gate_proj.weight: a rotation of the inputs while the model runs" in message
    assert "quantization_config.algo_config" in message


def test_int8_of_quark_in_groups_may_be_turned(tmp_path: Path) -> None:
    """With as many outputs as inputs it was read as if it were not."""
    quark = {"quant_method": "quark"}
    tensors, _ = experts(lambda *_: KINDS["int8 group"].of)
    said = refusal(tmp_path, tensors, {}, quantization_config=quark)
    assert "0.gate_proj.weight: INT8 in groups, which Quark stores [in, out], is not" in said
    tensors, weights = experts(lambda *_: KINDS["int8 channel"].of)
    converted(tmp_path / "channels", tensors, weights, quantization_config=quark)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_packed_without_straddling(bits: int, tmp_path: Path) -> None:
    """As compressed-tensors did before 2026."""
    tensors, _ = experts(lambda *_: lambda rng, n, k: of_packed(rng, n, k, bits))
    words = -(-HIDDEN // (32 // bits))
    change: dict[str, Tensor] = {"0.up_proj.weight_packed": np.ones((INNER, words), np.int32)}
    weights = {"num_bits": bits, "strategy": "channel"}
    quantization = {"config_groups": {"group_0": {"weights": weights}}}
    message = refusal(tmp_path, tensors, change, quantization_config=quantization)
    assert f"0.up_proj.weight_packed has {words} words for {HIDDEN} weights: {bits} bits" in message
    assert "Older versions of compressed-tensors packed so" in message


def test_scales_for_16_inputs_must_be_said_to_be_e5m3(tmp_path: Path) -> None:
    tensors, weights = experts(lambda *_: KINDS["nvfp4, E5M3"].of)
    said = refusal(tmp_path, tensors, {})
    assert (
        "gate_proj.weight_scale [192, 8]: a scale in U8 for 16 inputs is only supported in" in said
    )
    quantization = {
        "quant_method": "auto-round", "packing_format": "auto_round:llm_compressor_nvfp4_e5m3",
    }  # fmt: skip
    converted(tmp_path / "said", tensors, weights, quantization_config=quantization)


def test_mxfp6_of_other_tools_may_be_e3m2(tmp_path: Path) -> None:
    tensors, _ = experts(lambda *_: KINDS["mxfp6"].of)
    said = refusal(tmp_path, tensors, {}, quantization_config={"quant_method": "auto-round"})
    assert "0.gate_proj.weight_packed [192, 96]: MXFP6 is only supported as compressed-te" in said


def test_blocks_of_one_expert_are_not_called_by_another_name(tmp_path: Path) -> None:
    """weight_scales alone is EETQ's; beside weight_blocks it is gpt-oss's, of all experts."""
    tensors: dict[str, Tensor] = {}
    for expert, name in product(range(2), NAMES):
        rows, cols = shape_of(name)
        blocks, scales = np.zeros((rows, cols // 32, 16), np.uint8), np.zeros((rows, cols // 32))
        tensors[f"{SOURCE}.{expert}.{name}.weight_blocks"] = blocks
        tensors[f"{SOURCE}.{expert}.{name}.weight_scales"] = scales.astype(np.uint8)
    said = refusal(tmp_path, tensors, {})
    assert "weight_blocks: MXFP4 in blocks, as gpt-oss has it, is read of all experts" in said
    assert "EETQ" not in said
