"""What a path holds: a source checkpoint, or converted weights by whatever tool."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ktconv.checkpoint import Checkpoint, open_checkpoint, read_header
from ktconv.errors import CheckpointError
from ktconv.formats import FORMATS, PROJECTIONS, TensorId, parse_kt_path, parse_tensor_name
from ktconv.units import format_ranges
from ktconv.writer.finish import MANIFEST, read_manifest
from ktconv.writer.journal import STATE_DIRECTORY, Journal, file_is_intact

_LAYER_FOLDER = re.compile(r"_layer_[0-9]+")


def inspect_path(path: str) -> dict[str, Any]:
    """Facts about `path`, ready for JSON. Reads headers only; raises KtconvError."""
    directory = Path(path)
    if directory.is_dir():
        if (directory / STATE_DIRECTORY / "run.json").exists():
            return _unfinished(directory)
        if packed := _packed_tensors(directory):
            return _converted(directory, packed)
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
    layers = {int(index) for index in run.get("geometry", {}).get("layers", {})}
    finished = set()
    for index in layers:
        record = journal.read_unit(f"layer-{index:05d}")
        if record is not None and journal.unit_is_intact(record):
            finished.add(index)
    return {
        "schema": 1,
        "kind": "unfinished conversion",
        "path": str(directory),
        "family": run.get("geometry", {}).get("model_type"),
        "options": run.get("options", {}),
        "layers_done": format_ranges(sorted(finished)) or "none",
        "layers_missing": format_ranges(sorted(layers - finished)) or "none",
        "complete": False,
        "way_out": "run the same quantize-cpu command again",
    }


Packed = dict[TensorId, int]  # tensor -> bytes


def _packed_tensors(directory: Path) -> Packed:
    """All packed expert tensors below `directory`, in shards or in layer folders."""
    shards = sorted(directory.glob("*.safetensors"))
    tensors: Packed = {}
    for shard in shards:
        for tensor in read_header(shard).tensors:
            if (name := parse_tensor_name(tensor.name)) is not None:
                tensors[name] = tensor.nbytes
    if shards:
        return tensors
    for folder in directory.iterdir():
        if _LAYER_FOLDER.fullmatch(folder.name):
            for path in folder.glob("_numa_*/*.kt"):
                if (file := parse_kt_path(path.relative_to(directory).as_posix())) is not None:
                    tensors[file.tensor] = path.stat().st_size
    return tensors


def _converted(directory: Path, packed: Packed) -> dict[str, Any]:
    layers = sorted({tensor.layer for tensor in packed})
    experts = _count(packed, lambda tensor: tensor.expert)
    parts = _count(packed, lambda tensor: tensor.part)
    missing = list(_missing(packed, experts, parts))
    manifest = read_manifest(directory)
    damaged = [] if manifest is None else list(_damaged(directory, manifest))
    rows = packed.get(TensorId(layers[0], "gate", 0, 0, "scale"), 0) // 4
    cols = packed.get(TensorId(layers[0], "down", 0, 0, "scale"), 0) // 4
    weight = packed.get(TensorId(layers[0], "gate", 0, 0, "weight"), 0)
    return {
        "schema": 1,
        "kind": "converted weights",
        "path": str(directory),
        "made_by": f"ktconv {manifest['ktconv_version']}" if manifest else f"no {MANIFEST}",
        "family": manifest["geometry"]["model_type"] if manifest else None,
        "method": _method(rows, cols, weight),
        "numa_parts": sorted(set(parts.values())),
        "moe_layers": format_ranges(layers),
        "experts": sorted(set(experts.values())),
        "hidden_size": cols,
        "intermediate_size": rows * max(parts.values()),
        "expert_bytes": sum(packed.values()),
        "missing_tensors": len(missing),
        "first_missing": missing[0] if missing else None,
        "damaged_files": damaged,
        "complete": not missing and not damaged,
    }


def _count(packed: Packed, number: Any) -> dict[int, int]:
    """By layer, one more than the largest `number` of its tensors."""
    counts: dict[int, int] = defaultdict(int)
    for tensor in packed:
        counts[tensor.layer] = max(counts[tensor.layer], number(tensor) + 1)
    return counts


def _missing(packed: Packed, experts: Mapping[int, int], parts: Mapping[int, int]) -> Iterable[str]:
    from ktconv.formats import KINDS, tensor_name

    for layer, count in sorted(experts.items()):
        for expert in range(count):
            for proj in PROJECTIONS:
                for part in range(parts[layer]):
                    for kind in KINDS:
                        if TensorId(layer, proj, expert, part, kind) not in packed:
                            yield tensor_name(layer, proj, expert, part, kind)


def _damaged(directory: Path, manifest: Mapping[str, Any]) -> Iterable[str]:
    for unit in manifest["units"].values():
        for file in unit["files"]:
            if not file_is_intact(directory, file):
                yield file["name"]


def _method(rows: int, cols: int, weight_bytes: int) -> str:
    for fmt in FORMATS.values():
        if rows and cols and fmt.weight_nbytes(rows, cols) == weight_bytes:
            return fmt.name
    raise CheckpointError(
        f"packed weights of {weight_bytes} bytes for [{rows}, {cols}] fit no known format",
        f"known formats are {', '.join(fmt.name for fmt in FORMATS.values())}",
    )
