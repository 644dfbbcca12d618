"""Shapes: the published dimensions, or four numbers."""

from __future__ import annotations

import pytest

from ktconv.bench.presets import PRESETS, parse_shape
from ktconv.errors import UsageError
from ktconv.formats import formats_for
from ktconv.native import Activation

# hidden, intermediate, experts, top-k of each model's config.json
PUBLISHED = {
    "deepseek-v3": (7168, 2048, 256, 8),
    "deepseek-v4-flash": (4096, 2048, 256, 6),
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "qwen3-235b-a22b": (4096, 1536, 128, 8),
    "kimi-k2": (7168, 2048, 384, 8),
    "glm-4.5-air": (4096, 1408, 128, 8),
    "minimax-m2": (3072, 1536, 256, 8),
    "mixtral-8x7b": (4096, 14336, 8, 2),
    "gpt-oss-120b": (2880, 2880, 128, 4),
    "nemotron-3-nano": (2688, 1856, 128, 6),
    "nomic-embed-text-v2-moe": (768, 3072, 8, 2),
}


def test_presets_have_the_published_dimensions() -> None:
    found = {s.name: (s.hidden, s.intermediate, s.experts, s.top_k) for s in PRESETS.values()}
    assert found == PUBLISHED


def test_activations_of_presets() -> None:
    others = {"deepseek-v4-flash", "gpt-oss-120b", "nemotron-3-nano", "nomic-embed-text-v2-moe"}
    assert all(PRESETS[name].activation == Activation() for name in PRESETS.keys() - others)
    assert PRESETS["nemotron-3-nano"].activation == Activation("relu2")
    assert PRESETS["nemotron-3-nano"].operations == 4 * 2688 * 1856
    assert PRESETS["nomic-embed-text-v2-moe"].activation == Activation("ungated_gelu")
    assert PRESETS["deepseek-v4-flash"].activation == Activation(limit=10.0)
    assert PRESETS["gpt-oss-120b"].activation == Activation("swiglu", 1.702, 1.0, 7.0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_preset_can_be_held(name: str) -> None:
    shape = PRESETS[name]
    able = formats_for(shape.hidden, shape.intermediate, 1)
    assert {"bf16", "mxfp4", "int8"} <= set(able)
    assert ("int4" in able) == (name not in ("gpt-oss-120b", "nemotron-3-nano"))


def test_names_in_any_case_and_numbers() -> None:
    assert parse_shape("Qwen3-30B-A3B") is PRESETS["qwen3-30b-a3b"]
    shape = parse_shape(" 256, 128,4,2")
    assert (shape.hidden, shape.intermediate, shape.experts, shape.top_k) == (256, 128, 4, 2)
    assert shape.name == "256,128,4,2"
    assert shape.operations == 6 * 256 * 128


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("qwen3", "neither a preset nor"),
        ("", "neither a preset nor"),
        ("1,2,3", "neither a preset nor"),
        ("1,2,3,4,5", "neither a preset nor"),
        ("256,128,4,-2", "neither a preset nor"),
        ("256,128,4,1.5", "neither a preset nor"),
        ("0,128,4,2", "hidden size of 0"),
        ("256,0,4,2", "intermediate size of 0"),
        ("256,128,0,0", "experts of 0"),
        ("256,128,4,0", "top-k of 0"),
        ("99999999,128,4,2", "hidden size of 99999999"),
        ("256,128,4,5", "more experts per token"),
    ],
)
def test_what_is_no_shape(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_shape(text)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(UsageError) as caught:
        parse_shape("gpt-5")
    assert caught.value.hint and all(name in caught.value.hint for name in PRESETS)
