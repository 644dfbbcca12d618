"""Calls from code that torch.compile traces: the C library stays outside of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ktconv.runtime import MoELayer, route, split_deferred

from .conftest import EXPERTS, HIDDEN, batch

pytestmark = [pytest.mark.slow, pytest.mark.torch]

torch: Any = pytest.importorskip("torch")

Call = Callable[[MoELayer, Any, Any, Any], Any]


def in_the_background(layer: MoELayer, x: Any, ids: Any, weights: Any) -> Any:
    return layer.submit(x, ids, weights).wait()


def routed(layer: MoELayer, x: Any, ids: Any, weights: Any) -> Any:
    weights, ids = route.softmax(x @ torch.ones(HIDDEN, EXPERTS).tril(), k=2)
    return layer(x, ids, weights)


def in_two_parts(layer: MoELayer, x: Any, ids: Any, weights: Any) -> Any:
    now, later = split_deferred(ids, weights, 1)
    return layer(x, now, weights, add_to=layer(x, later, weights))


@pytest.mark.parametrize("call", [in_the_background, routed, in_two_parts])
def test_compiled_code_calls_layers(call: Call, make_layer: Callable[..., MoELayer]) -> None:
    """What is around a call is compiled, and results are the same."""
    layer = make_layer()
    x, ids, weights = (torch.from_numpy(array) for array in batch())
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def around(x: Any) -> Any:
        return call(layer, torch.relu(x) * 2, ids, weights) * 3

    compiled = torch.compile(around, backend=backend)
    try:
        for _ in range(2):
            assert torch.equal(compiled(x), around(x))
    finally:
        torch.compiler.reset()
    called = {node.target for graph in graphs for node in graph.graph.nodes}
    assert torch.relu in called
