"""Maps of unknown names: the same experts as under usual names, and one sentence for a bad map."""

from __future__ import annotations

import re
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
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ktconv.errors import CheckpointError, UsageError
from ktconv.families.names import norm_tensors, router_tensors, shared_expert_tensors
from ktconv.source import PROJECTIONS, Checkpoint, ModelSource, open_checkpoint
from ktconv.source.naming_map import (
    OTHER_KEYS,
    ROUTER_KEYS,
    SHARED_KEYS,
    NamingMap,
    map_of_record,
    parse_map,
    read_map,
)
from ktconv.source.reading.reader import SourceReader
from ktconv.source.reading.tensors import SourceTensors
from ktconv.verify.second_reader import SecondReader

HIDDEN, INNER, EXPERTS = 8, 6, 3
NAMES = {
    "gate": "decoder.h.{layer}.moe.w_gate.{expert}",
    "up": "decoder.h.{layer}.moe.w_up.{expert}",
    "down": "decoder.h.{layer}.moe.w_down.{expert}",
}


def experts_table(names: Mapping[str, str] = NAMES, name: str = "experts", **more: Any) -> str:
    lines = [f"[{name}]", *(f'{key} = "{text}"' for key, text in names.items())]
    return "\n".join([*lines, *(f"{key} = {value!r}" for key, value in more.items())]) + "\n"


MAP = experts_table()


def the_map(content: str) -> NamingMap:
    return parse_map(content, "--map names.toml")


def named(pattern: str, layer: int, expert: int = 0) -> str:
    return pattern.replace("{layer}", str(layer)).replace("{expert}", str(expert))


def layers_of(count: int = 1) -> list[Weights]:
    return [random_weights(HIDDEN, INNER, EXPERTS, seed=layer) for layer in range(count)]


def numbered(
    layers: list[Weights], names: Mapping[str, str] = NAMES, suffix: str = ".weight"
) -> dict[str, Tensor]:
    return {
        named(names[key], layer, expert) + suffix: bf16(getattr(weights, key)[expert])
        for layer, weights in enumerate(layers)
        for key in names
        for expert in range(EXPERTS)
    }


def config_of(layers: int = 1, **changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": EXPERTS}
    return simple_config(**{**sizes, "num_hidden_layers": layers, **changes})


def opened(
    directory: Path, tensors: Mapping[str, Tensor], content: str, layers: int = 1, **config: Any
) -> Checkpoint:
    model = write_checkpoint(directory, tensors, config_of(layers, **config))
    return open_checkpoint(ModelSource(model, map=the_map(content)))


def assert_has(checkpoint: Checkpoint, layers: list[Weights]) -> None:
    """By both readers."""
    assert [layer.index for layer in checkpoint.layers] == list(range(len(layers)))
    second = SecondReader(checkpoint, SourceReader(checkpoint.files, checkpoint.sources))
    for layer, weights in zip(checkpoint.layers, layers, strict=True):
        assert len(layer.experts) == EXPERTS
        for expert, matrices in enumerate(layer.experts):
            for projection in PROJECTIONS:
                expected = getattr(weights, projection)[expert]
                np.testing.assert_array_equal(read_matrix(matrices[projection]), expected)
                again = second.expert(layer, expert, projection)
                rows, cols = expected.shape
                values = again.values(range(rows), range(cols))
                np.testing.assert_array_equal(values, expected)


# ---- what a map finds ------------------------------------------------------------------

# The letters and marks of names; a word has one letter at least, so that no word is a number.
WORD = st.from_regex(r"[a-z]{1,3}[_a-z]{0,3}", fullmatch=True)


@st.composite
def renamings(draw: st.DrawFn) -> tuple[dict[str, str], dict[str, str], str]:
    """Patterns, settings, and the ending of all names."""
    words = draw(st.lists(WORD, min_size=6, max_size=6, unique=True))
    mark = st.sampled_from([".", "_", "/", "-"])
    start = draw(st.sampled_from(["", f"{words[0]}.", f"{words[0]}.0."]))
    head = f"{start}{words[1]}{draw(mark)}{{layer}}.{words[2]}."
    stacked, together = draw(st.booleans()), draw(st.booleans())
    keys = ["gate_up", "down"] if together else ["gate", "up", "down"]
    number = "" if stacked else f"{draw(mark)}{{expert}}"
    first = draw(st.booleans())
    found = {}
    for key, word in zip(keys, words[3:], strict=False):
        # A part after the projection's name keeps one name from being the start of another.
        found[key] = f"{head}{word}q{number}" if first else f"{head}e{number}.{word}q"
    more = {"stored": draw(st.sampled_from(["out-in", "in-out"]))}
    if "gate_up" in keys:
        more["order"] = draw(st.sampled_from(["gate first", "up first", "interleaved"]))
    return found, more, draw(st.sampled_from(["", ".weight"]))


def rearranged(
    layers: list[Weights], names: dict[str, str], more: dict[str, str], suffix: str
) -> dict[str, Tensor]:
    """The tensors as a map with these names and settings describes them."""
    tensors: dict[str, Tensor] = {}
    for layer, weights in enumerate(layers):
        stacks = {key: getattr(weights, key) for key in names if key != "gate_up"}
        if "gate_up" in names:
            pair = [weights.gate, weights.up]
            if more["order"] == "interleaved":
                stacks["gate_up"] = np.stack(pair, axis=2).reshape(EXPERTS, 2 * INNER, HIDDEN)
            else:
                step = -1 if more["order"] == "up first" else 1
                stacks["gate_up"] = np.concatenate(pair[::step], axis=1)
        for key, stack in stacks.items():
            values = stack.transpose(0, 2, 1) if more["stored"] == "in-out" else stack
            if "{expert}" not in names[key]:
                tensors[named(names[key], layer) + suffix] = bf16(values)
                continue
            for expert in range(EXPERTS):
                tensors[named(names[key], layer, expert) + suffix] = bf16(values[expert])
    return tensors


@settings(max_examples=60, deadline=None)
@given(renamings())
@example((NAMES, {"stored": "out-in"}, ".weight"))
def test_any_renaming_gives_the_same_matrices(
    renaming: tuple[dict[str, str], dict[str, str], str],
) -> None:
    names, more, suffix = renaming
    layers = layers_of(2)
    with tempfile.TemporaryDirectory() as directory:
        tensors = rearranged(layers, names, more, suffix)
        checkpoint = opened(Path(directory), tensors, experts_table(names, **more), 2)
        assert_has(checkpoint, layers)


@pytest.mark.parametrize("known_sizes", [True, False])
def test_sizes_of_weights_stored_in_out_without_config(tmp_path: Path, known_sizes: bool) -> None:
    layers, more = layers_of(), {"stored": "in-out"}
    unknown: dict[str, Any] = {"hidden_size": None, "moe_intermediate_size": None}
    config = {} if known_sizes else unknown
    tensors = rearranged(layers, NAMES, more, "")
    assert_has(opened(tmp_path, tensors, experts_table(NAMES, **more), **config), layers)


def test_zero_padded_numbers_and_offsets(tmp_path: Path) -> None:
    """Layers of the names start at 1 and experts at 1, both with leading zeros."""
    layers = layers_of(2)
    tensors = {
        f"blocks_{layer + 1:03d}/{key}/x{expert + 1:02d}": bf16(getattr(weights, key)[expert])
        for layer, weights in enumerate(layers)
        for key in PROJECTIONS
        for expert in range(EXPERTS)
    }
    names = {str(key): f"blocks_{{layer}}/{key}/x{{expert}}" for key in PROJECTIONS}
    content = experts_table(names, layer_offset=-1, expert_offset=-1)
    assert_has(opened(tmp_path, tensors, content, 2), layers)


def test_a_list_of_layers(tmp_path: Path) -> None:
    """Names count only MoE layers; the config says that the others are dense."""
    tensors = numbered(layers_of(2))
    kinds = ["dense", "sparse", "dense", "sparse"]
    content = experts_table(layers=[1, 3])
    checkpoint = opened(tmp_path, tensors, content, 4, mlp_layer_types=kinds)
    assert [layer.index for layer in checkpoint.layers] == [1, 3]


def test_names_of_parts_that_are_no_endings(tmp_path: Path) -> None:
    weights = layers_of()[0]
    tensors: dict[str, Tensor] = {}
    for key in PROJECTIONS:
        for expert in range(EXPERTS):
            matrix = getattr(weights, key)[expert]
            codes = np.full(matrix.shape, 0x38, np.uint8)  # 1.0
            tensors[f"h.0.{key}_q.{expert}"] = fp8(codes)
            tensors[f"h.0.{key}_s.{expert}"] = np.full((1,), expert + 2, np.float32)
    lines = ["[experts]"]
    for key in PROJECTIONS:
        lines.append(f'{key}.weight = "h.{{layer}}.{key}_q.{{expert}}"')
        lines.append(f'{key}.weight_scale = "h.{{layer}}.{key}_s.{{expert}}"')
    checkpoint = opened(tmp_path, tensors, "\n".join(lines))
    [layer] = checkpoint.layers
    assert layer.encoding == "fp8-block"
    for expert, matrices in enumerate(layer.experts):
        assert (read_matrix(matrices["up"]) == expert + 2).all()
    second = SecondReader(checkpoint, SourceReader(checkpoint.files, checkpoint.sources))
    assert (second.expert(layer, 2, "down").values(range(1), range(INNER)) == 4).all()


def test_mtp_layers(tmp_path: Path) -> None:
    layers = layers_of(3)
    mtp = {str(key): f"nextn.{{layer}}.{key}.{{expert}}" for key in PROJECTIONS}
    tensors = {**numbered(layers[:2]), **numbered(layers[2:], mtp)}
    content = MAP + experts_table(mtp, "mtp")
    checkpoint = opened(tmp_path, tensors, content, 2, num_nextn_predict_layers=1)
    assert_has(checkpoint, layers)
    assert [layer.is_mtp for layer in checkpoint.layers] == [False, False, True]
    assert checkpoint.mapped is not None
    assert checkpoint.mapped.prefix(checkpoint.layers[2].source) == "nextn.0."


def test_a_map_of_other_layers_than_those_found(tmp_path: Path) -> None:
    """A map may describe MTP layers alone."""
    layers = layers_of(2)
    usual = {key: f"model.layers.{{layer}}.mlp.experts.{{expert}}.{key}_proj" for key in NAMES}
    mtp = {str(key): f"nextn.{{layer}}.{key}.{{expert}}" for key in PROJECTIONS}
    tensors = {**numbered(layers[:1], usual), **numbered(layers[1:], mtp)}
    assert_has(opened(tmp_path, tensors, experts_table(mtp, "mtp")), layers)


# ---- semantics -------------------------------------------------------------------------


def test_settings_for_unknown_keys(tmp_path: Path) -> None:
    """In a nested section, too; config.json's own settings stay."""
    text = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "experts_in_moe": EXPERTS}
    config = {"model_type": "odd_vl", "text_config": {"model_type": "odd", **text}, "x": 1}
    model = write_checkpoint(tmp_path, numbered(layers_of()), config)
    content = f"like = 'deepseek_v3'\n{MAP}[config]\nnum_hidden_layers = 1\nnum_experts = 3\n"
    checkpoint = open_checkpoint(ModelSource(model, map=the_map(content)))
    text_config = checkpoint.config.content["text_config"]
    assert text_config == {
        **text, "model_type": "deepseek_v3", "num_hidden_layers": 1, "num_experts": 3
    }  # fmt: skip
    assert (checkpoint.config.content["model_type"], checkpoint.config.content["x"]) == (
        "odd_vl",
        1,
    )
    assert any("deepseek_v3" in note for note in checkpoint.notes)


def test_a_setting_that_config_json_has_too_is_noted(tmp_path: Path) -> None:
    content = f"{MAP}[config]\nnum_experts = 3\nhidden_act = 'gelu'\n"
    checkpoint = opened(tmp_path, numbered(layers_of()), content, num_experts=4, hidden_act="silu")
    assert len(checkpoint.layers[0].experts) == EXPERTS
    said = [note for note in checkpoint.notes if "config.json" in note]
    assert [re.findall("num_experts|hidden_act", note) for note in said] == [
        ["num_experts"], ["hidden_act"]
    ]  # fmt: skip


# ---- bad maps --------------------------------------------------------------------------

GATE = 'gate = "a.{layer}.g.{expert}"\n'
UP = 'up = "a.{layer}.u.{expert}"\n'
DOWN = 'down = "a.{layer}.d.{expert}"\n'
GOOD = "[experts]\n" + GATE + UP + DOWN
BAD = {
    "not TOML": ("[experts\n", "line 1"),
    "too many digits": ("like = 1" + 5000 * "0", "value has 5001 digits"),
    "key twice": (GOOD + GATE, "line 5"),
    "no table": ("like = 'qwen3_moe'\n", "no table [experts]"),
    "no table but a value": ("experts = 3\n", "line 1: experts must be a table"),
    "unknown table": (GOOD + "[expert]\n", "expert is not a key of a map; the nearest is experts"),
    "undecided": ("undecided = 'gate'\n" + GOOD, "line 1: undecided must be a list of texts"),
    "unknown key": (GOOD + "gates = 'x'\n", "line 5: [experts] gates"),
    "not a text": ("[experts]\ngate = 3\n" + UP + DOWN, "line 2: [experts] gate must be a name"),
    "no up": ("[experts]\n" + GATE + DOWN, "[experts] has no up"),
    "no down": ("[experts]\n" + GATE + UP, "[experts] has no down"),
    "no layer": ("[experts]\n" + UP + "down = 'a.d.{expert}'", "line 3: [experts] down has no {la"),
    "no expert in one": ("[experts]\n" + UP + "down = 'a.{layer}'", "down has no {expert}"),
    "layer twice": ("[experts]\n" + UP + "down = '{layer}.{layer}.{expert}'", "has {layer} twice"),
    "placeholder": ("[experts]\n" + UP + "down = '{layer}.{e}'", "placeholders are {layer} and"),
    "brace": ("[experts]\n" + UP + "down = '{layer}.{expert}.{'", "brace"),
    "side by side": ("[experts]\n" + UP + "down = '{layer}{expert}'", "behind each placeholder"),
    "digit": ("[experts]\n" + UP + "down = '{layer}0.{expert}'", "behind each placeholder"),
    "gate_up in no order": (
        "[experts]\ngate_up = 'b.{layer}.{expert}'\n" + DOWN,
        "line 2: [experts] gate_up needs order",
    ),
    "both": (GOOD + "gate_up = 'b.{layer}.{expert}'\n", "up and gate_up"),
    "order of nothing": (GOOD + "order = 'gate first'\n", "line 5: [experts] order belongs to"),
    "stored": (GOOD + "stored = 'transposed'\n", '"out-in" or "in-out", not "transposed"'),
    "layers": (GOOD + "layers = [1, 1]\n", "each once"),
    "layers and offset": (GOOD + "layers = [1]\nlayer_offset = 1\n", "both given"),
    "offset": (GOOD + "layer_offset = 1.5\n", "whole number, not 1.5"),
    "like": ("like = 'qwen3_mo'\n" + GOOD, 'line 1: like is "qwen3_mo"'),
    "others": (GOOD + "[others]\nroutes = 'r.{layer}'\n", "the nearest is router"),
    "others with experts": (GOOD + "[others]\nnorm = '{layer}.{expert}'\n", "has {expert}"),
    "others of nothing": (GOOD + "[mtp_others]\nnorm = '{layer}'\n", "belongs to [mtp], which"),
    "setting": (GOOD + "[config]\nnum_expert = 3\n", "line 6: [config] num_expert"),
    "setting of a time": (GOOD + "[config]\nnum_experts = 2026-01-01\n", "JSON does not have"),
    "model_type": (GOOD + "[config]\nmodel_type = 'qwen3_moe'\n", "cannot be given"),
    "empty table of parts": ("[experts]\n" + UP + "down = {}\n", "down is empty"),
}


@pytest.mark.parametrize("content, phrase", BAD.values(), ids=BAD)
def test_a_map_that_is_wrong_by_itself(content: str, phrase: str) -> None:
    with pytest.raises(UsageError) as error:
        the_map(content)
    assert phrase in str(error.value)
    assert str(error.value).startswith("--map names.toml") and "\n" not in str(error.value)
    assert error.value.hint


def test_good_map_is_good() -> None:
    """The one that BAD spoils."""
    assert the_map(GOOD).experts is not None


@pytest.mark.parametrize("data", [b"\xff\xfe", None], ids=["not text", "missing"])
def test_a_map_that_is_no_text_file(tmp_path: Path, data: bytes | None) -> None:
    path = tmp_path / "map.toml"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(UsageError, match=r"--map .*map\.toml") as refused:
        read_map(path)
    assert data is not None or (refused.value.hint or "").startswith("name a map, a TOML file; see")


@pytest.mark.parametrize(
    "source",
    [None, 3, {}, {"map": None}, {"map": {"toml": "x"}}, {"map": {"toml": [1]}}],
    ids=str,
)
def test_a_manifest_without_a_map(source: object) -> None:
    assert map_of_record(source) is None


def test_a_map_survives_the_manifest() -> None:
    """Byte for byte, whatever its line ends."""
    content = MAP.replace("\n", "\r\n") + "# the end"
    again = map_of_record({"map": the_map(content).record()})
    assert again is not None
    assert (again.content, again.sha256) == (content, the_map(content).sha256)


@pytest.mark.parametrize(
    ("content", "phrases"),
    [
        pytest.param(
            experts_table({**NAMES, "up": "decoder.h.{layer}.moe.up.{expert}"}),
            ["[experts] up of the map", "decoder.h.0.moe.w_up.0.weight"],
            id="matches nothing",
        ),
        pytest.param(
            experts_table({**NAMES, "up": NAMES["gate"]}),
            ["decoder.h.0.moe.w_gate.0.weight matches [experts] gate and [experts] up"],
            id="overlap",
        ),
        pytest.param(
            experts_table(layers=[5, 6, 7]), ["decoder.h.0.moe", "layer 5"], id="layers beyond"
        ),
        pytest.param(
            experts_table(layer_offset=-1), ["decoder.h.0.moe.w_gate.0.weight is layer -1"],
            id="negative layer",
        ),
        pytest.param(
            experts_table(expert_offset=-1), ["decoder.h.0.moe.w_gate.0.weight is expert -1"],
            id="negative expert",
        ),
        pytest.param(
            experts_table(expert_offset=1), ["decoder.h.0.moe.w_gate.2", "is expert 3"],
            id="expert beyond",
        ),
        pytest.param(
            experts_table(encoding="fp8-block"), ["decoder.h.0.moe.* is bf16", "'fp8-block'"],
            id="encoding",
        ),
        pytest.param(
            experts_table(stored="in-out"), ["w_gate.0.weight has shape"], id="stored otherwise"
        ),
        pytest.param(
            MAP + '[others]\nrouter = "decoder.h.{layer}.moe.route"\n',
            ["[others] router of the map", "decoder.h.0.moe.router.weight"],
            id="no router",
        ),
    ],
)  # fmt: skip
def test_a_map_that_does_not_fit(tmp_path: Path, content: str, phrases: list[str]) -> None:
    router = {"decoder.h.0.moe.router.weight": np.ones((EXPERTS, HIDDEN), np.float32)}
    with pytest.raises(CheckpointError) as error:
        opened(tmp_path, {**numbered(layers_of()), **router}, content)
    for phrase in phrases:
        assert phrase in str(error.value), error.value
    assert "model.layers" not in str(error.value)
    assert error.value.hint


def test_missing_experts_are_named_as_the_checkpoint_names_them(tmp_path: Path) -> None:
    tensors = numbered(layers_of())
    del tensors["decoder.h.0.moe.w_down.1.weight"]
    with pytest.raises(CheckpointError, match=r"^decoder\.h\.0\.moe\.w_down\.1 is missing"):
        opened(tmp_path, tensors, MAP)


def test_a_layer_without_experts_is_named_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        opened(tmp_path, numbered(layers_of()), MAP, 2)
    assert "layer 1 has no experts" in str(error.value)
    assert "names like decoder.h.0.moe.*" in str(error.value)
    assert "[config]" in str(error.value.hint)


def test_one_tensor_under_two_names(tmp_path: Path) -> None:
    tensors = numbered(layers_of())
    tensors["decoder.h.00.moe.w_up.01"] = tensors["decoder.h.0.moe.w_up.1.weight"]
    with pytest.raises(CheckpointError, match=r"h\.00\.moe\.w_up\.01.* are the same weight"):
        opened(tmp_path, tensors, MAP)


def test_a_layer_that_is_found_anyway(tmp_path: Path) -> None:
    usual = {key: f"model.layers.{{layer}}.mlp.experts.{{expert}}.{key}_proj" for key in NAMES}
    tensors = {**numbered(layers_of()), **numbered(layers_of(), usual)}
    with pytest.raises(CheckpointError) as error:
        opened(tmp_path, tensors, MAP)
    for phrase in ("layer 0 has two sets", "w_gate.0.weight", "experts.0.gate_proj.weight"):
        assert phrase in str(error.value)


def test_experts_of_another_tower(tmp_path: Path) -> None:
    """Those of the map are the language model's."""
    vision = {key: f"vision.blocks.{{layer}}.mlp.experts.{{expert}}.{key}_proj" for key in NAMES}
    layers = layers_of(2)
    tensors = {**numbered(layers[:1]), **numbered(layers[1:], vision)}
    checkpoint = opened(tmp_path, tensors, MAP, model_type="nobody_knows")
    assert_has(checkpoint, layers[:1])
    assert len(checkpoint.other_tensors) == 3 * EXPERTS
    assert any("vision.blocks.0.mlp.experts" in note for note in checkpoint.notes)


def test_a_map_of_usual_names(tmp_path: Path) -> None:
    """It may describe what would be found without it."""
    usual = {key: f"model.layers.{{layer}}.mlp.experts.{{expert}}.{key}_proj" for key in NAMES}
    layers = layers_of()
    checkpoint = opened(tmp_path, numbered(layers, usual), experts_table(usual))
    assert_has(checkpoint, layers)
    assert any("known without --map" in note for note in checkpoint.notes)
    odd = opened(tmp_path / "odd", numbered(layers), MAP)
    assert not any("known without --map" in note for note in odd.notes)


def test_other_tensors_have_the_names_that_the_layer_looks_for(tmp_path: Path) -> None:
    """Every key of [others]."""
    beside = {f"h.0.t{number}": np.ones(1, np.float32) for number in range(len(OTHER_KEYS))}
    lines = (f'{key} = "h.{{layer}}.t{number}"' for number, key in enumerate(OTHER_KEYS))
    others = "\n".join(lines)
    content = f"{MAP}[others]\n{others}"
    checkpoint = opened(tmp_path, {**numbered(layers_of()), **beside}, content)
    tensors, source = SourceTensors(checkpoint), checkpoint.layers[0].source
    router = router_tensors(source)
    found = [tensors.find(getattr(router, part)) for part in ROUTER_KEYS]
    found += [tensors.find(norm_tensors(source))]
    shared = shared_expert_tensors(source)
    found += [tensors.find(getattr(one, part) for one in shared) for part in SHARED_KEYS]
    assert [one and one.name for one in found] == list(beside)


def test_an_unknown_part(tmp_path: Path) -> None:
    """Of parts given by name, and of a tensor beside a weight."""
    names = 'gate.weights = "decoder.h.{layer}.moe.w_gate.{expert}"\n'
    content = "[experts]\n" + names + "".join(MAP.splitlines(keepends=True)[2:])
    with pytest.raises(CheckpointError, match="'weights', which no encoding has"):
        opened(tmp_path / "1", numbered(layers_of()), content)
    tensors = numbered(layers_of())
    tensors["decoder.h.0.moe.w_up.1.pre_scale"] = np.ones(1, np.float32)
    with pytest.raises(CheckpointError, match=r"decoder\.h\.0\.moe\.w_up\.1"):
        opened(tmp_path / "2", tensors, MAP)
