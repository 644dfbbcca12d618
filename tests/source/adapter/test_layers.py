"""Names of parameters with all experts, by sizes of layers and shapes of an adapter's tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ktconv.errors import CheckpointError
from ktconv.source.adapter.layers import LayerSizes, layer_names
from ktconv.source.adapter.names import PREFIX

EXPERTS, HIDDEN, INNER, RANK = 4, 32, 48, 2
PATH = "model.layers.3.mlp.experts"


def header(shapes: dict[str, tuple[int, int]]) -> Any:
    """Of tensors within the experts of layer 3."""
    tensors = [
        SimpleNamespace(name=f"{PREFIX}{PATH}.{name}.weight", shape=shape)
        for name, shape in shapes.items()
    ]
    return SimpleNamespace(tensors=tensors)


def pair(module: str, inputs: int, outputs: int, entries: int = EXPERTS) -> dict[str, Any]:
    start = f"{module}." if module else ""
    return {
        f"{start}lora_A": (entries * RANK, inputs),
        f"{start}lora_B": (outputs, entries * RANK),
    }


def found(layer: LayerSizes, shapes: dict[str, Any], **more: Any) -> list[Any]:
    names = layer_names({layer.number: layer}, None, [header(shapes)], **more)
    assert names[3].path == PATH
    return list(names[3].parameters)


LAYER = LayerSizes(3, PATH, EXPERTS, HIDDEN, INNER, True)


def test_shapes_say_the_order() -> None:
    straight = pair("base_layer", HIDDEN, 2 * INNER) | pair("", INNER, HIDDEN)
    swapped = pair("base_layer", 2 * INNER, HIDDEN) | pair("", HIDDEN, INNER)
    for shapes, expected in ((straight, False), (swapped, True)):
        parameters = found(LAYER, shapes)
        assert [one.name for one in parameters] == ["gate_up_proj", "down_proj"]
        assert {one.swapped for one in parameters} == {expected}


def test_sizes_that_are_alike() -> None:
    """2 I = H: only how the model stores the matrices tells the order."""
    layer = LAYER._replace(hidden=2 * INNER)
    shapes = pair("base_layer", 2 * INNER, 2 * INNER)
    with pytest.raises(CheckpointError, match="fit its parameters in both orders"):
        found(layer, shapes)
    for first in (False, True):
        assert {one.swapped for one in found(layer._replace(inputs_first=first), shapes)} == {first}


def test_parameters_in_modules_of_their_own() -> None:
    """As Aria and Granite have them."""
    for up, down in (("fc1", "fc2"), ("input_linear", "output_linear")):
        shapes = pair(up, HIDDEN, 2 * INNER) | pair(down, INNER, HIDDEN)
        own = [(one.module, one.projections) for one in found(LAYER, shapes) if one.module]
        assert own == [(up, ("gate", "up")), (down, ("down",))]


def test_experts_without_weights() -> None:
    """Of LongCat, in gate_up alone."""
    shapes = pair("base_layer", HIDDEN, 2 * INNER, EXPERTS + 3) | pair("", INNER, HIDDEN)
    parameters = found(LAYER._replace(spare=3), shapes)
    assert [one.entries for one in parameters] == [EXPERTS + 3, EXPERTS]


def test_layers_that_are_not_opened() -> None:
    """Their names are those of the adapter, where one layer of a model is opened alone."""
    other = LAYER._replace(number=5, source="model.layers.5.mlp.experts")
    shapes = pair("base_layer", HIDDEN, 2 * INNER)
    assert sorted(layer_names({5: other}, None, [header(shapes)])) == [5]
    assert found(other, shapes, whole=False)
