"""Reading files of statistics: safetensors, refused unless they are what they should be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ktconv.errors import CheckpointError, UsageError
from ktconv.source.config import MAX_SIZE
from ktconv.source.safetensors_file import read_header
from ktconv.source.types import TensorRef
from ktconv.stats.origin import FORMAT_VERSION, Origin
from ktconv.system.arrays import Array
from ktconv.system.files import read_exactly, translated
from ktconv.system.regular_files import opened_regular

_DTYPES: Mapping[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "I64": np.dtype("<i8")}
_DIGITS = 18


class StatisticsFile:
    """A file that `ktconv stats` wrote with `option`; `kind` is the format in its metadata.

    The header is read and validated at once. Raises UsageError for a file that is damaged, of
    another kind or version; ResourceError where the system refuses to read.
    """

    def __init__(self, path: Path, kind: str, option: str, known: int = FORMAT_VERSION) -> None:
        self.path = path
        self._again = f"record it again with: ktconv stats MODEL {option}"
        try:
            header = read_header(path)
        except CheckpointError as error:
            raise UsageError(str(error), self._again) from error
        self._metadata, self.nbytes = header.metadata, header.file_bytes
        self._tensors = {tensor.name: tensor for tensor in header.tensors}
        if self._metadata.get("format") != kind:
            raise UsageError(f"{path} is not a file of ktconv stats {option}", self._again)
        if (version := self._metadata.get("format_version")) != str(known):
            older = version in [str(number) for number in range(1, known)]
            raise UsageError(
                f"{path} has version {version} of its format, which this ktconv does not read",
                self._again if older else "use a later ktconv, or record it again",
            )
        self.origin = Origin(
            **{key: self.text(key) for key in ("model", "source_sha256", "text", "text_sha256")},
            tokens=self.number("tokens"),
            run=self.text("run"),
            router=str(self._metadata.get("router", "")),
        )

    @property
    def names(self) -> list[str]:
        """Names of its tensors."""
        return list(self._tensors)

    def text(self, key: str) -> str:
        """A value of the metadata."""
        if key not in self._metadata:
            raise self.damaged(f"its metadata has no {key}")
        return str(self._metadata[key])

    def number(self, key: str) -> int:
        """A count in the metadata."""
        text = self.text(key)
        if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS):
            raise self.damaged(f"{key} in its metadata is {text!r:.40}")
        return int(text)

    def rows_and_columns(self, name: str) -> tuple[int, int]:
        """The shape of a tensor that must have two dimensions."""
        shape = self._tensors[name].shape if name in self._tensors else ()
        if len(shape) != 2 or not all(0 < size <= MAX_SIZE for size in shape):
            raise self.damaged(f"tensor {name} is missing or has shape {list(shape)}")
        return shape[0], shape[1]

    def array(self, name: str, dtype: str, *shape: int) -> Array:
        """The tensor of this name, which must have this dtype and shape."""
        found = self.check(name, dtype, *shape)
        array: Array = np.empty(shape, _DTYPES[dtype])
        with opened_regular(self.path) as fd, translated("read", self.path):
            read_exactly(fd, array.data.cast("B"), found.offset)
        return array

    def check(self, name: str, dtype: str, *shape: int) -> TensorRef:
        """A tensor that must have this dtype and shape."""
        found = self._tensors.get(name)
        if found is None:
            raise self.damaged(f"it has no tensor {name}")
        if (found.dtype, found.shape) != (dtype, shape):
            has = f"{found.dtype} {list(found.shape)}"
            raise self.damaged(f"tensor {name} is {has}, not {dtype} {list(shape)}")
        return found

    def damaged(self, why: str) -> UsageError:
        """The error for this file."""
        return UsageError(f"{self.path} cannot be used: {why}", self._again)
