"""Computes what the page of several conversions shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ktconv.verify.report.scatter import Point, scatter_chart
from ktconv.verify.report.values import Column, Facts, finite, items, mapping, records, size_words

# Measures of errors, those that tell most first.
ERRORS = {
    "kl_mean": "KL divergence, mean, nats",
    "output_error": "relative error of layers' outputs, worst layer",
    "relative_rms_error": "relative RMS error of the weights",
}
_GB = 1e9


def named(row: Facts) -> Facts:
    """A row with its size in words, and its rates by columns."""
    rates = {f"rate {tokens}": rate for tokens, rate in mapping(row["tokens_per_s"]).items()}
    return Facts({**row, **rates, "size": size_words(row["bytes"])})


def columns(rows: Sequence[Facts]) -> list[Column]:
    """Columns of the table."""
    found: list[Column] = [
        ("conversion", "name", "text"),
        ("method", "method", "text"),
        ("size", "size", "text"),
        ("bytes", "bytes", "number"),
        ("bits per weight", "bits", "number"),
        ("weights: RMS error", "relative_rms_error", "error"),
        ("outputs: worst layer", "output_error", "error"),
        ("KL, mean", "kl_mean", "error"),
        ("perplexity", "perplexity_increase", "share"),
        ("same next token", "top1_agreement", "share"),
    ]
    found += [(f"tokens/s at {n}", f"rate {n}", "number") for n in _tokens(rows)]
    return found


def _tokens(rows: Sequence[Facts]) -> list[str]:
    return list(dict.fromkeys(str(n) for row in rows for n in mapping(row["tokens_per_s"])))


def deepest(rows: Sequence[Facts]) -> str | None:
    """The measure that all conversions have and that tells most."""
    mine = [row for row in rows if row["is_source"] is not True]
    return next(
        (name for name in ERRORS if mine and all(finite(row[name]) is not None for row in mine)),
        None,
    )


def errors_picture(rows: Sequence[Facts]) -> Any:
    """Error over size."""
    measure = deepest(rows)
    if measure is None:
        return None
    given = [
        Point(str(row["name"]), size / _GB, error)
        for row in rows
        if row["is_source"] is not True
        and (size := finite(row["bytes"])) is not None
        and (error := finite(row[measure])) is not None
    ]
    return scatter_chart(given, "size, GB", ERRORS[measure])


def speed_pictures(rows: Sequence[Facts]) -> list[tuple[str, Any]]:
    """Tokens/s over size, for each number of tokens."""
    found = []
    for tokens in _tokens(rows):
        given = [
            Point(str(row["name"]), size / _GB, rate, int(row["is_source"] is True))
            for row in rows
            if (size := finite(row["bytes"])) is not None
            and (rate := finite(mapping(row["tokens_per_s"])[tokens])) is not None
        ]
        chart = scatter_chart(given, "size, GB", "tokens/s", ["conversion", "source"])
        if chart is not None:
            found.append((tokens, chart))
    return found


def remarks(result: Facts) -> list[str]:
    """Failures, speeds that were not measured, and conversions that others make superfluous."""
    rows = records(result["rows"])
    names = {str(row["path"]): str(row["name"]) for row in rows}
    found = [f"{row['name']} failed: {one}" for row in rows for one in items(row["failures"])]
    found += [
        f"{row['name']}: speed not measured: {row['not_measured']}"
        for row in rows
        if row["not_measured"] is not None
    ]
    for path, other in mapping(result["dominated"]).items():
        mine, its = names.get(str(path), str(path)), names.get(str(other), str(other))
        found.append(f"{mine} is not smaller than {its}, and not nearer to the source")
    return found
