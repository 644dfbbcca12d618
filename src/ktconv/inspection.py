"""What a path holds: a source checkpoint, or converted weights by whatever tool."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktconv.checkpoint import Checkpoint, open_checkpoint, read_header
from ktconv.errors import CheckpointError
from ktconv.formats import (
    FORMATS,
    KINDS,
    PROJECTIONS,
    Format,
    Kind,
    Projection,
    TensorId,
    packed_shape,
    parse_kt_path,
    parse_tensor_name,
    tensor_name,
)
from ktconv.units import format_ranges
from ktconv.writer.finish import INDEX, MANIFEST, read_manifest
from ktconv.writer.journal import STATE_DIRECTORY, Journal, Record, file_is_intact, parse_record

_LAYER_FOLDER = re.compile(r"_layer_[0-9]+")


def inspect_path(path: str) -> dict[str, Any]:
    """Facts about `path`, ready for JSON. Reads headers only; raises KtconvError."""
    directory = Path(path)
    if directory.is_dir():
        if (directory / STATE_DIRECTORY / "run.json").exists():
            return _unfinished(directory)
        found = _packed_tensors(directory)
        if found.tensors or read_manifest(directory) is not None:
            return _converted(directory, found)
    return _source(open_checkpoint(path))


def _source(checkpoint: Checkpoint) -> dict[str, Any]:
    layers = checkpoint.layers
    return {
        "schema": 1,
        "kind": "checkpoint",
        "path": str(checkpoint.path),
        "family": checkpoint.config.get("model_type"),
        "files": len(checkpoint.files),
        "bytes": sum(source.nbytes for source in checkpoint.sources),
        "moe_layers": format_ranges([layer.index for layer in layers]),
        "mtp_layers": format_ranges([layer.index for layer in layers if layer.is_mtp]) or "none",
        "experts": sorted({len(layer.experts) for layer in layers}),
        "hidden_size": sorted({layer.hidden_size for layer in layers}),
        "intermediate_size": sorted({layer.intermediate_size for layer in layers}),
        "encodings": sorted({layer.encoding for layer in layers}),
        "experts_found_as": sorted({re.sub(r"[0-9]+", "N", layer.source) for layer in layers}),
        "other_tensors": len(checkpoint.other_tensors),
        "other_bytes": sum(tensor.nbytes for tensor in checkpoint.other_tensors),
        "numa_parts_possible": {key: _possible_parts(checkpoint, key) for key in FORMATS},
        "notes": list(checkpoint.notes),
    }


def _possible_parts(checkpoint: Checkpoint, method: str) -> list[int]:
    allowed = [
        set(FORMATS[method].allowed_parts(layer.hidden_size, layer.intermediate_size))
        for layer in checkpoint.layers
    ]
    return sorted(set.intersection(*allowed))


def _unfinished(directory: Path) -> dict[str, Any]:
    journal = Journal(directory)
    run = journal.read_run() or {}
    geometry = run.get("geometry", {})
    layers = {int(index) for index in geometry.get("layers", {})}
    finished = set()
    for index in layers:
        record = journal.read_unit(f"layer-{index:05d}")
        if record is not None and journal.unit_is_intact(record):
            finished.add(index)
    return {
        "schema": 1,
        "kind": "unfinished conversion",
        "path": str(directory),
        "family": geometry.get("model_type"),
        "options": run.get("options", {}),
        "layers_done": format_ranges(sorted(finished)) or "none",
        "layers_missing": format_ranges(sorted(layers - finished)) or "none",
        "complete": False,
        "way_out": "run the same quantize-cpu command again",
    }


@dataclass(slots=True)
class Packed:
    """The packed expert tensors of a directory, and files that cannot be what they claim."""

    tensors: dict[TensorId, int] = field(default_factory=dict)  # tensor -> bytes
    damaged: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Of one layer, as the sizes of most of its tensors say."""

    experts: int
    parts: int
    hidden: int
    intermediate: int
    format: Format | None  # None: no known format has such sizes

    def nbytes(self, proj: Projection, kind: Kind) -> int | None:
        if self.format is None:
            return None
        rows, cols = packed_shape(proj, self.hidden, self.intermediate, self.parts)
        if kind == "scale":
            return self.format.scale_nbytes(rows)
        return self.format.weight_nbytes(rows, cols)


def _packed_tensors(directory: Path) -> Packed:
    """Everything in shards, or in layer folders where there is no shard."""
    found = Packed()
    shards = sorted(directory.glob("*.safetensors"))
    for shard in shards:
        try:
            tensors = read_header(shard).tensors
        except CheckpointError:
            found.damaged.add(shard.name)
            continue
        for tensor in tensors:
            if (name := parse_tensor_name(tensor.name)) is not None:
                found.tensors[name] = tensor.nbytes
    if not shards:
        _add_folders(directory, found)
    return found


def _add_folders(directory: Path, found: Packed) -> None:
    for folder in directory.iterdir():
        if not _LAYER_FOLDER.fullmatch(folder.name):
            continue
        for path in folder.glob("_numa_*/*.kt"):
            name = path.relative_to(directory).as_posix()
            if (file := parse_kt_path(name)) is None:
                continue
            found.tensors[file.tensor] = path.stat().st_size
            if path.stat().st_size != file.nbytes:
                found.damaged.add(name)


def _converted(directory: Path, found: Packed) -> dict[str, Any]:
    packed, manifest = found.tensors, read_manifest(directory)
    by_layer: dict[int, dict[TensorId, int]] = defaultdict(dict)
    for key, size in packed.items():
        by_layer[key.layer][key] = size
    layers = {index: _geometry(tensors) for index, tensors in sorted(by_layer.items())}
    missing = [key for key in _expected(directory, layers, manifest) if key not in packed]
    odd = [key for key, size in packed.items() if _is_odd(key, size, layers[key.layer])]
    damaged = sorted(found.damaged | set(_damaged(directory, manifest)))
    formats = sorted({layer.format.name for layer in layers.values() if layer.format})
    return {
        "schema": 1,
        "kind": "converted weights",
        "path": str(directory),
        "made_by": f"ktconv {manifest.get('ktconv_version')}" if manifest else f"no {MANIFEST}",
        "family": manifest["geometry"].get("model_type") if manifest else None,
        "method": ", ".join(formats) or None,
        "numa_parts": sorted({layer.parts for layer in layers.values()}),
        "moe_layers": format_ranges(list(layers)) or "none",
        "experts": sorted({layer.experts for layer in layers.values()}),
        "hidden_size": sorted({layer.hidden for layer in layers.values()}),
        "intermediate_size": sorted({layer.intermediate for layer in layers.values()}),
        "expert_bytes": sum(packed.values()),
        "missing_tensors": len(missing),
        "first_missing": _name(missing[0]) if missing else None,
        "wrong_sizes": len(odd),
        "first_wrong_size": _name(odd[0]) if odd else None,
        "damaged_files": damaged,
        "complete": bool(formats) and not (missing or odd or damaged),
    }


def _name(key: TensorId) -> str:
    return tensor_name(key.layer, key.proj, key.expert, key.part, key.kind)


def _geometry(tensors: Mapping[TensorId, int]) -> Geometry:
    def usual(proj: Projection, kind: Kind) -> int:
        sizes = Counter(
            size for key, size in tensors.items() if (key.proj, key.kind) == (proj, kind)
        )
        return sizes.most_common(1)[0][0] if sizes else 0

    rows, cols = usual("gate", "scale") // 4, usual("down", "scale") // 4
    weight = usual("gate", "weight")
    parts = max(key.part for key in tensors) + 1
    known = [
        fmt
        for fmt in FORMATS.values()
        if fmt.check(cols, rows * parts, parts) is None and fmt.weight_nbytes(rows, cols) == weight
    ]
    experts = max(key.expert for key in tensors) + 1
    return Geometry(experts, parts, cols, rows * parts, known[0] if known else None)


def _expected(
    directory: Path, layers: Mapping[int, Geometry], manifest: Mapping[str, Any] | None
) -> Iterator[TensorId]:
    """What should be there: by manifest or index if there is one, and no gaps in any case."""
    listed = {name for name in map(parse_tensor_name, _listed(directory, manifest)) if name}
    yield from sorted(listed, key=_name)
    for index, layer in layers.items():
        for expert in range(layer.experts):
            for part in range(layer.parts):
                for proj in PROJECTIONS:
                    for kind in KINDS:
                        key = TensorId(index, proj, expert, part, kind)
                        if key not in listed:
                            yield key


def _listed(directory: Path, manifest: Mapping[str, Any] | None) -> Iterable[str]:
    if manifest is not None:
        return [name for unit in _units(manifest) for name in unit["tensors"]]
    try:
        index = parse_record((directory / INDEX).read_bytes())
    except OSError:
        return []
    weight_map = index.get("weight_map") if index else None
    return weight_map if isinstance(weight_map, dict) else []


def _is_odd(key: TensorId, size: int, layer: Geometry) -> bool:
    if key.proj not in PROJECTIONS:
        return False  # backward weights
    expected = layer.nbytes(key.proj, key.kind)
    return expected is not None and expected != size


def _damaged(directory: Path, manifest: Mapping[str, Any] | None) -> Sequence[str]:
    """Files that are not as the manifest has them, and the manifest if it tells too little."""
    if manifest is None:
        return [MANIFEST] if (directory / MANIFEST).exists() else []
    files = [file for unit in _units(manifest) for file in unit["files"]]
    damaged = [file["name"] for file in files if not file_is_intact(directory, file)]
    return damaged if None not in manifest["units"].values() else [*damaged, MANIFEST]


def _units(manifest: Mapping[str, Any]) -> list[Record]:
    """The units whose records are sound."""
    return [unit for unit in manifest["units"].values() if unit is not None]
