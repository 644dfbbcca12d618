"""Headers of GGUF files: what the gguf package writes, and everything that can be wrong in one."""

from __future__ import annotations

import hashlib
import struct
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from helpers.families import HIDDEN
from helpers.gguf_files import experts, metadata, write_gguf

from ktconv.errors import CheckpointError
from ktconv.source.gguf import file
from ktconv.source.gguf.file import read_gguf_header
from ktconv.source.gguf.types import TYPES

Tensor = tuple[str, Sequence[int], int, int]  # name, dimensions from the fastest, type, offset
ONE: Tensor = ("a", (32, 2), 0, 0)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def header(
    tensors: Sequence[Tensor] = (ONE,),
    pairs: Sequence[bytes] = (),
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A header by the specification, with any fault."""
    wanted = counts or (len(tensors), len(pairs))
    entries = b"".join(
        text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
        for name, dims, kind, offset in tensors
    )
    return b"GGUF" + struct.pack("<IQQ", version, *wanted) + b"".join(pairs) + entries


def write(directory: Path, data: bytes, payload: int = 256, alignment: int = 32) -> Path:
    path = directory / "x.gguf"
    path.write_bytes(data + bytes(-len(data) % alignment) + bytes(payload))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_gguf_header(path)
    assert caught.value.hint
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 600
    return str(caught.value)


# ---- sound files -----------------------------------------------------------------------


def test_as_the_package_reads_it(tmp_path: Path) -> None:
    types = {"ffn_gate": "Q4_0", "ffn_up": "Q8_0", "ffn_down": "BF16"}
    tensors = experts() | {"norm": np.ones(HIDDEN, np.float32)}
    words = [f"word {number}" for number in range(50)]
    pairs = metadata(1, flag=True, share=0.25, name="a name", limits=[0.0, 7.5])
    path = write_gguf(tmp_path / "m.gguf", tensors, pairs, types=types, vocabulary=words)
    found, reader = read_gguf_header(path), gguf.GGUFReader(path)
    assert [tensor.name for tensor in found.tensors] == [one.name for one in reader.tensors]
    for ours, theirs in zip(found.tensors, reader.tensors, strict=True):
        assert ours.dtype == theirs.tensor_type.name
        assert ours.shape == tuple(int(size) for size in theirs.shape[::-1])
        assert (ours.offset, ours.nbytes) == (theirs.data_offset, theirs.n_bytes)
        assert ours.file == path
    assert found.metadata["general.architecture"] == "qwen3moe"
    assert found.metadata["qwen3moe.flag"] is True
    assert found.metadata["qwen3moe.share"] == 0.25
    assert found.metadata["qwen3moe.limits"] == [0.0, 7.5]
    assert found.metadata["tokenizer.ggml.tokens"] is None
    assert found.metadata.keys() == {key for key in reader.fields if not key.startswith("GGUF.")}
    status = path.stat()
    assert (found.file_bytes, found.mtime_ns) == (status.st_size, status.st_mtime_ns)


def test_types_are_those_of_the_package() -> None:
    known = {int(kind): (kind.name, *gguf.GGML_QUANT_SIZES[kind])
             for kind in gguf.GGMLQuantizationType}  # fmt: skip
    known.setdefault(42, ("Q2_0", 64, 18))  # of later releases
    for number, kind in TYPES.items():
        assert known[number] == (kind.name, kind.elements, kind.nbytes)
    # Of those that no tensor of a model has: sums for products.
    assert {known[number][0] for number in known.keys() - TYPES.keys()} == {"Q8_1", "Q8_K"}


@pytest.mark.parametrize("version", [2, 3])
def test_versions(version: int, tmp_path: Path) -> None:
    data = header(version=version)
    found = read_gguf_header(write(tmp_path, data))
    assert [(one.name, one.shape) for one in found.tensors] == [("a", (2, 32))]
    assert found.sha256 == hashlib.sha256(data).hexdigest()


def test_alignment(tmp_path: Path) -> None:
    pairs = [pair("general.alignment", 4, struct.pack("<I", 256))]
    data = header([ONE, ("b", (4,), 24, 256)], pairs)
    path = write(tmp_path, data, 512, 256)
    assert [tensor.offset for tensor in read_gguf_header(path).tensors] == [256, 512]


def test_tensors_in_another_order_than_their_bytes(tmp_path: Path) -> None:
    path = write(tmp_path, header([("b", (8,), 0, 32), ("a", (8,), 0, 0)]), 64)
    assert [tensor.name for tensor in read_gguf_header(path).tensors] == ["a", "b"]


def test_a_part_without_tensors(tmp_path: Path) -> None:
    assert not read_gguf_header(write(tmp_path, header(()), 0)).tensors


def test_long_values_are_passed_over(tmp_path: Path) -> None:
    pairs = [
        pair("template", 8, text("x" * 10_000)),
        pair("types", 9, struct.pack("<IQ", 5, 9000) + bytes(4 * 9000)),
        pair("last", 10, struct.pack("<Q", 7)),
    ]
    found = read_gguf_header(write(tmp_path, header((), pairs), 0))
    assert found.metadata == {"template": None, "types": None, "last": 7}


def test_large_files_are_read_fast(tmp_path: Path) -> None:
    """A vocabulary of 200 000 words and 20 000 tensors. A processor's second is far more."""
    words = b"".join(text(f"word {number}") for number in range(200_000))
    pairs = [pair("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 200_000) + words)]
    tensors = [(f"blk.{number}.ffn_up.0.weight", (8,), 0, 32 * number) for number in range(20_000)]
    path = write(tmp_path, header(tensors, pairs), 32 * 20_000)
    started = time.process_time()
    assert len(read_gguf_header(path).tensors) == 20_000
    assert time.process_time() - started < 1


# ---- files that are wrong --------------------------------------------------------------

HUGE = 1 << 60
FAULTS: dict[str, tuple[bytes, str]] = {
    "ten bytes": (header()[:10], "has 10 bytes, too few for the header of a GGUF file"),
    "other file": (b"PK\3\4" + bytes(40), "does not start with GGUF"),
    "version 1": (header(version=1), "is GGUF version 1; supported are versions 2 and 3"),
    "version 4": (header(version=4), "is GGUF version 4; supported"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 1, 0) + bytes(80), "is a big-endian GGUF file"),
    "tensors": (header(counts=(HUGE, 0)), f"declares {HUGE} tensors, for which its"),
    "pairs": (header(counts=(0, 2**64 - 1)), "key-value pairs, for which its"),
    "more tensors": (header(counts=(4, 0)), "tensor '' has 0 dimensions"),
    "key": (header((), [struct.pack("<Q", HUGE)]), f"declares {HUGE} bytes for a key"),
    "key beyond": (header((), [struct.pack("<Q", 500)]), "declares 500 bytes for a key"),
    "long key": (header((), [pair("k" * 66_000, 0, b"1")]), "of more than 65535 bytes: 'kkk"),
    "key twice": (header((), [pair("k", 0, b"1"), pair("k", 0, b"2")]), "contains the key 'k' tw"),
    "key not text": (header((), [pair(b"\xff", 0, b"1")]), "that is not UTF-8: b'\\xff'"),
    "NUL": (header((), [pair("a\0b", 0, b"1")]), "contains a NUL byte"),
    "value not text": (header((), [pair("k", 8, text(b"\xff"))]), "has a value of 'k' that is not"),
    "type": (header((), [pair("k", 13, bytes(8))]), "of the unknown type 13 under the key 'k'"),
    "items": (header((), [pair("k", 9, struct.pack("<IQ", 77, 1))]), "array of values of the unkn"),
    "nested": (header((), [pair("k", 9, struct.pack("<IQ", 9, 1))]), "has an array of arrays"),
    "count": (header((), [pair("k", 9, struct.pack("<IQ", 10, HUGE))]), f"{HUGE} values under the"),
    "words": (header((), [pair("k", 9, struct.pack("<IQ", 8, HUGE))]), f"{HUGE} strings under the"),
    "word": (
        header((), [pair("k", 9, struct.pack("<IQQ", 8, 1, HUGE))]), "is truncated: its header"
    ),
    "alignment": (
        header((), [pair("general.alignment", 4, struct.pack("<I", 48))]), "general.alignment 48,"
    ),
    "no alignment": (
        header((), [pair("general.alignment", 8, text("32"))]), "general.alignment '32', which is"
    ),
    "name twice": (header([ONE, ("a", (8,), 0, 256)]), "tensor 'a' is there twice"),
    "name not text": (header([(b"\xff", (8,), 0, 0)]), "a name of a tensor that is not UTF-8"),  # type: ignore[list-item]
    "no dimension": (header([("a", (), 0, 0)]), "tensor 'a' has 0 dimensions; 1 to 4"),
    "five": (header([("a", (1,) * 5, 0, 0)]), "tensor 'a' has 5 dimensions"),
    "empty": (header([("a", (32, 0), 0, 0)]), "tensor 'a' has shape [0, 32], without any"),
    "product": (header([("a", (2**63, 4), 0, 0)]), "beyond the end of the file"),
    "wrapped": (header([("a", (2**33, 2**31), 0, 0)]), "beyond the end of the file"),
    "block": (header([("a", (100, 2), 12, 0)]), "rows of 100 elements, no multiple of the 256 of"),
    "unknown": (header([("a", (8,), 77, 0)]), "tensor 'a' is of the unknown type 77"),
    "removed": (header([("a", (32,), 31, 0)]), "is of type 31 (Q4_0_4_4), which llama.cpp has rem"),
    "ik": (header([("a", (256,), 139, 0)]), "is of type 139, one of ik_llama.cpp's own"),
    "offset": (header([("a", (8,), 0, 8)]), "offset 8, no multiple of the alignment 32"),
    "far": (header([("a", (8,), 0, 2**63)]), "beyond the end of the file"),
    "overlap": (header([ONE, ("b", (8,), 0, 128)]), "tensor 'b' overlaps tensor 'a' by 128"),
    "hole": (header([("a", (8,), 0, 0), ("b", (8,), 0, 96)]), "64 bytes between tensor 'a' and"),
    "late start": (header([("a", (8,), 0, 64)]), "64 bytes between the header and tensor 'a'"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault(fault: str, tmp_path: Path) -> None:
    data, reason = FAULTS[fault]
    path = tmp_path / "x.gguf"
    path.write_bytes(data) if fault in ("ten bytes", "word") else write(tmp_path, data)
    tracemalloc.start()
    try:
        assert reason in refusal(path)
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    """Wherever it ends."""
    numbers = struct.pack("<IQ2I", 4, 2, 1, 2)
    data = header([ONE], [pair("k", 8, text("value")), pair("n", 9, numbers)])
    data += bytes(-len(data) % 32) + bytes(256)
    path = tmp_path / "x.gguf"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        refusal(path)
    path.write_bytes(data)
    read_gguf_header(path)


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what costs more memory than bytes in the file."""
    monkeypatch.setattr(file, "MAX_TENSORS", 3)
    monkeypatch.setattr(file, "MAX_PAIRS", 2)
    tensors: list[Any] = [(str(number), (8,), 0, 32 * number) for number in range(4)]
    assert "declares 4 tensors; at most 3" in refusal(write(tmp_path, header(tensors)))
    pairs = [pair(str(number), 0, b"1") for number in range(3)]
    assert "declares 3 key-value pairs; at most 2" in refusal(write(tmp_path, header((), pairs)))
    monkeypatch.setattr(file, "MAX_HEADER_BYTES", 64)
    assert "more than the limit of 64 bytes" in refusal(
        write(tmp_path, header((), [pair("k", 8, text("x" * 80))]))
    )
