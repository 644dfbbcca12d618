"""The golden vectors of tests/data/golden: inputs by recipe, expected bytes by hash.

@pytest.mark.parametrize("case", golden.PARAMS)
def test_it(case: golden.Case) -> None:
    for item in case.matrices():
        payload, scale = pack(case.format, item.bf16)
        case.check(item.key("weight"), payload.tobytes())
        case.check(item.key("scale"), scale.tobytes())
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ktconv.formats import (
    BACKWARD,
    FORMATS,
    PROJECTIONS,
    Format,
    Kind,
    Matrix,
    Projection,
    is_backward,
    matrix_shape,
    split,
    tensor_name,
)

FOLDER = Path(__file__).parents[1] / "data" / "golden"

U16 = NDArray[np.uint16]
U64 = NDArray[np.uint64]


def splitmix64(seed: int, numbers: U64) -> U64:
    """Outputs number `numbers` (1 is the first) of the stream that starts at `seed`."""
    z = np.uint64(seed) + numbers * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    output: U64 = z ^ (z >> np.uint64(31))
    return output


def _bits(z: U64, low: int, mask: int) -> U64:
    field: U64 = (z >> np.uint64(low)) & np.uint64(mask)
    return field


def _signed(z: U64, magnitude: U64) -> U16:
    """Sign from bit 0 of z, the low 15 bits given."""
    bits: U16 = (_bits(z, 0, 1) << np.uint64(15) | magnitude).astype(np.uint16)
    return bits


def _of_values(values: NDArray[np.float64]) -> U16:
    """bf16 bits of values that bf16 holds exactly."""
    words = values.astype(np.float32).view(np.uint32)
    bits: U16 = (words >> np.uint32(16)).astype(np.uint16)
    return bits


def _halves(z: U64, levels: int) -> U16:
    """Integers around zero, those below 64 with a half where bit 40 says so."""
    v = (_bits(z, 24, (1 << 40) - 1) % np.uint64(levels)).astype(np.float64) - levels // 2
    half = (np.abs(v) < 64) & (_bits(z, 40, 1) == 1)
    return _of_values(v + np.where(half, 0.5, 0.0))


def _default(z: U64) -> U16:
    exponent = np.uint64(116) + _bits(z, 8, 255) % np.uint64(10)
    return _signed(z, exponent << np.uint64(7) | _bits(z, 16, 127))


def _limit(z: U64, magnitude: int) -> U16:
    """Magnitudes below `magnitude`, which is a scale's flush limit."""
    return _signed(z, _bits(z, 16, 1023) % np.uint64(magnitude))


def _special_rows(m: int, z: U64, n: U64, k: U64) -> tuple[U16, tuple[U64, int] | None]:
    """Content of rows n (all of them n % 32 == m), and the one element to set in each."""
    one, zero = np.uint64(1), np.zeros_like(z)
    match m:
        case 3:
            return ((k & one) << np.uint64(15)).astype(np.uint16) + zero.astype(np.uint16), None
        case 5:
            return _default(z), (n * np.uint64(7) + np.uint64(11), 0x4480)
        case 7:
            return _halves(z, 225), (n * np.uint64(5) + one, 0x42E0)
        case 9:
            return _halves(z, 255), (n * np.uint64(5) + np.uint64(2), 0xC2FE)
        case 11:
            return _signed(z, _bits(z, 16, 127)), None
        case 13:
            return _limit(z, 0x3E0), (n * np.uint64(3), 0x03E0)
        case 15:
            return _limit(z, 0x3FE), (n * np.uint64(3), 0x03FE)
        case 17:
            return _default(z), (n * np.uint64(9) + np.uint64(4), 0xFF7F)
        case 19:
            return _signed(z, zero + np.uint64(0x3F9D)), None
        case 21:
            v = (_bits(z, 24, (1 << 40) - 1) % np.uint64(29)).astype(np.float64) - 14
            return _of_values(v * 0.5), (n * np.uint64(2) + np.uint64(3), 0x40E0)
        case 23:
            return _signed(z, _bits(z, 8, 127) << np.uint64(7) | _bits(z, 16, 127)), None
    raise AssertionError(m)


def matrix(seed: int, rows: int, cols: int) -> U16:
    """bf16 bit patterns [rows, cols] of the recipe kt-golden-v1."""
    n = np.arange(rows, dtype=np.uint64)[:, None]
    k = np.arange(cols, dtype=np.uint64)[None, :]
    z = splitmix64(seed, np.uint64(1) + n * np.uint64(cols) + k)
    bits = _default(z)
    for m in (3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23):
        at = slice(m, rows, 32)
        content, change = _special_rows(m, z[at], n[at], k)
        if change is not None:
            column, value = change
            np.put_along_axis(
                content, (column % np.uint64(cols)).astype(np.int64), np.uint16(value), axis=1
            )
        bits[at] = content
    return bits


@dataclass(frozen=True)
class Item:
    """One matrix to pack: the slice that one part owns, transposed if backward."""

    layer: int
    proj: Matrix
    expert: int
    part: int
    bf16: U16  # [N, K], C-contiguous

    def key(self, kind: Kind) -> str:
        return tensor_name(self.layer, self.proj, self.expert, self.part, kind)


@dataclass(frozen=True, eq=False)
class Case:
    """One conversion of one layer by the reference."""

    name: str
    format: Format
    experts: int
    hidden: int
    intermediate: int
    parts: int
    layer: int
    seed: int
    backward: bool
    input_sha256: Mapping[str, str]  # by projection, all experts one after the other
    tensors: Mapping[str, Mapping[str, Any]]  # by tensor name
    blob: bytes | None

    @cache  # noqa: B019 - the cases live as long as the process
    def source(self, expert: int, proj: Projection) -> U16:
        """bf16 bits [out, in] of a whole forward matrix; read-only."""
        seed = self.seed + 1000 * expert + 1 + PROJECTIONS.index(proj)
        bits = matrix(seed, *matrix_shape(proj, self.hidden, self.intermediate))
        bits.flags.writeable = False
        return bits

    def matrices(self) -> Iterator[Item]:
        """Every matrix whose payload and scales the case holds."""
        names: tuple[Matrix, ...] = PROJECTIONS + BACKWARD if self.backward else PROJECTIONS
        for part in range(self.parts):
            for expert in range(self.experts):
                for proj in names:
                    yield self._item(proj, expert, part)

    def _item(self, proj: Matrix, expert: int, part: int) -> Item:
        forward = PROJECTIONS[(PROJECTIONS + BACKWARD).index(proj) % 3]
        owned = split(proj, self.hidden, self.intermediate, part, self.parts)
        bits = self.source(expert, forward)[owned.index]
        bits = bits.T if is_backward(proj) else bits
        return Item(self.layer, proj, expert, part, np.ascontiguousarray(bits))

    def expected_bytes(self, key: str) -> bytes | None:
        """The tensor itself, where the case has a blob."""
        if self.blob is None:
            return None
        start = self.tensors[key]["blob_offset"]
        return self.blob[start : start + self.tensors[key]["nbytes"]]

    def check(self, key: str, data: bytes) -> None:
        """Assert that `data` is the tensor `key`, byte for byte."""
        entry = self.tensors[key]
        assert len(data) == entry["nbytes"], f"{self.name} {key}: {len(data)} bytes"
        expected = self.expected_bytes(key)
        if expected is not None:
            wrong = np.flatnonzero(np.frombuffer(data, "u1") != np.frombuffer(expected, "u1"))
            assert not wrong.size, f"{self.name} {key}: {wrong.size} bytes, first {wrong[:8]}"
        found = hashlib.sha256(data).hexdigest()
        assert found == entry["sha256"], f"{self.name} {key}: SHA-256 is {found}"


def _case(entry: Mapping[str, Any]) -> Case:
    return Case(
        name=entry["name"],
        format=FORMATS[entry["format"].lower()],
        experts=entry["E"],
        hidden=entry["H"],
        intermediate=entry["I"],
        parts=entry["parts"],
        layer=entry["layer"],
        seed=entry["seed"],
        backward=entry["backward"],
        input_sha256=entry["input_sha256"],
        tensors=entry["tensors"],
        blob=(FOLDER / entry["blob"]).read_bytes() if "blob" in entry else None,
    )


CASES: tuple[Case, ...] = tuple(
    map(_case, json.loads((FOLDER / "golden_public.json").read_text("utf-8"))["cases"])
)
PARAMS = [pytest.param(case, id=case.name) for case in CASES]
