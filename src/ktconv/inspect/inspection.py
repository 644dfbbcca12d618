"""Contents of a path: a source checkpoint, or converted weights of any tool."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ktconv.errors import CheckpointError, KtconvError, UnknownNamesError
from ktconv.families.names import is_in_experts, split_name
from ktconv.formats import FORMATS, TensorId, is_backward, output_formats, parse_tensor_name
from ktconv.inspect.choice import methods
from ktconv.inspect.explanation import explain, explain_unknown
from ktconv.source import Checkpoint, open_checkpoint
from ktconv.source.activations import in_words, of_records
from ktconv.source.adapter.recorded import ENCODED_AGAIN
from ktconv.source.config import CONFIG_NAME
from ktconv.source.model_source import ModelSource
from ktconv.source.settings import ModelSettings
from ktconv.source.side_files import find_side_files
from ktconv.system.stores import is_remote, transfer
from ktconv.system.units import format_ranges
from ktconv.targets.card import codes_in_words
from ktconv.targets.encoded.recipe import parse_recipe
from ktconv.targets.encoded.scheme import FORMATS as ENCODED
from ktconv.targets.encoded.scheme import SCHEMES
from ktconv.targets.encoded.stacking import is_stacked, open_unstacked
from ktconv.targets.gguf.target import FORMAT as GGUF
from ktconv.targets.gguf.weights import open_gguf
from ktconv.targets.packed.target import options_of_record
from ktconv.targets.packed.weights import (
    Geometry,
    PackedWeights,
    listed_names,
    may_hold_packed,
    name_of,
    open_packed,
)
from ktconv.targets.pruned import FORMAT as PRUNED
from ktconv.writer.journal import Journal, file_is_intact
from ktconv.writer.manifest import MANIFEST, Manifest, read_manifest

# Experts of the method awq: names that no model has.
_REORDERED = re.compile(r"(blk\.[0-9]+)\.ffn_[a-z]+_exps\.([0-9]+)\.[a-z]+")


def inspect_path(model: ModelSource | str, explained: bool = False) -> dict[str, Any]:
    """Facts about a checkpoint or an output, ready for JSON. Reads headers only; raises
    KtconvError. `explained`: with how experts were found, and a map for names that are not
    known."""
    source = ModelSource.of(model)
    source.naming()  # raises for a map that cannot be used, whatever is there
    directory = Path(source.model)
    if directory.is_dir():
        if Journal(directory).has_run():
            return _unfinished(directory)
        manifest = read_manifest(directory)
        if manifest is None and not may_hold_packed(directory):
            return _opened(source, explained)
        if manifest is not None and manifest.options.get("format") == PRUNED:
            return _opened(source, explained) | _pruned(manifest)
        if manifest is not None and manifest.options.get("format") == GGUF:
            return _gguf(directory, manifest)
        if manifest is not None and manifest.options.get("format") in ENCODED:
            return _quantized(directory, manifest)
        found = open_packed(directory)
        if found.tensors or manifest is not None:
            return _converted(directory, found, manifest)
    return _opened(source, explained)


def _opened(source: ModelSource, explained: bool) -> dict[str, Any]:
    try:
        checkpoint = open_checkpoint(source)
    except UnknownNamesError as error:
        if not explained or source.map is not None or source.place().is_file():
            raise  # GGUF files are without maps
        return explain_unknown(source, error)
    return _source(checkpoint) | ({"explained": explain(checkpoint)} if explained else {})


def _pruned(manifest: Manifest) -> dict[str, Any]:
    """Facts about a pruned checkpoint: who made it, and how many experts stay."""
    pruning = manifest.pruning
    kept = {} if pruning is None else {"kept": pruning.in_words}
    return {"made_by": f"ktconv {manifest.record.get('ktconv_version')}", **kept}


def _source(checkpoint: Checkpoint) -> dict[str, Any]:
    layers = checkpoint.layers
    return {
        "schema": 1,
        "kind": "checkpoint",
        "path": str(checkpoint.path),
        "family": checkpoint.config.model_type,
        "files": len(checkpoint.files),
        "bytes": checkpoint.nbytes,
        "moe_layers": format_ranges([layer.index for layer in layers]),
        "mtp_layers": format_ranges([layer.index for layer in layers if layer.is_mtp]) or "none",
        "experts": sorted({len(layer.experts) for layer in layers}),
        "hidden_size": sorted({layer.hidden_size for layer in layers}),
        "intermediate_size": sorted({layer.intermediate_size for layer in layers}),
        "activation": in_words({layer.index: layer.activation for layer in layers}),
        "encodings": sorted({one for layer in layers for one in layer.encodings}),
        "experts_found_as": sorted({re.sub(r"[0-9]+", "N", layer.source) for layer in layers}),
        "other_tensors": len(checkpoint.other_tensors),
        "other_bytes": sum(tensor.nbytes for tensor in checkpoint.other_tensors),
        "numa_parts_possible": {key: _possible_parts(checkpoint, key) for key in output_formats()},
        "methods": methods(checkpoint),
        "notes": [*checkpoint.notes, *_unusable_side_files(checkpoint)],
        **_network(checkpoint),
    }


def _unusable_side_files(checkpoint: Checkpoint) -> list[str]:
    """Notes on files next to the weights that a conversion refuses, such as Git LFS pointers."""
    directory = checkpoint.side_directory
    if directory is None or is_remote(directory):  # where each file would take a request
        return []
    try:
        find_side_files(directory)
    except KtconvError as error:
        return [f"{error}; conversions refuse it"]
    return []


def _network(checkpoint: Checkpoint) -> dict[str, int]:
    """Requests and bytes that reading the headers took; nothing for a checkpoint on this
    machine."""
    if not is_remote(checkpoint.path):
        return {}
    return {"network_bytes": transfer.nbytes, "network_requests": transfer.requests}


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
        "way_out": "run the same command again",
    }


def _quantized(directory: Path, manifest: Manifest) -> dict[str, Any]:
    """Experts encoded in a checkpoint."""
    found = open_unstacked(directory) if is_stacked(manifest) else open_packed(directory)
    options, layers = manifest.options, manifest.layers
    missing = sorted(manifest.tensors.keys() - found.others.keys())
    experts = [tensor for name, tensor in found.others.items() if _expert_of(name)]
    names = {*found.others, *manifest.tensors}  # also those in files that are missing
    converted = {parts for name in names if (parts := _expert_of(name))}
    row = SCHEMES.get(str(options.get("scheme")))
    for_cpu = row is not None and row.command == "quantize-cpu"
    chosen = {"method": options.get("method"), "scheme": options.get("scheme")}
    damaged = sorted({*found.damaged, *_damaged(directory, manifest)})
    return {
        "schema": 1,
        "kind": "encoded experts" if for_cpu else "experts for a GPU",
        "path": str(directory),
        "made_by": f"ktconv {manifest.version}",
        "family": manifest.model_type,
        **({"method": options.get("scheme")} if for_cpu else chosen),
        **_grouping(options),
        "moe_layers": format_ranges(list(layers)) or "none",
        "experts": sorted({layer["experts"] for layer in layers.values()}),
        "experts_left_out": sum(layer["experts"] for layer in layers.values()) - len(converted),
        "hidden_size": sorted({layer["hidden_size"] for layer in layers.values()}),
        "intermediate_size": sorted({layer["intermediate_size"] for layer in layers.values()}),
        "activation": _activation(directory, manifest, layers),
        "expert_bytes": sum(tensor.nbytes for tensor in experts),
        "missing_tensors": len(missing),
        "first_missing": missing[0] if missing else None,
        "damaged_files": damaged,
        "complete": bool(experts) and not (missing or damaged),
    }


def _gguf(directory: Path, manifest: Manifest) -> dict[str, Any]:
    """Experts in GGUF files."""
    found = open_gguf(directory)
    layers = manifest.layers
    missing = sorted(manifest.tensors.keys() - found.files.others.keys())
    damaged = sorted({*found.files.damaged, *_damaged(directory, manifest)})
    return {
        "schema": 1,
        "kind": "GGUF model" if found.others else "experts in GGUF files",
        "path": str(directory),
        "made_by": f"ktconv {manifest.version}",
        "family": manifest.model_type,
        "method": manifest.options.get("method"),
        "moe_layers": format_ranges(list(layers)) or "none",
        "experts": sorted({layer["experts"] for layer in layers.values()}),
        "hidden_size": sorted({layer["hidden_size"] for layer in layers.values()}),
        "intermediate_size": sorted({layer["intermediate_size"] for layer in layers.values()}),
        "activation": _activation(directory, manifest, layers),
        "expert_bytes": sum(tensor.nbytes for tensor in found.experts.values()),
        "other_tensors": len(found.others),
        "missing_tensors": len(missing),
        "first_missing": missing[0] if missing else None,
        "damaged_files": damaged,
        "complete": bool(found.experts) and not (missing or damaged),
    }


def _grouping(options: Mapping[str, Any]) -> dict[str, Any]:
    """The group size with the layout of experts that are not numbered, or the methods of a
    recipe."""
    lines = options.get("recipe")
    if not isinstance(lines, list):
        layout = options.get("expert_layout")
        stacked = {} if layout is None else {"expert_layout": layout}
        return {"group_size": options.get("group_size"), **stacked}
    recipe = parse_recipe("\n".join(map(str, lines)))
    methods = [recipe.method, *(rule.method for rule in recipe.rules)]
    return {"methods": list(dict.fromkeys(method.words for method in methods))}


def _expert_of(name: str) -> tuple[str, str] | None:
    """The path of the experts and the number of the one that a tensor belongs to."""
    if found := _REORDERED.fullmatch(name):
        return found[1], found[2]
    parts = split_name(name) if is_in_experts(name) else None
    return None if parts is None else (parts[0], parts[1].partition(".")[0])


def _converted(directory: Path, found: PackedWeights, manifest: Manifest | None) -> dict[str, Any]:
    packed = {tensor: place.nbytes for tensor, place in found.tensors.items()}
    layers = found.layers
    backward = any(is_backward(key.proj) for key in packed)
    expected = _expected(directory, layers, manifest, backward)
    missing = [key for key in expected if key not in packed]
    odd = [key for key, size in packed.items() if _is_odd(key, size, layers[key.layer])]
    damaged = sorted({*found.damaged, *_damaged(directory, manifest)})
    formats = sorted({layer.format.name for layer in layers.values() if layer.format})
    return {
        "schema": 1,
        "kind": "converted weights",
        "path": str(directory),
        "made_by": f"ktconv {manifest.version}" if manifest else f"no {MANIFEST}",
        "family": manifest.model_type if manifest else None,
        "method": ", ".join(formats) or None,
        "codes_by": _codes(manifest),
        "backward": backward,
        "numa_parts": sorted({layer.parts for layer in layers.values()}),
        "moe_layers": format_ranges(list(layers)) or "none",
        **({"tower": manifest.tower} if manifest and manifest.tower else {}),
        **({"adapters": list(manifest.adapters)} if manifest and manifest.adapters else {}),
        **({ENCODED_AGAIN: manifest.encoded_again} if manifest and manifest.encoded_again else {}),
        "experts": sorted({layer.experts for layer in layers.values()}),
        "experts_left_out": sum(len(layer.elsewhere) for layer in layers.values()),
        "hidden_size": sorted({layer.hidden for layer in layers.values()}),
        "intermediate_size": sorted({layer.intermediate for layer in layers.values()}),
        "activation": _activation(directory, manifest, layers),
        "expert_bytes": sum(packed.values()),
        "missing_tensors": len(missing),
        "first_missing": name_of(missing[0]) if missing else None,
        "wrong_sizes": len(odd),
        "first_wrong_size": name_of(odd[0]) if odd else None,
        "damaged_files": damaged,
        "complete": bool(formats) and not (missing or odd or damaged),
    }


def _codes(manifest: Manifest | None) -> str | None:
    """The choice of scales and codes, as far as a manifest says it."""
    options = options_of_record(manifest.options) if manifest else None
    return codes_in_words(options) if options else None


def _activation(directory: Path, manifest: Manifest | None, layers: Iterable[int]) -> str | None:
    """Activation by the manifest, else by config.json; None where neither is there and readable."""
    found = of_records(manifest.geometry) if manifest else None
    if found is None and (directory / CONFIG_NAME).exists():
        with contextlib.suppress(CheckpointError):  # what is damaged is reported by verify
            config = ModelSettings.beside(directory)
            found = {layer: config.activation(layer) for layer in layers}
    return in_words(found) if found else None


def _expected(
    directory: Path, layers: Mapping[int, Geometry], manifest: Manifest | None, backward: bool
) -> Iterator[TensorId]:
    """Tensors that should be there: by manifest or index if there is one, and no gaps in any
    case."""
    listed = {name for name in map(parse_tensor_name, listed_names(directory, manifest)) if name}
    yield from sorted(listed, key=name_of)
    for index, layer in layers.items():
        matrices = layer.matrices(backward)
        yield from (key for key in layer.tensors(index, matrices) if key not in listed)


def _is_odd(key: TensorId, size: int, layer: Geometry) -> bool:
    expected = layer.stored(key.proj, key.kind)
    return expected is not None and expected[2] != size


def _damaged(directory: Path, manifest: Manifest | None) -> Sequence[str]:
    """Files that differ from the manifest, and the manifest itself if it is incomplete."""
    if manifest is None:
        return [MANIFEST] if (directory / MANIFEST).exists() else []
    damaged = [file["name"] for file in manifest.files if not file_is_intact(directory, file)]
    return [*damaged, MANIFEST] if manifest.damaged_units else damaged
