"""Headers: every way to be wrong has its sentence, and nothing else can come out."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from helpers.families import file_bytes, write_safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ktconv.errors import CheckpointError, ResourceError
from ktconv.source import read_header
from ktconv.source.safetensors_file import _checked, _sound
from ktconv.source.strict_json import parse_object

GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def entry(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**GOOD, **changes}.items() if value != "absent"}


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert caught.value.hint
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_good_file(tmp_path: Path) -> None:
    header = (
        b'{"__metadata__":{"format":"pt"},"b":{"dtype":"U8","shape":[3],"data_offsets":[8,11]},'
    )
    header += b'"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},'
    header += b'"scalar":{"dtype":"BF16","shape":[],"data_offsets":[11,13]},'
    header += b'"none":{"dtype":"F32","shape":[0,5],"data_offsets":[8,8]}}   '
    read = read_header(write(tmp_path, file_bytes(header, bytes(13))))
    assert [tensor.name for tensor in read.tensors] == ["a", "none", "b", "scalar"]
    assert read.metadata == {"format": "pt"}
    tensor = read.tensors[2]
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == ("U8", (3,), 3)
    assert tensor.offset == 8 + len(header) + 8


@pytest.mark.parametrize("size", range(8))
def test_too_short_for_a_length(tmp_path: Path, size: int) -> None:
    assert f"has {size} bytes" in refusal(write(tmp_path, bytes(size)))


def test_header_beyond_the_file(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, struct.pack("<Q", 100) + b"{}"))
    assert "truncated: 98 of the 100 bytes of its header are missing" in message


def test_header_beyond_the_limit(tmp_path: Path) -> None:
    assert "limit of 100000000" in refusal(write(tmp_path, struct.pack("<Q", 2**60) + b"{}"))


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"", "does not start with"),
        (b"[]", "does not start with"),
        (b" \n[]", "does not start with"),
        (b"\x0c{}", "does not start with"),
        (b'{"a":', "not valid JSON"),
        (b"{}x", "not valid JSON"),
        (b'{"a\xff":1}', "not UTF-8"),
        (b'{"a":' + b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b'{"a":' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b'{"a":{},"a":{}}', "the key 'a' twice"),
        (b'{"a":{"dtype":"U8","dtype":"U8"}}', "the key 'dtype' twice"),
        (b'{"__metadata__":[]}', "__metadata__"),
        (b'{"__metadata__":{"a":1}}', "__metadata__"),
        (rb'{"\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', "not valid Unicode"),
    ],
)
def test_bad_json(tmp_path: Path, header: bytes, reason: str) -> None:
    assert reason in refusal(write(tmp_path, file_bytes(header)))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ([], "not a JSON object"),
        (None, "not a JSON object"),
        (entry(dtype="absent"), "has no dtype"),
        (entry(shape="absent"), "has no shape"),
        (entry(data_offsets="absent"), "has no data_offsets"),
        (entry(dtype="F31"), "unknown dtype 'F31'"),
        (entry(dtype=["F32"]), "unknown dtype"),
        (entry(shape=2), "shape that is not"),
        (entry(shape=[True, 2]), "shape that is not"),
        (entry(shape=[2.0]), "shape that is not"),
        (entry(shape=[-2]), "shape that is not"),
        (entry(shape=[0, 2**63]), "shape that is not"),
        (entry(data_offsets=[0]), "data_offsets that are not"),
        (entry(data_offsets=[0, 8, 8]), "data_offsets that are not"),
        (entry(data_offsets=[False, 8]), "data_offsets that are not"),
        (entry(data_offsets=[-8, 0]), "data_offsets that are not"),
        (entry(data_offsets=[8, 0]), "data_offsets that are not"),
        (entry(shape=[3]), "has 8 bytes of data, but F32 of shape [3] needs 12"),
        (entry(shape=[2**40, 2**40]), "needs"),
        (entry(dtype="F4", shape=[3]), "do not fill whole bytes"),
    ],
)
def test_bad_entry(tmp_path: Path, wrong: Any, reason: str) -> None:
    header = json.dumps({"w.1": wrong}).encode()
    message = refusal(write(tmp_path, file_bytes(header, bytes(8))))
    assert "tensor 'w.1'" in message
    assert reason in message


@pytest.mark.parametrize(
    ("second", "size", "reason"),
    [
        ([4, 12], 12, "'b' overlaps tensor 'a' by 4 bytes"),
        ([0, 8], 8, "overlaps tensor 'a' by 8 bytes"),
        ([12, 20], 20, "4 bytes between tensor 'a' and tensor 'b' belong to no tensor"),
        ([8, 16], 11, "truncated: 5 of its"),
        ([8, 16], 18, "2 bytes after its last tensor"),
        ([2**62, 2**62 + 8], 16, "between tensor 'a' and tensor 'b'"),
    ],
)
def test_bad_coverage(tmp_path: Path, second: list[int], size: int, reason: str) -> None:
    header = json.dumps({"a": entry(), "b": entry(data_offsets=second)}).encode()
    assert reason in refusal(write(tmp_path, file_bytes(header, bytes(size))))


SCALAR = '"dtype":"U8","shape":[],"data_offsets":[0,1]'


@pytest.mark.parametrize(
    "header",
    [
        "{}",
        '{"__metadata__":{},"a":{SCALAR}}',
        '{"a":{SCALAR},"__metadata__":{"format":"pt","dtype":"x"}}',
        '{"ä":{SCALAR},"b":{"shape":[0,3],"dtype":"F32","data_offsets":[1,1]}}',
    ],
)
def test_a_sound_header_is_parsed_at_once(header: str, tmp_path: Path) -> None:
    raw = header.replace("SCALAR", SCALAR).encode()
    found = _sound(tmp_path, raw, 8)
    assert found is not None and found == _checked(tmp_path, raw, 8)


@pytest.mark.parametrize(
    "header",
    [
        '{"a:b":{"dtype":"U8","data_offsets":[0,1]}}',  # a colon of the name for that of the key
        '{"a:b":{"shape":[],"data_offsets":[0,1]}}',
        '{"a:b":{"dtype":"U8","shape":[]}}',
        '{"a::b":{"dtype":"U8"}}',
        '{"a":{"dtype":"U8","shape":[],"data_offsets":[1,0]}}',
        '{"a:b":{"dtype":"U8","data_offsets":[1,0]}}',
        '{"a":{"dtype":"X","shape":[0],"data_offsets":[0,0]}}',  # no bytes of a dtype that is none
        '{"a":{"shape":[0],"data_offsets":[0,0],"more":1}}',
        '{"a":{"shape":[0],"data_offsets":[0,0],"shape":[0]}}',
        '{"a":{"dtype":"U8","more":0,"other":0}}',
        '{"a":{SCALAR},"a":{SCALAR}}',
        '{"a":{SCALAR,"shape":[]}}',
        '{"a":{SCALAR,"more":1}}',
        '{"a":{SCALAR},"__metadata__":{"x":"1","x":"2"}}',
        '{"a":{SCALAR},"__metadata__":{"x":1}}',
        '{"a":{SCALAR},"__metadata__":null}',
        '{"a\\u0062":{SCALAR}}',
    ],
)
def test_other_headers_are_looked_at_closely(header: str, tmp_path: Path) -> None:
    assert _sound(tmp_path, header.replace("SCALAR", SCALAR).encode(), 8) is None


def test_not_a_file(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "absent.safetensors")
    assert "not a regular file" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal(tmp_path / "pipe")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_shard_without_permission_to_read(tmp_path: Path) -> None:
    path = write(tmp_path, file_bytes(b"{}"))
    path.chmod(0)
    with pytest.raises(ResourceError, match="cannot be read"):
        read_header(path)


def test_system_error_is_translated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, file_bytes(b"{}"))

    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ResourceError, match=r"x\.safetensors cannot be read: Input/output error"):
        read_header(path)


SIMPLE_DTYPES = st.sampled_from(["<f4", "<f2", "|u1", "|i1", "<i8", "?"]).map(np.dtype)
ARRAYS = hnp.arrays(SIMPLE_DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
FILES = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FILES
@given(arrays=st.dictionaries(st.text(max_size=8), ARRAYS, max_size=6))
def test_reads_what_the_safetensors_library_writes(tmp_path: Path, arrays: Any) -> None:
    arrays.pop("__metadata__", None)
    arrays = {k: v for k, v in arrays.items() if k.isprintable()}
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors.numpy.save(arrays))
    content = path.read_bytes()
    tensors = read_header(path).tensors
    assert {tensor.name for tensor in tensors} == set(arrays)
    for tensor in tensors:
        array = arrays[tensor.name]
        assert tensor.shape == array.shape
        assert content[tensor.offset : tensor.offset + tensor.nbytes] == array.tobytes()


@settings(FILES, max_examples=300)
@given(data=st.data())
def test_corruption_is_refused_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    """Any bytes may change: the result is CheckpointError, or what the library reads too."""
    path = tmp_path / "x.safetensors"
    write_safetensors(
        path, {"a": np.zeros(3, np.float32), "b.c": np.ones((2, 2), np.float16), "d": np.ones(())}
    )
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(content)))
        count = data.draw(st.integers(0, 3))
        patch = data.draw(st.binary(max_size=3) | st.sampled_from([b"0", b"1", b'"', b",", b"]"]))
        content[start : start + count] = patch
    path.write_bytes(content)
    try:
        ours = read_header(path)
    except CheckpointError:
        return
    theirs = dict(safetensors.deserialize(bytes(content)))
    assert {tensor.name for tensor in ours.tensors} == set(theirs)
    for tensor in ours.tensors:
        assert list(tensor.shape) == theirs[tensor.name]["shape"]
        stored = bytes(content[tensor.offset : tensor.offset + tensor.nbytes])
        assert stored == theirs[tensor.name]["data"]


def test_a_byte_order_mark_is_called_so(tmp_path: Path) -> None:
    header = b"\xef\xbb\xbf{}"
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="begins with a byte order mark") as caught:
        read_header(path)
    assert "Save the file again with the library safetensors" in str(caught.value.hint)


@pytest.mark.parametrize(
    "text",
    ['{"a":1,"a":2}', '{"a":{"b":1,"b":2}}', '{"a":{"b":{"c":1,"c":2}}}', '{"a":{"b":1},"a":{}}',
     '{"a":":{","a":1}', '{"a":[{"b":1,"b":2}]}'],
)  # fmt: skip
def test_a_key_twice_is_found_wherever_it_is(text: str) -> None:
    with pytest.raises(CheckpointError, match="twice"):
        parse_object(text.encode(), "x", "hint")


@pytest.mark.parametrize("text", ['{"a:{":{"b":":"},"c":[1]}', '{"a":[{"b":1},{"b":2}]}', "{}"])
def test_keys_that_are_not_twice(text: str) -> None:
    assert parse_object(text.encode(), "x", "hint") == json.loads(text)
