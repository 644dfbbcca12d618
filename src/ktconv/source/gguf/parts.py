"""The GGUF files that make up a model: one, or the numbered parts of a split."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ktconv.errors import CheckpointError
from ktconv.source.gguf.file import MAGIC, read_gguf_header
from ktconv.source.hub_cache import absence
from ktconv.source.safetensors_file import Header
from ktconv.system.opened import opened_source
from ktconv.system.units import counted

SUFFIX = ".gguf"
_PART = re.compile(r"(?P<base>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)
_DOWNLOAD = "Download the missing files; incomplete models are not converted."
_MIXED = "Put the files of one split into a directory of their own, and download them again."
# Values of general.type in GGUF files that are not models, and what those files are.
_NO_MODELS = {
    "imatrix": "an importance matrix",
    "mmproj": "the projector of a multimodal model",
    "adapter": "a LoRA adapter",
    "vocab": "a vocabulary",
}


def is_gguf(path: Path) -> bool:
    """Whether the file begins like a GGUF file, or is called one. Raises as `open_regular`."""
    if path.name.endswith(SUFFIX):
        return True
    with opened_source(path) as opened:
        return opened.state.nbytes >= len(MAGIC) and opened.take(len(MAGIC), 0) == MAGIC


def model_files(names: Iterable[str]) -> Mapping[str, str]:
    """The models among file names: what a user would call each, and one file of it.

    >>> model_files(["a-00002-of-00002.gguf", "a-00001-of-00002.gguf", "b.gguf"])
    {'a': 'a-00001-of-00002.gguf', 'b': 'b.gguf'}
    """
    found: dict[str, str] = {}
    for name in sorted(names):
        if name.endswith(SUFFIX):
            found.setdefault(model_stem(name), name)
    return found


def model_stem(name: str) -> str:
    """The name of the model that the file is, or is a part of."""
    match = _PART.fullmatch(name)
    return match["base"] if match else name.removesuffix(SUFFIX)


def part_names(name: str) -> list[str]:
    """Names of all parts of the split that the file is one of; its own where it is not split."""
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    return [f"{match['base']}-{i:05d}-of-{count:05d}{SUFFIX}" for i in range(1, count + 1)]


def all_parts(path: Path) -> Sequence[Path]:
    """Every part of the split that `path` is one of; `path` itself where it is not split.

    CheckpointError names the parts that are missing.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count:
        raise CheckpointError(
            f"{path} is called part {number} of {count}, which cannot be", "Rename the file."
        )
    parts = [path.with_name(name) for name in part_names(path.name)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        words, hint = absence(path.parent, missing, _DOWNLOAD)
        raise CheckpointError(
            f"{len(missing)} of the {count} parts of {path.parent / match['base']} {words}", hint
        )
    return parts


def read_parts(files: Sequence[Path]) -> list[Header]:
    """The headers of all parts of a model, in order, checked against each other."""
    headers = [read_gguf_header(file) for file in files]
    for header in headers:
        _refuse_no_model(header)
    count = _number(headers[0], "split.count", default=1)
    if len(files) == 1 and count == 1:
        return headers
    for index, header in enumerate(headers):
        _check_part(header, index, len(files))
    total = sum(len(header.tensors) for header in headers)
    for header in headers:
        declared = _number(header, "split.tensors.count")
        if declared != total:
            raise CheckpointError(
                f"{header.file} says that all parts together have {counted(declared, 'tensor')} "
                f"(split.tensors.count), but they have {total}",
                _MIXED,
            )
    return headers


def _refuse_no_model(header: Header) -> None:
    kind = header.metadata.get("general.type")
    if header.metadata.get("general.architecture") == "clip":
        kind = "mmproj"
    if isinstance(kind, str) and kind in _NO_MODELS:
        raise CheckpointError(
            f"{header.file} is {_NO_MODELS[kind]} (general.type {kind}), not a model",
            "Give the GGUF file with the weights of the model.",
        )


def _check_part(header: Header, index: int, count: int) -> None:
    declared, number = (_number(header, f"split.{key}") for key in ("count", "no"))
    if declared == count and number == index:
        return
    if count == 1:
        raise CheckpointError(
            f"{header.file} is part {number + 1} of {declared}, but its name does not say so, and "
            "the other parts cannot be found by it",
            f"Give all parts their names again: BASE-00001-of-{declared:05d}{SUFFIX} and so on.",
        )
    raise CheckpointError(
        f"{header.file} is part {number + 1} of {declared} (split.no, split.count), but its name "
        f"says part {index + 1} of {count}",
        _MIXED,
    )


def _number(header: Header, key: str, default: int | None = None) -> int:
    value: Any = header.metadata.get(key, default)
    if type(value) is not int or value < 0:
        state = "no" if value is None else f"an unusable {value!r:.40} as"
        raise CheckpointError(f"{header.file} is part of a split, but has {state} {key}", _MIXED)
    return value
