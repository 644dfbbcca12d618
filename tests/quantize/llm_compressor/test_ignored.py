"""Which modules config.json lists as not quantized: engines find every linear layer of a model
either there or among the targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from helpers.convert import read_json
from helpers.families import FAMILIES, build_model, write_family
from helpers.gpu import quantize
from helpers.oneshot import take_experts_apart

from ktconv.targets.encoded.ignored import ignored_modules
from ktconv.writer.shards import Tensor

pytestmark = [pytest.mark.slow, pytest.mark.torch]


def ignored(tensors: Mapping[str, tuple[int, ...]]) -> list[str]:
    return ignored_modules(Tensor(name, "BF16", shape, 0) for name, shape in tensors.items())


def test_what_counts() -> None:
    """Weights of two and more dimensions; no norms, biases, scales; no embeddings, which old
    versions of vLLM could not load as ignored linear layers."""
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (64, 8),
        "model.norm.weight": (8,),
        "fc.weight": (4, 8),
        "fc.e_score_correction_bias": (4,),
        "visual.patch_embed.proj.weight": (8, 3, 2, 2, 2),
        "fc.dt_bias": (8, 8),
        "lm_head.weight": (64, 8),
        "lm_head.bias": (64,),
    }
    assert ignored(tensors) == ["fc", "lm_head", "visual.patch_embed.proj"]


def test_a_head_that_is_the_embeddings() -> None:
    """It has no tensor, yet it is a linear layer."""
    assert ignored({"model.embed_tokens.weight": (64, 8)}) == ["lm_head"]
    assert ignored({"language_model.lm_head.weight": (64, 8)}) == ["language_model.lm_head"]


def test_layers_that_engines_join() -> None:
    """By all names; only where all parts are there."""
    tensors = {f"self_attn.{part}_proj.weight": (8, 8) for part in "qkv"}
    parts = ["self_attn.k_proj", "self_attn.q_proj"]
    joined = ["self_attn.qkv", "self_attn.qkv_proj", "self_attn.v_proj"]
    assert ignored(tensors) == ["lm_head", *parts, *joined]
    del tensors["self_attn.v_proj.weight"]
    assert ignored(tensors) == ["lm_head", *parts]


def test_a_model_that_is_loaded_under_another_name() -> None:
    """By the names of the checkpoint, of the modules in transformers and vLLM, and from layers on,
    as SGLang looks them up."""
    rest = "layers.3.mixer.shared_experts.up_proj"
    tensors = {f"backbone.{rest}.weight": (8, 8), "backbone.embeddings.weight": (64, 8)}
    assert ignored(tensors) == [f"backbone.{rest}", rest, "lm_head", f"model.{rest}"]


@pytest.fixture(scope="module")
def told(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """The quantization_config of a family's output, each made once."""
    made: dict[str, dict[str, Any]] = {}

    def get(name: str) -> dict[str, Any]:
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            write_family(name, directory / "model")
            quantize(directory / "model", directory / "out", group_size=32)
            config = read_json(directory / "out/config.json")
            made[name] = config["quantization_config"]
        return made[name]

    return get


# ---- the published rule ----------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_every_linear_layer_by_the_rule_of_compressed_tensors(
    name: str, torch: Any, told: Callable[[str], dict[str, Any]]
) -> None:
    """The library's own matcher and its own assignment of schemes, over all modules of the model:
    experts have the scheme and are not ignored, all other linear layers are."""
    from ktconv.quantize.llm_compressor.library import quiet

    config = told(name)
    with quiet():
        from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
        from compressed_tensors.utils.match import is_match

        model = build_model(name)
        take_experts_apart(model)
        (group,) = config["config_groups"].values()
        experts = 0
        for path, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                expert = ".experts." in path
                experts += expert
                assert is_match(path, module, group["targets"]), path
                assert is_match(path, module, group["targets"][0]) == expert, path
                assert is_match(path, module, config["ignore"]) != expert, path
        apply_quantization_config(model, QuantizationConfig.model_validate(config))
    assert experts and experts % 12 == 0  # 4 experts of 3 matrices in each layer
    for path, module in model.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        quantized = isinstance(module, torch.nn.Linear) and ".experts." in path
        assert (scheme is not None) == quantized, path
        if scheme is not None:
            assert (scheme.weights.num_bits, scheme.weights.group_size) == (4, 32)


# ---- rules of engines ------------------------------------------------------------------

_QKV_O = "self_attn.qkv_proj self_attn.o_proj"
_MLA = "self_attn.fused_qkv_a_proj_with_mqa self_attn.q_b_proj self_attn.kv_b_proj self_attn.o_proj"
_DENSE = "mlp.gate_up_proj mlp.down_proj"
_SHARED = "mlp.shared_experts.gate_up_proj mlp.shared_experts.down_proj"
_SHARED_ONE = _SHARED.replace("shared_experts", "shared_expert")
_DELTA = "linear_attn.in_proj_qkvz linear_attn.in_proj_ba linear_attn.out_proj"
_SPLIT_DELTA = "linear_attn.in_proj_qkv linear_attn.in_proj_z linear_attn.in_proj_b "
_SPLIT_DELTA += "linear_attn.in_proj_a linear_attn.out_proj"
# What the models of sglang-kt 0.7.2 asked for while they were built: the layer, its linear layers.
_ASKED: Mapping[str, Sequence[tuple[str, str]]] = {
    "mixtral": [("layers.0", _QKV_O), ("layers.1", _QKV_O)],
    "qwen2_moe": [("model.layers.0", _QKV_O), ("model.layers.1", f"{_QKV_O} {_SHARED_ONE}")],
    "qwen3_moe": [("model.layers.0", _QKV_O), ("model.layers.1", _QKV_O)],
    "qwen3_next": [("model.layers.1", f"{_DELTA} {_SHARED_ONE}")],
    "qwen3_5_moe": [("model.language_model.layers.1", f"{_SPLIT_DELTA} {_SHARED_ONE}")],
    "qwen3_vl_moe": [("model.language_model.layers.1", _QKV_O)],
    "deepseek_v2": [
        ("model.layers.0", f"{_MLA} {_DENSE}"),
        ("model.layers.1", f"{_MLA} {_SHARED}"),
    ],
    "deepseek_v3": [
        ("model.layers.0", f"{_MLA} {_DENSE}"),
        ("model.layers.2", f"{_MLA} {_SHARED}"),
        ("model.decoder", f"{_MLA} {_SHARED}"),
    ],
    "glm4_moe": [("model.layers.0", f"{_QKV_O} {_DENSE}"), ("model.layers.2", _QKV_O)],
    "minimax_m2": [("model.layers.0", _QKV_O), ("model.layers.1", _QKV_O)],
    "olmoe": [("model.layers.0", _QKV_O), ("model.layers.1", _QKV_O)],
}
_RULES: Mapping[str, Callable[[str, str], bool]] = {
    "part": lambda entry, name: entry.lower() in name.lower(),  # sglang-kt 0.7.2
    "end": lambda entry, name: name == entry or name.endswith(f".{entry}"),  # SGLang 0.5.23
    "whole": lambda entry, name: entry == name,  # vLLM
}
_PARTS: Mapping[str, Sequence[str]] = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj_with_mqa": ["q_a_proj", "kv_a_proj_with_mqa"],
}


def scheme_of(
    name: str, kind: str, config: Mapping[str, Any], rule: str, parts: Mapping[str, Sequence[str]]
) -> str | None:
    """What SGLang and vLLM find for a module, of which they know these `parts`: None if it is
    ignored, else the target that it fits. Raises where there is none."""
    import re

    parent, _, last = name.rpartition(".")
    asked = [name]
    if last in parts and name not in config["ignore"]:
        asked = [f"{parent}.{part}" for part in parts[last]]
    verdicts = {any(_RULES[rule](entry, one) for entry in config["ignore"]) for one in asked}
    assert len(verdicts) == 1, f"the parts of {name} are not treated alike"
    if verdicts == {True}:
        return None
    (group,) = config["config_groups"].values()
    for target in group["targets"]:
        if target.startswith("re:") and re.match(target[3:], name):
            return str(target)
    for target in group["targets"]:
        if target.lower() in kind.lower():
            return str(target)
    raise ValueError(f"Unable to find matching target for {name}")


def rewritten(name: str, ignore: Sequence[str]) -> list[str]:
    """The list as SGLang's Qwen3-VL has it after its change of names."""
    if name != "qwen3_vl_moe":
        return list(ignore)
    begins = {"model.language_model.": "language_model.model.", "model.visual.": "visual."}
    changed = [entry.replace("attn.qkv", "attn.qkv_proj") for entry in ignore]
    for old, new in begins.items():
        changed = [entry.replace(old, new) if entry.startswith(old) else entry for entry in changed]
    return changed


@pytest.mark.parametrize("rule", ["part", "end"])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_sglang_asks_for(name: str, rule: str, told: Callable[[str], dict[str, Any]]) -> None:
    """Whether or not its model tells the parts of joined layers."""
    config = {**told(name), "ignore": rewritten(name, told(name)["ignore"])}
    for parts in ({}, _PARTS) if name != "qwen3_vl_moe" else ({},):
        for layer, modules in _ASKED[name]:
            for module in modules.split():
                found = scheme_of(f"{layer}.{module}", "RowParallelLinear", config, rule, parts)
                assert found is None, f"{layer}.{module}"
            box = "block_sparse_moe" if name == "mixtral" else "mlp"
            for proj in ("gate_proj", "up_proj", "down_proj"):
                expert = f"{layer}.{box}.experts.0.{proj}"
                found = scheme_of(expert, "FusedMoE", config, rule, parts)
                assert found == config["config_groups"]["experts"]["targets"][0]


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"mixtral"}))
def test_what_vllm_asks_for(name: str, told: Callable[[str], dict[str, Any]]) -> None:
    """By whole names, those of the checkpoint; its models tell the parts."""
    for layer, modules in _ASKED[name]:
        for module in () if layer == "model.decoder" else modules.split():
            assert scheme_of(f"{layer}.{module}", "Linear", told(name), "whole", _PARTS) is None


def test_without_the_list_they_raise(told: Callable[[str], dict[str, Any]]) -> None:
    """Or take attention for quantized, where the class is a target."""
    config = told("qwen3_moe")
    name = "model.layers.0.self_attn.o_proj"
    bare = {**config, "ignore": []}
    assert scheme_of(name, "RowParallelLinear", bare, "part", {}) == "Linear"
    pattern = config["config_groups"]["experts"]["targets"][:1]
    bare["config_groups"] = {"experts": {"targets": pattern}}
    with pytest.raises(ValueError, match="Unable to find matching target"):
        scheme_of(name, "RowParallelLinear", bare, "part", {})


def test_experts_are_looked_up_by_the_class_too(told: Callable[[str], dict[str, Any]]) -> None:
    """sglang-kt 0.7.2 and vLLM before 0.11 know no other way to a scheme of packed experts."""
    for name in FAMILIES:
        assert "Linear" in told(name)["config_groups"]["experts"]["targets"]
