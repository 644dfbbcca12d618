"""The methods of quantize-cpu that write GGUF files: options, turned into a request."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktconv.cli import options as common
from ktconv.cli.ray import on_cluster
from ktconv.errors import UsageError
from ktconv.formats.gguf import GGUF_FORMATS

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
    with on_cluster(*cluster, wanted, to_gguf, "quantize_gguf_on") as (wanted, job):
        common.convert(wanted, prepare(wanted), job, dry_run, as_json)
