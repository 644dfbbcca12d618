"""Maps guessed from names and shapes: right where words or shapes decide, a question elsewhere."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.families import (
    Tensor,
    Weights,
    bf16,
    fp8,
    random_weights,
    read_matrix,
    simple_config,
    write_checkpoint,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from ktconv.errors import UnknownNamesError, UsageError
from ktconv.families.config import Config
from ktconv.source import PROJECTIONS, ModelSource, open_checkpoint
from ktconv.source.config import interpret_config
from ktconv.source.map_guess import Guess, guess_map
from ktconv.source.name_patterns import name_patterns
from ktconv.source.naming_map import parse_map, read_map
from ktconv.source.safetensors_file import read_header
from ktconv.source.types import TensorRef

HIDDEN, INNER, EXPERTS, LAYERS = 12, 8, 3, 2
OTHERS = {
    "wte.weight": (32, HIDDEN),
    "h.0.attn.q.weight": (HIDDEN, HIDDEN), "h.1.attn.q.weight": (HIDDEN, HIDDEN),
    "h.0.attn.conv.weight": (HIDDEN, 1, 4), "h.1.attn.conv.weight": (HIDDEN, 1, 4),
    "h.0.mlp.0.weight": (2 * HIDDEN, HIDDEN), "h.0.mlp.2.weight": (HIDDEN, 2 * HIDDEN),
    "h.1.mlp.0.weight": (2 * HIDDEN, HIDDEN), "h.1.mlp.2.weight": (HIDDEN, 2 * HIDDEN),
}  # fmt: skip


def named(pattern: str, layer: int, expert: int = 0) -> str:
    return pattern.replace("{layer}", str(layer)).replace("{expert}", str(expert))


def layers_of(count: int = LAYERS, hidden: int = HIDDEN, inner: int = INNER) -> list[Weights]:
    return [random_weights(hidden, inner, EXPERTS, seed=layer) for layer in range(count)]


def tensors_of(
    layers: list[Weights], names: Mapping[str, str], turned: bool = False
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {name: bf16(np.ones(shape)) for name, shape in OTHERS.items()}
    for layer, weights in enumerate(layers):
        stacks = {key: getattr(weights, key) for key in names if key != "gate_up"}
        if "gate_up" in names:
            stacks["gate_up"] = np.concatenate([weights.gate, weights.up], axis=1)
        for key, stack in stacks.items():
            values = stack.transpose(0, 2, 1) if turned else stack
            if "{expert}" not in names[key]:
                tensors[named(names[key], layer)] = bf16(values)
                continue
            for expert in range(EXPERTS):
                tensors[named(names[key], layer, expert)] = bf16(values[expert])
    return tensors


def config_of(layers: int = LAYERS, **changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": EXPERTS}
    return simple_config(
        **{"model_type": "nobody_knows", "num_hidden_layers": layers, **sizes, **changes}
    )


def guessed(directory: Path, tensors: Mapping[str, Tensor], config: dict[str, Any]) -> Guess:
    write_checkpoint(directory, tensors, config)
    found = read_header(directory / "model.safetensors").tensors
    return guess_map(found, interpret_config(Config(config)), "model")


def assert_guess(
    directory: Path, layers: list[Weights], names: Mapping[str, str], turned: bool = False,
    **changes: Any,
) -> str:  # fmt: skip
    """The guessed map as it is gives the right matrices; returns it."""
    config = config_of(len(layers), **changes)
    guess = guessed(directory, tensors_of(layers, names, turned), config)
    assert guess.map is not None
    checkpoint = open_checkpoint(ModelSource(directory, map=parse_map(guess.map, "guess")))
    assert [layer.index for layer in checkpoint.layers] == list(range(len(layers)))
    for layer, weights in zip(checkpoint.layers, layers, strict=True):
        for expert, matrices in enumerate(layer.experts):
            assert ("gate" in matrices) == bool({"gate", "gate_up"} & names.keys())
            for projection, matrix in matrices.items():
                expected = getattr(weights, projection)[expert]
                np.testing.assert_array_equal(read_matrix(matrix), expected)
    return guess.map


STYLES = {
    "words": {"gate": "h.{layer}.moe.w_gate.{expert}.weight", "up": "h.{layer}.moe.w_up.{expert}"
              ".weight", "down": "h.{layer}.moe.w_down.{expert}.weight"},
    "w1 w2 w3": {"gate": "h.{layer}.e.{expert}.w1.weight", "up": "h.{layer}.e.{expert}.w3.weight",
                 "down": "h.{layer}.e.{expert}.w2.weight"},
    "numbers in words": {"gate": "layer{layer}/expert{expert}/gate",
                         "up": "layer{layer}/expert{expert}/up",
                         "down": "layer{layer}/expert{expert}/down"},
    "numbers as components": {"gate": "h.{layer}.e.{expert}.net.gate",
                              "up": "h.{layer}.e.{expert}.net.up",
                              "down": "h.{layer}.e.{expert}.net.down"},
    "together": {"gate_up": "h.{layer}.e.{expert}.wi.weight",
                 "down": "h.{layer}.e.{expert}.wo.weight"},
    "stacked": {"gate": "h.{layer}.moe.gate_w", "up": "h.{layer}.moe.up_w",
                "down": "h.{layer}.moe.down_w"},
    "stacked together": {"gate_up": "h.{layer}.moe.inp", "down": "h.{layer}.moe.outp"},
}  # fmt: skip


@pytest.mark.parametrize("names", STYLES.values(), ids=STYLES)
@pytest.mark.parametrize("turned", [False, True], ids=["out-in", "in-out"])
def test_the_guess_is_right(tmp_path: Path, names: Mapping[str, str], turned: bool) -> None:
    text = assert_guess(tmp_path, layers_of(), names, turned)
    undecided = parse_map(text, "guess").undecided
    assert ('order = "gate first"' in text) == ("gate_up" in names)
    assert ("gate_up" in names) == any("the order of gate and up" in one for one in undecided)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.from_regex("[a-z]{1,4}", fullmatch=True).filter(
            lambda word: word not in ("w", "fc", "v", "wi", "lin", "proj", "mat", "ff")
        ),
        min_size=2, max_size=4,
    ),
    st.sampled_from([".", "_", "/"]), st.booleans(), st.booleans(), st.permutations(PROJECTIONS),
)  # fmt: skip
def test_any_names_with_telling_words(
    words: list[str], mark: str, first: bool, stacked: bool, order: list[str]
) -> None:
    """Whatever comes before layer and expert, and in whatever order tensors are stored."""
    head, *rest = words
    inside = ".".join(rest)
    number = "" if stacked else "{expert}."
    names = {}
    for key in order:
        tail = f"{key}{mark}x" if first else f"x{mark}{key}"
        names[key] = f"{head}.{{layer}}.{inside}.{number}{tail}.weight"
    with tempfile.TemporaryDirectory() as directory:
        assert_guess(Path(directory), layers_of(), names)


def test_one_layer(tmp_path: Path) -> None:
    """Nothing shows that the constant number is that of a layer, except that there is no other."""
    assert "{layer}" in assert_guess(tmp_path, layers_of(1), STYLES["words"])


def test_shapes_decide_where_words_say_nothing(tmp_path: Path) -> None:
    """Down by its shape; gate before up is a guess, and the map is refused until someone decides:
    nothing would show later that they are exchanged."""
    names = {str(key): f"h.{{layer}}.z.{{expert}}.{word}" for key, word in zip(PROJECTIONS, "abc",
             strict=True)}  # fmt: skip
    text = assert_guess(tmp_path, layers_of(), names)
    file = tmp_path / "names.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"undecided: \[experts\]: gate and up .*exchange them if"):
        read_map(file)
    start, _, rest = text.partition("undecided = [")
    file.write_text(start + rest.partition("\n]\n")[2])
    naming = read_map(file)
    assert naming is not None and not naming.undecided


def test_words_decide_where_shapes_say_nothing(tmp_path: Path) -> None:
    weights = layers_of(hidden=INNER, inner=INNER)
    text = assert_guess(tmp_path, weights, STYLES["w1 w2 w3"], hidden_size=INNER)
    [doubt] = parse_map(text, "guess").undecided
    assert doubt == '[experts]: if the weights are stored [in, out], add stored = "in-out"'


def test_experts_before_layers(tmp_path: Path) -> None:
    names = {str(key): f"e.{{expert}}.h.{{layer}}.{key}" for key in PROJECTIONS}
    assert_guess(tmp_path, layers_of(), names)


def test_experts_without_a_gate(tmp_path: Path) -> None:
    names = {key: f"h.{{layer}}.z.{{expert}}.{key}.weight" for key in ("up", "down")}
    text = assert_guess(tmp_path, layers_of(), names, hidden_act="relu2")
    assert "gate =" not in text.partition("[others]")[0]
    assert '# like = "nomic_bert"' in text and "qwen3_moe" not in text


def test_biased_experts_without_a_gate(tmp_path: Path) -> None:
    """Of Phixtral: its map, once it says what the model is like."""
    names = {"up": "h.{layer}.moe.mlp.{expert}.fc1.weight",
             "down": "h.{layer}.moe.mlp.{expert}.fc2.weight"}  # fmt: skip
    tensors = tensors_of(layers_of(), names)
    for name, (_, shape, _) in list(tensors.items()):
        tensors[name.replace(".weight", ".bias")] = np.ones(shape[0], np.float32)
    config = config_of(LAYERS, activation_function="gelu_new")
    guess = guessed(tmp_path, tensors, config)
    assert guess.map is not None
    chosen = guess.map.replace("# like = ", "like = ")
    for layer in open_checkpoint(ModelSource(tmp_path, map=parse_map(chosen, "guess"))).layers:
        assert str(layer.activation) == "GELU (tanh) without a gate, with biases"
        assert layer.projections == ("up", "down") and layer.biased


def test_scales_are_no_experts_of_their_own(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {}
    shapes = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    for key, shape in shapes.items():
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                name = f"h.{layer}.z.{expert}.{key}"
                tensors[f"{name}.weight"] = fp8(np.full(shape, 0x38, np.uint8))
                tensors[f"{name}.weight_scale"] = np.full((shape[0], 1), 2, np.float32)
    guess = guessed(tmp_path, tensors, config_of())
    assert guess.map is not None
    checkpoint = open_checkpoint(ModelSource(tmp_path, map=parse_map(guess.map, "guess")))
    assert (read_matrix(checkpoint.layers[1].experts[2]["down"]) == 2).all()
    assert [one.dtypes for one in guess.likely] == [["F8_E4M3"]] * 3


def test_what_is_beside_experts(tmp_path: Path) -> None:
    tensors = tensors_of(layers_of(), STYLES["words"])
    for layer in range(LAYERS):
        tensors[f"h.{layer}.moe.route.weight"] = bf16(np.ones((EXPERTS, HIDDEN)))
        tensors[f"h.{layer}.moe.bias_of_choice"] = bf16(np.ones(EXPERTS))
        for key, shape in (("gate", (5, HIDDEN)), ("up", (5, HIDDEN)), ("down", (HIDDEN, 5))):
            tensors[f"h.{layer}.moe.shared.{key}.weight"] = bf16(np.ones(shape))
    guess = guessed(tmp_path, tensors, config_of())
    assert guess.map is not None
    naming = parse_map(guess.map, "guess")
    assert naming.experts is not None
    assert {key: one.text for key, one in naming.experts.others.items()} == {
        "router": "h.{layer}.moe.route",
        "correction": "h.{layer}.moe.bias_of_choice",
        **{f"shared_{key}": f"h.{{layer}}.moe.shared.{key}" for key in PROJECTIONS},
    }


def test_missing_settings_are_asked_for(tmp_path: Path) -> None:
    guess = guessed(tmp_path, tensors_of(layers_of(), STYLES["words"]), config_of(num_experts=None))
    assert guess.map is not None
    assert "# num_experts = ..." in guess.map and "# num_experts_per_tok = ..." in guess.map


@pytest.mark.parametrize(
    "names",
    [
        {},
        {"h.{layer}.z.{expert}.only.weight": (INNER, HIDDEN)},
        {f"h.{{layer}}.z.{{expert}}.{word}.weight": (HIDDEN, HIDDEN) for word in "qkvo"},
    ],
    ids=["no experts", "one matrix", "four alike"],
)
def test_nothing_is_guessed(tmp_path: Path, names: Mapping[str, tuple[int, ...]]) -> None:
    tensors: dict[str, Tensor] = {name: bf16(np.ones(shape)) for name, shape in OTHERS.items()}
    for pattern, shape in names.items():
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                tensors[named(pattern, layer, expert)] = bf16(np.ones(shape))
    assert guessed(tmp_path, tensors, config_of()).map is None
    with pytest.raises(UnknownNamesError) as error:
        open_checkpoint(tmp_path)
    assert "no MoE layer was found" in str(error.value)


@pytest.mark.parametrize("word", ['"', "\\", "{}", "{layer}", "\n", "\u0663", "#", "=", " ", "'"])
def test_hostile_names(tmp_path: Path, word: str) -> None:
    """A map that is right, or none; and other tensors of such names are harmless."""
    names = {key: f"h{word}.{{layer}}.z.{{expert}}.{key}" for key in PROJECTIONS}
    tensors = {
        f"h{word}.{layer}.z.{expert}.{key}": bf16(getattr(weights, key)[expert])
        for layer, weights in enumerate(layers_of())
        for key in PROJECTIONS
        for expert in range(EXPERTS)
    }
    guess = guessed(tmp_path / "1", tensors, config_of())
    if guess.map is not None:
        checkpoint = open_checkpoint(ModelSource(tmp_path / "1", map=parse_map(guess.map, "guess")))
        assert len(checkpoint.layers) == LAYERS
    else:
        assert "{" in word or word in ("\n", "\u0663", " ")
    usual = tensors_of(layers_of(), STYLES["words"])
    beside = {name.replace("z", "moe"): bf16(np.ones(3)) for name in tensors}
    guess = guessed(tmp_path / "2", {**usual, **beside}, config_of())
    assert guess.map is not None
    assert (
        len(open_checkpoint(ModelSource(tmp_path / "2", map=parse_map(guess.map, "guess"))).layers)
        == 2
    )
    assert names


def refs(*names: str, shape: tuple[int, ...] = (8, 8)) -> list[TensorRef]:
    return [TensorRef(name, Path("x"), "BF16", shape, 0, 128) for name in names]


def test_patterns() -> None:
    """Numbers that vary are marks; those of words, and constant ones, are not."""
    names = [f"a.{layer}.w{word}.{expert}.v2" for layer in range(9) for word in (1, 2, 3)
             for expert in range(5)]  # fmt: skip
    found = name_patterns(refs(*names, "a.0.norm"))
    texts = ["a.{}.w1.{}.v2", "a.{}.w2.{}.v2", "a.{}.w3.{}.v2", "a.0.norm"]
    assert [one.text for one in found] == texts
    assert [len(one.tensors) for one in found] == [45, 45, 45, 1]
    assert found[0].described == "9 x 5 tensors, BF16 [8, 8]"
    assert found[3].described == "1 tensor, BF16 [8, 8]"
    assert found[0].marked({0: "layer", 1: "expert"}) == "a.{layer}.w1.{expert}.v2"


def test_many_tensors_are_few_patterns() -> None:
    """Also in time: every name is looked at a few times, not compared with the others."""
    names = (f"h.{layer}.moe.{key}.{expert}.weight" for layer in range(60)
             for key in PROJECTIONS for expert in range(64))  # fmt: skip
    found = name_patterns(refs(*names))
    assert [one.described for one in found] == ["60 x 64 tensors, BF16 [8, 8]"] * 3
