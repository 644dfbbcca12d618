"""Physical-to-logical maps: one rule for converted layers, native ones and those packed online."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import Converted
from helpers.families import random_weights
from helpers.paths import EXAMPLE
from numpy.typing import NDArray

from ktconv.errors import UsageError
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
from ktconv.quantize.packed.run import Request, quantize_cpu
from ktconv.runtime.layers import Experts, native_experts, open_experts, pack_online
from ktconv.runtime.layers.slots import Slots, slot_origins
from ktconv.system.pool import Pool
from ktconv.targets.expert_sets import ExpertSet, write_expert_set
from ktconv.targets.packed.target import Options

Opened = Callable[[Slots | None], Experts]


def packed_online(slots: Slots | None) -> Experts:
    weights = random_weights(experts=8, seed=4)
    return pack_online(*weights, "int8", parts=2, slots=slots)


@pytest.fixture(scope="session")
def converted(converted_example: Converted) -> Path:
    return converted_example(method="int4")


@pytest.fixture(params=["converted", "native", "online"])
def opened(request: pytest.FixtureRequest, converted: Path) -> Opened:
    """A layer of 8 experts with these slots."""
    of: dict[str, Opened] = {
        "converted": lambda slots: open_experts(converted, 1, slots=slots),
        "native": lambda slots: native_experts(EXAMPLE, 1, slots=slots),
        "online": packed_online,
    }
    return of[request.param]


def computed(experts: Experts, ids: NDArray[np.int64]) -> NDArray[np.uint16]:
    rng = np.random.default_rng(1)
    x = f32_to_bf16(rng.standard_normal((len(ids), experts.hidden), np.float32))
    weights = rng.random(ids.shape, np.float32)
    with Pool(2) as pool:
        return experts.forward(x, ids, weights, pool)


@pytest.mark.parametrize("slots", [[7, 6, 5, 4, 3, 2, 1, 0], [3, 3, 0, 7, 3], range(8), [5]])
def test_a_slot_computes_its_expert(opened: Opened, slots: Any) -> None:
    """Also replicas of an expert, in any order: the same bits as without a map, but for sums, which
    run over slots: so each token has one expert."""
    ids = np.arange(len(slots))[:, None]
    plain, mapped = opened(None), opened(slots)
    assert mapped.count == len(slots) and mapped.origins.tolist() == list(slots)
    expected = computed(plain, np.array(slots)[:, None])
    np.testing.assert_array_equal(computed(mapped, ids), expected)
    for expert in set(slots):
        for one, other in zip(mapped.streams(expert), plain.streams(expert), strict=True):
            assert one is not None and other is not None
            np.testing.assert_array_equal(one.values(), other.values())


def test_tokens_with_replicas(opened: Opened) -> None:
    """A reference by logical experts: two slots of one expert count twice."""
    experts = opened(np.array([2, 6, 2, 1], np.int32))
    ids = np.array([[0, 2, 3], [1, 1, 0], [-1, 2, 3]])
    x = f32_to_bf16(np.random.default_rng(3).standard_normal((3, experts.hidden), np.float32))
    weights = np.random.default_rng(4).random(ids.shape, np.float32)
    logical = np.array([[2, 2, 1], [6, 6, 2], [-1, 2, 1]])
    with Pool(1) as pool:
        found = experts.forward(x, ids, weights, pool)
    expected = opened(None).reference(x, logical, weights, rounded=True)
    assert np.allclose(bf16_to_f32(found), expected, rtol=2e-2, atol=1e-2 * np.abs(expected).max())
    np.testing.assert_array_equal(experts.reference(x, ids, weights, rounded=True), expected)


def test_replicas_share_memory(opened: Opened) -> None:
    experts = opened([4, 1, 4, 4])
    rows = experts.layer._keep
    for row in rows:
        matrices = [expert[2] for expert in row if expert is not None]
        starts = [matrix.codes.ctypes.data for matrix in matrices]
        assert starts[0] == starts[2] == starts[3] != starts[1]


@pytest.mark.parametrize(
    ("slots", "says"),
    [
        ([], r"must be a list of expert numbers.*\[0\]"),
        ([0, 8], "slot 1 is to have expert 8, but the layer has experts 0 to 7"),
        ([-1], "slot 0 is to have expert -1"),
        ([[0, 1]], r"one for each slot, not int64 \[1, 2\]"),
        (np.array([1.0]), "not float64"),
        (np.array([True]), "not bool"),
    ],
)
def test_maps_that_are_none(opened: Opened, slots: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        opened(slots)


def test_numbers_of_any_integer_type() -> None:
    assert slot_origins(None, 3) == [0, 1, 2]
    for kind in (np.int8, np.uint64):
        assert slot_origins(np.array([2, 0], kind), 3) == [2, 0]


def test_experts_that_were_left_out(tmp_path: Path) -> None:
    """Their slots are empty, and refused when a token asks for them."""
    hot = tmp_path / "hot.json"
    write_expert_set(ExpertSet({0: (2, 5), 1: (3,)}), hot)
    request = Request(
        str(EXAMPLE), tmp_path / "out", Options(numa=1), exclude_experts=hot, allow_partial=True
    )
    assert quantize_cpu(request).complete
    experts = open_experts(tmp_path / "out", 0, slots=[5, 0, 5, 7])
    assert experts.origins.tolist() == [-1, 0, -1, 7]
    computed(experts, np.array([[1, 3], [3, 1]]))
    with pytest.raises(ValueError, match="expert"):
        computed(experts, np.array([[0, 1]]))
