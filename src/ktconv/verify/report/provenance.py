"""Where the conversion and the verification were made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktconv.verify.report.html import escape, facts, mapping, show, show_id
from ktconv.verify.report.parts import as_section, plural

_MAX_FACTS = 80
_MAX_ENTRIES = 24


def provenance_section(result: Mapping[str, Any]) -> str:
    provenance = mapping(result.get("provenance"))
    if not provenance:
        return ""
    parts = []
    for name, value in provenance.items():
        title = {"manifest": "The conversion’s manifest", "machine": "This machine"}.get(
            name, escape(name)
        )
        parts.append(f"<h3>{title}</h3>\n")
        if value is None:
            parts.append('<p class="soft">There is none.</p>\n')
            continue
        pairs = _flat("", value)
        parts.append(facts(pairs[:_MAX_FACTS]))
        if len(pairs) > _MAX_FACTS:
            parts.append(f'<p class="soft">and {len(pairs) - _MAX_FACTS:,} more</p>\n')
    return as_section("provenance", "Provenance", "", "".join(parts))


def _flat(name: str, value: Any, depth: int = 0) -> list[tuple[str, str]]:
    """Facts one below another, a.b for what is nested; long lists become their length."""
    if isinstance(value, Mapping) and value and depth < 4 and len(value) <= _MAX_ENTRIES:
        return [
            pair
            for inner, content in value.items()
            for pair in _flat(f"{name}.{inner}" if name else str(inner), content, depth + 1)
        ]
    if isinstance(value, (Mapping, list, tuple)):
        if len(value) > _MAX_ENTRIES or any(isinstance(item, (Mapping, list)) for item in value):
            return [(name, f'<span class="soft">{plural(len(value), "value")}</span>')]
        return [(name, ", ".join(show_id(item) for item in value) if value else show([*value]))]
    return [(name, show_id(value))]
