"""Names of tensors and `.kt` files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktconv.formats import (
    BACKWARD,
    KINDS,
    PROJECTIONS,
    KtFile,
    TensorId,
    kt_path,
    parse_kt_path,
    parse_tensor_name,
    tensor_name,
)

numbers = st.integers(0, 99_999)
tensors = st.builds(
    TensorId,
    numbers,
    st.sampled_from(PROJECTIONS + BACKWARD),
    numbers,
    numbers,
    st.sampled_from(KINDS),
)
methods = st.sampled_from(["INT4", "INT8", "MOE_INT4", "MOE_INT8"])


@given(t=tensors)
def test_tensor_names_round_trip(t: TensorId) -> None:
    assert parse_tensor_name(tensor_name(t.layer, t.proj, t.expert, t.part, t.kind)) == t


@given(t=tensors, method=methods, nbytes=st.integers(0, 2**40))
def test_kt_paths_round_trip(t: TensorId, method: str, nbytes: int) -> None:
    path = kt_path(method, t.layer, t.proj, t.expert, t.part, t.kind, nbytes)
    assert parse_kt_path(path) == KtFile(method, t, nbytes)


def test_examples() -> None:
    """SPEC 2.1 and 2.2."""
    assert (
        kt_path("INT4", 3, "gate", 0, 1, "weight", 16384)
        == "_layer_3/_numa_1/INT4_gate_0_16384Byte_quant_.kt"
    )
    assert (
        kt_path("INT4", 3, "down", 0, 1, "scale", 1024)
        == "_layer_3/_numa_1/INT4_down_0_1024Byte_scale_.kt"
    )
    assert tensor_name(0, "up_bwd", 7, 1, "scale") == "blk.0.ffn_up_bwd_exps.7.numa.1.scale"


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.ffn_gate_exps.0.weight",
        "blk.00.ffn_gate_exps.0.numa.0.weight",
        "blk.0.ffn_gate_exps.0.numa.0.weight\n",
        "blk.0.ffn_gate_exps.0.numa.0.biases",
        "xblk.0.ffn_gate_exps.0.numa.0.weight",
        "blk.٣.ffn_gate_exps.0.numa.0.weight",
        "blk.0.ffn_gate_up_exps.0.numa.0.weight",
        "",
    ],
)
def test_other_names_do_not_parse(name: str) -> None:
    assert parse_tensor_name(name) is None


@pytest.mark.parametrize(
    "path",
    [
        "_layer_3/_numa_1/AMXINT4_gate_0_16384Byte_quant_.kt",
        "_layer_3/_numa_1/INT4_gate_0_16384Byte_quant.kt",
        "_layer_3/_numa_1/INT4_gate_0_016384Byte_quant_.kt",
        "_layer_3/INT4_gate_0_16384Byte_quant_.kt",
        "root/_layer_3/_numa_1/INT4_gate_0_16384Byte_quant_.kt",
        "_layer_3/_numa_1/INT4_gate_0_16384Byte_weight_.kt",
    ],
)
def test_other_paths_do_not_parse(path: str) -> None:
    assert parse_kt_path(path) is None
