"""The verification's section at the end of a model card, between two marks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktconv.errors import OutputError, UsageError
from ktconv.source.side_files import CARD
from ktconv.system.files import translated, write_durably
from ktconv.system.text import printable
from ktconv.verify.text import levels_in_words

BEGIN, END = "<!-- ktconv verify: begin -->", "<!-- ktconv verify: end -->"
_SECTION = re.compile(rf"\n*{re.escape(BEGIN)}.*?{re.escape(END)}\n?", re.DOTALL)
_LINES = {"layers": 2}  # others: the first one


def check_card(output: Path) -> None:
    """An error for an output whose card cannot get a section, before an hour of work."""
    _without_section(output)


def write_card(output: Path, facts: Mapping[str, Any]) -> None:
    """The card of `output` with the section of these facts (`verify --json`) in place of an earlier
    one; without any where a check failed."""
    text = _without_section(output)
    if facts["passed"]:
        text += f"\n{BEGIN}\n{section(facts)}{END}\n"
    write_durably(output / CARD, text.encode(), output)


def section(facts: Mapping[str, Any]) -> str:
    """Markdown; of files only names."""
    facts = dict(facts)
    if model := facts.get("model"):
        facts["model"] = {**model, "text": printable(Path(str(model["text"])).name)}
    part = "" if facts["sample"] == 1 else f", a sample of {facts['sample']:g} of the experts"
    lines = [
        f"- {level}: {line}"
        for level, found in levels_in_words(facts)
        if level != "coverage"  # names another directory
        for line in found[: _LINES.get(level, 1)]
    ]
    version = facts["ktconv_version"]
    head = f"Passed `ktconv verify --level {facts['level']}` of ktconv {version}{part}:"
    return "\n".join(["## Verified", "", head, "", *lines, ""])


def _without_section(output: Path) -> str:
    """The card's text without the section of an earlier verification."""
    card = output / CARD
    if not card.is_file():
        raise UsageError(
            f"--card adds figures to {card}, which is not there",
            "omit --card: only conversions of ktconv have a model card",
        )
    with translated("read", card):
        data = card.read_bytes()
    try:
        text = _SECTION.sub("", data.decode()).rstrip("\n") + "\n"
    except UnicodeDecodeError:
        raise OutputError(f"{card} is not UTF-8", "restore it, or omit --card") from None
    if BEGIN in text or END in text:
        raise OutputError(
            f"{card} has one of the marks {BEGIN} and {END} without the other", "remove it"
        )
    return text
