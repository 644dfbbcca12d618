"""`ktconv quantize-gpu`: options of both methods, and what it prints in addition."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from ktconv.cli import options as common
from ktconv.cli.exits import errors_shown
from ktconv.cli.output import JsonOption, given_options, notify
from ktconv.cli.parsing import choice, flag, option
from ktconv.cli.ray import RayOption, RayScratchOption, on_cluster
from ktconv.cli.sources import USUAL, Reading, reads_source
from ktconv.errors import UsageError
from ktconv.system.units import parse_ranges, parse_size

ScaleRule = Literal["amax", "search"]  # as in target.py; a test compares them
GpuMethod = Literal["rtn", "gptq"]  # as quantize_gpu.run.METHODS
# As encoded.scheme.names_of; a test compares them.
Scheme = Literal["W4A16", "W8A16", "FP8_BLOCK", "FP8_DYNAMIC", "MXFP4A16", "NVFP4A16"]


@reads_source("tower")
def quantize_gpu_command(
    context: typer.Context,
    model: common.ModelArgument,
    output: common.OutputArgument,
    method: Annotated[
        GpuMethod, choice(GpuMethod, "rtn: round to nearest; gptq: calibrated on a text.")
    ] = "rtn",
    scheme: Annotated[
        Scheme,
        choice(Scheme, "Format, as compressed-tensors calls it; gptq: W4A16 or W8A16."),
    ] = "W4A16",
    group_size: Annotated[
        int | None,
        option(
            "W4A16, W8A16: weights of a row per scale, 128 unless given; -1: the whole row. "
            "kt-kernel's RAWINT4 needs 32.",
            "N",
        ),
    ] = None,
    scale: Annotated[
        ScaleRule,
        choice(
            ScaleRule,
            "W4A16, W8A16 by rtn: scales of the largest weights, as llm-compressor, or by a search "
            "for the smallest squared error.",
        ),
    ] = "amax",
    experts: Annotated[
        Path | None, option("Quantize only the experts listed in this file.", "FILE")
    ] = None,
    dataset: Annotated[
        str, option("gptq: FILE.jsonl, FILE.txt, or NAME[:CONFIG] of a dataset.", "TEXT")
    ] = "",
    split: Annotated[str, option("gptq: split of a named dataset.", "NAME")] = "train",
    samples: Annotated[int, option("gptq: number of calibration samples.", "N", min=1)] = 512,
    max_seq_len: Annotated[
        int, option("gptq: maximum tokens per sample.", "N", "--max-seq-len", min=1)
    ] = 2048,
    dampening: Annotated[
        float, option("gptq: dampening, as a fraction of the Hessian's mean diagonal.", "F")
    ] = 0.1,
    seed: Annotated[int, option("gptq: random seed for choosing samples.", "N", min=0)] = 0,
    self_test: Annotated[
        bool,
        flag(
            "--self-test/--no-self-test", "gptq: compare the first layer with rounding to nearest."
        ),
    ] = True,
    device: Annotated[
        str, option("gptq: auto, cpu, cuda or cuda:1; auto: a GPU if available.", "NAME")
    ] = "auto",
    layers: common.LayersOption = "",
    reading: Reading = USUAL,
    mtp: common.MtpOption = True,
    max_shard_size: common.ShardSizeOption = "5GB",
    threads: common.ThreadsOption = 0,
    max_memory: Annotated[str, option("rtn: memory limit.", "SIZE")] = "8GiB",
    max_gpu_memory: Annotated[str, option("gptq: GPU memory limit.", "SIZE")] = "",
    max_cpu_memory: Annotated[
        str,
        option(
            "gptq: CPU memory limit of calibration; what samples need beyond it goes to disk.",
            "SIZE",
        ),
    ] = "",
    verify: common.VerifyOption = True,
    requantize: common.RequantizeOption = False,
    overwrite: common.OverwriteOption = False,
    finalize: common.FinalizeOption = False,
    ray: RayOption = None,
    ray_scratch: RayScratchOption = None,
    dry_run: common.DryRunOption = False,
    progress: common.ProgressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Quantize the routed experts of a checkpoint for GPUs, into a compressed-tensors format.

    All other weights stay unquantized. Run the same command again to continue an interrupted run.

    Example: ktconv quantize-gpu Qwen/Qwen3-30B-A3B qwen3-w4a16 --method rtn --scheme W4A16
    """
    with errors_shown(as_json, common.MODEL_HINTS, progress):
        from ktconv.quantize.encoded.request import Request
        from ktconv.quantize.llm_compressor.run import prepare, quantize_gpu
        from ktconv.targets.encoded.module_classes import class_lines
        from ktconv.targets.encoded.scheme import group_size_of
        from ktconv.targets.encoded.target import Calibration, Options

        calibrated = method == "gptq"
        _refuse_options_of("rtn" if calibrated else "gptq", given_options(context))
        calibration = Calibration(dataset, split, samples, max_seq_len, seed) if dataset else None
        options = Options(
            method=method,
            scheme=scheme,
            group_size=group_size_of(scheme) if group_size is None else group_size,
            mtp=mtp,
            requantize=requantize,
            scale=scale,
            max_shard_size=parse_size(max_shard_size, "--max-shard-size"),
            calibration=calibration if calibrated else None,
            dampening=dampening if calibrated else None,
        )
        request = Request(
            model=reading.source(model, headers_only=dry_run, output=output),
            output=output,
            options=options,
            layers=parse_ranges(layers, "--layers") if layers else None,
            experts=experts,
            device=device,
            threads=threads or None,
            max_memory=parse_size(max_memory, "--max-memory"),
            max_gpu_memory=_limit(max_gpu_memory, "--max-gpu-memory"),
            max_cpu_memory=_limit(max_cpu_memory, "--max-cpu-memory"),
            self_test=self_test,
            verify=verify,
            overwrite=overwrite,
            finalize=finalize,
        )
        cluster = on_cluster(
            ray, ray_scratch, request, reading.cache_dir, quantize_gpu, there="quantize_gpu_on"
        )
        with cluster as (request, job):
            preflight = prepare(request)
            facts = {"classes": [asdict(count) for count in preflight.classes]}
            lines = class_lines(preflight.classes)
            job = partial(job, notify=notify)
            common.convert(request, preflight, job, dry_run, as_json, facts=facts, lines=lines)


_OPTIONS_OF: dict[GpuMethod, set[str]] = {
    "rtn": {"--max-memory", "--scale", "--requantize"},
    "gptq": {
        "--dataset", "--split", "--samples", "--max-seq-len", "--dampening", "--seed",
        "--self-test", "--max-gpu-memory", "--max-cpu-memory",
    },
}  # fmt: skip


def _refuse_options_of(other: GpuMethod, given: frozenset[str]) -> None:
    """UsageError for an option that belongs to the other method."""
    if wrong := sorted(given & _OPTIONS_OF[other]):
        limit = "; the limit for gptq is --max-cpu-memory" if other == "rtn" else ""
        raise UsageError(
            f"{wrong[0]} belongs to --method {other}",
            f"add --method {other}, or omit it{limit}",
        )


def _limit(text: str, option: str) -> int | None:
    return parse_size(text, option) if text else None
