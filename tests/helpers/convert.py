"""Running conversions and holding their output against the truth.

The truth is `helpers.reference` on source values decoded by NumPy; files are read by the
safetensors library and never by our own reader.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import deserialize

from helpers import reference
from helpers.families import Raw, Weights, read_matrix
from helpers.reference import Choice, kt_layout
from helpers.reference.kt_layout import pack_codes
from ktconv.conversion.run import Report
from ktconv.formats import (
    FORMATS,
    Format,
    kt_path,
    parse_tensor_name,
    split,
    tensor_name,
)
from ktconv.formats.decode import round_to_bf16
from ktconv.quantize.packed.run import Request, quantize_cpu
from ktconv.source import PROJECTIONS, ModelSource, Projection, open_checkpoint
from ktconv.targets.packed.target import Options

# (layer, expert, projection) -> the whole forward matrix [out, in]
Matrices = Mapping[tuple[int, int, Projection], NDArray[np.float32]]

Rule = Literal["amax", "search"]

Converted = Callable[..., Path]  # of the fixture converted_example

SIDE_FILES = {"README.md", "ktconv.json", "model.safetensors.index.json"}
REQUEST_OPTIONS = {
    "layers", "threads", "max_memory", "verify", "overwrite", "finalize", "importance",
    "calibrate",
}  # fmt: skip


def convert(model: Path, output: Path, **options: Any) -> Report:
    """`quantize_cpu` with fields of Request and Options by name, one part and one thread."""
    source = ModelSource(str(model), options.pop("config", None))
    request = {key: options.pop(key) for key in REQUEST_OPTIONS & options.keys()}
    chosen = Options(**{"numa": 1, **options})
    return quantize_cpu(Request(source, output, chosen, **{"threads": 1, **request}))


# ---- reading ---------------------------------------------------------------------------


def read_shards(shards: Iterable[Path]) -> dict[str, Raw]:
    """Every tensor of these files, through the safetensors library."""
    return {
        name: Raw(view["dtype"], tuple(view["shape"]), bytes(view["data"]))
        for shard in shards
        for name, view in deserialize(shard.read_bytes())
    }


def read_model(directory: Path) -> dict[str, Raw]:
    """Every tensor of a checkpoint or an output; sub-directories do not count."""
    return read_shards(sorted(directory.glob("*.safetensors")))


def read_folders(directory: Path) -> dict[str, bytes]:
    """Every `.kt` file by its path below `directory`."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.glob("_layer_*/**/*")
        if path.is_file()
    }


def read_header(shard: Path) -> tuple[int, dict[str, Any]]:
    """Where the data starts, and the header."""
    data = shard.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    return start, json.loads(data[8:start])


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def all_files(directory: Path) -> dict[str, bytes]:
    """Every file below `directory`, to compare two outputs."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


# ---- the truth -------------------------------------------------------------------------


def source_matrices(model: Path) -> Matrices:
    """The values of all expert matrices of a checkpoint, element by element."""
    return {
        (layer.index, number, proj): read_matrix(expert[proj])
        for layer in open_checkpoint(model).layers
        for number, expert in enumerate(layer.experts)
        for proj in PROJECTIONS
    }


def matrices_of(layers: Mapping[int, Weights]) -> Matrices:
    """The same for hand-made weights."""
    return {
        (index, expert, proj): getattr(weights, proj)[expert]
        for index, weights in layers.items()
        for proj in PROJECTIONS
        for expert in range(len(weights.gate))
    }


@dataclass(frozen=True)
class Truth:
    """What one part of one matrix must become."""

    source: NDArray[np.float32]
    codes: NDArray[np.int8]
    scale: NDArray[np.float32]
    payload: bytes

    @property
    def scale_bytes(self) -> bytes:
        return self.scale.astype("<f4").tobytes()


def truths(
    matrices: Matrices, method: str, numa: int, compat: bool = False, scale: Rule | None = None
) -> dict[tuple[int, int, Projection, int], Truth]:
    """(layer, expert, projection, part) -> its truth. `scale`: the rule, None: the usual one."""
    fmt, found = FORMATS[method], {}
    choice = Choice(scale or ("amax" if compat else "search"))
    for (layer, expert, proj), values in matrices.items():
        exact = round_to_bf16(values) if compat else values
        key = fmt.key, choice.rule, exact.shape, _content(exact)
        inner, hidden = values.shape if proj != "down" else values.shape[::-1]
        for part in range(numa):
            index = split(proj, hidden, inner, part, numa).index
            found[layer, expert, proj, part] = _truth(fmt, exact, key, index, choice)
    return found


Key = tuple[object, ...]

_own_offsets = kt_layout._all_offsets
_small_offsets = lru_cache(64)(_own_offsets)


def _offsets(fmt: Format, rows: int, cols: int) -> Any:
    """Places of codes, which are computed once for each size of small matrices."""
    return (_small_offsets if rows * cols <= 1 << 16 else _own_offsets)(fmt, rows, cols)


vars(kt_layout)["_all_offsets"] = _offsets

_KEPT = 1000
_MADE: dict[Key, Truth] = {}  # many tests convert the same matrices
_CODED: dict[Key, Any] = {}


def _truth(fmt: Format, values: NDArray[np.float32], key: Key, index: Any, choice: Choice) -> Truth:
    """The values of a part of a matrix that `key` stands for."""
    part = *key, str(index)
    if part not in _MADE:
        piece = np.ascontiguousarray(values[index])
        if piece.shape[1] == values.shape[1]:  # whole rows, each of which is coded by itself
            codes, scales = (one[index[0]] for one in _coded(fmt, values, key, choice))
        else:
            codes, scales = _coded(fmt, piece, part, choice)
        payload = pack_codes(fmt, codes).tobytes()
        _keep(_MADE, part, Truth(piece, codes, scales, payload))
    return _MADE[part]


def _coded(fmt: Format, matrix: NDArray[np.float32], key: Key, choice: Choice) -> Any:
    """Codes and scales."""
    if key not in _CODED:
        found = reference.quantize(fmt, matrix, choice)
        for one in found:
            one.flags.writeable = False
        _keep(_CODED, key, found)
    return _CODED[key]


def _content(matrix: NDArray[np.float32]) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(matrix).data).digest()


def _keep(made: dict[Key, Any], key: Key, value: Any) -> None:
    if len(made) == _KEPT:
        made.clear()
    made[key] = value


def expected_experts(
    matrices: Matrices, method: str, numa: int, compat: bool = False, scale: Rule | None = None
) -> dict[str, Raw]:
    """Every expert tensor of the output, by name."""
    tensors = {}
    expected = truths(matrices, method, numa, compat, scale)
    for (layer, expert, proj, part), truth in expected.items():
        name = tensor_name(layer, proj, expert, part, "weight")
        tensors[name] = Raw("I8", (len(truth.payload),), truth.payload)
        name = tensor_name(layer, proj, expert, part, "scale")
        tensors[name] = Raw("F32", truth.scale.shape, truth.scale_bytes)
    return tensors


def kt_files_of(tensors: Mapping[str, Raw], method: str) -> dict[str, bytes]:
    """The same tensors as files of `--layout layers`."""
    files = {}
    for name, tensor in tensors.items():
        found = parse_tensor_name(name)
        assert found is not None
        layer, proj, expert = found.layer, found.proj, found.expert
        size = len(tensor.data)
        path = kt_path(method.upper(), layer, proj, expert, found.part, found.kind, size)
        files[path] = tensor.data
    return files


# ---- assertions ------------------------------------------------------------------------


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Equal mappings; a failure names keys and not megabytes."""
    assert sorted(found.keys() - expected.keys()) == [], "unexpected"
    assert sorted(expected.keys() - found.keys()) == [], "missing"
    assert [key for key in sorted(expected) if found[key] != expected[key]] == [], "differ"


def assert_shards(directory: Path, method: str, numa: int, max_shard_size: int = 0) -> None:
    """Names, alignment, metadata, index and size limit of a finished output's shards."""
    shards = sorted(directory.glob("*.safetensors"))
    total = len(shards)
    assert [shard.name for shard in shards] == [
        f"model-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)
    ]
    weight_map: dict[str, str] = {}
    size = 0
    for shard in shards:
        start, header = read_header(shard)
        assert start % 64 == 0
        metadata = header.pop("__metadata__")
        assert metadata["ktconv_method"] == method.upper()
        assert metadata["ktconv_numa"] == str(numa)
        assert metadata["format"] == "pt"
        assert not weight_map.keys() & header.keys()
        weight_map.update(dict.fromkeys(header, shard.name))
        size += shard.stat().st_size - start
        assert not max_shard_size or shard.stat().st_size <= max_shard_size
        assert shard.stat().st_mode & 0o777 == 0o644
    index = read_json(directory / "model.safetensors.index.json")
    assert index["weight_map"] == weight_map
    assert index["metadata"]["total_size"] == size


def assert_output(
    directory: Path,
    matrices: Matrices,
    others: Mapping[str, Raw],
    *,
    method: str,
    numa: int,
    layout: str = "safetensors",
    compat: bool = False,
    scale: Rule | None = None,
    max_shard_size: int = 0,
) -> None:
    """The output holds exactly these experts and, under these names, these other tensors."""
    experts = expected_experts(matrices, method, numa, compat, scale)
    if layout == "layers":
        assert not list(directory.glob("*.safetensors*"))
        assert_same(read_folders(directory), kt_files_of(experts, method))
    else:
        assert_shards(directory, method, numa, max_shard_size)
        assert_same(read_model(directory), {**experts, **others})
    assert not (directory / ".ktconv").exists()
    assert (directory / "README.md").is_file()
    manifest = read_json(directory / "ktconv.json")
    assert manifest["options"]["method"] == method
    assert manifest["options"]["numa"] == numa
