"""Layouts of encoded matrices: the tensors that they plan, and what is read back from them."""

from __future__ import annotations

import numpy as np
import pytest

from ktconv.targets.encoded.layouts.base import MIXED_PRECISION
from ktconv.targets.encoded.readers import TRANSFORMERS
from ktconv.targets.encoded.scheme import FORMATS, ROWS, Scheme, group_size_of

ALL = [row.name for row in ROWS]
OUTPUTS, INPUTS = 384, 256
ITEM = {"F32": 4, "I32": 4, "I64": 8, "BF16": 2, "F16": 2}


@pytest.mark.parametrize("name", ALL)
def test_what_is_stored_is_read_back(name: str) -> None:
    rng = np.random.default_rng(3)
    scheme = Scheme(name, group_size_of(name))
    layout, sizes = scheme.layout, scheme.sizes(OUTPUTS, INPUTS, False)
    codes = rng.integers(0, 256, (OUTPUTS, sizes.row_bytes), np.uint8)
    raw = rng.integers(
        0, 256, (sizes.scale_shape[0], sizes.scale_shape[1] * sizes.scale_bytes), np.uint8
    )
    scales = raw.view({0: "u1", 1: "u1", 2: "<u2", 4: "<u4"}[sizes.scale_bytes])
    zeros = rng.integers(0, 16, scales.shape, np.uint8) if layout.name == "awq" else None
    others = layout.others(sizes, scales, 0.75, zeros)
    parts = {
        part: np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for part, array in others.items()
    }

    whole = layout.whole(codes)
    assert layout.streamed == (whole is codes)
    assert layout.codes(whole.reshape(-1), sizes).tobytes() == codes.tobytes()
    assert layout.codes(whole.reshape(-1), sizes).shape == codes.shape
    planned = {tensor.name: tensor for tensor in layout.tensors("m", sizes)}
    assert list(planned) == [f"m.{part}" for part in layout.parts]
    assert layout.parts[1:] == tuple(others)
    for part, found in {layout.parts[0]: whole.reshape(-1), **parts}.items():
        tensor = planned[f"m.{part}"]
        assert found.nbytes == tensor.nbytes
        assert tensor.nbytes == int(np.prod(tensor.shape)) * ITEM.get(tensor.dtype, 1)

    if layout.scale_part is None:
        assert not scheme.encodes
        with pytest.raises(ValueError, match=f"^{layout.name} has no scales$"):
            layout.scales(parts, sizes)
    else:
        assert layout.scales(parts, sizes).tobytes() == scales.tobytes()
        assert len(layout.scales(parts, sizes)) == len(scales)
    found_zeros = layout.zeros(parts, sizes)
    assert (found_zeros is None) == (zeros is None)
    if zeros is not None:
        assert found_zeros is not None and np.array_equal(found_zeros, zeros)
    outer = "nvfp4" in layout.name
    assert layout.factor(parts) == (0.75 if outer else 0)
    assert not outer or layout.divides == (name == "NVFP4A16")  # ModelOpt's engines multiply


def test_manifests_have_these_names_of_formats() -> None:
    """Outputs that exist have them; engines know those of compressed-tensors."""
    assert sorted(FORMATS) == [
        "awq", "bf16", "float-quantized", "fp8-block", "gptq", "mixed-precision", "mxfp4",
        "mxfp4-pack-quantized", "mxfp8", "mxfp8-quantized", "nvfp4", "nvfp4-pack-quantized",
        "pack-quantized",
    ]  # fmt: skip


def test_these_methods_are_said_to_be_read_by_transformers() -> None:
    assert [row.name for row in ROWS if not TRANSFORMERS.failure(row.name)] == [
        "W4A16", "W8A16", "FP8_DYNAMIC", "MXFP4A16", "rawint4", "int4-g64", "int4-g128",
        "int8-g128", "fp8", "fp8-channel", "mxfp8", "bf16",
    ]  # fmt: skip


def test_zeros_that_are_not_given() -> None:
    """8, in words of eight; GPTQ's first version stores them less one."""
    for name, nibbles in (("awq", 0x88), ("gptq-int4", 0x77)):
        scheme = Scheme(name, group_size_of(name))
        sizes = scheme.sizes(OUTPUTS, INPUTS, True)
        found = scheme.layout.others(sizes, np.zeros(sizes.scale_shape, "<u2"), 0.0)
        assert set(np.asarray(found["qzeros"]).view(np.uint8).reshape(-1)) == {nibbles}


def test_a_mix_is_no_layout_of_a_matrix() -> None:
    sizes = Scheme("awq", 128).sizes(OUTPUTS, INPUTS, False)
    with pytest.raises(ValueError, match="a layout of its own"):
        MIXED_PRECISION.shapes(sizes)
    with pytest.raises(ValueError, match="a layout of its own"):
        MIXED_PRECISION.others(sizes, np.zeros(1), 0.0)
