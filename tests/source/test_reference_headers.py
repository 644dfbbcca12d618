"""Odd headers: what the safetensors package opens is read, and what it refuses is refused, with the
exceptions below and their reasons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.families import file_bytes
from safetensors import SafetensorError, safe_open

from ktconv.errors import CheckpointError
from ktconv.source import read_header

PLAIN = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
FOUR = bytes(4)


def entry(dtype: str = "F32", shape: Any = (1,), offsets: Any = (0, 4), **more: Any) -> bytes:
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}).encode()


def one(content: bytes) -> bytes:
    """A header of one tensor."""
    return b'{"a":' + content + b"}"


def two(first: bytes, second: bytes) -> bytes:
    return b'{"a":' + first + b',"b":' + second + b"}"


# Header, and the bytes behind it.
CASES: dict[str, tuple[bytes, bytes]] = {
    "plain": (one(PLAIN), FOUR),
    "spaces before": (b"    " + one(PLAIN), FOUR),
    "all kinds of space before": (b"\n\t\r " + one(PLAIN), FOUR),
    "spaces after": (one(PLAIN) + b"   ", FOUR),
    "all kinds of space after": (one(PLAIN) + b"\n\t\r ", FOUR),
    "spaces inside": (b'{ "a" :\n{"dtype" : "F32","shape":[ 1 ],"data_offsets":[0, 4]}\t}', FOUR),
    "a length that is no multiple of 8": (one(PLAIN) + b" ", FOUR),
    "a form feed before": (b"\x0c" + one(PLAIN), FOUR),
    "a no-break space before": ("\u00a0".encode() + one(PLAIN), FOUR),
    "a byte order mark": (b"\xef\xbb\xbf" + one(PLAIN), FOUR),
    "a NUL before": (b"\0" + one(PLAIN), FOUR),
    "a NUL after": (one(PLAIN) + b"\0", FOUR),
    "another object after": (one(PLAIN) + b"{}", FOUR),
    "a list": (b"[" + one(PLAIN) + b"]", FOUR),
    "a comma after the last": (b'{"a":' + PLAIN + b",}", FOUR),
    "a comment": (b"/**/" + one(PLAIN), FOUR),
    "nothing": (b"", b""),
    "no tensor": (b"{}", b""),
    "no tensor, spaces": (b" { } ", b""),
    "no tensor, but bytes": (b"{}", FOUR),
    "metadata null": (b'{"__metadata__":null,"a":' + PLAIN + b"}", FOUR),
    "metadata behind": (b'{"a":' + PLAIN + b',"__metadata__":{"k":"v"}}', FOUR),
    "metadata of numbers": (b'{"__metadata__":{"k":1},"a":' + PLAIN + b"}", FOUR),
    "metadata of null": (b'{"__metadata__":{"k":null},"a":' + PLAIN + b"}", FOUR),
    "metadata a list": (b'{"__metadata__":[],"a":' + PLAIN + b"}", FOUR),
    "metadata twice": (b'{"__metadata__":{},"a":' + PLAIN + b',"__metadata__":{}}', FOUR),
    "a name twice": (b'{"a":' + PLAIN + b',"a":' + PLAIN + b"}", FOUR),
    "a key twice": (one(b'{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}'), FOUR),
    "an unknown key": (one(entry(x=[1, {"y": None}])), FOUR),
    "an unknown NaN": (one(entry(x=float("nan"))), FOUR),
    "an unknown number of 30 digits": (one(entry(x=10**30)), FOUR),
    "an entry that is a list": (one(b'["F32",[1],[0,4]]'), FOUR),
    "an entry that is null": (two(b"null", PLAIN), FOUR),
    "no shape": (one(b'{"dtype":"F32","data_offsets":[0,4]}'), FOUR),
    "a scalar": (one(entry(shape=[])), FOUR),
    "nothing at the start": (two(entry(shape=[0], offsets=[0, 0]), PLAIN), FOUR),
    "nothing at the end": (two(PLAIN, entry(shape=[0, 7], offsets=[4, 4])), FOUR),
    "nothing within another": (two(PLAIN, entry(shape=[0], offsets=[2, 2])), FOUR),
    "nothing beyond the end": (two(PLAIN, entry(shape=[0], offsets=[9, 9])), FOUR),
    "another order": (two(entry("U8", offsets=[4, 5]), PLAIN), bytes(5)),
    "odd offsets": (two(entry("U8", offsets=[0, 1]), entry(offsets=[1, 5])), bytes(5)),
    "the same bytes twice": (two(PLAIN, PLAIN), FOUR),
    "an overlap": (two(PLAIN, entry(offsets=[2, 6])), bytes(6)),
    "a gap": (two(PLAIN, entry(offsets=[8, 12])), bytes(12)),
    "a gap at the start": (one(entry(offsets=[4, 8])), bytes(8)),
    "bytes behind the last": (one(PLAIN), bytes(5)),
    "bytes missing": (one(PLAIN), bytes(3)),
    "offsets backwards": (one(entry(shape=[0], offsets=[4, 0])), FOUR),
    "three offsets": (one(entry(offsets=[0, 4, 4])), FOUR),
    "a size 1.0": (one(entry(shape=[1.0])), FOUR),
    "a size 1e0": (one(PLAIN.replace(b"[1]", b"[1e0]")), FOUR),
    "a size 01": (one(PLAIN.replace(b"[1]", b"[01]")), FOUR),
    "an offset -0": (one(PLAIN.replace(b"[0,", b"[-0,")), FOUR),
    "a size that is text": (one(entry(shape=["1"])), FOUR),
    "a size that is true": (one(entry(shape=[True])), FOUR),
    "a dtype in lower case": (one(entry("f32")), FOUR),
    "an escaped dtype": (one(PLAIN.replace(b"F32", b"F\\u0033" + b"2")), FOUR),
    "half bytes": (one(entry("F4", shape=[3], offsets=[0, 2])), bytes(2)),
    "an escaped name": (b'{"\\u0061\\/b":' + PLAIN + b"}", FOUR),
    "a name beyond 16 bits": (b'{"\\ud83d\\ude00":' + PLAIN + b"}", FOUR),
    "half a name beyond 16 bits": (b'{"\\ud83d":' + PLAIN + b"}", FOUR),
    "a name with NUL": (b'{"a\\u0000b":' + PLAIN + b"}", FOUR),
    "a name with a line feed": (b'{"a\nb":' + PLAIN + b"}", FOUR),
    "an empty name": (b'{"":' + PLAIN + b"}", FOUR),
    "a name in Latin-1": (b'{"\xe9":' + PLAIN + b"}", FOUR),
}
_WIDTHS = {
    8: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ I4 NF4",
    16: "U16 I16 F16 BF16",
    32: "U32 I32 F32 TF32",
    64: "U64 I64 F64 C64",
    128: "C128 F128",
    6: "F6_E2M3 F6_E3M2",
    4: "F4 U4",
}
for bits, names in _WIDTHS.items():
    for name in names.split():
        CASES[f"dtype {name}"] = (one(entry(name, [8], [0, bits])), bytes(bits))

STRICTER = {
    "a name twice": "readers differ in which of the two counts",
    "an entry that is a list": "no writer makes it, and other readers do not read it",
    "a name with NUL": "programs in C would read the name up to it",
}
LAXER = {
    "an unknown NaN": "nothing depends on keys that are not known",
    "an offset -0": "it is 0",
}


def opened(path: Path) -> dict[str, list[int]] | None:
    """Names and shapes by the reference reader; None where it refuses."""
    try:
        with safe_open(path, "numpy") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except SafetensorError:
        return None


def read(path: Path) -> dict[str, list[int]] | None:
    try:
        return {tensor.name: list(tensor.shape) for tensor in read_header(path).tensors}
    except CheckpointError as error:
        assert error.hint and str(path) in str(error)
        return None


@pytest.mark.parametrize("case", CASES)
def test_a_header_is_read_as_by_the_reference(case: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_bytes(*CASES[case]))
    ours, theirs = read(path), opened(path)
    if case in STRICTER:
        assert ours is None and theirs is not None
    elif case in LAXER:
        assert ours is not None and theirs is None
    else:
        assert ours == theirs


def test_both_kinds_of_case_are_there(tmp_path: Path) -> None:
    path, refused = tmp_path / "x.safetensors", 0
    for header, data in CASES.values():
        path.write_bytes(file_bytes(header, data))
        refused += opened(path) is None
    assert 25 <= refused <= len(CASES) - 40


@pytest.mark.parametrize("before", [b"", b"   ", b"\n\t"])
def test_weights_behind_a_padded_header_are_those_of_the_tensor(
    before: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_bytes(before + one(PLAIN) + b"  ", b"\x00\x00\x80\x3f"))
    [tensor] = read_header(path).tensors
    assert path.read_bytes()[tensor.offset :] == b"\x00\x00\x80\x3f"
    with safe_open(path, "numpy") as file:
        assert file.get_tensor("a").tolist() == [1.0]
