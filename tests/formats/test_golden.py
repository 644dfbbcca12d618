"""The NumPy truth against the bytes that the reference wrote."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from helpers import golden
from helpers.reference import quantize_pack

from ktconv.formats import PROJECTIONS, kt_path, packed_shape, parse_kt_path, parse_tensor_name
from ktconv.formats.decode import bf16_to_f32


def test_splitmix64_starts_as_published() -> None:
    assert golden.splitmix64(0, np.array([1], np.uint64))[0] == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("case", golden.PARAMS)
def test_inputs(case: golden.Case) -> None:
    for proj in PROJECTIONS:
        digest = hashlib.sha256()
        for expert in range(case.experts):
            digest.update(case.source(expert, proj).tobytes())
        assert digest.hexdigest() == case.input_sha256[proj], (case.name, proj)


@pytest.mark.parametrize("case", golden.PARAMS)
def test_outputs(case: golden.Case) -> None:
    seen = set()
    for item in case.matrices():
        payload, scale = quantize_pack(case.format, bf16_to_f32(item.bf16))
        case.check(item.key("weight"), payload.tobytes())
        case.check(item.key("scale"), scale.tobytes())
        seen |= {item.key("weight"), item.key("scale")}
    assert seen == set(case.tensors)


@pytest.mark.parametrize("case", golden.PARAMS)
def test_names_and_sizes(case: golden.Case) -> None:
    fmt = case.format
    for key, entry in case.tensors.items():
        t = parse_tensor_name(key)
        assert t is not None, key
        rows, cols = packed_shape(t.proj, case.hidden, case.intermediate, case.parts)
        sizes = {
            "weight": fmt.layout.weight_size(rows, cols),
            "scale": fmt.layout.scale_size(rows, cols),
        }
        assert sizes[t.kind] == entry["nbytes"], key
        path = kt_path(fmt.name, t.layer, t.proj, t.expert, t.part, t.kind, entry["nbytes"])
        assert path == entry["kt_file"]
        parsed = parse_kt_path(path)
        assert parsed is not None
        assert (parsed.method, parsed.tensor, parsed.nbytes) == (fmt.name, t, entry["nbytes"])
