"""Headers of GGUF files, read and validated without reading a weight.

A GGUF file (versions 2 and 3, little endian) is the magic "GGUF", u32 version, u64 number of
tensors, u64 number of key-value pairs, the pairs, one entry per tensor, and from the next multiple
of `general.alignment` on the tensors' bytes, each tensor at a multiple of the alignment too. All
of it is checked: any count, length or offset in a downloaded file can be wrong.

Memory stays below MAX_HEADER_BYTES and a few objects per tensor. Arrays of strings, which are
vocabularies, are passed over.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from struct import Struct
from typing import Any, NoReturn

from ktconv.errors import CheckpointError
from ktconv.source.gguf.types import BEYOND_IK_LLAMA, FIRST_OF_IK_LLAMA, REMOVED, TYPES, GgmlType
from ktconv.source.safetensors_file import MAX_HEADER_BYTES, Header, check_places
from ktconv.source.types import TensorRef
from ktconv.system.files import FileTooShortError
from ktconv.system.opened import Opened, opened_source
from ktconv.system.regular_files import unreadable

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
MAX_ALIGNMENT = 1 << 20
MAX_NAME_BYTES = 0xFFFF  # of a key; no tensor's name is longer either
# No model comes near. Each costs objects that are larger than its bytes in the file.
MAX_TENSORS, MAX_PAIRS = 1 << 20, 1 << 16
_KEPT_STRING = 1 << 12  # bytes of a value; longer ones are chat templates and licences
_KEPT_ARRAY = 1 << 12  # items; a number for each layer, not one for each token
_KEPT_ITEMS = 1 << 18  # of all arrays

_DAMAGED = "The file is damaged or not a GGUF file; download or copy it again."
_UNSUPPORTED = "Convert it again with a current version of llama.cpp, or use a safetensors version."
_CHUNK = 1 << 20

_U32, _U64, _HEAD = Struct("<I"), Struct("<Q"), Struct("<QQ")
_ARRAY_HEAD = Struct("<IQ")
# Sizes from the fastest dimension on, type and offset of tensors with 1 to 4 dimensions.
_ENTRIES = [Struct(f"<{dims}QIQ") for dims in (1, 2, 3, 4)]
# Types of values: 8 is a string, 9 an array.
_STRING, _ARRAY = 8, 9
_NUMBERS = {
    0: Struct("<B"), 1: Struct("<b"), 2: Struct("<H"), 3: Struct("<h"), 4: _U32, 5: Struct("<i"),
    6: Struct("<f"), 7: Struct("<?"), 10: _U64, 11: Struct("<q"), 12: Struct("<d"),
}  # fmt: skip
# The fewest bytes of a pair (key length, type, u8) and of a tensor (name length, dimensions, one
# dimension, type, offset): no count can be larger than the file has room for.
_LEAST_PAIR, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8


def read_gguf_header(path: Path) -> Header:
    """Read and validate the header of the GGUF file `path`; symlinks are followed.

    Shapes are in elements, the dimension that varies slowest first, as in safetensors files;
    dtypes are ggml's names of types. `metadata` has the pairs, without long strings and arrays.
    Raises CheckpointError naming the file (and tensor) for anything that is missing or wrong,
    ResourceError where the system refuses to read.
    """
    with opened_source(path) as opened:
        try:
            file_bytes, mtime_ns, etag = opened.state
            source = _Source(path, opened, file_bytes)
            tensors_count, pairs_count = _read_counts(source)
            metadata = _read_pairs(source, pairs_count)
            alignment = _alignment(source, metadata)
            entries = _read_entries(source, tensors_count, alignment)
        except OSError as error:
            raise unreadable(path, error) from error
    header_bytes = source.position
    start = -(-header_bytes // alignment) * alignment if entries else header_bytes
    tensors = [
        TensorRef(name, path, kind.name, shape, start + offset, nbytes)
        for name, kind, shape, offset, nbytes in entries
    ]
    tensors.sort(key=attrgetter("offset", "nbytes"))
    check_places(path, tensors, start, file_bytes, _DAMAGED, alignment)
    digest = hashlib.sha256(memoryview(source.data)[:header_bytes]).hexdigest()
    return Header(path, tensors, metadata, file_bytes, mtime_ns, digest, etag)


def read_raw_pairs(path: Path) -> list[tuple[str, bytes]]:
    """The key-value pairs of a GGUF file, each with its key, as they are stored; raises as
    `read_gguf_header`."""
    found = []
    with opened_source(path) as opened:
        source = _Source(path, opened, opened.state.nbytes)
        _, count = _read_counts(source)
        for _ in range(count):
            start = source.position
            key = source.name("a key")
            (kind,) = source.unpack(_U32)
            _array(source, key) if kind == _ARRAY else _value(source, key, kind)
            found.append((key, bytes(memoryview(source.data)[start : source.position])))
    return found


def float32_bytes(path: Path) -> int:
    """Bytes of all weights in float32, as which transformers has them while it loads the file."""
    return sum(4 * math.prod(tensor.shape) for tensor in read_gguf_header(path).tensors)


class _Source:
    """The bytes from the start of a file on, as far as they were asked for."""

    def __init__(self, path: Path, opened: Opened, file_bytes: int) -> None:
        self.path, self.file_bytes = path, file_bytes
        self.data = bytearray()
        self.position = 0
        self.kept_items = 0
        self._opened = opened

    def fail(self, fault: str, hint: str = _DAMAGED) -> NoReturn:
        raise CheckpointError(f"{self.path} {fault}", hint)

    @property
    def room(self) -> int:
        """Bytes from here to where a header can end."""
        return min(self.file_bytes, MAX_HEADER_BYTES) - self.position

    def take(self, length: int) -> int:
        """Position where the next `length` bytes begin in `data`, which are passed over."""
        start, end = self.position, self.position + length
        if end > len(self.data):
            self._load(end)
        self.position = end
        return start

    def _load(self, end: int) -> None:
        if end > self.file_bytes:
            self.fail(f"is truncated: its header does not end within its {self.file_bytes} bytes")
        if end > MAX_HEADER_BYTES:
            self.fail(f"has a header of more than {MAX_HEADER_BYTES} bytes")
        end = min(max(end, len(self.data) + _CHUNK), self.file_bytes)
        try:
            self.data += self._opened.take(end - len(self.data), len(self.data))
        except FileTooShortError:
            self.fail("became shorter while it was read")

    def unpack(self, form: Struct) -> tuple[Any, ...]:
        start = self.take(form.size)
        return form.unpack_from(self.data, start)

    def count(self, what: str, count: int, least: int) -> int:
        """`count`, for which there is room if each takes `least` bytes."""
        if count * least > self.room:
            self.fail(
                f"declares {count} {what}, for which its {self.file_bytes} bytes have no room"
                if count * least > self.file_bytes - self.position
                else f"declares {count} {what}, more than the limit of {MAX_HEADER_BYTES} bytes "
                "of a header allows"
            )
        return count

    def string(self, what: str) -> bytes:
        (length,) = self.unpack(_U64)
        start = self.take(self.count(f"bytes for {what}", length, 1))
        return bytes(memoryview(self.data)[start : self.position])

    def text(self, what: str) -> str:
        """A string that is valid UTF-8 without NUL."""
        raw = self.string(what)
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            self.fail(f"has {what} that is not UTF-8: {raw!r:.80}")
        if "\0" in text:
            self.fail(f"has {what} that contains a NUL byte: {text!r:.80}")
        return text

    def name(self, what: str) -> str:
        """A text of at most MAX_NAME_BYTES. There may be 100 000, so `text` is only called for
        those that are wrong or not loaded yet."""
        data, start = self.data, self.position
        if start + 8 <= len(data):
            (length,) = _U64.unpack_from(data, start)
            end = start + 8 + length
            if length <= MAX_NAME_BYTES and end <= len(data):
                raw = data[start + 8 : end]
                if raw.isascii() and b"\0" not in raw:
                    self.position = end
                    return raw.decode()
        name = self.text(what)
        if self.position - start - 8 > MAX_NAME_BYTES:
            self.fail(f"has {what} of more than {MAX_NAME_BYTES} bytes: {name!r:.40}")
        return name

    def skip_strings(self, count: int) -> None:
        """Pass over `count` strings: in one loop, since a vocabulary has hundreds of thousands."""
        unpack, data, position = _U64.unpack_from, self.data, self.position
        loaded = len(data)
        for _ in range(count):
            if position + 8 > loaded:
                self.position = position
                self.take(8)
                loaded = len(data)
            position += 8 + unpack(data, position)[0]
        self.position = position
        self.take(0)


# ---- counts and pairs ------------------------------------------------------------------


def _read_counts(source: _Source) -> tuple[int, int]:
    if source.file_bytes < len(MAGIC) + _U32.size + _HEAD.size:
        source.fail(f"has {source.file_bytes} bytes, too few for the header of a GGUF file")
    start = source.take(len(MAGIC))
    if source.data[start : source.position] != MAGIC:
        source.fail(f"does not start with {MAGIC.decode()}")
    (version,) = source.unpack(_U32)
    if version not in VERSIONS:
        if int.from_bytes(version.to_bytes(4, "big"), "little") in (1, *VERSIONS):
            source.fail(
                "is a big-endian GGUF file, which is not supported",
                "Use the little-endian file of this model.",
            )
        source.fail(f"is GGUF version {version}; supported are versions 2 and 3", _UNSUPPORTED)
    tensors, pairs = source.unpack(_HEAD)
    for what, count, least, most in (
        ("tensors", tensors, _LEAST_TENSOR, MAX_TENSORS),
        ("key-value pairs", pairs, _LEAST_PAIR, MAX_PAIRS),
    ):
        source.count(what, count, least)
        if count > most:
            source.fail(f"declares {count} {what}; at most {most} are supported")
    return tensors, pairs


def _read_pairs(source: _Source, count: int) -> dict[str, Any]:
    """The pairs; None for the values that are passed over."""
    found: dict[str, Any] = {}
    for _ in range(count):
        key = source.name("a key")
        if key in found:
            source.fail(f"contains the key {key!r:.80} twice")
        (kind,) = source.unpack(_U32)
        found[key] = _array(source, key) if kind == _ARRAY else _value(source, key, kind)
    return found


def _value(source: _Source, key: str, kind: int) -> Any:
    if kind == _STRING:
        start = source.position
        raw = source.string(f"the value of {key!r:.80}")
        if len(raw) > _KEPT_STRING:
            return None
        source.position = start
        return source.text(f"a value of {key!r:.80}")
    form = _NUMBERS.get(kind)
    if form is None:
        source.fail(f"has a value of the unknown type {kind} under the key {key!r:.80}")
    return source.unpack(form)[0]


def _array(source: _Source, key: str) -> list[Any] | None:
    kind, count = source.unpack(_ARRAY_HEAD)
    if kind == _STRING:
        source.skip_strings(source.count(f"strings under the key {key!r:.80}", count, 8))
        return None
    form = _NUMBERS.get(kind)
    if form is None:
        what = "arrays" if kind == _ARRAY else f"values of the unknown type {kind}"
        source.fail(f"has an array of {what} under the key {key!r:.80}")
    source.count(f"values under the key {key!r:.80}", count, form.size)
    start = source.take(count * form.size)
    source.kept_items += count if count <= _KEPT_ARRAY else 0
    if count > _KEPT_ARRAY or source.kept_items > _KEPT_ITEMS:
        return None
    with memoryview(source.data) as data:
        return [one for (one,) in form.iter_unpack(data[start : source.position])]


def _alignment(source: _Source, metadata: dict[str, Any]) -> int:
    found = metadata.get(ALIGNMENT, 32)
    usable = type(found) is int and 0 < found <= MAX_ALIGNMENT and not found & (found - 1)
    if not usable:
        source.fail(f"has {ALIGNMENT} {found!r:.40}, which is no power of two up to 2^20")
    return int(found)


# ---- tensors ---------------------------------------------------------------------------

_Entry = tuple[str, GgmlType, tuple[int, ...], int, int]  # name, type, shape, offset, bytes


def _read_entries(source: _Source, count: int, alignment: int) -> Sequence[_Entry]:
    found: list[_Entry] = []
    names: set[str] = set()
    for _ in range(count):
        name = source.name("a name of a tensor")
        try:
            if name in names:
                raise _FaultError("is there twice")
            names.add(name)
            found.append((name, *_read_entry(source, alignment)))
        except _FaultError as fault:
            message = f"{source.path}: tensor {name!r:.200} {fault}"
            raise CheckpointError(message, fault.hint) from None
    return found


class _FaultError(Exception):
    """Fault of a tensor's entry, as the end of a sentence, and perhaps the way out."""

    def __init__(self, fault: str, hint: str = _DAMAGED) -> None:
        super().__init__(fault)
        self.hint = hint


def _read_entry(source: _Source, alignment: int) -> tuple[GgmlType, tuple[int, ...], int, int]:
    (dims,) = source.unpack(_U32)
    if not 0 < dims <= len(_ENTRIES):
        raise _FaultError(f"has {dims} dimensions; 1 to {len(_ENTRIES)} are possible")
    *sizes, number, offset = source.unpack(_ENTRIES[dims - 1])
    kind = TYPES.get(number) or _unsupported(number)
    shape = tuple(sizes[::-1])
    elements = math.prod(shape)
    if elements == 0:
        raise _FaultError(f"has shape {list(shape)}, without any element")
    if shape[-1] % kind.elements:
        raise _FaultError(
            f"has rows of {shape[-1]} elements, no multiple of the {kind.elements} of a block of "
            f"{kind.name}"
        )
    if offset % alignment:
        raise _FaultError(f"has offset {offset}, no multiple of the alignment {alignment}")
    nbytes = elements // kind.elements * kind.nbytes
    if offset + nbytes > source.file_bytes:
        raise _FaultError(
            f"has shape {list(shape)} of {kind.name} from offset {offset} on, beyond the end of "
            f"the file, which has {source.file_bytes} bytes"
        )
    return kind, shape, offset, nbytes


def _unsupported(number: int) -> NoReturn:
    if number in REMOVED:
        raise _FaultError(
            f"is of type {number} ({REMOVED[number]}), which llama.cpp has removed", _UNSUPPORTED
        )
    if FIRST_OF_IK_LLAMA <= number < BEYOND_IK_LLAMA:
        raise _FaultError(
            f"is of type {number}, one of ik_llama.cpp's own, which are not supported",
            "Use a GGUF file with llama.cpp's types only.",
        )
    raise _FaultError(f"is of the unknown type {number}", _UNSUPPORTED)
