"""Every encoding in the table, from headers to packed experts: the bytes are those of the values
that the stored numbers stand for.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.convert import Rule, assert_output, convert, matrices_of
from helpers.encoded import HIDDEN, INNER, KINDS, SIZES, SOURCE, encoded_model, of_nvfp4
from helpers.families import Tensor, Weights, raw, simple_config, write_checkpoint

from ktconv import native
from ktconv.errors import CheckpointError
from ktconv.source import elements, open_checkpoint
from ktconv.source.encodings import ENCODINGS
from ktconv.source.encodings.grids import load_groups
from ktconv.source.types import BlockGrid, GroupIndex, TensorRef

pytestmark = pytest.mark.slow

NV = "nvfp4, compressed-tensors"


def test_every_encoding_has_a_fixture() -> None:
    here = {one.name for one in ENCODINGS if not one.name.startswith("gguf-")}
    quantized = here - {"bf16", "fp16", "fp32"}
    assert quantized == {kind.name for kind in KINDS.values()}


def test_units_are_those_of_the_library() -> None:
    plain = [one for one in vars(elements).values() if isinstance(one, elements.Element)]
    decoded = [*plain, *elements.STREAMS.values(), *elements.BLOCKS.values()]
    assert {one.name for one in decoded} == set(native.DTYPES)
    for one in decoded:
        unit = (one.unit_bytes, one.unit_rows, one.unit_cols)
        assert unit == native.stored_unit(one.name)


# Each kind has one of them, by turns: reading knows neither rules nor methods.
OTHERS: tuple[tuple[str, int, Rule], ...] = (("int4", 1, "search"), ("int8", 2, "amax"))


@pytest.mark.parametrize(
    ("other", "kind"), [(OTHERS[i % 2], kind) for i, kind in enumerate(KINDS)], ids=KINDS
)
def test_numbered_experts(other: tuple[str, int, Rule], kind: str, tmp_path: Path) -> None:
    model, weights, nbytes = encoded_model(tmp_path / "model", kind)
    assert open_checkpoint(model).layers[0].encoding == KINDS[kind].name
    truth = matrices_of({0: weights})
    cuts: list[tuple[str, int, Rule]] = [("int4", 3, "amax"), other]
    for method, numa, scale in cuts:
        output = tmp_path / f"{method}-{numa}"
        report = convert(model, output, method=method, numa=numa, scale=scale, requantize=True)
        assert report.source_bytes <= nbytes
        assert_output(output, truth, {}, method=method, numa=numa, scale=scale)


def test_fused_experts(tmp_path: Path) -> None:
    """Two fused tensors whose columns share bytes, with an outer scale for each expert."""
    rng = np.random.default_rng(5)
    tensors: dict[str, Tensor] = {}
    values = []
    for name, shape in (("gate_up_proj", (2 * INNER, HIDDEN)), ("down_proj", (HIDDEN, INNER))):
        experts = [of_nvfp4(rng, *shape, ("weight", "weight_scale_2"), False) for _ in range(2)]
        stored = [{part: raw(one) for part, one in parts.items()} for parts, _ in experts]
        for part, suffix in (("weight", ""), ("weight_scale", "_scale")):
            dtype, size, _ = stored[0][part]
            whole = b"".join(one[part].data for one in stored)
            tensors[f"{SOURCE}.{name}{suffix}"] = type(stored[0][part])(dtype, (2, *size), whole)
        outer = [np.frombuffer(one["weight_scale_2"].data, np.float32) for one in stored]
        tensors[f"{SOURCE}.{name}_scale_2"] = np.concatenate(outer)
        values.append(np.stack([value for _, value in experts]))
    gate, up = np.split(values[0], 2, axis=1)
    model = write_checkpoint(tmp_path / "model", tensors, simple_config(**SIZES))
    convert(model, tmp_path / "out", method="int4", numa=3)
    truth = matrices_of({0: Weights(gate, up, values[1])})
    assert_output(tmp_path / "out", truth, {}, method="int4", numa=3)


def test_groups_of_a_slice_are_those_of_its_grid() -> None:
    """Numbers in the file count from the tensor's first group, the grid from the slice's."""
    tensor = TensorRef("down_proj.g_idx", Path("model.safetensors"), "I32", (256,), 0, 1024)
    slice_ = BlockGrid(tensor, "F16", 0, 1, 1, 1, 64, 0, 128)
    index = GroupIndex(tensor, 128)
    numbers = np.array([3, 2, 2, 3], "<i4")
    found = load_groups(index, slice_, 2, numbers.tobytes())
    assert found is not None
    assert found.tolist() == [1, 0, 0, 1]
    for beyond in (1, 4):
        numbers[1] = beyond
        with pytest.raises(CheckpointError, match="its scales are those of groups 2 to 3"):
            load_groups(index, slice_, 2, numbers.tobytes())


@pytest.mark.parametrize(
    ("kind", "name", "tensor", "reason"),
    [
        (
            "nvfp4, compressed-tensors",
            "1.up_proj.weight_packed",
            np.zeros((INNER, 8), np.uint8),
            "shape",
        ),
        (
            "nvfp4, compressed-tensors",
            "1.up_proj.weight_global_scale",
            np.zeros(1, np.float32),
            "the scale 0.0",
        ),
        (
            "gptq by activation",
            "1.up_proj.g_idx",
            np.full(HIDDEN, 4, np.int32),
            "group numbers 4 to 4",
        ),
        ("awq", "1.up_proj.odd", np.zeros(1, np.float32), "is not a known companion"),
    ],
)
def test_packed_tensors_that_do_not_fit_are_refused(
    kind: str, name: str, tensor: Tensor, reason: str, tmp_path: Path
) -> None:
    model, _, _ = encoded_model(tmp_path / "model", kind, **{f"{SOURCE}.{name}": tensor})
    with pytest.raises(CheckpointError, match=reason) as error:
        convert(model, tmp_path / "out", method="int8")
    assert f"{SOURCE}.1.up_proj." in str(error.value)
