"""Options, plans, progress and results that the converting commands share."""

from __future__ import annotations

import gc
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from ktconv.cli import calls, events
from ktconv.cli.exits import NOTHING_WRITTEN, Hints, interruptible
from ktconv.cli.help import ADVANCED, CHECKS, OUTPUT
from ktconv.cli.output import fact_lines, notify, print_result
from ktconv.cli.parameters import argument, choice, flag, option
from ktconv.errors import (
    DiskFullError,
    DiskSpaceError,
    FileSizeError,
    InUseError,
    SourceChangedError,
    UsageError,
)
from ktconv.system.machine import MAX_THREADS
from ktconv.system.units import counted, format_duration, format_ranges, format_rate, format_size
from ktconv.targets.consumers import uneven

if TYPE_CHECKING:
    from ktconv.conversion.plan import Unit
    from ktconv.conversion.run import Preflight, Report

# Hints for commands that convert packed weights, and for those that convert a model.
PACKED_HINTS: Hints = {
    DiskFullError: "free some space, then run the same command again: finished layers are kept",
    FileSizeError: "raise the limit of the file system or process, or lower --max-shard-size",
    SourceChangedError: "make sure nothing writes there, then start again with --overwrite",
    MemoryError: "use fewer --threads",
}
MODEL_HINTS: Hints = {
    **PACKED_HINTS,
    DiskSpaceError: "free some space, use another disk, or convert fewer layers with --layers",
    InUseError: "wait for it to end, or give each run its own --layers",
}

# Options that several commands have.
_MODEL = argument(
    "A checkpoint directory, GGUF file, hub id or URL.",
    "MODEL",
    "A hub id, org/name, is looked up in the local Hugging Face cache, or read from the hub with "
    "--download. `org/name:Q4_K_M` chooses one of several GGUF models. Any part of a split GGUF "
    "file means all of them. URLs: docs/remote.md.",
)
_OUTPUT = argument("Output directory; created if missing.", "OUTPUT")
ModelArgument = Annotated[str, _MODEL]
OptionalModelArgument = Annotated[str | None, _MODEL]
OutputArgument = Annotated[Path, _OUTPUT]
OptionalOutputArgument = Annotated[Path | None, _OUTPUT]
LayersOption = Annotated[
    str,
    option(
        "Convert only these layers, e.g. 0-3,7.",
        "LIST",
        panel=OUTPUT,
        detail="Several machines can share one OUTPUT. The last to finish writes the index and the "
        "manifest, or run --finalize.",
    ),
]
MtpOption = Annotated[
    bool,
    flag(
        "--mtp/--no-mtp",
        "Convert MTP layers too.",
        OUTPUT,
        "MTP: multi-token prediction, layers behind the others that guess further tokens.",
    ),
]
ShardSizeOption = Annotated[str, option("Maximum size of a shard.", "SIZE", panel=OUTPUT)]
ThreadsOption = Annotated[
    int, option("Worker threads; 0: one per usable CPU.", "T", min=0, max=MAX_THREADS)
]
CopyThreadsOption = Annotated[
    int, option("Worker threads; 0: up to 8.", "T", min=0, max=MAX_THREADS)
]
VerifyOption = Annotated[
    bool,
    flag(
        "--verify/--no-verify",
        "Read back what was written.",
        detail="Everything is unpacked by code of its own and compared with the source. With "
        "--no-verify it is compared in memory only.",
    ),
]
RequantizeOption = Annotated[
    bool,
    flag(
        "--requantize",
        "Re-quantize weights that are in this format already.",
        ADVANCED,
        "Codes and scales that the source has in this format are kept unchanged otherwise, "
        "which adds no error: docs/encodings.md.",
    ),
]
OverwriteOption = Annotated[
    bool, flag("--overwrite", "Remove what ktconv wrote to OUTPUT, start again.")
]
FinalizeOption = Annotated[
    bool,
    flag(
        "--finalize",
        "Only write the index and manifest of finished layers.",
        ADVANCED,
        "Used when several machines converted the layers of one OUTPUT.",
    ),
]
ProgressOption = Annotated[
    events.Mode,
    choice(
        events.Mode,
        "Form of progress on stderr.",
        "--progress",
        metavar="MODE",
        detail="- auto: a bar on terminals, lines elsewhere\n- json: one object a line, for "
        "programs: docs/progress.md",
    ),
]
SampleOption = Annotated[
    float,
    option(
        "Fraction of experts and layers to read, in (0, 1].",
        "F",
        panel=CHECKS,
        detail="A sample has at least one layer, and one expert of every layer; the same --seed "
        "gives the same sample.",
    ),
]
SeedOption = Annotated[
    int, option("Seed of the sample and of random inputs.", "N", panel=ADVANCED, min=0)
]
TextOption = Annotated[
    Path | None,
    option("Text to read instead of the built-in sample.", "FILE", panel=CHECKS),
]
WindowsOption = Annotated[
    int, option("Windows of 512 tokens at level model.", "N", panel=ADVANCED, min=1)
]
DryRunOption = Annotated[
    bool,
    flag(
        "--dry-run",
        "Print the plan and write nothing.",
        detail="Reads headers, and scales if they are few. The plan has layers, experts, the exact "
        "output size, memory, disk space, and what is copied or skipped and why.",
    ),
]


_TRUE = {"1", "ON", "YES", "TRUE"}  # as the hub's library reads variables
Job = Callable[..., "Report"]  # takes a request, an observer and a preflight


def convert(
    request: Any,
    preflight: Preflight[Any],
    job: Job,
    dry_run: bool,
    as_json: bool,
    did: str = "Converted",
    facts: Mapping[str, Any] = MappingProxyType({}),
    lines: Sequence[str] = (),
) -> None:
    """Print the plan, or do the job and print its result.

    Notes and progress are shown, and an interrupt prints how to continue. `did` is the verb of the
    result; plans have `lines` in addition, and all JSON has `facts`.
    """
    if dry_run:
        zeros = preflight.zero_scales()
        shown = {**preflight_facts(preflight), "zero_scales": zeros, **facts}
        print_result(as_json, shown, lambda: [*preflight_lines(preflight, zeros), *lines])
        return
    notes = [f"note: {note}" for note in preflight.plan.notes]
    for line in (*lines, *notes, *(f"skipped: {what}" for what in preflight.plan.skipped)):
        notify(line)
    if not calls.is_called():
        gc.freeze()  # the plan lives as long as the process, so collections need not walk it
    with interruptible(lambda: _next_step(request.output, request.overwrite)):
        observer = progress_over({unit.key: unit.source_bytes for unit in preflight.plan.units})
        with observer:
            report = job(request, observer, preflight)
    print_result(as_json, {**report_facts(report), **facts}, lambda: report_lines(report, did))


def _next_step(output: Path, overwrite: bool) -> str:
    """Say what an interrupted run left in `output`, and how to continue."""
    from ktconv.writer.journal import STATE_DIRECTORY
    from ktconv.writer.manifest import MANIFEST

    if os.access(output / STATE_DIRECTORY, os.F_OK):
        return f"Finished layers are kept: run the same command again to continue in {output}."
    if overwrite:
        return f"Files in {output} may have been removed: run the same command again."
    return f"{output} is complete." if os.access(output / MANIFEST, os.F_OK) else NOTHING_WRITTEN


def preflight_facts(
    preflight: Preflight[Any], pending: Sequence[Unit] | None = None
) -> dict[str, Any]:
    """The JSON of a dry run. `pending`: units to write; None: those that are missing now."""
    from ktconv.source.activations import by_ranges, in_words

    plan = preflight.plan
    chosen = [unit.layer for unit in preflight.units]
    activations = {layer.index: layer.activation for layer in chosen}
    units = [*preflight.units, *plan.others]
    return {
        "schema": 1,
        "model_type": plan.checkpoint.config.model_type,
        **plan.target.facts(),
        "layers": len(chosen),
        "layer_indices": [layer.index for layer in chosen],
        "mtp_layers": [layer.index for layer in chosen if layer.is_mtp],
        "experts": max(len(unit.experts) for unit in preflight.units),
        "experts_left_out": sum(unit.omitted for unit in preflight.units),
        "hidden_size": chosen[0].hidden_size,
        "intermediate_size": chosen[0].intermediate_size,
        "encodings": sorted({one for layer in chosen for one in layer.encodings}),
        "activation": in_words(activations),
        "activations": by_ranges(activations),
        "layers_by_encoding": {
            name: format_ranges([layer.index for layer in chosen if layer.encoding == name])
            for name in sorted({layer.encoding for layer in chosen})
        },
        "source_bytes": sum(unit.source_bytes for unit in units),
        "output_bytes": sum(unit.output_bytes for unit in units),
        "files": sum(len(unit.shard_counts) for unit in units),
        "copied_tensors": sum(len(unit.copies) for unit in plan.others),
        "copied_bytes": sum(unit.data_bytes for unit in plan.others),
        "copied_files": [str(path) for path in plan.sidecars],
        "skipped": list(plan.skipped),
        "notes": list(plan.notes),
        "threads": preflight.threads,
        "peak_memory_bytes": preflight.peak_memory,
        "disk_needed_bytes": preflight.disk_needed(
            preflight.pending() if pending is None else pending
        ),
        "disk_free_bytes": preflight.disk_free,
        **network_facts(preflight if pending is None else None),
        "seconds": 0.0,
    }


def network_facts(planned: Preflight[Any] | None = None) -> dict[str, Any]:
    """Bytes and requests of the network so far, and what `planned` will transfer; empty for sources
    on this machine."""
    from ktconv.system.opened import store_of
    from ktconv.system.stores import is_remote, transfer

    if not transfer.stores:
        return {}
    facts = {
        "network_bytes": transfer.nbytes,
        "network_requests": transfer.requests,
        "network_retries": transfer.retries,
    }
    if planned is None:
        return facts
    source = planned.plan.checkpoint.path
    if is_remote(source):
        found = store_of(source)
        units = planned.pending()
        from ktconv.conversion.tasks import spans_of_unit
        from ktconv.source.remote.ahead import requests_for

        kept = [min(found.kept(spans_of_unit(unit)), unit.source_bytes) for unit in units]
        left = [unit.source_bytes - here for unit, here in zip(units, kept, strict=True)]
        facts["bytes_to_transfer"], facts["bytes_in_cache"] = sum(left), sum(kept)
        facts["requests_to_send"] = sum(map(requests_for, left))
    return facts


def report_facts(report: Report) -> dict[str, Any]:
    """The JSON of a finished run."""
    from ktconv.conversion.records import peak_rss

    units, converted = report.preflight.plan.units, set(report.converted)
    written = [unit for unit in units if unit.key in converted]
    return preflight_facts(report.preflight, written) | {
        "seconds": round(report.seconds, 3),
        "source_bytes_read": report.source_bytes,
        "gb_per_second": round(report.source_bytes / 1e9 / max(report.seconds, 1e-9), 3),
        "peak_rss_bytes": peak_rss(),
        "complete": report.complete,
        "converted_units": list(report.converted),
        "kept_units": list(report.kept),
        "missing_units": list(report.missing),
        "mean_relative_rms_error": report.mean_error,
        "worst_tensor": report.worst[0] if report.worst else None,
        "worst_relative_rms_error": report.worst[1] if report.worst else None,
        "zero_scales": report.zero_scales,
        "nearly_zero_matrices": report.lost,
        "nearly_zero_tensors": list(report.lost_names),
        **(upload_commands(report.preflight.request.output) if report.complete else {}),
        **report.more,
    }


def _encodings(facts: dict[str, Any]) -> str:
    """fp8-block, or where layers differ: fp8-block (layers 0-60), bf16+int8 (layer 61)."""
    layers = facts["layers_by_encoding"]
    if len(layers) == 1:
        return ", ".join(facts["encodings"])
    return ", ".join(
        f"{name} (layer{'' if which.isdecimal() else 's'} {which})"
        for name, which in layers.items()
    )


def preflight_lines(preflight: Preflight[Any], zero_scales: int | None = 0) -> Iterator[str]:
    """The plan as readable lines. `zero_scales`: see `Preflight.zero_scales`."""
    from ktconv.conversion.records import zero_scales_in_words

    facts, request = preflight_facts(preflight), preflight.request
    layers = format_ranges(facts["layer_indices"])
    mtp = f", MTP: {format_ranges(facts['mtp_layers'])}" if facts["mtp_layers"] else ""
    copied = f"{counted(facts['copied_tensors'], 'tensor')}, {format_size(facts['copied_bytes'])}"
    enough = "" if facts["disk_free_bytes"] >= facts["disk_needed_bytes"] else "  NOT ENOUGH"
    container = counted(facts["files"], "shard") if facts["files"] else "layer folders"
    rows = {
        "model": f"{request.source} ({facts['model_type']})",
        "MoE layers": f"{facts['layers']} ({layers}{mtp})",
        "experts": f"{facts['experts']} of hidden {facts['hidden_size']}, "
        f"intermediate {facts['intermediate_size']}, {_encodings(facts)}",
        "activation": facts["activation"],
        "write": f"{preflight.plan.target.description}, {container}",
        "source": f"{facts['source_bytes']} bytes ({format_size(facts['source_bytes'])})",
        "output": f"{facts['output_bytes']} bytes ({format_size(facts['output_bytes'])}), "
        f"plus index and manifest",
        "copied as is": copied if facts["copied_tensors"] else "nothing",
        "files copied": ", ".join(facts["copied_files"]) or "none",
        "skipped": "; ".join(facts["skipped"]) or "nothing",
        "memory": f"{format_size(facts['peak_memory_bytes'])} peak with "
        f"{counted(facts['threads'], 'thread')}",
        "disk": f"{format_size(facts['disk_needed_bytes'])} needed, "
        f"{format_size(facts['disk_free_bytes'])} free{enough}",
    }
    if "bytes_to_transfer" in facts:
        nbytes = facts["bytes_to_transfer"]
        rows["network"] = (
            f"{format_size(nbytes)} to transfer in about {facts['requests_to_send']} requests: "
            f"{format_duration(nbytes / 125e6)} at 1 Gbit/s, {format_duration(nbytes / 1.25e9)} at "
            f"10; the headers took {format_size(facts['network_bytes'])} in "
            f"{facts['network_requests']}"
        )
        if facts["bytes_in_cache"]:
            rows["cache"] = f"{format_size(facts['bytes_in_cache'])} more are in the cache"
    if zero_scales != 0:
        rows["zero scales"] = (
            "all scales are checked when the conversion begins"
            if zero_scales is None
            else zero_scales_in_words(zero_scales)
        )
    for number, note in enumerate(facts["notes"], 1):
        rows[f"note {number}"] = note
    return fact_lines(rows)


def report_lines(report: Report, did: str = "Converted") -> Iterator[str]:
    """The result of a run as readable lines."""
    from ktconv.conversion.records import describe_units, zero_scales_in_words

    output = report.preflight.request.output
    if coverage := report.more.get("coverage"):
        from ktconv.quantize.llm_compressor.gptq.coverage import coverage_lines

        yield from coverage_lines(coverage)
    if not report.converted and report.complete:
        yield f"{output} is complete: nothing to do."
        yield from _upload_lines(output)
        return
    if report.converted:
        rate = format_rate(report.source_bytes / max(report.seconds, 1e-9))
        yield (
            f"{did} {describe_units(report.converted)} in {report.seconds:.1f} s "
            f"({rate} of source)."
        )
        if network := network_facts():
            yield (
                f"Network: {format_size(network['network_bytes'])} in "
                f"{network['network_requests']} requests, {network['network_retries']} repeated."
            )
    if report.worst and report.mean_error is not None:
        yield (
            f"Relative RMS error: mean {report.mean_error:.4f} over the tensors, "
            f"worst {report.worst[1]:.4f} ({report.worst[0]})."
        )
    if report.zero_scales:
        yield f"Zero scales in the source: {zero_scales_in_words(report.zero_scales)}."
    if report.lost:
        from ktconv.conversion.records import lost_line

        yield f"warning: {lost_line(report.lost, report.lost_names)}."
    if report.complete:
        yield f"{output} is complete."
        plan = report.preflight.plan
        flags = None if uneven(plan.checkpoint.layers) else plan.target.serving()
        if flags:
            yield f"Serve it with sglang-kt: {flags} {output}"
        yield from _upload_lines(output)
    elif report.missing:
        has_index = report.preflight.plan.target.has_index
        last = "Index and manifest are" if has_index else "The manifest is"
        yield (
            f"{output} is incomplete: missing {describe_units(report.missing)}. {last} written "
            "when these are converted."
        )
    else:
        yield (
            f"Another ktconv is still writing to {output} and will finalize it; if it "
            "fails, run with --finalize."
        )


def upload_commands(output: Path) -> dict[str, str]:
    """Commands that publish an output; USER stands for the user's name on the hub."""
    name = re.sub(r"[^A-Za-z0-9_.]+|\.{2,}", "-", output.resolve().name).strip("-.") or "NAME"
    path = f"./{output}" if str(output).startswith("-") else str(output)
    where, what = f"USER/{name[:80]}", shlex.quote(path)
    return {"push": f"ktconv push {what} {where}", "upload": f"hf upload {where} {what} ."}


def _upload_lines(output: Path) -> Iterator[str]:
    commands = upload_commands(output)
    yield f"Publish it: {commands['push']}"
    yield f"or: {commands['upload']}"


def progress_over(sizes: dict[str, int]) -> Any:
    """Progress over units of these sizes, as `--progress` says or the terminal allows."""
    from ktconv.cli.progress import EventObserver, LineObserver, QuietObserver

    if listener := events.events():
        return EventObserver(sizes, listener)
    mode = progress_mode()
    if mode == "none":
        return QuietObserver(sizes, notify)
    if mode == "lines":
        return LineObserver(sizes, notify)
    from ktconv.cli.bar import BarObserver

    return BarObserver(sizes)


def _has_room_for_a_bar() -> bool:
    if sys.stderr is None or not sys.stderr.isatty():
        return False  # before a library is loaded that knows terminals
    from ktconv.cli.bar import BarObserver

    return BarObserver.fits()


def progress_mode() -> events.Mode:
    """The mode to show progress in, never `auto`. UsageError for a bar without room for one."""
    mode, fits = events.mode(), _has_room_for_a_bar()
    if mode == "bar" and not fits:
        raise UsageError(
            "--progress bar needs a terminal with room for a bar on stderr",
            "use --progress lines, or leave it out",
        )
    if mode == "auto":
        unwanted = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper() in _TRUE
        return "bar" if fits and not unwanted else "lines"
    return mode
