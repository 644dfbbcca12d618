"""`ktconv plan`: options as a request."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from ktconv.cli.exits import errors_shown
from ktconv.cli.help import CPUS, GPUS, HOT, OUTPUT
from ktconv.cli.output import JsonOption, notify, print_result
from ktconv.cli.parameters import MOST_PARTS, argument, choice, flag, option
from ktconv.cli.sources import USUAL, Reading, reads_source
from ktconv.system.units import parse_size

PlacementName = Literal["linear", "round_robin", "balanced"]  # as plan.request.PlacementName


@reads_source("download", "cache_dir")
def plan(
    model: Annotated[str, argument("A checkpoint, GGUF file, hub id or output.", "MODEL")],
    ep: Annotated[
        int,
        option(
            "Expert parallel: share experts out over N ranks.",
            "N",
            panel=GPUS,
            min=1,
            max=4096,
            detail="Each rank is a GPU, or a group of --tp GPUs, and holds whole experts.",
        ),
    ] = 1,
    tp: Annotated[
        int,
        option(
            "Tensor parallel: cut each expert into N parts.",
            "N",
            panel=GPUS,
            min=1,
            max=4096,
            detail="One part for each GPU of a rank.",
        ),
    ] = 1,
    placement: Annotated[
        PlacementName | None,
        choice(
            PlacementName,
            "Order in which --ep shares experts out.",
            panel=GPUS,
            metavar="KIND",
            detail="The default is linear, with copies or nodes balanced.\n\n- linear: neighbours "
            "together\n- round_robin: every N-th\n- balanced: by load, as EPLB does",
        ),
    ] = None,
    redundant: Annotated[
        int,
        option(
            "Copies of busy experts in each layer.",
            "N",
            panel=GPUS,
            min=0,
            max=65536,
            detail="Used by --placement balanced.",
        ),
    ] = 0,
    nodes: Annotated[
        int,
        option(
            "Machines that the ranks are on.",
            "N",
            panel=GPUS,
            min=1,
            detail="Used by --placement balanced: the groups among which a router chooses first "
            "stay on one machine.",
        ),
    ] = 1,
    load: Annotated[
        Path | None,
        option(
            "Counts of how often experts are used.",
            "FILE",
            panel=GPUS,
            detail="A file of `ktconv stats --json` or `--trace`. Without it all experts count the "
            "same.",
        ),
    ] = None,
    gpu_memory: Annotated[
        str,
        option(
            "Memory for weights on each GPU.",
            "SIZE",
            panel=HOT,
            detail="Keeps as many of the most used experts as fit, if --hot is not given.",
        ),
    ] = "",
    hot: Annotated[
        str | None,
        option(
            "Keep the N most used experts on GPUs, or 20%.",
            "N",
            panel=HOT,
            detail="Counted over all layers together.",
        ),
    ] = None,
    per_layer: Annotated[
        bool,
        flag("--per-layer", "Choose the same number in each layer.", HOT),
    ] = False,
    method: Annotated[
        str | None,
        option(
            "Weight format on CPUs; default: int4.",
            "METHOD",
            panel=CPUS,
            detail="A format of `ktconv bench --method`; the names of quantize-cpu, "
            "compressed-tensors and KTransformers are known too.",
        ),
    ] = None,
    numa: Annotated[
        int,
        option("NUMA parts; 0: one per NUMA node.", "N", panel=CPUS, min=0, max=MOST_PARTS),
    ] = 0,
    reading: Reading = USUAL,
    write: Annotated[
        Path | None,
        option(
            "Write the experts that are on GPUs.",
            "FILE",
            panel=OUTPUT,
            detail="Read by --experts and --exclude-experts: docs/hot-experts.md.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        option("Draw the load of ranks and experts.", "FILE", panel=OUTPUT),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Plan which GPUs and NUMA nodes hold which experts; only headers are read.
    What is impossible, such as a cut through a group of weights, is bad usage: exit code 2.

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
