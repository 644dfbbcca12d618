"""`ktconv plan`: options as a request."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from ktconv.cli.exits import errors_shown
from ktconv.cli.output import JsonOption, notify, print_result
from ktconv.cli.parsing import MOST_PARTS, argument, choice, flag, option
from ktconv.cli.sources import USUAL, Reading, reads_source
from ktconv.system.units import parse_size

PlacementName = Literal["linear", "round_robin", "balanced"]  # as plan.request.PlacementName


@reads_source("download", "cache_dir")
def plan(
    model: Annotated[
        str, argument("A checkpoint, GGUF file, hub id, or output of quantize-cpu.", "MODEL")
    ],
    ep: Annotated[
        int, option("Share experts out over N GPUs, or groups of --tp.", "N", min=1, max=4096)
    ] = 1,
    tp: Annotated[
        int, option("Cut each expert into N parts, one for each GPU.", "N", min=1, max=4096)
    ] = 1,
    placement: Annotated[
        PlacementName | None,
        choice(PlacementName, "How --ep shares out; default: linear, with copies balanced."),
    ] = None,
    redundant: Annotated[
        int, option("Copies of busy experts in each layer, for balanced.", "N", min=0, max=65536)
    ] = 0,
    nodes: Annotated[
        int, option("Machines of --ep, among which balanced keeps groups together.", "N", min=1)
    ] = 1,
    load: Annotated[
        Path | None, option("How often experts are used: a file of ktconv stats.", "FILE")
    ] = None,
    gpu_memory: Annotated[
        str, option("Memory for weights on each GPU: keep as many hot experts as fit.", "SIZE")
    ] = "",
    hot: Annotated[
        str | None, option("Keep this many of the most used experts on GPUs, or 20%.", "N")
    ] = None,
    per_layer: Annotated[
        bool, flag("--per-layer", "Choose hot experts in each layer, not among all.")
    ] = False,
    method: Annotated[str | None, option("Weight format on CPUs; default: int4.", "NAME")] = None,
    numa: Annotated[
        int, option("NUMA parts; 0: as many as this machine has nodes.", "N", min=0, max=MOST_PARTS)
    ] = 0,
    reading: Reading = USUAL,
    write: Annotated[
        Path | None,
        option("Write the experts on GPUs, for --experts and --exclude-experts.", "FILE"),
    ] = None,
    plot: Annotated[
        Path | None, option("Draw the load of ranks and experts, before and after.", "FILE")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Plan which GPUs and NUMA nodes hold which experts; only headers are read.

    Exit code 2: what was asked for is impossible, for example a cut through a group of weights.

    Example: ktconv plan Qwen/Qwen3-30B-A3B --ep 8 --redundant 8 --load counts.json
    """
    with errors_shown(as_json):
        from ktconv.plan.command import run
        from ktconv.plan.request import PlanRequest

        request = PlanRequest(
            model=reading.source(model, headers_only=True),
            ep=ep,
            tp=tp,
            placement=placement,
            redundant=redundant,
            nodes=nodes,
            load=load,
            gpu_memory=parse_size(gpu_memory, "--gpu-memory") if gpu_memory else None,
            hot=hot,
            per_layer=per_layer,
            method=method,
            numa=numa,
            write=write,
            plot=plot,
        )
        facts, lines = run(request, notify)
        print_result(as_json, facts, lambda: lines)
