"""Where codes lie: the worked examples of SPEC 4.2, and packing as a bijection."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.reference.kt_layout import TILINGS, offsets, pack_codes, unpack_codes
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ktconv.formats import FORMATS, INT4, INT8, Format, output_formats

both_formats = pytest.mark.parametrize("fmt", output_formats().values(), ids=lambda fmt: fmt.key)

# Shapes beyond one column block with more than one row block, where the block sizes
# show, and with a ragged last block of either kind.
WIDE = {
    "int8": [(128, 3584 + 64), (192, 3776), (96, 2 * 3584 + 192), (64, 7168)],
    "int4": [(256, 3584 + 128), (256, 7168), (160, 2 * 3584 + 256), (128, 3584)],
}


def random_codes(fmt: Format, rows: int, cols: int, seed: int) -> NDArray[np.int8]:
    half = 1 << (TILINGS[fmt.code].bits - 1)
    return np.random.default_rng(seed).integers(-half, half, (rows, cols), np.int8)


def offset(fmt: Format, rows: int, cols: int, n: int, k: int) -> tuple[int, int]:
    byte, plane = offsets(fmt, np.array(n), np.array(k), rows, cols)
    return int(byte), int(plane)


@pytest.mark.parametrize(
    ("fmt", "shape", "element", "place"),
    [
        (INT8, (128, 256), (37, 70), (10326, 0)),
        (INT8, (192, 3776), (100, 3700), (480080, 0)),
        (INT4, (128, 256), (37, 70), (4182, 1)),
        (INT4, (256, 7168), (200, 7000), (856480, 1)),
    ],
)
def test_offset_examples(
    fmt: Format, shape: tuple[int, int], element: tuple[int, int], place: tuple[int, int]
) -> None:
    assert offset(fmt, *shape, *element) == place
    codes = np.zeros(shape, np.int8)
    codes[element] = -3
    packed = pack_codes(fmt, codes)
    byte, plane = place
    field = 0xFD if fmt is INT8 else 0xD << (4 * plane)
    assert np.flatnonzero(packed).tolist() == [byte]
    assert packed[byte] == field


@both_formats
def test_block_height_shows_only_in_wide_and_high_matrices(fmt: Format) -> None:
    """SPEC 4.2, last paragraph: in one column block strips simply follow one another."""
    tiling = TILINGS[fmt.code]
    strip, rows = tiling.n_block + 32, 2 * tiling.n_block
    byte, _ = offset(fmt, rows, tiling.k_block, strip, 0)
    assert byte == fmt.layout.weight_size(strip, tiling.k_block)
    wide = tiling.k_block + tiling.k_tile
    byte, _ = offset(fmt, rows, wide, strip, 0)
    above = fmt.layout.weight_size(tiling.n_block, wide)
    assert byte == above + fmt.layout.weight_size(32, tiling.k_block)


@pytest.mark.parametrize(
    ("fmt", "shape"), [(FORMATS[key], shape) for key, shapes in WIDE.items() for shape in shapes]
)
def test_every_field_is_used_once(fmt: Format, shape: tuple[int, int]) -> None:
    rows, cols = shape
    n, k = np.arange(rows)[:, None], np.arange(cols)[None, :]
    byte, plane = offsets(fmt, n, k, rows, cols)
    fields = np.sort((byte * (8 // TILINGS[fmt.code].bits) + plane).ravel())
    assert np.array_equal(fields, np.arange(rows * cols))
    codes = random_codes(fmt, rows, cols, 0)
    assert np.array_equal(unpack_codes(fmt, pack_codes(fmt, codes), rows, cols), codes)


@both_formats
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_unpack_undoes_pack(fmt: Format, data: st.DataObject) -> None:
    rows = 32 * data.draw(st.integers(1, 9), "strips")
    cols = TILINGS[fmt.code].k_tile * data.draw(st.integers(1, 6), "tiles")
    codes = random_codes(fmt, rows, cols, data.draw(st.integers(0, 99), "seed"))
    packed = pack_codes(fmt, codes)
    assert packed.shape == (fmt.layout.weight_size(rows, cols),)
    assert np.array_equal(unpack_codes(fmt, packed, rows, cols), codes)


def test_int4_nibbles_are_twos_complement() -> None:
    codes = np.zeros((32, 128), np.int8)
    codes[0, 0], codes[0, 64] = -8, 7
    assert pack_codes(INT4, codes)[0] == 0x78


@both_formats
def test_wrong_shapes_are_refused(fmt: Format) -> None:
    with pytest.raises(ValueError, match="33 rows"):
        pack_codes(fmt, np.zeros((33, TILINGS[fmt.code].k_tile), np.int8))
    with pytest.raises(ValueError, match="32 columns"):
        pack_codes(fmt, np.zeros((32, 32), np.int8))
    with pytest.raises(ValueError, match="payload"):
        unpack_codes(fmt, np.zeros(7, np.uint8), 32, TILINGS[fmt.code].k_tile)
    with pytest.raises(TypeError, match="int16"):
        pack_codes(fmt, np.zeros((32, TILINGS[fmt.code].k_tile), np.int16))


def test_codes_beyond_a_nibble_are_refused() -> None:
    with pytest.raises(ValueError, match=r"-8\.\.7"):
        pack_codes(INT4, np.full((32, 128), 8, np.int8))
