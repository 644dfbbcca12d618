"""Run `ktconv stats`: from a request to a JSON document, printed lines and files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from ktconv.checkpoint import check_headers, locate_model
from ktconv.checkpoint.strict_json import parse_object
from ktconv.errors import UsageError
from ktconv.model.load import running, way_out
from ktconv.placement.expert_sets import write_expert_set
from ktconv.stats.counts import LayerCounts, Statistics, from_facts
from ktconv.stats.placement import ENDING, write_placement
from ktconv.stats.record import Recorder, text_pieces
from ktconv.stats.request import DEFAULT_TOKENS, StatsRequest
from ktconv.stats.text import lines_of
from ktconv.stats.trace import read_trace, write_trace
from ktconv.system.arrays import I32
from ktconv.system.files import check_writable, translated
from ktconv.system.text import Notify


def run(request: StatsRequest, notify: Notify) -> tuple[dict[str, Any], list[str]]:
    """The JSON document and the lines for people. Raises KtconvError."""
    started = time.monotonic()
    _check(request)
    earlier = _earlier(request)
    statistics, ids = (earlier, {}) if earlier else _record(request, notify)
    if request.layers is not None:
        statistics = statistics.only(request.layers)
    facts = statistics.facts(*request.choice)
    if request.trace is not None:
        experts = {layer.layer: layer.experts for layer in statistics.layers}
        write_trace(request.trace, {n: ids[n] for n in experts}, experts)
        notify(f"wrote {request.trace}")
    if request.write is not None:
        chosen = statistics.hot(*request.choice)
        write_expert_set(chosen, request.write)
        notify(f"wrote {chosen.count} experts of {len(chosen.layers)} layers to {request.write}")
    if request.placement is not None:
        write_placement(statistics, request.placement)
        notify(f"wrote {request.placement}")
    facts["seconds"] = round(time.monotonic() - started, 3)
    return facts, list(lines_of(statistics, facts, request))


def _check(request: StatsRequest) -> None:
    """Everything that can be checked before a model is loaded."""
    ways = [
        name for name in ("hot", "hot_share", "hot_total") if getattr(request, name) is not None
    ]
    if len(ways) > 1:
        one, other = (f"--{name.replace('_', '-')}" for name in ways[:2])
        raise UsageError(f"{one} and {other} cannot be combined", "use one of them")
    if request.hot_share is not None and not 0 < request.hot_share <= 1:
        raise UsageError(
            f"--hot-share must be in (0, 1], got {request.hot_share:g}", "for example 0.9"
        )
    if request.write is not None and not ways:
        raise UsageError(
            "--write needs a number of experts to select", "add --hot N or --hot-share F"
        )
    for option, path, ending in (
        ("--trace", request.trace, ".safetensors"),
        ("--placement", request.placement, ENDING),
    ):
        if path is not None and path.suffix != ending:
            raise UsageError(f"{option} {path} does not end in {ending}", f"name a {ending} file")
    if request.placement is not None and request.layers is not None:
        raise UsageError("--placement needs all layers", "omit --layers")
    for name in ("write", "trace", "placement"):
        path = getattr(request, name)
        if path is not None:
            check_writable(path, f"--{name}")


# ---- recording -------------------------------------------------------------------------


def _earlier(request: StatsRequest) -> Statistics | None:
    """Counts of an earlier run, if MODEL is a file of them."""
    path = Path(request.model)
    if path.suffix not in (".json", ".safetensors") or not path.is_file():
        return None
    for name in ("text", "max_tokens", "max_memory", "trace"):
        if getattr(request, name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')} does not apply to counts read from {path}",
                "omit it, or give the model itself",
            )
    if path.suffix == ".safetensors":
        return read_trace(path)
    with translated("read", path):
        data = path.read_bytes()
    return from_facts(parse_object(data, str(path), "give the output of ktconv stats --json"), path)


def _record(request: StatsRequest, notify: Notify) -> tuple[Statistics, dict[int, I32]]:
    """Counts, and the recorded ids if a trace was requested."""
    directory = locate_model(request.model)
    check_headers(directory)
    pieces = _text(request.text)
    notify("loading the model")
    limit = request.max_tokens or DEFAULT_TOKENS
    name = request.text.name if request.text else "the built-in sample"
    hints = way_out(
        "use a release of transformers that supports this architecture",
        "set --max-memory to offload part of the weights to disk",
    )
    with hints, running(directory), Recorder(directory, request.max_memory) as recorder:
        _check_choice(recorder.experts, request)
        notify(f"reading at most {limit} tokens of {name}")
        found, ids = recorder.read(pieces, limit, notify, keep=request.trace is not None)
    return Statistics(found.layers, {**found.about, "text": name}), ids


def _text(path: Path | None) -> Iterator[str]:
    """The text, whose first piece was read: a missing file is an error before a model is loaded."""
    pieces = text_pieces(path)
    first = next(pieces, "")
    if not first.strip():
        raise UsageError(f"--text {path} is empty", "give a UTF-8 text file")
    return chain([first], pieces)


def _check_choice(experts: dict[int, int], request: StatsRequest) -> None:
    """--hot and --layers must fit the model: an error before it reads."""
    import numpy as np

    one = [LayerCounts(n, 1, np.ones(count, np.int64)) for n, count in experts.items()]
    statistics = Statistics(one, {})
    if request.layers is not None:
        statistics = statistics.only(request.layers)
    statistics.chosen(*request.choice)
