"""Real headers of quantized checkpoints with arbitrary changes: a sentence, or matrices, scales,
zero points and index vectors that are inside their tensors; quickly and in little memory."""

from __future__ import annotations

import json
import math
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.encoded import KINDS
from helpers.families import raw, simple_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ktconv.errors import KtconvError
from ktconv.source import ExpertMatrix, TensorRef, open_checkpoint, read_header
from ktconv.source.reading.matrices import MatrixReader
from ktconv.source.reading.reader import SourceReader
from ktconv.source.safetensors_file import BITS_PER_ELEMENT
from ktconv.system.opened import Opened

pytestmark = pytest.mark.slow

Entry = tuple[str, tuple[int, ...]]  # dtype and shape
HIDDEN, INNER = 128, 192
SOURCE = "model.layers.0.mlp.experts"
MODELS = (
    "fp8 block, Qwen", "fp8 block, ModelOpt", "mxfp4, DeepSeek-V4", "nvfp4, compressed-tensors",
    "int4 packed by activation", "int3 packed, asymmetric", "int8 asymmetric",
    "int8 asymmetric, msModelSlim", "gptq by activation", "awq",
)  # fmt: skip
NAMES = (
    "weight", "weight_scale", "weight_scale_inv", "weight_packed", "weight_zero_point", "qweight",
    "weight_g_idx", "qzeros", "scales", "g_idx", "weight_shape", "bias", "weight_scale_2", "x",
)  # fmt: skip
SIZES = (0, 1, 2, 3, 4, 8, 31, 32, 64, 96, 128, 192, 193, 384, 2**31, 2**62)
SETTINGS = settings(
    max_examples=300, derandomize=True, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip


def headers() -> dict[str, dict[str, Entry]]:
    """By kind: the tensors of a model with one layer of one or of two fused experts."""
    found = {}
    for kind in MODELS:
        tensors: dict[str, Entry] = {}
        for name in ("gate_proj", "up_proj", "down_proj"):
            shape = (HIDDEN, INNER) if name == "down_proj" else (INNER, HIDDEN)
            parts, _ = KINDS[kind].of(np.random.default_rng(1), *shape)
            for part, tensor in parts.items():
                tensors[f"{SOURCE}.0.{name}.{part}"] = raw(tensor)[:2]
        found[kind] = tensors
    found["fused"] = {
        f"{SOURCE}.gate_up_proj": ("F8_E4M3", (1, 2 * INNER, HIDDEN)),
        f"{SOURCE}.gate_up_proj_scale_inv": ("F32", (1, 3, 1)),
        f"{SOURCE}.down_proj": ("F8_E4M3", (1, HIDDEN, INNER)),
        f"{SOURCE}.down_proj_scale_inv": ("F32", (1, 1, 2)),
    }
    found["blocks"] = {
        f"{SOURCE}.gate_up_proj_blocks": ("U8", (1, 2 * INNER, HIDDEN // 32, 16)),
        f"{SOURCE}.gate_up_proj_scales": ("U8", (1, 2 * INNER, HIDDEN // 32)),
        f"{SOURCE}.gate_up_proj_bias": ("BF16", (1, 2 * INNER)),
        f"{SOURCE}.down_proj_blocks": ("U8", (1, HIDDEN, INNER // 32, 16)),
        f"{SOURCE}.down_proj_scales": ("U8", (1, HIDDEN, INNER // 32)),
        f"{SOURCE}.down_proj_bias": ("BF16", (1, HIDDEN)),
    }
    return found


HEADERS = headers()


@st.composite
def changed(draw: st.DrawFn) -> tuple[str, dict[str, Entry]]:
    """A consistent file whose tensors have other names, dtypes or shapes than they should."""
    kind = draw(st.sampled_from(sorted(HEADERS)))
    tensors = dict(HEADERS[kind])
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        part = draw(st.sampled_from(sorted({name.rpartition(".")[2] for name in tensors})))
        name = draw(st.sampled_from(sorted(one for one in tensors if one.endswith(f".{part}"))))
        dtype, shape = tensors.pop(name)
        what = draw(st.sampled_from(["size"] * 4 + ["axes", "dtype", "name", "swap", "gone"]))
        if what == "size" and shape:
            axis, size = draw(st.integers(0, len(shape) - 1)), draw(st.sampled_from(SIZES))
            shape = (*shape[:axis], size, *shape[axis + 1 :])
        elif what == "axes":
            shape = draw(st.sampled_from([shape[::-1], (1, *shape), (*shape, 1), shape[1:],
                                          (math.prod(shape),)]))  # fmt: skip
        elif what == "dtype":
            dtype = draw(st.sampled_from(sorted(BITS_PER_ELEMENT)))
        elif what == "name":
            name = f"{name.rpartition('.')[0]}.{draw(st.sampled_from(NAMES))}"
        elif what == "swap" and tensors:
            other = draw(st.sampled_from(sorted(tensors)))
            tensors[name], (dtype, shape), name = (dtype, shape), tensors.pop(other), other
        if what != "gone":
            tensors[name] = dtype, shape
        if not tensors:
            break
    return kind, tensors


def write(directory: Path, kind: str, tensors: dict[str, Entry]) -> bool:
    """Whether there can be such a file. Its data are numbers near 1 in every dtype, or zeros, which
    take no space, where there are many."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        nbytes, rest = divmod(math.prod(shape) * BITS_PER_ELEMENT[dtype], 8)
        if rest or end + nbytes > 1 << 40:
            return False
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    data = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(data)) + data + b"\x3c" * (end if end < 1 << 22 else 0))
        file.truncate(8 + len(data) + end)
    quantization = dict(KINDS[kind].quantization) if kind in KINDS else {}
    config = simple_config(
        num_experts=1, hidden_size=HIDDEN, moe_intermediate_size=INNER,
        quantization_config=quantization, model_type="gpt_oss" if kind == "blocks" else None,
    )  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return True


class InsideTensors(SourceReader):
    """Refuses to read beyond a tensor."""

    def read(self, fd: Opened, tensor: TensorRef, target: memoryview, offset: int) -> None:
        assert offset >= 0 and offset + len(target) <= tensor.nbytes, (tensor, offset, len(target))
        super().read(fd, tensor, target, offset)


def read_all(reader: SourceReader, matrix: ExpertMatrix) -> None:
    """Scales and what belongs to them, and the first rows."""
    start, length = matrix.extent
    assert matrix.tensor.offset <= start
    assert start + length <= matrix.tensor.offset + matrix.tensor.nbytes
    source = MatrixReader(reader, matrix)
    try:
        source.load_scales()
        source.load_bias()
    except KtconvError as error:
        assert matrix.tensor.name.rpartition(".")[0] in str(error)
    data, bounce = np.empty(matrix.nbytes(matrix.rows), np.uint8), np.empty(1 << 16, np.uint8)
    with source.open() as fd:
        source.read(fd, range(matrix.rows), data, bounce)


@SETTINGS
@given(change=changed())
def test_changed_tensors(change: tuple[str, dict[str, Entry]], tmp_path: Path) -> None:
    if not write(tmp_path, *change):
        return
    tracemalloc.start()
    started = time.process_time()
    try:
        checkpoint = open_checkpoint(tmp_path)
        reader = InsideTensors(checkpoint.files, checkpoint.sources)
        for layer in checkpoint.layers:
            for expert in layer.experts:
                for matrix in expert.values():
                    read_all(reader, matrix)
    except KtconvError as error:
        assert len(str(error)) < 2000
        assert SOURCE in str(error) or "no MoE layer" in str(error) or "config.json" in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 16 << 20
    assert time.process_time() - started < 2


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("fuzz")
    kind = "int4 packed by activation"
    assert write(directory, kind, HEADERS[kind])
    return (directory / "model.safetensors").read_bytes()


@SETTINGS
@given(
    changes=st.lists(
        st.tuples(
            st.floats(0, 1),
            st.one_of(
                st.binary(max_size=9),
                st.sampled_from([b'"', b"}", b"[", b"-1", b"1e9", b"9" * 30, b"\\u0000", b"\xff"]),
            ),
            st.sampled_from([0, 1, 2, 8, 60]),
        ),
        min_size=1,
        max_size=4,
    ),
    length=st.one_of(st.none(), st.sampled_from([0, 1, 10**8, 10**8 + 1, 2**32, 2**63, 2**64 - 1])),
    cut=st.one_of(st.none(), st.floats(0, 1)),
)
def test_changed_bytes(
    changes: list[tuple[float, bytes, int]],
    length: int | None,
    cut: float | None,
    sound: bytes,
    tmp_path: Path,
) -> None:
    """Whatever the bytes are, a header that is accepted describes exactly those of its file."""
    header = bytearray(sound[8 : 8 + int.from_bytes(sound[:8], "little")])
    data = sound[8 + len(header) :]
    for place, piece, replaced in changes:
        at = int(place * len(header))
        header[at : at + replaced] = piece
    whole = struct.pack("<Q", len(header) if length is None else length) + header + data
    path = tmp_path / "model.safetensors"
    path.write_bytes(whole if cut is None else whole[: int(cut * len(whole))])
    tracemalloc.start()
    try:
        found = read_header(path)
    except KtconvError as error:
        assert error.hint and str(path) in str(error)
    else:
        assert sum(tensor.nbytes for tensor in found.tensors) == path.stat().st_size - 8 - len(
            header
        )
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 16 << 20
