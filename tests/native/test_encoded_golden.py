"""Encodings against what the library that defines them wrote (tests/data/golden/encodings.json)."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from helpers import golden
from helpers.paths import ROOT

from ktconv import native
from ktconv.native import Encoding, audit_encoded, encode

BEYOND = [3, 11, 13, 15, 17, 23]  # rows; make_encodings.py says why
GOLDEN = json.loads((ROOT / "tests/data/golden/encodings.json").read_text())


@pytest.mark.parametrize(
    "case", GOLDEN["cases"], ids=lambda case: f"{case['kind']}-{case['group']}"
)
def test_bytes_are_the_librarys(isa: str, case: dict[str, Any]) -> None:
    rows, cols = case["rows"], case["cols"]
    bits = golden.matrix(GOLDEN["seed"], rows, cols)
    if not case["kind"].startswith("int"):
        bits[BEYOND] = bits[1]
    whole = case["kind"].startswith("int")
    source = native.Matrix(
        np.ascontiguousarray(bits).reshape(-1).view(np.uint8), "BF16", rows, cols,
        round_to_bf16=whole,
    )  # fmt: skip
    encoding = Encoding(case["kind"], case["group"])
    codes, scales = encode(encoding, source, case["tensor_scale"])
    wanted = [np.frombuffer(base64.b64decode(case[name]), np.uint8) for name in ("codes", "scale")]
    assert np.array_equal(scales.reshape(-1).view(np.uint8), wanted[1])
    assert np.array_equal(codes.reshape(-1), wanted[0])
    found = audit_encoded(encoding, source, codes, scales, case["tensor_scale"])
    assert (found.other_codes, found.other_scales) == (0, 0)
