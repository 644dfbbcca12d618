"""Requests of conversions as JSON values, for nodes that plan the same conversion."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import asdict, replace

from ktconv.conversion.records import run_record
from ktconv.conversion.run import BaseRequest, Conversion
from ktconv.source import ModelSource
from ktconv.system import machine
from ktconv.writer.journal import Record

SPARE_MEMORY = 512 << 20  # of a Ray worker, in addition to what the plan counts for the work
_PATH = "path"  # key of a path's absolute form


def request_record(request: BaseRequest) -> Record:
    """Record of a request, which `request_of` reads. TypeError for options that are no plain
    values."""
    given = asdict(request)
    options, _ = given.pop("options"), given.pop("model")
    usual = type(options)()
    chosen = {name: one for name, one in asdict(options).items() if one != getattr(usual, name)}
    return {"options": encode(chosen), **encode(given), "model": source_record(request.source)}


def request_of(record: Mapping[str, Any], request: type[Any], options: type[Any]) -> Any:
    """The request of this class, with options of that one."""
    given = {name: decode(value) for name, value in record.items()}
    return request(
        **{**given, "options": options(**given["options"]), "model": ModelSource(**given["model"])}
    )


def source_record(source: ModelSource) -> Record:
    """A source as another machine understands it, for `ModelSource(**decode(record))`. A cache is
    of this machine."""
    given = asdict(replace(source.portable(), cache=None))
    return {name: encode(one) for name, one in given.items()}


def encode(value: Any) -> Any:
    """A plain value as JSON values, paths made absolute; `decode` is the opposite. TypeError."""
    if isinstance(value, Path):
        return {_PATH: str(value.absolute())}
    if isinstance(value, Mapping):
        return {str(name): encode(one) for name, one in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [encode(one) for one in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} is no plain value")


def decode(value: Any) -> Any:
    """The value that `encode` was given, with lists for tuples."""
    if isinstance(value, dict):
        if value.keys() == {_PATH}:
            return Path(value[_PATH])
        return {name: decode(one) for name, one in value.items()}
    return value


def on_a_node(request: Any, output: Path, threads: int) -> Any:
    """The request as one unit of it is converted: the whole plan, whose state the driver keeps."""
    return replace(
        request,
        output=output,
        threads=threads,
        layers=None,
        overwrite=False,
        finalize=False,
        max_memory=request.max_memory + SPARE_MEMORY,
    )


def job_memory(peak: int) -> int:
    """Bytes of a node's process, from the planned peak of this one, which can be much larger than a
    worker before it begins: a notebook, or a program with a model in memory."""
    return max(peak - machine.resident_memory(), 0) + SPARE_MEMORY


def digest(conversion: Conversion) -> str:
    """Checksum of every input that determines the output bytes; driver and workers compare it."""
    record = run_record(conversion.plan) | conversion.origin()
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
