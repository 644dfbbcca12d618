"""The table of families: rows that contradict nothing, and one more row that is all it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import convert, read_model
from helpers.families import (
    Tensor,
    Weights,
    bf16,
    fused,
    numbered,
    random_weights,
    read_matrix,
    simple_config,
    write_checkpoint,
)

from ktconv.errors import CheckpointError
from ktconv.families import table
from ktconv.families.activations import assumed_activation
from ktconv.families.config import Config, top_k_of
from ktconv.families.family import ExpertActivation, Family, Matrices, Router, RouterSpec
from ktconv.families.names import ExpertModule, expert_module, norm_tensors, router_tensors
from ktconv.families.routers import find_router, router_of
from ktconv.families.table import KEYS, Families
from ktconv.families.unread import UNREAD
from ktconv.native import Activation
from ktconv.runtime.layers import experts_per_token, open_experts
from ktconv.runtime.layers.load import activation_of
from ktconv.source import PROJECTIONS, open_checkpoint
from ktconv.source.config import interpret_config
from ktconv.source.settings import ModelSettings
from ktconv.targets.encoded.module_classes import class_of
from ktconv.targets.encoded.names import fits, module_name, target_pattern
from ktconv.verify import VerifyRequest, hidden_states, verify

HIDDEN, EXPERTS = 128, 4
LAYERS = ("trunk.blocks.1", "trunk.blocks.2", "drafts.0")


# ---- the rows --------------------------------------------------------------------------


def test_rows_contradict_nothing() -> None:
    rows = table.FAMILIES.rows
    types = [kind for row in rows for kind in row.types]
    assert len(set(types)) == len(types) and not any(kind.endswith("_text") for kind in types)
    for row in rows:
        assert row.keys.keys() <= KEYS.keys(), row.types
        own = {} if row.matrices.rows_of_all else row.matrices.projections
        for spelling, projection in own.items():
            assert table.FAMILIES.projections[spelling] == projection, row.types
    biases, corrections = table.FAMILIES.names("router_bias"), table.FAMILIES.names("correction")
    assert not set(biases) & set(corrections)


def test_a_key_means_one_setting() -> None:
    settings = {setting: set(table.FAMILIES.keys(setting)) for setting in KEYS}
    assert sum(map(len, settings.values())) == len(set().union(*settings.values()))


def test_families_are_data_only() -> None:
    """Whoever opens a checkpoint imports the table: neither torch nor numpy comes with it."""
    code = (
        "import sys, ktconv.families.config, ktconv.families.names, ktconv.source\n"
        "sys.exit(bool({'numpy', 'torch'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- top-k -----------------------------------------------------------------------------

SECTIONS = ("thinker_config", "text_config", "llm_config", "language_config")


@pytest.mark.parametrize("key", table.FAMILIES.keys("top_k"))
@pytest.mark.parametrize("section", [None, *SECTIONS])
def test_a_top_k_under_every_name(key: str, section: str | None, tmp_path: Path) -> None:
    """Bench, the router and the checkpoint's check read it alike."""
    text = {"model_type": "ernie4_5_moe", key: 3, "moe_num_experts": 2}
    config = text if section is None else {"model_type": "outer", section: text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert experts_per_token(tmp_path) == top_k_of(Config(config)) == 3
    with pytest.raises(CheckpointError, match=f"{key} is 3, but a layer has 2 experts"):
        interpret_config(Config(config))
    with pytest.raises(CheckpointError, match="3 experts per token are more than the 2"):
        router_of(config, 0)
    text["moe_num_experts"] = 8
    assert router_of(config, 0).top_k == 3


def test_a_top_k_for_each_layer(tmp_path: Path) -> None:
    config = {"model_type": "hunyuan_v1_moe", "moe_topk": [1, 3], "num_experts": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for layer, expected in enumerate((1, 3)):
        assert experts_per_token(tmp_path, layer) == expected
        assert router_of(config, layer).top_k == expected
    assert experts_per_token(tmp_path, 2) == 8  # config.json does not say
    assert top_k_of(Config(config | {"moe_k": 5}), 2) is None
    with pytest.raises(CheckpointError, match="itself: moe_topk is 3 but moe_k is 5"):
        top_k_of(Config(config | {"moe_k": 5}), 1)
    assert top_k_of(Config(config | {"moe_k": 3}), 1) == 3
    assert top_k_of(Config({"text_config": config, "num_experts_per_tok": 5}), 2) is None


def test_a_top_k_beside_the_text_section(tmp_path: Path) -> None:
    """As the checkpoint's own check reads it: the text section decides where both say it."""
    text = {"model_type": "mixtral"}
    config = {"num_experts_per_tok": 3, "text_config": text}
    assert top_k_of(Config(config)) == router_of(config, 0).top_k == 3
    config["text_config"] = {**text, "num_experts_per_tok": 1}
    assert top_k_of(Config(config)) == router_of(config, 0).top_k == 1


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("kimi_linear", "num_experts_per_token", "moe_topk"),
        ("ernie4_5_moe", "moe_k", "num_experts_per_tok"),
        ("qwen3_moe", "num_experts_per_tok", "num_experts_per_token"),
    ],
)
def test_top_k_keys_that_disagree(kind: str, first: str, second: str) -> None:
    """The family's own key is the first, and whoever reads the config refuses it alike."""
    config = {"model_type": kind, second: 2, first: 3, "norm_topk_prob": True}
    for read in (lambda: top_k_of(Config(config)), lambda: router_of(config, 0)):
        with pytest.raises(CheckpointError, match=f"itself: {first} is 3 but {second} is 2$"):
            read()
    with pytest.raises(CheckpointError, match=r"itself: \w+ is [23] but \w+ is [23]$"):
        interpret_config(Config(config))
    config[second] = 3
    assert top_k_of(Config(config)) == router_of(config, 0).top_k == 3
    config[second] = [3, 3]
    assert interpret_config(Config(config)).top_k
    config[second] = [1, 2]
    with pytest.raises(CheckpointError, match="contradicts itself"):
        interpret_config(Config(config))


def test_what_a_row_says_of_its_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Family(("loud_moe",), activation=ExpertActivation(alpha=2.0, limit=3.0))
    monkeypatch.setattr(table, "FAMILIES", Families((*table.FAMILIES.rows, row)))
    assert activation_of(ModelSettings({"model_type": "loud_moe"})) == Activation(
        "swiglu", 2.0, 1.0, 3.0
    )
    said = {"model_type": "loud_moe", "swiglu_alpha": 1.5, "swiglu_limit": 4}
    assert activation_of(ModelSettings(said)) == Activation("swiglu", 1.5, 1.0, 4.0)


# ---- one more row ----------------------------------------------------------------------

WORDS = ("wi", "wv", "wo")
ROW = Family(
    ("ordinary_moe",),
    layers="blocks",
    mtp="drafts",
    block="sparse",
    experts="specialists",
    matrices=Matrices(*WORDS, gate_up="wiv"),
    router="chooser",
    correction="chooser.balance",
    shared="generalist",
    shared_matrices=Matrices(*WORDS),
    shared_gate="generalist_gate",
    norm="second_norm",
    activation=ExpertActivation("gelu_tanh"),
    routing=Router(
        RouterSpec("sigmoid", correction=True, renormalise=False), frozenset(("scale",))
    ),
    keys={
        "text section": ("words",),
        "layers": ("depth",),
        "hidden size": ("width",),
        "intermediate size": ("specialist_width",),
        "experts": ("specialists",),
        "top_k": ("chosen",),
        "scale": ("loudness",),
        "leading dense layers": ("dense_depth",),
    },
)
TEXT = {
    "model_type": "ordinary_moe_text", "depth": 3, "width": HIDDEN, "specialist_width": 192,
    "specialists": EXPERTS, "chosen": 2, "loudness": 1.5, "dense_depth": 1,
}  # fmt: skip


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "FAMILIES", Families((*table.FAMILIES.rows, ROW)))


def write(directory: Path, style: Callable[..., dict[str, Tensor]]) -> Path:
    """Two MoE layers behind a dense one, and one for multi-token prediction."""
    tensors: dict[str, Tensor] = {"trunk.blocks.0.sparse.wo.weight": bf16(np.ones((8, 8)))}
    rng = np.random.default_rng(0)
    for index, layer in enumerate(LAYERS):
        tensors |= style(f"{layer}.sparse.specialists", random_weights(inner=192, seed=index))
        shared = numbered(f"{layer}.sparse", random_weights(inner=64, experts=1), WORDS)
        tensors |= {name.replace(".0.w", ".generalist.w"): one for name, one in shared.items()}
        tensors |= {
            f"{layer}.sparse.chooser.weight": bf16(rng.standard_normal((EXPERTS, HIDDEN))),
            f"{layer}.sparse.chooser.balance": rng.random(EXPERTS, np.float32),
            f"{layer}.sparse.generalist_gate.weight": bf16(np.ones((1, HIDDEN))),
            f"{layer}.second_norm.weight": bf16(np.ones(HIDDEN)),
        }
    return write_checkpoint(directory, tensors, {"model_type": "ordinary_moe", "words": TEXT})


def by_number(source: str, weights: Weights) -> dict[str, Tensor]:
    return numbered(source, weights, WORDS)


def stacked(source: str, weights: Weights) -> dict[str, Tensor]:
    usual = fused(source, weights, transposed=False)
    return {
        f"{source}.wiv": usual[f"{source}.gate_up_proj"],
        f"{source}.wo": usual[f"{source}.down_proj"],
    }


STYLES = pytest.mark.parametrize("style", [by_number, stacked])


@STYLES
@pytest.mark.usefixtures("added")
def test_a_new_row_opens_a_checkpoint(style: Callable[..., Any], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, style))
    assert [layer.index for layer in checkpoint.layers] == [1, 2, 3]
    assert [layer.is_mtp for layer in checkpoint.layers] == [False, False, True]
    for seed, layer in enumerate(checkpoint.layers):
        weights = random_weights(inner=192, seed=seed)
        for expert, matrices in enumerate(layer.experts):
            for projection in PROJECTIONS:
                expected = getattr(weights, projection)[expert]
                np.testing.assert_array_equal(read_matrix(matrices[projection]), expected)
    assert checkpoint.config.router(1) == RouterSpec(
        "sigmoid", 2, correction=True, renormalise=False, routed_scaling_factor=1.5
    )


@STYLES
@pytest.mark.usefixtures("added", "tiles")  # the AMX level runs too, where it is emulated
def test_a_new_row_is_converted_and_verified(
    style: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_states, "find_spec", lambda name: None)
    model, output = write(tmp_path / "model", style), tmp_path / "out"
    convert(model, output, method="int8", mtp=False, allow_activation_mismatch=True)
    names = read_model(output).keys()
    assert {name for name in names if "drafts" in name or "specialists" in name} == set()
    assert "trunk.blocks.1.sparse.chooser.weight" in names
    assert open_experts(output, 1).activation == Activation("gelu_tanh")
    assert experts_per_token(output) == 2

    result = verify(VerifyRequest(output, str(model), tokens=6, threads=1))
    assert result.passed, result.failures
    rows = result.facts["layers"]["layers"]
    assert [(row["layer"], row["routing"]) for row in rows] == [(1, "router"), (2, "router")]
    assert all(row["quantization_error_with_shared"] is not None for row in rows)


@STYLES
def test_without_its_row_the_family_is_refused(style: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no MoE layer was found"):
        open_checkpoint(write(tmp_path, style))


@pytest.mark.parametrize("name", ["nllb-moe", "interns2_mobius_text", "doge"])
def test_models_that_are_not_read_are_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    """Also where their names could be described in a map, or two towers have such experts."""
    at = ("encoder.layers.1.ffn.experts.expert_0.fc1", "decoder.layers.1.ffn.experts.expert_0.fc1")
    write_checkpoint(
        tmp_path, {f"{one}.weight": bf16(np.zeros((8, 8))) for one in at}, {"model_type": name}
    )
    known = name.removesuffix("_text")
    with pytest.raises(CheckpointError, match=f"experts of {known} are not supported") as error:
        open_checkpoint(tmp_path)
    assert UNREAD[known] in str(error.value)


@pytest.mark.usefixtures("added")
def test_errors_use_the_words_of_the_row(tmp_path: Path) -> None:
    tensors = by_number("trunk.blocks.0.sparse.specialists", random_weights())
    del tensors["trunk.blocks.0.sparse.specialists.3.wv.weight"]
    write_checkpoint(tmp_path, tensors, {"model_type": "ordinary_moe"})
    with pytest.raises(CheckpointError, match=r"specialists\.3\.wv\.weight is missing"):
        open_checkpoint(tmp_path)


@pytest.mark.usefixtures("added")
def test_a_new_row_in_an_output_for_gpus(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, by_number))
    pattern = target_pattern(
        module_name(layer, 0, proj) for layer in checkpoint.layers for proj in layer.projections
    )
    assert fits(pattern, "trunk.blocks.1.sparse.specialists.3.wv")
    assert not fits(pattern, "trunk.blocks.1.sparse.generalist.wv")
    assert class_of("trunk.blocks.1.sparse.chooser.weight") == "router gates"
    assert class_of("trunk.blocks.1.sparse.generalist.wv.weight") == "shared experts"
    assert class_of("trunk.blocks.0.sparse.wo.weight") == "leading dense layers"
    module = expert_module("trunk.blocks.1.sparse.specialists.3.wv")
    assert module == ExpertModule("trunk.blocks.1.sparse.specialists", 3, "up")


# ---- other places of experts -----------------------------------------------------------

PLACES = [
    # block, experts, source of the first layer
    ("", "experts", "model.layers.0.experts"),
    ("mixture", "", "model.layers.0.mixture"),
    ("mlp", "switch", "model.layers.0.mlp.switch"),
]


@pytest.mark.parametrize(("block", "experts", "source"), PLACES)
def test_places_of_experts(
    block: str, experts: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts in the layer itself, stacks in the block itself, a container of another name."""
    row = Family(
        ("placed_moe",),
        block=block,
        experts=experts,
        matrices=Matrices("a", "b", "c", gate_up="input_linear"),
        router="router.layer",
        shared="shared",
    )
    monkeypatch.setattr(table, "FAMILIES", Families((*table.FAMILIES.rows, row)))
    where = ".".join(filter(None, ("model.layers.0", block)))
    weights = random_weights(inner=192)
    usual = fused(source, weights, transposed=False, suffix=".weight")
    beside = {
        f"{where}.router.layer.weight": bf16(np.ones((EXPERTS, HIDDEN))),
        f"{where}.shared.a.weight": bf16(np.ones((8, HIDDEN))),
        "model.layers.0.post_attention_layernorm.weight": bf16(np.ones(HIDDEN)),
    }
    tensors = {
        f"{source}.input_linear.weight": usual[f"{source}.gate_up_proj.weight"],
        f"{source}.c.weight": usual[f"{source}.down_proj.weight"],
        **beside,
    }
    checkpoint = open_checkpoint(
        write_checkpoint(tmp_path, tensors, simple_config(moe_intermediate_size=None))
    )
    [layer] = checkpoint.layers
    assert (layer.index, layer.source, layer.intermediate_size) == (0, source, 192)
    np.testing.assert_array_equal(read_matrix(layer.experts[3]["up"]), weights.up[3])
    assert {tensor.name for tensor in checkpoint.other_tensors} == beside.keys()
    assert not checkpoint.notes
    assert f"{where}.router.layer.weight" in router_tensors(source).weight
    assert norm_tensors(source)[0] == "model.layers.0.post_attention_layernorm.weight"
    assert class_of(f"{where}.router.layer.weight") == "router gates"
    module = module_name(layer, 3, "up")
    found = expert_module(module)
    assert found is not None and (found.expert, found.proj) == (3, "up")
    assert fits(target_pattern([module]), module)


def test_experts_narrower_than_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = simple_config(hidden_size=512, latent=HIDDEN)
    write_checkpoint(tmp_path, numbered("model.layers.0.mlp.experts", random_weights()), config)
    with pytest.raises(CheckpointError, match="hidden_size 512"):
        open_checkpoint(tmp_path)
    row = Family(("latent_moe",), keys={"width of experts": ("latent",)})
    monkeypatch.setattr(table, "FAMILIES", Families((*table.FAMILIES.rows, row)))
    [layer] = open_checkpoint(tmp_path).layers
    assert layer.hidden_size == HIDDEN


@pytest.mark.parametrize(
    ("whole", "text", "found"),
    [
        ("minimax_m3_vl", "minimax_m3_text", "minimax_m3_vl"),  # as vLLM calls it
        ("inkling_mm_model", "inkling_model", "inkling_mm_model"),  # and SGLang
        ("kimi_k25", "kimi_k2", "kimi_k2"),
        ("other_vl", "other_text", "other"),
    ],
)
def test_the_type_of_a_text_section(whole: str, text: str, found: str) -> None:
    """The text section's type counts if the table has it, else that of the whole model."""
    config = Config({"model_type": whole, "text_config": {"model_type": text}})
    assert config.type == found
    assert config.family == table.FAMILIES.of(found)


@pytest.mark.parametrize("section", ["language_config", "text_config"])
def test_a_text_section_without_a_type(section: str) -> None:
    """DeepSeek-OCR's, which leaves it to the whole model; one of its own goes first."""
    said = {"n_routed_experts": 64, "num_experts_per_tok": 6, "topk_method": "greedy"}
    config = {"model_type": "deepseek_vl_v2", section: said}
    row = Config(config).family
    assert row is not None and "deepseek_vl_v2" in row.types
    assert assumed_activation(Config(config)) == ""
    found = find_router(Config(config), 1)
    assert (found.inferred, found.spec.scoring, found.spec.top_k) == ("", "softmax", 6)
    assert not found.spec.renormalise
    other = Config({**config, section: {**said, "model_type": "qwen3_moe"}}).family
    assert other is not None and "qwen3_moe" in other.types
