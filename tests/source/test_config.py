"""config.json: what no model can mean is refused by its key, what real models say is not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from helpers.cli import edit_json, ktconv, write_model
from helpers.families import (
    Tensor,
    bf16,
    fp8,
    numbered,
    random_weights,
    simple_config,
    write_checkpoint,
)
from helpers.packages import needs_torch

from ktconv.cli.app import app
from ktconv.errors import CheckpointError
from ktconv.families import table
from ktconv.families.config import Config, text_section
from ktconv.source import open_checkpoint
from ktconv.source.config import interpret_config

pytestmark = pytest.mark.slow

NAN, INF = math.nan, math.inf


def model(directory: Path, layers: int = 1, **config: Any) -> Path:
    tensors: dict[str, Tensor] = {}
    for index in range(layers):
        tensors |= numbered(f"model.layers.{index}.mlp.experts", random_weights(seed=index))
    return write_checkpoint(directory, tensors, simple_config(num_hidden_layers=layers, **config))


def refusal(directory: Path, **config: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(model(directory, **config))
    assert caught.value.hint
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "values", "wanted"),
    [
        ("model_type", [["x"], 1, {}, True, "a\0b"], "a name"),
        ("num_experts_per_tok", ["2", 2.0, True, 0, -1, {}, ["2"], [True]], "a number of experts"),
        ("num_experts", ["4", 4.0, True, -4, {}], "a size"),
        ("num_experts", [[], ["4"], [4.0], [-4], [True]], "a number or a list of one"),
        ("hidden_size", ["128", [128], NAN, {}], "a size"),
        ("num_nextn_predict_layers", ["1", [0], -1], "a size"),
        ("rms_norm_eps", [NAN, INF, -INF, -1e-6, "1e-6", True, [1e-6]], "a number of at least 0"),
        ("layer_norm_eps", [NAN, "x"], "a number of at least 0"),
        ("routed_scaling_factor", [NAN, INF, "2.5", True, [NAN]], "a finite number"),
        ("swiglu_limit", [NAN, INF, "7", -1, [], [7.0, -1]], "a number of at least 0"),
        ("moe_norm_min", [NAN, -1e-12, "1e-12", [0.1]], "a number of at least 0"),
        ("router_jitter_noise", [INF, -0.01, "x"], "a number of at least 0"),
        ("moe_normalize_expert_weights", [0, -1.0, "1", NAN], "a number above 0"),
        ("output_multiplier", [NAN, "0.5", True], "a finite number"),
        ("zero_expert_num", [-1, 1.5, "2", [2]], "a number of experts"),
        ("num_hash_layers", [-1, 0.5, "3"], "a number of layers"),
        ("n_shared_experts", [-1, 0.5, "1", True, []], "a number of experts"),
        ("ffn_config", ["x", 1, [{}]], "an object"),
        ("rope_theta", [NAN, INF, 0, -1.0, "10000", []], "a number above 0"),
        ("moe_layers", [1, "0,1", ["0"], [True], {}], "a list of layers"),
        (
            "moe_layer_freq",
            ["1", 1.0, True, -1, {}, [0.5], ["1"], [[1]]],
            "a number of at least 1 or a list of 0 and 1",
        ),
        ("moe_layer_freq", [0], "a number of at least 1 or a list of 0 and 1"),
        ("decoder_sparse_step", [0, -1, "1", 1.0, True, [1]], "a number of at least 1"),
        ("interleave_moe_layer_step", [0, -1], "a number of at least 1"),
        ("moe_layer_interval", [0, -2], "a number of at least 1"),
        ("expert_layer_period", [0, -1, "2"], "a number of at least 1"),
        ("llm_config", ["x", 1, [{}], False], "an object"),
        ("norm_topk_prob", ["false", 2, [True], NAN], "true or false"),
        ("moe_apply_router_weight_on_input", ["no", 2], "true or false"),
        ("scoring_func", [1, ["sigmoid"]], "a name"),
        ("hidden_act", [1, ["silu"]], "a name"),
        ("n_group", ["8", 8.0, [8]], "an integer"),
        ("first_k_dense_replace", ["0", 0.0, [0], True], "an integer"),
        ("mlp_layer_types", ["sparse", [1], {"0": "sparse"}], "a list of names"),
        ("mlp_only_layers", [1, ["0"], [0.0]], "a list of layers"),
        ("quantization_config", ["fp8", [], 0], "an object"),
    ],
)
def test_a_value_that_no_model_can_have(
    key: str, values: list[Any], wanted: str, tmp_path: Path
) -> None:
    for value in values:
        message = refusal(tmp_path, **{key: value})
        assert message.startswith(f"config.json: {key} is {value!r}, not {wanted}"), message
        nested = simple_config(text_config={key: value})
        with pytest.raises(CheckpointError, match=f"config.json: {key} is"):
            interpret_config(Config(nested))


@pytest.mark.parametrize("key", table.FAMILIES.keys("top_k"))
def test_null_experts_per_token_are_found_before_anything_is_converted(
    key: str, tmp_path: Path
) -> None:
    """Readers have no default for null. A number under another key or in another section is one."""
    written = model(tmp_path, layers=2)
    edit_json(written / "config.json", lambda content: content.pop("num_experts_per_tok", None))
    edit_json(written / "config.json", lambda content: content.update({key: None}))
    says = f"config.json: {key} is null, but a layer has 4 experts, of which a token needs a number"
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(written)
    for command in ("inspect", "plan"):
        result = ktconv(command, written)
        assert result.exit_code == 2 and says in " ".join(result.stderr.split())
    edit_json(written / "config.json", lambda content: content.pop(key))
    assert open_checkpoint(written).layers


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5, but a layer has 4 experts"),
        (
            {"num_experts_per_tok": [2, 5]},
            "num_experts_per_tok is 5, but a layer has 4 experts",
        ),
        ({"moe_topk": 6, "zero_expert_num": 1}, "moe_topk is 6, but a layer has 4 experts"),
        ({"num_experts": 0}, "but config.json has num_experts 0"),
        ({"num_experts": [8, 8]}, "has experts 4, but config.json has num_experts [8, 8]"),
        ({"num_experts": [4, 8, 4]}, "num_experts lists 3 layers but num_hidden_layers is 2"),
        (
            {"num_experts": [4, 8, 4], "num_nextn_predict_layers": 1},
            "has experts 4, but config.json has num_experts [4, 8, 4]",
        ),
        ({"num_experts": [4]}, "num_experts lists 1 layer but num_hidden_layers is 2"),
        ({"moe_topk": [4] * 3}, "moe_topk lists 3 layers but num_hidden_layers is 2"),
        (
            {"moe_intermediate_size": [64, 128, 128], "num_nextn_predict_layers": 1},
            "has intermediate size 128, but config.json",
        ),
        ({"hidden_size": 0}, "hidden_size 0"),
        ({"num_hidden_layers": 0}, "but config.json has num_hidden_layers 0 and does not declare"),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types lists 1 layer but num_hidden_layers"),
        ({"moe_layer_freq": [1]}, "moe_layer_freq lists 1 layer but num_hidden_layers is 2"),
        ({"mlp_layer_types": ["moe"] * 3}, "mlp_layer_types lists 3 layers but num_hidden"),
        ({"hybrid_override_pattern": "E"}, "hybrid_override_pattern lists 1 layer but num_"),
        ({"layers_block_type": ["moe"] * 3}, "layers_block_type lists 3 layers but num_hidden"),
        ({"swiglu_limits": [0.0, 0.0, 7.0]}, "swiglu_limits lists 3 layers but num_hidden_layers"),
    ],
)
def test_a_value_that_the_tensors_contradict(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    written = model(tmp_path, layers=2)
    edit_json(written / "config.json", lambda content: content.update(config))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(written)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        {"num_experts_per_tok": 4},
        {"num_experts_per_tok": None, "moe_topk": [4, 2]},
        {"moe_topk": 6, "zero_expert_num": 2},
        {"num_experts": [4, 4], "moe_intermediate_size": [128, 128]},
        {"num_experts": [2, 2]},  # two towers whose experts lie in one list
        {"num_experts": [4, 4, 4], "num_nextn_predict_layers": 1},
        {"hybrid_override_pattern": "EE", "num_hidden_layers": None},
        {"rms_norm_eps": 0, "norm_topk_prob": 1, "routed_scaling_factor": 1},
        {"rope_theta": [5e6, 1e4], "swiglu_limit": [None, 7.0]},
        {"rope_theta": {"full_attention": {}}},
        {"swiglu_limit": 0, "moe_layers": [0, 1], "text_config": None},
        {"moe_layer_freq": [True, 1]},
        {"first_k_dense_replace": -1, "n_group": None, "topk_group": None},
        {"time_step_limit": [0.0, INF], "id2label": {"0": NAN}},
        {"hidden_size": None, "num_experts": None, "quantization_config": None},
        {"unknown": ["anything", {"at": [[]]}]},
    ],
)
def test_a_value_that_a_model_can_have(config: dict[str, Any], tmp_path: Path) -> None:
    written = model(tmp_path, layers=2)
    edit_json(written / "config.json", lambda content: content.update(config))
    assert len(open_checkpoint(written).layers) == 2


# What files on the hub say, in excerpts: nothing of it is a contradiction.
REAL: dict[str, dict[str, Any]] = {
    "hunyuan_v1_moe": {
        "hidden_size": 4096, "intermediate_size": 3072, "num_hidden_layers": 32,
        "num_experts": 64, "moe_topk": [8] * 32, "moe_intermediate_size": [3072] * 32,
        "num_shared_expert": [1] * 32, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
    },
    "ernie4_5_moe_vl": {
        "moe_num_experts": [64, 64], "moe_intermediate_size": [1536, 512], "moe_k": 6,
        "moe_layer_start_index": [1, 1], "moe_layer_end_index": [29, 28],
        "num_hidden_layers": 28, "hidden_size": 2560, "intermediate_size": 12288,
        "hidden_act": "silu", "rms_norm_eps": 1e-05, "rope_theta": 500000,
    },
    "step3p5": {
        "moe_num_experts": 288, "moe_top_k": 8, "num_hidden_layers": 2, "norm_expert_weight": True,
        "rope_theta": [5000000.0, 10000.0], "swiglu_limits": [0.0, 7.0],
        "moe_layers_enum": "1", "moe_router_activation": "sigmoid", "num_nextn_predict_layers": 3,
    },
    "longcat_flash": {
        "n_routed_experts": 512, "zero_expert_num": 256, "moe_topk": 12, "num_layers": 28,
        "expert_ffn_hidden_size": 2048, "ffn_hidden_size": 12288, "routed_scaling_factor": 6.0,
    },
    "kimi_linear": {
        "num_experts": 256, "num_experts_per_token": 8, "moe_renormalize": True,
        "num_expert_group": 1, "topk_group": 1, "moe_layer_freq": 1, "first_k_dense_replace": 1,
        "num_hidden_layers": 27, "moe_router_activation_func": "sigmoid",
    },
    "minimax_m3_vl": {
        "text_config": {"num_local_experts": 128, "num_experts_per_tok": 4, "num_hidden_layers": 3,
                        "moe_layer_freq": [0, 1, 1], "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        "vision_config": {"hidden_size": 1280, "num_hidden_layers": 32, "rms_norm_eps": "unread"},
    },
    "qwen3_omni_moe": {
        "thinker_config": {"text_config": {"num_experts": 128, "num_experts_per_tok": 8,
                                           "decoder_sparse_step": 1, "mlp_only_layers": []}},
        "talker_config": {"text_config": {"num_experts": 64, "num_experts_per_tok": 6}},
    },
    "llama4": {
        "text_config": {"num_local_experts": 16, "num_experts_per_tok": 1, "moe_layers": [0, 1],
                        "num_hidden_layers": 2, "hidden_act": "silu", "rope_theta": 500000.0},
    },
    "minimax_m2": {
        "num_local_experts": 256, "num_experts_per_tok": 8, "use_routing_bias": True,
        "quantization_config": {"quant_method": "fp8", "fmt": "float8_e4m3fn",
                                "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    },
    "granitemoehybrid": {
        "num_local_experts": 62, "num_experts_per_tok": 6, "time_step_limit": [0.0, INF],
        "layer_types": ["mamba", "attention"], "num_hidden_layers": 2, "rms_norm_eps": 1e-05,
    },
    "gemma4": {
        "text_config": {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
                        "intermediate_size": 2112, "hidden_activation": "gelu_pytorch_tanh",
                        "rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
    },
    "dbrx": {"ffn_config": {"moe_num_experts": 16, "moe_top_k": 4}, "n_layers": 40},
    "jamba": {
        "num_experts": 16, "num_experts_per_tok": 2, "expert_layer_period": 2,
        "expert_layer_offset": 1, "num_hidden_layers": 32, "rms_norm_eps": 1e-06,
    },
}  # fmt: skip


@pytest.mark.parametrize("model_type", REAL)
def test_what_real_models_say_is_not_refused(model_type: str) -> None:
    config = json.loads(json.dumps({"model_type": model_type, **REAL[model_type]}))
    assert model_type in interpret_config(Config(config)).model_types


def test_configs_of_transformers_are_not_refused() -> None:
    """Every family that has experts, as its own class writes it."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    seen = 0
    for name in transformers.CONFIG_MAPPING:
        if not any(word in name for word in ("moe", "deepseek", "mixtral", "llama4", "gpt_oss")):
            continue
        content = transformers.CONFIG_MAPPING[name]().to_json_string(use_diff=False)
        interpret_config(Config(json.loads(content)))
        seen += 1
    assert seen > 20


@pytest.mark.parametrize("section", ["x", 1, [{}], False, []])
def test_a_text_section_that_is_no_object(section: object, tmp_path: Path) -> None:
    message = refusal(tmp_path, text_config=section)
    assert message == f"config.json: text_config is {section!r}, not an object"
    with pytest.raises(CheckpointError, match="text_config is"):
        interpret_config(Config({"thinker_config": {"text_config": section}}))


@pytest.mark.parametrize("value", ["1", [1], 1.5, True])
def test_a_number_of_layers_that_is_none(value: object) -> None:
    with pytest.raises(CheckpointError, match="num_hidden_layers is"):
        interpret_config(Config(simple_config(num_hidden_layers=value)))


def test_text_section_of_nested_sections() -> None:
    inner = {"hidden_size": 8}
    content: dict[str, Any] = {"thinker_config": {"text_config": inner}, "text_config": {}}
    assert text_section(content) is inner
    for _ in range(5000):  # deeper than functions can call themselves
        content = {"text_config": content}
    assert text_section(content) is inner
    assert text_section({"text_config": "no object"}) == {"text_config": "no object"}


# ---- FP8 -------------------------------------------------------------------------------


def fp8_model(directory: Path, **quantization: Any) -> Path:
    codes = np.full((128, 128), 0x38, np.uint8)
    tensors: dict[str, Tensor] = {}
    for expert in range(4):
        for name in ("gate_proj", "up_proj", "down_proj"):
            key = f"model.layers.0.mlp.experts.{expert}.{name}.weight"
            tensors |= {key: fp8(codes), f"{key}_scale_inv": np.ones((1, 1), np.float32)}
    told = {"weight_block_size": [128, 128], **quantization}
    return write_checkpoint(directory, tensors, simple_config(quantization_config=told))


@pytest.mark.parametrize(
    "declared",
    [
        {},
        {"quant_method": "fp8"},
        {"quant_method": "fp8", "fmt": "e4m3"},
        {"fmt": "float8_e4m3fn", "quant_method": None},
    ],
)
def test_fp8_that_config_declares(declared: dict[str, Any], tmp_path: Path) -> None:
    [layer] = open_checkpoint(fp8_model(tmp_path, **declared)).layers
    assert layer.encoding == "fp8-block"


@pytest.mark.parametrize(
    ("key", "value"),
    [("fmt", "e5m2"), ("fmt", "int8"), ("quant_method", "awq"), ("quant_method", "gptq")],
)
def test_fp8_that_config_contradicts(key: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(fp8_model(tmp_path, **{key: value}))
    assert str(caught.value) == (
        "model.layers.0.mlp.experts.0.gate_proj.weight is F8_E4M3 (fp8-block), but "
        f"quantization_config.{key} in config.json is {value!r}"
    )


@pytest.mark.parametrize("key", ["fmt", "quant_method"])
@pytest.mark.parametrize("value", [["fp8"], 8, {}])
def test_fp8_of_wrong_types(key: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"quantization_config.{key} is .* not a name"):
        open_checkpoint(fp8_model(tmp_path, **{key: value}))


# ---- all commands ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda config: config.update(num_experts_per_tok=99), "num_experts_per_tok is 99"),
        (lambda config: config.update(num_experts=[4]), "num_experts lists 1 layer"),
        (lambda config: config.update(rms_norm_eps=NAN), "rms_norm_eps is nan"),
    ],
)
@needs_torch
def test_all_commands_agree(spoil: Any, message: str, tmp_path: Path) -> None:
    written = write_model(tmp_path / "model", layers=2)
    output = tmp_path / "output"
    assert CliRunner().invoke(app, ["quantize-cpu", str(written), str(output)]).exit_code == 0
    edit_json(written / "config.json", spoil)
    for words in (
        ("inspect", written),
        ("quantize-cpu", written, tmp_path / "new"),
        ("quantize-gpu", written, tmp_path / "new"),
        ("verify", output, "--source", written),
        ("stats", written),
    ):
        result = CliRunner().invoke(app, list(map(str, words)))
        assert (result.exit_code, result.stdout) == (2, ""), (words, result.output)
        assert message in result.stderr, words
    assert not (tmp_path / "new").exists()


# ---- names of tensors ------------------------------------------------------------------


@pytest.mark.parametrize("digits", [7, 20, 5000])
def test_a_layer_number_beyond_all_reason(digits: int, tmp_path: Path) -> None:
    """It is no tensor of an unknown kind that could be copied."""
    number = "1" + "0" * (digits - 1)
    written = model(tmp_path)
    tensors = numbered("model.layers.0.mlp.experts", random_weights())
    name = f"model.layers.{number}.mlp.experts.0.gate_proj.weight"
    tensors |= {name: bf16(np.zeros((128, 128)))}
    write_checkpoint(written, tensors, simple_config())
    with pytest.raises(CheckpointError, match="has a layer number of more than 6 digits"):
        open_checkpoint(written)


def test_a_dense_layer_number_beyond_all_reason(tmp_path: Path) -> None:
    """Longer than what Python reads as an integer."""
    tensors = numbered("model.layers.0.mlp.experts", random_weights())
    tensors |= {f"model.layers.{'9' * 5000}.mlp.gate_proj.weight": bf16(np.zeros((1, 1)))}
    assert open_checkpoint(write_checkpoint(tmp_path, tensors, simple_config())).layers


@pytest.mark.parametrize("name", ["model.norm\0.weight", "\0", "model.layers.0.mlp.experts.0.x\0"])
@needs_torch
def test_a_nul_in_a_name_is_refused_at_once(name: str, tmp_path: Path) -> None:
    tensors = numbered("model.layers.0.mlp.experts", random_weights())
    tensors |= {name: bf16(np.zeros((1, 1)))}
    written = write_checkpoint(tmp_path / "model", tensors, simple_config())
    for words in (
        ("inspect", written),
        ("quantize-cpu", written, tmp_path / "new"),
        ("quantize-gpu", written, tmp_path / "new"),
        ("stats", written),
    ):
        result = CliRunner().invoke(app, list(map(str, words)))
        assert (result.exit_code, result.stdout) == (2, ""), (words, result.output)
        assert f"the name of tensor {name!r} contains a NUL byte" in result.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", ["quantize-cpu", "quantize-gpu"])
def test_fp8_whose_product_overflows(command: str, tmp_path: Path) -> None:
    """Neither the value nor its scale is a NaN or an infinity, and the message says so."""
    if command == "quantize-gpu":
        pytest.importorskip("llmcompressor")
    codes = np.full((128, 128), 0x38, np.uint8)
    big = codes.copy()
    big[5, 7] = 0x7E  # 448
    tensors: dict[str, Tensor] = {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        key = f"model.layers.0.mlp.experts.0.{name}.weight"
        scale = np.full((1, 1), 3e38 if name == "down_proj" else 1, np.float32)
        tensors |= {key: fp8(big if name == "down_proj" else codes), f"{key}_scale_inv": scale}
    config = simple_config(
        num_experts=1,
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
    )
    written = write_checkpoint(tmp_path / "model", tensors, config)
    result = CliRunner().invoke(app, [command, str(written), str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "the value at [5, 7] times its scale 3e+38 in" in result.stderr
    assert "down_proj.weight_scale_inv is beyond float32" in result.stderr
    assert "NaN" not in result.stderr


def test_false_for_none() -> None:
    """As Hunyuan's files say that there are no groups and no factor."""
    none = dict.fromkeys(("n_group", "topk_group", "routed_scaling_factor"), False)
    interpret_config(
        Config({"model_type": "hunyuan_v1_moe", "num_experts": 64, "moe_topk": 8, **none})
    )


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_a_byte_order_mark(encoding: str, tmp_path: Path) -> None:
    """Editors of Windows write it; transformers does not read such a file either."""
    path = model(tmp_path) / "config.json"
    mark = "" if encoding in ("utf-8-sig", "utf-16") else chr(0xFEFF)
    path.write_bytes((mark + path.read_text()).encode(encoding))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert f"{path} begins with a byte order mark" in str(caught.value)
    assert caught.value.hint == "Save it as UTF-8 without a byte order mark."


@pytest.mark.parametrize(("said", "head", "noted"), [
    (False, None, True), (False, "lm_head.weight", False), (True, None, False),
    (None, None, False),
])  # fmt: skip
def test_a_head_that_is_missing_is_noted(
    said: bool | None, head: str | None, noted: bool, tmp_path: Path
) -> None:
    """Loaders make one up at random; `plan` and `inspect` show the note."""
    tensors: dict[str, Tensor] = dict(numbered("model.layers.0.mlp.experts", random_weights()))
    tensors["model.embed_tokens.weight"] = bf16(np.zeros((8, 64), np.float32))
    if head is not None:
        tensors[head] = bf16(np.zeros((8, 64), np.float32))
    config = {} if said is None else {"tie_word_embeddings": said}
    written = write_checkpoint(tmp_path, tensors, simple_config(num_hidden_layers=1, **config))
    notes = open_checkpoint(written).notes
    assert any("lm_head.weight" in note for note in notes) == noted
    planned = " ".join(ktconv("plan", written).stderr.split())
    assert ("no tensor is the head (lm_head.weight)" in planned) == noted
