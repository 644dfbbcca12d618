"""Run `ktconv stats`: from a request to a JSON document, printed lines and files."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ktconv.errors import UsageError
from ktconv.model.load import running, way_out
from ktconv.model.text import open_text
from ktconv.source import check_headers
from ktconv.source.model_source import ModelSource
from ktconv.stats.counts import SCHEMA, LayerCounts, Statistics
from ktconv.stats.files import (
    PLACEMENT,
    placement_file,
    read_statistics,
    trace_file,
    write_placement,
    write_trace,
)
from ktconv.stats.importance import importance_file
from ktconv.stats.record import Recorder, Recording, Wanted
from ktconv.stats.scores import scores_file
from ktconv.system.arrays import I32
from ktconv.system.text import Notify, first_few, silent, table_lines
from ktconv.system.units import counted
from ktconv.targets.expert_sets import expert_set_file, write_expert_set
from ktconv.writer.option_files import WrittenFile, check_written, check_written_directory

if TYPE_CHECKING:
    from ktconv.model.streamed.stream import Progression

_NEWER = "use a release of transformers that supports this architecture"
DEFAULT_TOKENS = 20480  # 40 windows
# Options that need the model itself.
_OF_RECORDING = (
    "text", "max_tokens", "max_memory", "trace", "importance", "hessian", "scores", "work_dir",
    "dry_run",
)  # fmt: skip
SHOWN_NEVER = 5  # experts that are named in a row of the table


class StatsRequest(Struct, frozen=True):
    """The request of `stats`: what to count, how to choose, and what to write."""

    model: ModelSource | str  # a checkpoint, or what an earlier run recorded: .json or .safetensors
    text: Path | None = None  # None: the text that ships with ktconv
    max_tokens: int | None = None
    max_memory: int | None = None  # bytes that the process may have; None: what is free
    layers: Sequence[int] | None = None
    hot: int | None = None
    hot_share: float | None = None
    hot_total: int | None = None
    write: Path | None = None
    trace: Path | None = None
    placement: Path | None = None
    importance: Path | None = None
    hessian: Path | None = None
    scores: Path | None = None
    work_dir: Path | None = None  # for the state of the pass; None: in the user's cache
    dry_run: bool = False

    @property
    def source(self) -> ModelSource:
        """The model with the options about reading it; `config` is for GGUF models."""
        return ModelSource.of(self.model)

    @property
    def choice(self) -> tuple[int | None, float | None, int | None]:
        """The choice, as `Statistics.chosen` takes it."""
        return self.hot, self.hot_share, self.hot_total


def run(
    request: StatsRequest,
    notify: Notify = silent,
    progression: Progression = lambda sizes: nullcontext(),
) -> tuple[dict[str, Any], list[str]]:
    """The JSON document and the lines for people. Raises KtconvError.

    `progression` makes an observer of bytes of source by unit; what is recorded goes on where an
    earlier run with the same request stopped.
    """
    started = time.monotonic()
    _check(request)
    with ExitStack() as opened:
        recording = None
        statistics, ids = _earlier(request), dict[int, I32]()
        if statistics is None:
            recording = opened.enter_context(_prepared(request))
            if request.dry_run:
                return {"schema": SCHEMA, **recording.facts}, recording.lines
            for line in recording.lines:
                notify(line)
            with way_out(_NEWER):
                statistics, ids = recording.run(progression, notify)
        if request.layers is not None:
            statistics = statistics.only(request.layers)
        facts = statistics.facts(*request.choice)
        _write(request, statistics, ids, notify)
        if recording is not None:
            recording.complete()
    facts["seconds"] = round(time.monotonic() - started, 3)
    return facts, list(_lines(statistics, facts, request))


def _write(
    request: StatsRequest, statistics: Statistics, ids: Mapping[int, I32], notify: Notify
) -> None:
    """The files that were asked for; those of inputs of experts are there."""
    for path in (request.importance, request.hessian, request.scores):
        if path is not None:
            notify(f"wrote {path}")
    if request.trace is not None:
        experts = {layer.layer: layer.experts for layer in statistics.layers}
        write_trace(request.trace, {n: ids[n] for n in experts}, experts)
        notify(f"wrote {request.trace}")
    if request.write is not None:
        chosen = statistics.hot(*request.choice)
        write_expert_set(chosen, request.write)
        notify(
            f"wrote {counted(chosen.count, 'expert')} of "
            f"{counted(len(chosen.layers), 'layer')} to {request.write}"
        )
    if request.placement is not None:
        write_placement(statistics, request.placement)
        notify(f"wrote {request.placement}")


def _check(request: StatsRequest) -> None:
    """Everything that can be checked before a model is loaded."""
    if request.hot_share is not None and not 0 < request.hot_share <= 1:
        raise UsageError(
            f"--hot-share must be in (0, 1], got {request.hot_share:g}", "for example 0.9"
        )
    for option, path, ending in (
        ("--trace", request.trace, ".safetensors"),
        ("--placement", request.placement, PLACEMENT),
        ("--importance", request.importance, ".safetensors"),
    ):
        if path is not None and path.suffix != ending:
            raise UsageError(f"{option} {path} does not end in {ending}", f"name a {ending} file")
    check_written(_files(request), _read(request))


def _files(request: StatsRequest) -> list[WrittenFile]:
    """Files that the options name to be written; --hessian names a directory instead."""
    kinds = (
        (request.write, expert_set_file),
        (request.trace, trace_file),
        (request.placement, placement_file),
        (request.importance, importance_file),
        (request.scores, scores_file),
    )
    return [file_at(path) for path, file_at in kinds if path is not None]


def _read(request: StatsRequest) -> list[str | Path | None]:
    """Inputs of the command, to which no option may write."""
    return [*request.source.files(), request.text]


# ---- recording -------------------------------------------------------------------------


def _earlier(request: StatsRequest) -> Statistics | None:
    """Counts of an earlier run, if MODEL is a file of them."""
    path = Path(request.source.model)
    if path.suffix not in (".json", ".safetensors") or not path.is_file():
        return None
    for name in _OF_RECORDING:
        if getattr(request, name):
            raise UsageError(
                f"--{name.replace('_', '-')} does not apply to counts read from {path}",
                "omit it, or give the model itself",
            )
    return read_statistics(path)


def _prepared(request: StatsRequest) -> Recording:
    """The pass over the text, planned."""
    config = request.source.config
    place = check_headers(request.source)
    if config is not None and not place.is_file():
        raise UsageError("--config is for GGUF models only", "omit it")
    for option, path in (("--hessian", request.hessian), ("--work-dir", request.work_dir)):
        if path is not None:
            check_written_directory(path, option, [place, *_read(request)])
    check_written(_files(request), [place])
    pieces, name = open_text(request.text)
    with way_out(_NEWER), running(place):
        adapters, precise = request.source.adapter or (), request.scores is not None
        prune = request.source.prune
        recorder = Recorder(place, config, adapters, prune=prune, precise=precise)
        _check_choice(recorder.experts, request)
        return recorder.prepare(
            pieces,
            request.max_tokens or DEFAULT_TOKENS,
            Wanted(
                ids=request.trace is not None,
                importance=request.importance,
                hessian=request.hessian,
                scores=request.scores,
                layers=request.layers,
            ),
            text=name,
            max_memory=request.max_memory,
            work=request.work_dir,
        )


def _check_choice(experts: dict[int, int], request: StatsRequest) -> None:
    """--hot and --layers must fit the model: an error before it reads."""
    import numpy as np

    one = [LayerCounts(n, 1, np.ones(count, np.int64)) for n, count in experts.items()]
    statistics = Statistics(one, {})
    if request.layers is not None:
        statistics = statistics.only(request.layers)
    statistics.chosen(*request.choice)


# ---- lines for people ------------------------------------------------------------------


def _lines(statistics: Statistics, facts: dict[str, Any], request: StatsRequest) -> Iterator[str]:
    head = ("layer", "tokens", "most used", "least used", "hot", "take", "balance", "never used")
    yield from table_lines([head, *(_row(about) for about in facts["layers"])])
    yield (
        f"{_choice(request)}: {facts['hot_experts']} of {counted(facts['experts'], 'expert')} take "
        f"{100 * facts['hot_share']:.1f} % of the routed tokens"
    )
    if request.hot_total is not None and (tied := statistics.tied(request.hot_total)):
        yield (
            f"not chosen, but used as often as the last of these: {tied}. sglang-kt "
            "may choose them instead; a different --hot-total avoids the tie"
        )


def _row(about: dict[str, Any]) -> tuple[str, ...]:
    most, least = (
        f"{one['expert']} ({100 * one['share']:.2f} %)"
        for one in (about["most_used"], about["least_used"])
    )
    never = about["never_used"]
    return (
        str(about["layer"]),
        str(about["tokens"]),
        most,
        least,
        f"{len(about['hot'])} of {about['experts']}",
        f"{100 * about['hot_share']:.1f} %",
        f"{about['balance']:.3f}",
        first_few(never, SHOWN_NEVER) or "none",
    )


def _choice(request: StatsRequest) -> str:
    """The choice of the hot experts, in words."""
    if request.hot is not None:
        return f"the {request.hot} hottest of each layer"
    if request.hot_total is not None:
        return f"the {request.hot_total} hottest of all layers"
    if request.hot_share is not None:
        return f"the fewest of each layer that take {100 * request.hot_share:g} %"
    return "the hottest quarter of each layer"
