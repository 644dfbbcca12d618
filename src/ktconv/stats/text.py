"""Counts and the chosen experts, as lines for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ktconv.stats.counts import Statistics
from ktconv.stats.request import StatsRequest

SHOWN_NEVER = 5  # experts that are named in a row of the table


def lines_of(statistics: Statistics, facts: dict[str, Any], request: StatsRequest) -> Iterator[str]:
    head = ("layer", "tokens", "most used", "least used", "hot", "take", "balance", "never used")
    rows = [head, *(_row(about) for about in facts["layers"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield (
        f"{_choice(request)}: {facts['hot_experts']} of {facts['experts']} experts take "
        f"{100 * facts['hot_share']:.1f} % of the routed tokens"
    )
    if request.hot_total is not None and (tied := statistics.tied(request.hot_total)):
        yield (
            f"not chosen, but used as often as the last of these: {tied}. sglang-kt "
            "may choose them instead; a different --hot-total avoids the tie"
        )


def _row(about: dict[str, Any]) -> tuple[str, ...]:
    most, least = (
        f"{one['expert']} ({100 * one['share']:.2f} %)"
        for one in (about["most_used"], about["least_used"])
    )
    never = about["never_used"]
    names = ", ".join(map(str, never[:SHOWN_NEVER]))
    more = f" and {len(never) - SHOWN_NEVER} more" if len(never) > SHOWN_NEVER else ""
    return (
        str(about["layer"]),
        str(about["tokens"]),
        most,
        least,
        f"{len(about['hot'])} of {about['experts']}",
        f"{100 * about['hot_share']:.1f} %",
        f"{about['balance']:.3f}",
        names + more if never else "none",
    )


def _choice(request: StatsRequest) -> str:
    """How the hot experts were chosen."""
    if request.hot is not None:
        return f"the {request.hot} hottest of each layer"
    if request.hot_total is not None:
        return f"the {request.hot_total} hottest of all layers"
    if request.hot_share is not None:
        return f"the fewest of each layer that take {100 * request.hot_share:g} %"
    return "the hottest quarter of each layer"
