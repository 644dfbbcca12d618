"""The formats of quantize-cpu that are checkpoints or GGUF files: options, turned into requests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ktconv.cli import options as common
from ktconv.cli.mix import Mix
from ktconv.cli.ray import on_cluster
from ktconv.errors import UsageError
from ktconv.formats import output_formats
from ktconv.formats.gguf import GGUF_FORMATS
from ktconv.formats.specs import names_in, spec_of

# As encoded.scheme.names_of; a test compares them.
ENCODED_METHODS = tuple(one for one in names_in("quantize-cpu") if one not in output_formats())
INTEGERS = tuple(one for one in ENCODED_METHODS if spec_of(one, "quantize-cpu").is_int)


def encode_experts(
    method: str | Mix,
    scale: Literal["amax", "search"] | None,
    request: Mapping[str, Any],
    options: Mapping[str, Any],
    experts: Path | None,
    cluster: tuple[str | None, Path | None],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Run or plan it. `method`: its name, or what says it of each matrix; `request` and `options`:
    fields of those; `cluster`: --ray and --ray-scratch."""
    from functools import partial

    from msgspec.structs import asdict

    from ktconv.cli.output import notify
    from ktconv.quantize.encoded.mix import method_facts, method_lines
    from ktconv.quantize.encoded.request import Request
    from ktconv.quantize.encoded.run import encode, prepare
    from ktconv.targets.encoded.module_classes import class_lines
    from ktconv.targets.encoded.scheme import MIXED, group_size_of
    from ktconv.targets.encoded.target import Options

    name = MIXED.name if isinstance(method, Mix) else method
    rule = scale or ("search" if name in (MIXED.name, *INTEGERS) else "amax")
    chosen = Options(scheme=name, group_size=group_size_of(name), scale=rule, **options)
    wanted = Request(options=chosen, experts=experts, **request)
    if isinstance(method, Mix):
        wanted = method.settled(wanted)
    with on_cluster(*cluster, wanted, encode) as (wanted, job):
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


GGUF_METHODS = tuple(GGUF_FORMATS)


def convert_to_gguf(
    request: Mapping[str, Any],
    options: Mapping[str, Any],
    importance: str | None,
    beside: Path | None,
    cluster: tuple[str | None, Path | None],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Run or plan it. `request` and `options`: fields of those; `cluster`: --ray and
    --ray-scratch."""
    from ktconv.quantize.gguf.run import Request, prepare, to_gguf
    from ktconv.targets.gguf.target import Options

    if importance == "weights":
        raise UsageError(
            "--importance weights belongs to --method int4 and int8",
            "give a file of ktconv stats --importance, or an imatrix of llama.cpp",
        )
    wanted = Request(
        **request,
        options=Options(**options),
        importance=None if importance is None else Path(importance),
        beside=beside,
    )
    with on_cluster(*cluster, wanted, to_gguf) as (wanted, job):
        common.convert(wanted, prepare(wanted), job, dry_run, as_json)
