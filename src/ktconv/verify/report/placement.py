"""How a serving engine would load the experts and share them out among GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktconv.verify.report.html import Column, key, records, show, show_id, table, tiles
from ktconv.verify.report.parts import as_section, pill


def mapping_section(section: Mapping[str, Any]) -> str:
    if not section:
        return ""
    body = tiles(
        [
            ("experts", show(section.get("experts")), ""),
            ("slots filled", show(section.get("slots")), "each by one tensor"),
        ]
    )
    for name, title in _KINDS:
        if rows := records(section.get(name)):
            body += f"<h3>{title}</h3>\n" + table(_COLUMNS, rows, title.lower())
    lead = "Whether engines can load the experts, and on how many GPUs."
    return as_section("mapping", "Mapping", lead, body, pill(section))


_KINDS = (("tensor_parallel", "Tensor parallel"), ("expert_parallel", "Expert parallel"))
_COLUMNS = (
    Column("GPUs", key("size"), show_id),
    Column("possible", key("possible"), text=True),
    Column("why not", key("reason"), text=True),
    Column("asked for", key("demanded"), text=True),
)
