"""Real headers of GGUF files with arbitrary changes: a sentence or a sound result, quickly and in
little memory."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from helpers.gguf_files import around, experts, metadata, write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ktconv.errors import KtconvError
from ktconv.source import open_checkpoint
from ktconv.source.gguf.file import read_gguf_header

_NUMBERS = [0, 1, 2, 3, 7, 8, 9, 31, 32, 255, 256, 2**16, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]
_MEMORY = 16 << 20


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small model: header and the bytes of its tensors."""
    rng = np.random.default_rng(0)
    weights = {name: rng.random((2, 32, 32), np.float32) for name in experts()}
    pairs = metadata(
        expert_count=2, expert_feed_forward_length=32, embedding_length=32,
        leading_dense_block_count=0, expert_gating_func=1, expert_weights_scale=1.5,
        expert_weights_norm=True, swiglu_clamp_exp=[0.0], rope=[1, 2, 3], title="a text",
    )  # fmt: skip
    path = tmp_path_factory.mktemp("fuzz") / "m.gguf"
    tensors = weights | around(hidden=32, count=2)
    types = {"ffn_gate_exps": "Q4_0", "ffn_up_exps": "Q8_0"}
    words = ["a", "few", "words"]
    write_gguf(path, tensors, pairs, types=types, vocabulary=words)
    read_gguf_header(path)
    assert open_checkpoint(path).layers
    return path.read_bytes()


def header_bytes(data: bytes) -> int:
    """Where the tensors begin, as far as a mutation needs to know."""
    return data.index(b"blk.0.ffn_norm.weight") + 64


@st.composite
def changes(draw: st.DrawFn) -> list[tuple[float, bytes, int]]:
    """Places in the header from 0 to 1, what is put there, and how many bytes it replaces."""
    piece = st.one_of(
        st.sampled_from([struct.pack("<Q", number) for number in _NUMBERS]),
        st.sampled_from([struct.pack("<I", number % 2**32) for number in _NUMBERS]),
        st.binary(max_size=12),
    )
    one = st.tuples(st.floats(0, 1), piece, st.sampled_from([0, 1, 4, 8, 40]))
    return draw(st.lists(one, min_size=1, max_size=4))


@settings(
    max_examples=150,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(changes=changes(), cut=st.one_of(st.none(), st.floats(0, 1)))
def test_changed_headers(
    changes: list[tuple[float, bytes, int]], cut: float | None, sound: bytes, tmp_path: Path
) -> None:
    data, length = bytearray(sound), header_bytes(sound)
    for place, piece, replaced in changes:
        at = int(place * length)
        data[at : at + (len(piece) if replaced == 1 else replaced)] = piece
    if cut is not None:
        del data[int(cut * len(data)) :]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    started = time.process_time()
    try:
        checkpoint = open_checkpoint(path)
    except KtconvError as error:
        assert error.hint and len(str(error)) < 2000
    else:
        for layer in checkpoint.layers:
            for expert in layer.experts:
                for matrix in expert.values():
                    start, length = matrix.extent
                    assert start > 0 and start + length <= len(data)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < _MEMORY
    assert time.process_time() - started < 2


@settings(max_examples=60, derandomize=True, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(data=st.binary(max_size=200))
def test_any_bytes(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + data)
    try:
        read_gguf_header(path)
    except KtconvError as error:
        assert error.hint
