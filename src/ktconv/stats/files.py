"""Files of counts for other programs.

A trace, for `ktconv bench --routing trace:FILE`: `ids` is int32 [layers, tokens, top-k]; the
metadata has the numbers of the layers and how many experts each has. bench replays the layers one
after the other.

A placement, by which sglang-kt places experts by frequency (`--kt-expert-placement-strategy
frequency --init-expert-location FILE.pt`): a dict that torch.save writes. `logical_count` is int64
[1, layers, experts], whose first dimension is summed up. Layers are all of the model, by number;
those without experts have zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import numpy as np

from ktconv.errors import UsageError
from ktconv.source.config import MAX_SIZE
from ktconv.source.strict_json import parse_object
from ktconv.stats.counts import NUM_LAYERS, LayerCounts, Statistics, from_facts
from ktconv.system.arrays import I32, I64
from ktconv.system.pointers import refuse_pointer_at
from ktconv.system.regular_files import read_given, refuse_device
from ktconv.system.units import parse_ranges
from ktconv.writer.option_files import WrittenFile
from ktconv.writer.shards import Tensor, plan_shard

PLACEMENT = ".pt"  # the ending by which sglang-kt knows it
_COUNT = "logical_count"
_COUNTS = "give the output of ktconv stats --json"
_OF_TRACE = {"layers", "experts"}  # its metadata


def trace_file(path: Path) -> WrittenFile:
    """FILE of --trace."""
    return WrittenFile(path, "--trace", "a trace that ktconv wrote", _is_trace)


def _is_trace(path: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return set(file.keys()) == {"ids"} and set(file.metadata() or ()) == _OF_TRACE
    except SafetensorError:
        return False


def placement_file(path: Path) -> WrittenFile:
    """FILE of --placement."""
    return WrittenFile(path, "--placement", "a placement that ktconv wrote", _is_placement)


def _is_placement(path: Path) -> bool:
    """Whether torch.save made it of such a dict; nothing of the file is executed."""
    try:
        with ZipFile(path) as file:
            data = [name for name in file.namelist() if name.endswith("/data.pkl")]
            return len(data) == 1 and _COUNT.encode() in file.read(data[0])
    except BadZipFile:
        return False


def write_trace(path: Path, ids: Mapping[int, I32], experts: Mapping[int, int]) -> None:
    """Raises UsageError for layers that differ in experts or experts per token: their ids do not
    fit into one array."""
    if len({found.shape for found in ids.values()}) > 1 or len({experts[n] for n in ids}) > 1:
        raise UsageError(
            "the layers differ in their number of experts or of experts per token",
            "select layers with equal numbers with --layers",
        )
    metadata = {"layers": ",".join(map(str, ids)), "experts": str(experts[next(iter(ids))])}
    array = np.stack(list(ids.values()))
    tensor = Tensor("ids", "I32", array.shape, array.nbytes)
    # safetensors would write the metadata in another order each time.
    header = plan_shard(path.name, [tensor], metadata).header
    trace_file(path).write([header, array.tobytes()])


def read_statistics(path: Path) -> Statistics:
    """Counts that `ktconv stats` wrote: with --json, or as a trace. Raises a KtconvError for any
    other file."""
    what = "the file of counts"
    if path.suffix == ".safetensors":
        refuse_device(path, what)
        refuse_pointer_at(path)
        return read_trace(path)
    data = read_given(path, what, _COUNTS)
    return from_facts(parse_object(data, str(path), _COUNTS), path)


def read_trace(path: Path) -> Statistics:
    """The counts of a trace that `write_trace` wrote. UsageError for any other file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata, ids = file.metadata() or {}, file.get_tensor("ids")
        experts = int(metadata["experts"])
        layers = parse_ranges(metadata["layers"], "layers")
        if ids.ndim != 3 or ids.dtype.kind != "i" or len(layers) != len(ids) or not ids.size:
            raise ValueError
        if not 0 < experts <= MAX_SIZE:
            raise ValueError
        if ids.min() < -1 or ids.max() >= experts or (ids < 0).all(axis=(1, 2)).any():
            raise ValueError
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, UsageError):
        raise UsageError(
            f"{path} is not a trace of ktconv stats: it does not name its layers and their experts",
            "record one with: ktconv stats MODEL --trace FILE.safetensors",
        ) from None
    counts = (np.bincount(part[part >= 0], minlength=experts) for part in ids)
    found = [
        LayerCounts(layer, ids.shape[1], count.astype(np.int64))
        for layer, count in zip(layers, counts, strict=True)
    ]
    about = {"model": None, "model_type": None, "text": None, "tokens": ids.shape[1]}
    return Statistics(found, about)


def logical_count(statistics: Statistics) -> I64:
    """Counts [1, layers, experts]. UsageError where the number of layers is not known, or layers
    have different numbers of experts, which this file cannot express."""
    layers = statistics.about.get(NUM_LAYERS)
    numbers = [layer.layer for layer in statistics.layers]
    if type(layers) is not int or not max(numbers) < layers <= MAX_SIZE:
        raise UsageError(
            "--placement needs the number of layers of the model, which is not recorded here",
            "give the model itself, or a --json report of this version",
        )
    experts = {layer.experts for layer in statistics.layers}
    if len(experts) > 1:
        raise UsageError(
            "--placement cannot express layers with different numbers of experts",
            f"the layers have {', '.join(map(str, sorted(experts)))}",
        )
    counts = np.zeros((1, layers, experts.pop()), np.int64)
    for layer in statistics.layers:
        counts[0, layer.layer] = layer.counts
    return counts


def write_placement(statistics: Statistics, path: Path) -> None:
    """Write FILE.pt. UsageError as `logical_count`, or without PyTorch."""
    counts = logical_count(statistics)
    try:
        import torch
    except ImportError:
        raise UsageError(
            "--placement needs torch, which is not installed", "pip install 'ktconv[model]'"
        ) from None
    buffer = BytesIO()
    torch.save({_COUNT: torch.from_numpy(counts)}, buffer)
    placement_file(path).write(buffer.getvalue())
