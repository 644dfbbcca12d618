"""The head of the page: what was verified, how far, and whether it holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ktconv.verify.report.failures import failure_count
from ktconv.verify.report.html import escape, facts, number, show, show_id, show_path, show_share
from ktconv.verify.report.parts import LEVELS, TONES, banner, plural

TITLES = {
    "pass": "Verification passed",
    "fail": "Verification failed",
    "skip": "Verification without a verdict",
}


def tone_of(result: Mapping[str, Any]) -> str:
    """Passed only if the result says so and holds no failure."""
    passed = result.get("passed")
    if failure_count(result) or (passed is not None and passed is not True):
        return "fail"
    return "pass" if passed is True else "skip"


def name_of(path: Any) -> str:
    return str(path).rstrip("/").rpartition("/")[2] if path else "no output"


def verdict(result: Mapping[str, Any]) -> str:
    tone, count = tone_of(result), failure_count(result)
    level = result.get("level")
    asked = f"Level <b>{escape(level)}</b>" if level else "Level not stated"
    words = f"{asked} · {plural(count, 'failure')}"
    sample = number(result.get("sample"))
    if sample is not None and sample < 1:
        words += f" · a sample of {show_share(sample)}, not everything"
    seconds = number(result.get("seconds"))
    if seconds is not None:
        words += f" · {_duration(seconds)}"
    pairs = [
        ("output", show_path(result.get("output"))),
        ("source", show_path(result.get("source"))),
        ("method", show(result.get("method"))),
        *_shape(result),
        ("sample", show_share(result.get("sample"))),
        ("seed", show_id(result.get("seed"))),
    ]
    levels = "".join(_level(result, level) for level in LEVELS)
    inside = f'<ol class="levels">\n{levels}</ol>\n{facts(pairs)}'
    return banner(tone, TITLES[tone], words, inside)


def _shape(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What weights for CPUs or GPUs have beside a method."""
    if "scheme" not in result:
        return [("NUMA parts", show(result.get("numa")))]
    size = result.get("group_size")
    groups = "one scale per row" if size is None else show(size)
    return [("scheme", show(result.get("scheme"))), ("group size", groups)]


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds) or seconds < 60:
        return f"{show(float(f'{seconds:.3g}'))} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _level(result: Mapping[str, Any], level: str) -> str:
    section = result.get(level)
    if not isinstance(section, Mapping):
        return f'<li class="skip"><b>{level}</b><span>not run</span></li>\n'
    passed = section.get("passed")
    tone = TONES.get(passed, "skip") if isinstance(passed, bool) else "skip"
    word = {"pass": "✓ passed", "fail": "✗ failed", "skip": "no verdict"}[tone]
    return (
        f'<li class="{tone}" title="{LEVELS[level]}"><b><a href="#{level}">{level}</a></b>'
        f"<span>{word}</span></li>\n"
    )
