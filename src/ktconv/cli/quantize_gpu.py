"""`ktconv quantize-gpu`: options of both methods, and what it prints in addition."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import click
from msgspec.structs import asdict

from ktconv.cli import options as common
from ktconv.cli.conflicts import Conflict, belongs, refuse_conflicts
from ktconv.cli.exits import errors_shown
from ktconv.cli.help import ACCURACY, ADVANCED, FORMAT, OUTPUT
from ktconv.cli.output import JsonOption, notify
from ktconv.cli.parameters import choice, flag, option
from ktconv.cli.ray import RAY_CONFLICTS, RayOption, RayScratchOption, on_cluster
from ktconv.cli.sources import USUAL, Reading, reads_source
from ktconv.system.units import parse_ranges, parse_size

ScaleRule = Literal["amax", "search"]  # as in target.py; a test compares them
ExpertLayout = Literal["numbered", "stacked", "stacked-flat"]  # as stacking.LAYOUTS
GpuMethod = Literal["rtn", "gptq"]  # as llm_compressor.run.METHODS
# As encoded.scheme.names_of; a test compares them.
Scheme = Literal["W4A16", "W8A16", "FP8_BLOCK", "FP8_DYNAMIC", "MXFP4A16", "MXFP8", "NVFP4A16"]

_RTN, _GPTQ = "--algorithm rtn", "--algorithm gptq"
CONFLICTS = (
    *belongs(
        ["--max-memory"], _RTN, f"add {_RTN}, or omit it; the limit for gptq is --max-cpu-memory",
        when="--algorithm=gptq",
    ),
    *belongs(
        ["--requantize", "--scale"], _RTN, f"add {_RTN}, or omit it", when="--algorithm=gptq"
    ),
    *belongs(
        [
            "--dampening", "--dataset", "--max-cpu-memory", "--max-gpu-memory", "--max-seq-len",
            "--samples", "--seed", "--self-test", "--split",
        ],
        _GPTQ, f"add {_GPTQ}, or omit it", when="--algorithm=rtn",
    ),
    Conflict(
        "--expert-layout=stacked-flat --algorithm=gptq",
        "--expert-layout stacked-flat does not go with --algorithm gptq",
        "use --expert-layout stacked, or --algorithm rtn",
    ),
    *(
        Conflict(
            f"--expert-layout={layout} --experts",
            f"--expert-layout {layout} has all experts of a layer in a tensor, in the order of "
            "their numbers, and --experts chooses some",
            "omit one of them, or use --expert-layout numbered",
        )
        for layout in ("stacked", "stacked-flat")
    ),
    *RAY_CONFLICTS,
)  # fmt: skip


@reads_source("tower")
def quantize_gpu_command(
    context: click.Context,
    model: common.ModelArgument,
    output: common.OutputArgument,
    algorithm: Annotated[
        GpuMethod,
        choice(
            GpuMethod,
            "Way to round weights.",
            "--algorithm",
            "--method",
            panel=FORMAT,
            detail="- rtn: to the nearest; needs no data, GPU or torch\n- gptq: by GPTQ of "
            "llm-compressor, calibrated on --dataset\n\n`--method` is the old name of this "
            "option.",
        ),
    ] = "rtn",
    scheme: Annotated[
        Scheme,
        choice(
            Scheme,
            "Weight format, as compressed-tensors calls it.",
            metavar="SCHEME",
            panel=FORMAT,
            detail="- W4A16, W8A16: integers of 4 or 8 bits, symmetric; activations stay in 16 "
            "bits\n- FP8_BLOCK: E4M3 with a scale for 128 x 128 weights; engines round activations "
            "to FP8 in groups of 128\n- FP8_DYNAMIC: E4M3 with a scale for each row; engines round "
            "activations to FP8 by token\n- MXFP4A16: E2M1 in groups of 32 with a power of two; "
            "activations stay in 16 bits\n- MXFP8: E4M3 in groups of 32 with a power of two; "
            "engines round activations likewise\n- NVFP4A16: E2M1 in groups of 16 with an E4M3 "
            "scale and a second one for the matrix, which gate and up of an expert share\n\nThe "
            "names of quantize-cpu are known too: rawint4 is W4A16 with --group-size 32. GPTQ "
            "takes W4A16 and W8A16.",
        ),
    ] = "W4A16",
    group_size: Annotated[
        int | None,
        option(
            "Weights of a row that share a scale.",
            "N",
            panel=FORMAT,
            detail="W4A16 and W8A16 have 32, 64, 128 (the default), or -1 for the whole row. It "
            "must divide the columns of gate, up and down; a tensor-parallel engine divides the "
            "columns of down further. kt-kernel's RAWINT4 needs 32.",
        ),
    ] = None,
    scale: Annotated[
        ScaleRule,
        choice(
            ScaleRule,
            "Rule for the scales of integers (rtn).",
            panel=ACCURACY,
            detail="- amax: from the largest weights, which gives the bits of llm-compressor\n"
            "- search: for the smallest squared error, which is about 9 % smaller: "
            "docs/formats.md, 10.2",
        ),
    ] = "amax",
    expert_layout: Annotated[
        ExpertLayout,
        choice(
            ExpertLayout,
            "Tensors of each expert, or of all of a layer.",
            "--expert-layout",
            metavar="LAYOUT",
            panel=FORMAT,
            detail="- numbered: tensors of each expert, as 5.gate_proj.weight_packed; every engine "
            "reads them that reads the format\n- stacked: gate_up_proj.weight_packed [E, ...], as "
            "llm-compressor stacks experts\n- stacked-flat: gate_up_proj_packed [E, ...], as vLLM "
            "reads stacked experts\n\nThe numbers are the same. Which engine reads which: "
            "docs/quantize-gpu.md.",
        ),
    ] = "numbered",
    experts: Annotated[
        Path | None,
        option(
            "Quantize only the experts in this file.",
            "FILE",
            panel=OUTPUT,
            detail="docs/hot-experts.md.",
        ),
    ] = None,
    dataset: Annotated[
        str,
        option(
            "gptq: FILE.jsonl, FILE.txt or NAME[:CONFIG].",
            "TEXT",
            panel=ACCURACY,
            detail="The calibration samples: docs/quantize-gpu.md#samples.",
        ),
    ] = "",
    split: Annotated[
        str, option("gptq: split of a named dataset.", "NAME", panel=ADVANCED)
    ] = "train",
    samples: Annotated[
        int, option("gptq: number of calibration samples.", "N", panel=ACCURACY, min=1)
    ] = 512,
    max_seq_len: Annotated[
        int,
        option("gptq: maximum tokens per sample.", "N", "--max-seq-len", panel=ACCURACY, min=1),
    ] = 2048,
    dampening: Annotated[
        float,
        option(
            "gptq: dampening of the Hessian.",
            "F",
            panel=ADVANCED,
            detail="Fraction of the Hessian's mean diagonal that is added to its diagonal. Larger "
            "values stay closer to rounding to nearest, which helps with few samples.",
        ),
    ] = 0.1,
    seed: Annotated[
        int, option("gptq: seed for choosing samples.", "N", panel=ADVANCED, min=0)
    ] = 0,
    self_test: Annotated[
        bool,
        flag(
            "--self-test/--no-self-test",
            "gptq: test the first layer against rtn.",
            ADVANCED,
            "The run ends if the outputs of its experts are further from the source's than with "
            "rounding to nearest.",
        ),
    ] = True,
    device: Annotated[
        str,
        option(
            "gptq: auto, cpu, cuda or cuda:1.",
            "NAME",
            detail="auto: a GPU if there is one.",
        ),
    ] = "auto",
    layers: common.LayersOption = "",
    reading: Reading = USUAL,
    mtp: common.MtpOption = True,
    max_shard_size: common.ShardSizeOption = "5GB",
    threads: common.ThreadsOption = 0,
    max_memory: Annotated[str, option("rtn: memory limit.", "SIZE")] = "8GiB",
    max_gpu_memory: Annotated[
        str,
        option(
            "gptq: GPU memory limit.",
            "SIZE",
            panel=ADVANCED,
            detail="Limits what PyTorch takes: docs/quantize-gpu.md#memory.",
        ),
    ] = "",
    max_cpu_memory: Annotated[
        str,
        option(
            "gptq: CPU memory limit of calibration.",
            "SIZE",
            panel=ADVANCED,
            detail="Samples go to disk beyond it. The default is what is free: "
            "docs/quantize-gpu.md#memory.",
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
    """Quantize the routed experts of a checkpoint for GPUs, as compressed-tensors does.
    All other weights stay unquantized. Run the same command again to continue an interrupted run.

    Example: ktconv quantize-gpu Qwen/Qwen3-30B-A3B qwen3-w4a16 --scheme W4A16
    """
    with errors_shown(as_json, common.MODEL_HINTS, progress):
        from ktconv.quantize.encoded.request import Request
        from ktconv.quantize.llm_compressor.run import prepare, quantize_gpu
        from ktconv.targets.encoded.module_classes import class_lines
        from ktconv.targets.encoded.scheme import group_size_of
        from ktconv.targets.encoded.target import Calibration, Options

        refuse_conflicts(context, CONFLICTS)
        calibrated = algorithm == "gptq"
        calibration = Calibration(dataset, split, samples, max_seq_len, seed) if dataset else None
        options = Options(
            method=algorithm,
            scheme=scheme,
            group_size=group_size_of(scheme) if group_size is None else group_size,
            mtp=mtp,
            requantize=requantize,
            scale=scale,
            expert_layout=expert_layout,
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
        with on_cluster(ray, ray_scratch, request, quantize_gpu) as (request, job):
            preflight = prepare(request)
            facts = {"classes": [asdict(count) for count in preflight.classes]}
            lines = class_lines(preflight.classes)
            job = partial(job, notify=notify)
            common.convert(request, preflight, job, dry_run, as_json, facts=facts, lines=lines)


def _limit(text: str, option: str) -> int | None:
    return parse_size(text, option) if text else None
