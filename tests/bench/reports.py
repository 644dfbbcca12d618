"""Rows and reports with made-up figures, and a checker of JSON against our schema."""

from __future__ import annotations

import json
from typing import Any

from helpers.paths import DOCS

from ktconv.bench.limits import Limits
from ktconv.bench.presets import Shape
from ktconv.bench.rows import Case, Errors, Row, Sample, judge
from ktconv.bench.run import Report

SCHEMA, PACK_SCHEMA, SFT_SCHEMA = (
    json.loads((DOCS / f"{name}.schema.json").read_text(encoding="utf-8"))
    for name in ("bench", "bench-pack", "bench-sft")
)
SHAPE = Shape("256,128,16,4", 256, 128, 16, 4)
EXPERT_BYTES = 100_000
LIMITS = Limits(threads=2, isa="avx512", read_gb_s=10.0, int8_gops=500.0, bf16_gflops=200.0)
TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def case(**changes: Any) -> Case:
    fields = {
        "engine": "ktconv",
        "method": "int4",
        "unit": "int8",
        "shape": SHAPE,
        "routing": "balanced",
        "tokens": 3,
        "threads": LIMITS.threads,
        "isa": LIMITS.isa,
        "parts": 1,
        "expert_bytes": EXPERT_BYTES,
        "in_cache": False,
    }
    return Case(**{**fields, **changes})


def row(seconds: float = 1e-4, **changes: Any) -> Row:
    sample = Sample((seconds,) * 5, pairs=12.0, distinct=8.0)
    return judge(case(**changes), sample, LIMITS, LIMITS, Errors(0.01, 0.1, 0.001))


def report(*rows: Row) -> Report[Row]:
    return Report({"cpu": "a CPU"}, [LIMITS], list(rows))


def problems(value: Any, schema: dict[str, Any], where: str = "$") -> list[str]:
    """What is wrong with `value`, for the part of JSON Schema that ours uses."""
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        return [f"{where} is {value!r}, not {kinds}"]
    found = []
    if "const" in schema and value != schema["const"]:
        found.append(f"{where} is {value!r}")
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{where} is {value!r}")
    if isinstance(value, dict):
        found += [
            f"{where} lacks {name}" for name in schema.get("required", ()) if name not in value
        ]
        known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        for name, item in value.items():
            found += problems(item, known.get(name, others), f"{where}.{name}")
    if isinstance(value, list):
        for index, item in enumerate(value):
            found += problems(item, schema.get("items", {}), f"{where}[{index}]")
    return found


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, TYPES[kind])
