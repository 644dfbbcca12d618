"""The formats of quantize-cpu that are checkpoints: options, turned into a request of `encode`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import typer

from ktconv.cli import options as common
from ktconv.cli.mix import Mix
from ktconv.cli.output import given_options
from ktconv.cli.ray import on_cluster
from ktconv.errors import UsageError
from ktconv.formats import output_formats
from ktconv.formats.specs import names_in, spec_of

# As encoded.scheme.names_of; a test compares them.
ENCODED_METHODS = tuple(one for one in names_in("quantize-cpu") if one not in output_formats())
_INTEGERS = tuple(one for one in ENCODED_METHODS if spec_of(one, "quantize-cpu").is_int)

# Options of packed experts, and why others have none.
_OF_PACKED = {
    "--numa": "KTransformers cuts these weights into NUMA parts when it loads them",
    "--layout": "these weights are shards with an index",
    "--importance": "its scales follow from the largest weights",
    "--calibrate": "its codes are the nearest",
    "--fold": "its weights are the model's own",
    "--save-backward": "KTransformers trains on int4 and int8 alone",
    "--compat": "the reference converter does not write it",
    "--estimate": "only errors of int4 and int8 are predicted",
}


def refuse_options_of_packed(context: typer.Context, method: str | Mix) -> None:
    """UsageError for an option of the methods int4 and int8."""
    given = given_options(context)
    if isinstance(method, Mix):
        allowed = {"--importance"} if method.chooses else set()
        for name in sorted(given & {"--method", *_OF_PACKED} - allowed):
            raise UsageError(f"{name} cannot be combined with {method.option}", f"omit {name}")
        return
    if "--scale" in given and method not in _INTEGERS:
        raise UsageError(
            f"--scale does not apply to --method {method}, whose rule for scales is fixed",
            "omit it",
        )
    for name in sorted(given & _OF_PACKED.keys()):
        raise UsageError(
            f"{name} does not apply to --method {method}: {_OF_PACKED[name]}",
            "omit it, or use --method int4 or int8",
        )


def encode_experts(
    method: str | Mix,
    scale: Literal["amax", "search"] | None,
    request: Mapping[str, Any],
    options: Mapping[str, Any],
    experts: Path | None,
    allow_partial: bool,
    cluster: tuple[str | None, Path | None, Path | None],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Run or plan it. `method`: its name, or what says it of each matrix; `request` and `options`:
    fields of those; `cluster`: --ray, --ray-scratch and --cache-dir."""
    from dataclasses import asdict
    from functools import partial

    from ktconv.cli.output import notify
    from ktconv.quantize.encoded.mix import method_facts, method_lines
    from ktconv.quantize.encoded.request import Request
    from ktconv.quantize.encoded.run import encode, prepare
    from ktconv.targets.encoded.module_classes import class_lines
    from ktconv.targets.encoded.scheme import MIXED, group_size_of
    from ktconv.targets.encoded.target import Options

    if (experts or request["exclude_experts"]) and not allow_partial:
        named = "--experts" if experts else "--exclude-experts"
        raise UsageError(
            "engines cannot load an output without all experts",
            f"omit {named}; or add --allow-partial to convert for ktconv's own runtime",
        )
    name = MIXED.name if isinstance(method, Mix) else method
    rule = scale or ("search" if name in (MIXED.name, *_INTEGERS) else "amax")
    chosen = Options(scheme=name, group_size=group_size_of(name), scale=rule, **options)
    wanted = Request(options=chosen, experts=experts, **request)
    if isinstance(method, Mix):
        wanted = method.settled(wanted)
    address, scratch, cache = cluster
    with on_cluster(address, scratch, wanted, cache, encode, "quantize_gpu_on") as (wanted, job):
        preflight = prepare(wanted)
        facts = {"classes": [asdict(count) for count in preflight.classes]}
        lines = class_lines(preflight.classes)
        if found := method_facts(preflight.plan):
            facts |= {"methods": found}
            lines += method_lines(found)
        if isinstance(method, Mix):
            facts |= method.facts
        job = partial(job, notify=notify)
        common.convert(wanted, preflight, job, dry_run, as_json, facts=facts, lines=lines)
