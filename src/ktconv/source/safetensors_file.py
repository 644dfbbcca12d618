"""Headers of safetensors files, read and validated without reading a weight.

A safetensors file is 8 bytes of header length (little endian), the header (a JSON
object: tensor name to dtype, shape and data_offsets), then the tensors' bytes. The
tensors must cover those bytes exactly: no overlap, no hole, nothing behind the last.
All of it is checked, because a truncated or patched shard could otherwise be read.
"""

from __future__ import annotations

import codecs
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from msgspec import Meta, MsgspecError, Struct, field
from msgspec.json import Decoder

from ktconv.errors import CheckpointError
from ktconv.source.strict_json import parse_object
from ktconv.source.types import SourceFile, TensorRef
from ktconv.system.files import FileTooShortError
from ktconv.system.opened import Opened, opened_source
from ktconv.system.regular_files import unreadable
from ktconv.system.text import path_text

# The format's own limit; it keeps a damaged length from becoming an allocation.
MAX_HEADER_BYTES = 100_000_000
# Sizes and offsets are unsigned 64-bit in the format; files end before 2^63.
_MAX_SIZE = 2**63

BITS_PER_ELEMENT: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip

_JSON_SPACE = b" \t\n\r"
_DAMAGED = "The file is damaged or not a safetensors file; download or copy it again."


class Unused(NamedTuple):
    """Tensors of a file that do not belong to the checkpoint."""

    tensors: int
    nbytes: int


NONE = Unused(0, 0)


class Header(Struct, frozen=True):
    """The header of one safetensors or GGUF file, and what identifies the file's state."""

    file: Path
    tensors: Sequence[TensorRef]  # ascending offset
    metadata: Mapping[str, Any]  # of safetensors files: texts
    file_bytes: int
    mtime_ns: int | None  # None: it is remote, and has an etag
    sha256: str  # of the header's bytes, of safetensors files without their length
    etag: str | None = None
    # Tensors in the file that are left out of `tensors`, by the index of a checkpoint:
    elsewhere: Unused = NONE  # those that it has in other shards
    unlisted: Unused = NONE  # those that it does not list

    @property
    def unused_bytes(self) -> int:
        return self.elsewhere.nbytes + self.unlisted.nbytes

    @property
    def state(self) -> SourceFile:
        """The file's state when its header was read."""
        name = path_text(self.file.name)
        return SourceFile(name, self.file_bytes, self.mtime_ns, self.sha256, self.etag)


def read_header(path: Path) -> Header:
    """Read and validate the header of the safetensors file `path`; symlinks are followed.

    Raises CheckpointError naming the file (and tensor) for anything that is missing or
    wrong, ResourceError where the system refuses to read.
    """
    with _opened_header(path) as (raw, opened):
        return _header(path, raw, opened)


def _header(path: Path, raw: bytes, opened: Opened) -> Header:
    file_bytes, mtime_ns, etag = opened.state
    data_start = 8 + len(raw)
    metadata, tensors = _sound(path, raw, data_start) or _checked(path, raw, data_start)
    tensors.sort(key=attrgetter("offset", "nbytes"))
    end = check_places(path, tensors, data_start, file_bytes, _DAMAGED)
    if end < file_bytes:
        raise CheckpointError(
            f"{path} has {file_bytes - end} bytes after its last tensor that belong to no tensor",
            _DAMAGED,
        )
    digest = hashlib.sha256(raw).hexdigest()
    return Header(path, tensors, metadata, file_bytes, mtime_ns, digest, etag)


_Parsed = tuple[Mapping[str, str], list[TensorRef]]  # metadata, and tensors in the file's order


def _checked(path: Path, raw: bytes, data_start: int) -> _Parsed:
    """The contents of a header. CheckpointError for whatever is wrong, tensor by tensor."""
    entries = parse_object(raw, f"the header of {path}", _DAMAGED)
    if b"\\u0000" in raw:
        _refuse_nul(path, entries)
    metadata = _check_metadata(path, entries.pop("__metadata__", {}))
    return metadata, [_tensor(path, name, entry, data_start) for name, entry in entries.items()]


_Size = Annotated[int, Meta(ge=0, le=_MAX_SIZE - 1)]


class _Entry(Struct, gc=False):
    """One tensor of a header. Defaults, which stand for what is missing, are never sound."""

    dtype: str = ""
    shape: tuple[_Size, ...] = (-1,)
    data_offsets: tuple[_Size, _Size] = (1, 0)


class _WithMetadata(Struct):
    metadata: dict[str, str] = field(name="__metadata__", default_factory=dict)


_ENTRIES, _METADATA = Decoder(dict[str, _Entry]), Decoder(_WithMetadata)


def _sound(path: Path, raw: bytes, data_start: int) -> _Parsed | None:
    """The contents of a header that is sound, in a third of the time; None for any other, and for
    some that are.

    Strings without escapes are as they stand there. A key has a colon, an object a brace, and
    strings can only add to both: with as many as all entries need, no key occurs twice, and none is
    there besides.
    """
    if b"\\" in raw:
        return None
    try:
        entries, metadata = _ENTRIES.decode(raw), _METADATA.decode(raw).metadata
    except (MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    keys = len(entries) + len(metadata)
    objects = 1 + len(entries)
    entries.pop("__metadata__", None)
    if raw.count(b"{") != objects or raw.count(b":") != keys + 3 * len(entries):
        return None
    needed: dict[tuple[str, tuple[int, ...]], int] = {}  # bytes by dtype and shape: of few kinds
    tensors = []
    for name, entry in entries.items():
        kind = entry.dtype, entry.shape
        begin, end = entry.data_offsets
        if needed.get(kind) != end - begin:
            bits = BITS_PER_ELEMENT.get(entry.dtype)
            if bits is None or begin > end or math.prod(entry.shape) * bits != 8 * (end - begin):
                return None
            needed[kind] = end - begin
        tensors.append(TensorRef(name, path, *kind, data_start + begin, end - begin))
    return metadata, tensors


def header_mentions(path: Path, text: bytes) -> bool:
    """Whether the header of `path` has `text` in it: a fraction of the time that parsing takes.

    Raises as `read_header` does where the file cannot be a safetensors file.
    """
    with _opened_header(path) as (raw, _):
        return text in raw


@contextmanager
def _opened_header(path: Path) -> Iterator[tuple[bytes, Opened]]:
    with opened_source(path) as opened:
        try:
            raw = _read_length_and_json(path, opened, opened.state.nbytes)
        except FileTooShortError as error:
            raise CheckpointError(f"{path} became shorter while it was read", _DAMAGED) from error
        except OSError as error:
            raise unreadable(path, error) from error
        yield raw, opened


def _read_length_and_json(path: Path, opened: Opened, file_bytes: int) -> bytes:
    if file_bytes < 8:
        raise CheckpointError(
            f"{path} has {file_bytes} bytes, too few for the 8 bytes of a header length", _DAMAGED
        )
    length = int.from_bytes(opened.take(8, 0), "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} declares a header of {length} bytes, more than the format's "
            f"limit of {MAX_HEADER_BYTES}",
            _DAMAGED,
        )
    if length > file_bytes - 8:
        missing = length - (file_bytes - 8)
        raise CheckpointError(
            f"{path} is truncated: {missing} of the {length} bytes of its header are missing",
            _DAMAGED,
        )
    raw = opened.take(length, 8)
    if raw.startswith(codecs.BOM_UTF8):
        raise CheckpointError(
            f"the header of {path} begins with a byte order mark, which no reader of safetensors "
            "accepts",
            "Save the file again with the library safetensors; a text editor may have changed it.",
        )
    if not raw.lstrip(_JSON_SPACE).startswith(b"{"):  # as the reference reader
        raise CheckpointError(f"the header of {path} does not start with '{{'", _DAMAGED)
    return raw


def _refuse_nul(path: Path, names: Iterable[str]) -> None:
    """CheckpointError for a name with NUL, which C programs would read only up to it."""
    for name in names:
        if "\0" in name:
            raise CheckpointError(
                f"{path}: the name of tensor {name!r} contains a NUL byte", _DAMAGED
            )


def _check_metadata(path: Path, metadata: Any) -> Mapping[str, str]:
    if metadata is None:  # null: as if it were not there
        return {}
    if isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values()):
        return metadata
    raise CheckpointError(
        f"the header of {path} has a __metadata__ that does not map strings to strings", _DAMAGED
    )


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> TensorRef:
    fault = _entry_fault(entry)
    if fault:
        raise CheckpointError(f"{path}: tensor {name!r} {fault}", _DAMAGED)
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    return TensorRef(name, path, entry["dtype"], shape, data_start + begin, end - begin)


def _entry_fault(entry: Any) -> str | None:
    """Fault of one tensor's entry, as the end of a sentence, or None."""
    if type(entry) is not dict:
        return "has an entry that is not a JSON object"
    try:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    except KeyError as missing:
        return f"has no {missing.args[0]}"
    bits = BITS_PER_ELEMENT.get(dtype) if type(dtype) is str else None
    if bits is None:
        return f"has the unknown dtype {dtype!r}"
    if not _is_size_list(shape):
        return f"has a shape that is not a list of non-negative integers: {shape!r:.80}"
    if not _is_size_list(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"has data_offsets that are not [begin, end] with begin <= end: {offsets!r:.80}"
    needed, rest = divmod(math.prod(shape) * bits, 8)
    if rest:
        return f"has {dtype} elements of shape {shape} that do not fill whole bytes"
    if needed != offsets[1] - offsets[0]:
        return (
            f"has {offsets[1] - offsets[0]} bytes of data, but {dtype} of shape {shape} "
            f"needs {needed}"
        )
    return None


def _is_size_list(value: Any) -> bool:
    """A list of integers in [0, 2^63); True and 1.0 are not integers here."""
    if type(value) is not list:
        return False
    for item in value:  # noqa: SIM110 - all() takes thrice the time, for every tensor
        if type(item) is not int or not 0 <= item < _MAX_SIZE:
            return False
    return True


def check_places(
    path: Path,
    tensors: Sequence[TensorRef],
    start: int,
    file_bytes: int,
    hint: str,
    alignment: int = 1,
) -> int:
    """The end of the last tensor. CheckpointError for overlaps, holes and a cut end; `tensors`
    ascend by offset, each begins at the first multiple of the alignment after the one before it."""
    end, previous = start, "the header"
    for tensor in tensors:
        if tensor.offset < end:
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r:.200} overlaps {previous} by "
                f"{end - tensor.offset} bytes",
                hint,
            )
        if tensor.offset - end >= alignment:
            raise CheckpointError(
                f"{path}: {tensor.offset - end} bytes between {previous} and tensor "
                f"{tensor.name!r:.200} belong to no tensor",
                hint,
            )
        end, previous = tensor.offset + tensor.nbytes, f"tensor {tensor.name!r:.200}"
    if end > file_bytes:
        raise CheckpointError(
            f"{path} is truncated: {end - file_bytes} of its {end} bytes are missing", hint
        )
    return end
