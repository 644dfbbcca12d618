"""What `ktconv stats` does: options in, a document, lines and files out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktconv.checkpoint import check_headers, locate_model
from ktconv.checkpoint.strict_json import parse_object
from ktconv.errors import UsageError
from ktconv.model.load import running, way_out
from ktconv.placement.expert_sets import write_expert_set
from ktconv.stats.counts import LayerCounts, Statistics, from_facts
from ktconv.stats.placement import ENDING, write_placement
from ktconv.stats.record import I32, Recorder, text_pieces
from ktconv.stats.trace import read_trace, write_trace
from ktconv.system.files import check_writable, translated
from ktconv.system.text import Notify

MAX_TOKENS = 20480  # by default: 40 windows
SHOWN_NEVER = 5  # experts that are named in a row of the table


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    model: str  # a checkpoint, or what an earlier run recorded: .json or .safetensors
    text: Path | None = None  # None: the text that ships with ktconv
    max_tokens: int | None = None
    max_memory: int | None = None  # bytes of weights that are in memory; None: all
    layers: Sequence[int] | None = None
    hot: int | None = None
    hot_share: float | None = None
    hot_total: int | None = None
    write: Path | None = None
    trace: Path | None = None
    placement: Path | None = None

    @property
    def choice(self) -> tuple[int | None, float | None, int | None]:
        """How to choose, as `Statistics.chosen` takes it."""
        return self.hot, self.hot_share, self.hot_total


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Counts, and the ids behind them where a trace was asked for."""

    statistics: Statistics
    ids: dict[int, I32] = field(default_factory=dict)


def run(options: Options, notify: Notify) -> tuple[dict[str, Any], list[str]]:
    """The JSON document and the lines for people. Raises KtconvError."""
    started = time.monotonic()
    _check(options)
    earlier = _earlier(options)
    recorded = _record(options, notify) if earlier is None else _Recorded(earlier)
    statistics = recorded.statistics
    if options.layers is not None:
        statistics = statistics.only(options.layers)
    facts = statistics.facts(*options.choice)
    if options.trace is not None:
        experts = {layer.layer: layer.experts for layer in statistics.layers}
        write_trace(options.trace, {n: recorded.ids[n] for n in experts}, experts)
        notify(f"wrote {options.trace}")
    if options.write is not None:
        chosen = statistics.hot(*options.choice)
        write_expert_set(chosen, options.write)
        notify(f"wrote {chosen.count} experts of {len(chosen.layers)} layers to {options.write}")
    if options.placement is not None:
        write_placement(statistics, options.placement)
        notify(f"wrote {options.placement}")
    facts["seconds"] = round(time.monotonic() - started, 3)
    return facts, list(_lines(statistics, facts, options))


def _check(options: Options) -> None:
    """Everything that can be told before a model is loaded."""
    ways = [
        name for name in ("hot", "hot_share", "hot_total") if getattr(options, name) is not None
    ]
    if len(ways) > 1:
        one, other = (f"--{name.replace('_', '-')}" for name in ways[:2])
        raise UsageError(f"{one} and {other} choose in different ways", "give one of them")
    if options.hot_share is not None and not 0 < options.hot_share <= 1:
        raise UsageError(
            f"--hot-share {options.hot_share:g} is no share", "give more than 0, at most 1"
        )
    if options.write is not None and not ways:
        raise UsageError("--write needs to know how many experts", "add --hot N or --hot-share F")
    if options.trace is not None and options.trace.suffix != ".safetensors":
        raise UsageError(f"--trace {options.trace} has another ending", "end it with .safetensors")
    if options.placement is not None and options.placement.suffix != ENDING:
        raise UsageError(
            f"--placement {options.placement} has another ending", f"end it with {ENDING}"
        )
    if options.placement is not None and options.layers is not None:
        raise UsageError("--placement takes all layers", "leave --layers out")
    for name in ("write", "trace", "placement"):
        path = getattr(options, name)
        if path is not None:
            check_writable(path, f"--{name}")


# ---- recording -------------------------------------------------------------------------


def _earlier(options: Options) -> Statistics | None:
    """What an earlier run recorded, if that is what was given."""
    path = Path(options.model)
    if path.suffix not in (".json", ".safetensors") or not path.is_file():
        return None
    for name in ("text", "max_tokens", "max_memory", "trace"):
        if getattr(options, name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')} has no meaning where {path} was recorded before",
                "leave it out, or give the model itself",
            )
    if path.suffix == ".safetensors":
        return read_trace(path)
    with translated("read", path):
        data = path.read_bytes()
    return from_facts(parse_object(data, str(path), "give what ktconv stats --json printed"), path)


def _record(options: Options, notify: Notify) -> _Recorded:
    directory = locate_model(options.model)
    check_headers(directory)
    pieces = _text(options.text)
    notify("loading the model")
    limit = options.max_tokens or MAX_TOKENS
    name = options.text.name if options.text else "the sample of ktconv"
    with _way_out(), running(directory), Recorder(directory, options.max_memory) as recorder:
        _check_choice(recorder.experts, options)
        notify(f"reading at most {limit} tokens of {name}")
        found, ids = recorder.read(pieces, limit, notify, keep=options.trace is not None)
    return _Recorded(Statistics(found.layers, {**found.about, "text": name}), ids)


def _way_out() -> AbstractContextManager[None]:
    """Hints of errors that end the counting."""
    return way_out(
        "use a release of transformers that has this architecture itself",
        "give --max-memory, which leaves a part of the weights on the disk",
    )


def _text(path: Path | None) -> Iterator[str]:
    """The text, whose first piece was read: a missing file is told before a model is loaded."""
    pieces = text_pieces(path)
    first = next(pieces, "")
    if not first.strip():
        raise UsageError(f"--text {path} holds no text", "give a text in UTF-8")

    def whole() -> Iterator[str]:
        yield first
        yield from pieces

    return whole()


def _check_choice(experts: dict[int, int], options: Options) -> None:
    """--hot and --layers must fit the model: told before it reads."""
    import numpy as np

    one = [LayerCounts(n, 1, np.ones(count, np.int64)) for n, count in experts.items()]
    statistics = Statistics(one, {})
    if options.layers is not None:
        statistics = statistics.only(options.layers)
    statistics.chosen(*options.choice)


# ---- for people ------------------------------------------------------------------------


def _lines(statistics: Statistics, facts: dict[str, Any], options: Options) -> Iterator[str]:
    head = ("layer", "tokens", "most used", "least used", "hot", "take", "balance", "never used")
    rows = [head, *(_row(about) for about in facts["layers"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield (
        f"{_choice(options)}: {facts['hot_experts']} of {facts['experts']} experts take "
        f"{100 * facts['hot_share']:.1f} % of the routed tokens"
    )
    if options.hot_total is not None and (tied := statistics.tied(options.hot_total)):
        yield (
            f"not chosen, but used as often as the last of these: {tied}. sglang-kt may choose "
            "them instead; another --hot-total leaves it no choice"
        )


def _row(about: dict[str, Any]) -> tuple[str, ...]:
    most, least = (
        f"{one['expert']} ({100 * one['share']:.2f} %)"
        for one in (about["most_used"], about["least_used"])
    )
    never = about["never_used"]
    names = ", ".join(map(str, never[:SHOWN_NEVER]))
    more = f" and {len(never) - SHOWN_NEVER} more" if len(never) > SHOWN_NEVER else ""
    return (
        str(about["layer"]),
        str(about["tokens"]),
        most,
        least,
        f"{len(about['hot'])} of {about['experts']}",
        f"{100 * about['hot_share']:.1f} %",
        f"{about['balance']:.3f}",
        names + more if never else "none",
    )


def _choice(options: Options) -> str:
    """How the hot experts were chosen."""
    if options.hot is not None:
        return f"the {options.hot} hottest of each layer"
    if options.hot_total is not None:
        return f"the {options.hot_total} hottest of all layers"
    if options.hot_share is not None:
        return f"the fewest of each layer that take {100 * options.hot_share:g} %"
    return "the hottest quarter of each layer"
