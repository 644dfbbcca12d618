"""Our unpacking against compressed-tensors' own, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from ktconv.verify.encoded.unpack import levels, values
from ktconv.verify.second_reader.numbers import floats_of


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("cols", [8, 128, 200, 13])
def test_levels_are_those_of_compressed_tensors(bits: int, cols: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    import torch

    low = -(2 ** (bits - 1))
    wanted = np.random.default_rng(cols).integers(low, -low, (5, cols)).astype(np.int8)
    packed = helpers.pack_to_int32(torch.from_numpy(wanted), bits)
    theirs = helpers.unpack_from_int32(packed, bits, torch.Size(wanted.shape)).numpy()
    ours = levels(packed.contiguous().numpy().reshape(-1).view(np.uint8), 5, cols, bits)
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(ours, wanted)


def test_a_word_by_hand() -> None:
    """0x...10: the first column in the lowest bits, stored as level + 8."""
    word = np.array([0xF0000018], np.uint32).view(np.uint8)
    assert levels(word, 1, 8, 4).tolist() == [[0, -7, -8, -8, -8, -8, -8, 7]]
    word = np.array([0x7F80FF00], np.uint32).view(np.uint8)
    assert levels(word, 1, 4, 8).tolist() == [[-128, 127, 0, -1]]


def test_values_are_level_times_scale_of_the_group() -> None:
    level = np.array([[1, -2, 3, 4]], np.int8)
    scale = floats_of(np.array([0x3F80, 0x4000], np.uint16).tobytes(), "BF16").reshape(1, -1)
    assert values(level, scale).tolist() == [[1.0, -2.0, 6.0, 8.0]]
    half = floats_of(np.array([0x3C00], np.uint16).tobytes(), "F16").reshape(1, -1)
    assert values(level, half).tolist() == [[1.0, -2.0, 3.0, 4.0]]


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="12 bytes are not 1 rows of 2 words"):
        levels(np.zeros(12, np.uint8), 1, 16, 4)
