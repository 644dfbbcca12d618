"""`ktconv prune`: options as a request."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import click

from ktconv.cli import options as common
from ktconv.cli.conflicts import one_of, refuse_conflicts
from ktconv.cli.exits import errors_shown
from ktconv.cli.help import ADVANCED, OUTPUT, SELECTION
from ktconv.cli.output import JsonOption, notify, print_result
from ktconv.cli.parameters import choice, flag, option
from ktconv.cli.sources import USUAL, Reading, reads_source
from ktconv.errors import UsageError
from ktconv.system.units import parse_size

Measure = Literal["saliency", "frequency", "router_weight", "output_norm"]  # as stats.scores
PruneEngine = Literal["ktconv", "vllm", "sglang", "transformers", "kt-kernel"]
CONFLICTS = (
    *one_of("--keep", "--ratio", "--target-size"),
    *one_of("--overwrite", "--finalize", hint="use one of them"),
)


@reads_source("map", "tower", "adapter")
def prune_command(
    context: click.Context,
    model: common.ModelArgument,
    output: common.OptionalOutputArgument = None,
    reading: Reading = USUAL,
    scores: Annotated[
        Path | None,
        option(
            "Scores of the experts.",
            "FILE",
            panel=SELECTION,
            detail="A file of `ktconv stats MODEL --text FILE --scores FILE.json`, or another "
            "tool's ranking: docs/pruning.md.",
        ),
    ] = None,
    by: Annotated[
        Measure,
        choice(
            Measure,
            "Score by which experts are chosen.",
            "--by",
            panel=SELECTION,
            detail="- saliency: of REAP, the mean of router weight times output norm\n"
            "- frequency: the share of tokens\n- router_weight: its mean\n"
            "- output_norm: the mean 2-norm of outputs",
        ),
    ] = "saliency",
    keep: Annotated[
        int | None, option("Keep N experts of each layer.", "N", panel=SELECTION, min=1)
    ] = None,
    ratio: Annotated[
        float | None,
        option(
            "Drop this share of each layer's experts.",
            "R",
            panel=SELECTION,
            detail="Rounded down to whole experts, and to whole groups where the router chooses "
            "groups.",
        ),
    ] = None,
    target_size: Annotated[
        str | None,
        option(
            "Keep as many as fit into this size.",
            "SIZE",
            panel=SELECTION,
            detail="All weights count, in the encoding of the source. Each layer keeps the same "
            "number of experts.",
        ),
    ] = None,
    per_layer: Annotated[
        PruneEngine | None,
        choice(
            PruneEngine,
            "Choose among all layers together, for an engine.",
            metavar="ENGINE",
            panel=SELECTION,
            detail="Layers get different numbers of experts, by one threshold for all. Only "
            "ktconv's own runtime loads such a model.",
        ),
    ] = None,
    allow_few_tokens: Annotated[
        bool,
        flag(
            "--allow-few-tokens",
            "Use scores of a short text.",
            ADVANCED,
            "Scores of fewer than 100 tokens for each expert, on average in a layer, are refused "
            "otherwise.",
        ),
    ] = False,
    write: Annotated[
        Path | None,
        option(
            "Write which experts are kept.",
            "FILE.json",
            panel=OUTPUT,
            detail="The converting commands take it as --prune. OUTPUT may be left out then.",
        ),
    ] = None,
    max_shard_size: common.ShardSizeOption = "5GB",
    threads: common.CopyThreadsOption = 0,
    verify: common.VerifyOption = True,
    overwrite: common.OverwriteOption = False,
    finalize: common.FinalizeOption = False,
    dry_run: common.DryRunOption = False,
    progress: common.ProgressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Drop the experts that matter least, in the encoding of the source.
    The bytes of the others are copied. Run the same command again to continue an interrupted run.

    Example: ktconv prune Qwen/Qwen3-30B-A3B qwen3-96 --scores scores.json --keep 96
    """
    with errors_shown(as_json, common.MODEL_HINTS, progress):
        from ktconv.prune.choose import Choice
        from ktconv.prune.run import Request, kept_file, prepare, prune, select, write_kept
        from ktconv.targets.pruned import Options
        from ktconv.writer.option_files import check_written

        refuse_conflicts(context, CONFLICTS)
        if output is None and write is None and not dry_run:
            raise UsageError(
                "neither OUTPUT nor --write says what to write",
                "name a directory for the pruned checkpoint, or --write FILE",
            )
        source = reading.source(model, headers_only=dry_run or output is None, output=output)
        wanted = Choice(
            scores=scores,
            measure=by,
            keep=keep,
            ratio=ratio,
            target_size=parse_size(target_size, "--target-size") if target_size else None,
            per_layer=per_layer,
            allow_few_tokens=allow_few_tokens,
        )
        request = Request(
            model=source,
            output=output or Path(),
            options=Options(max_shard_size=parse_size(max_shard_size, "--max-shard-size")),
            choice=wanted,
            threads=threads or None,
            verify=verify,
            overwrite=overwrite,
            finalize=finalize,
        )
        if write is not None:
            check_written([kept_file(write)], [*source.files(), scores, output])
        if output is None:
            checkpoint, pruning, selection = select(request)
            notes = [] if selection is None else list(selection.notes)
            facts: dict[str, Any] = {
                "schema": 1,
                "model_type": checkpoint.config.model_type,
                "notes": notes,
                **({} if selection is None else selection.facts()),
            }
            if write is not None and not dry_run:
                write_kept(write, pruning)
            lines = [] if selection is None else list(selection.lines())
            print_result(as_json, facts, lambda: [*lines, *(f"note: {one}" for one in notes)])
            return
        preflight = prepare(request)
        chosen = preflight.selection
        common.convert(
            request,
            preflight,
            prune,
            dry_run,
            as_json,
            "Copied",
            facts={} if chosen is None else chosen.facts(),
            lines=[] if chosen is None else list(chosen.lines()),
        )
        if write is not None and not dry_run:
            assert preflight.plan.checkpoint.pruning is not None
            write_kept(write, preflight.plan.checkpoint.pruning)
            notify(f"wrote {write}")
