"""The result of a verification as one HTML page that needs nothing else.

The page holds its style and pictures, asks no network, reads without its script, and treats
every text of the result as hostile: tensor names and generated text come from anywhere. Its
content security policy lets no other script run even if an escape were forgotten.

Each section of the page is a file; `html` and `parts` are what they are made of, `charts` and
`heat` the pictures.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from ktconv.verify.report.charts import DEFINITIONS
from ktconv.verify.report.comparison import comparison_sections, comparison_title
from ktconv.verify.report.failures import failures_section, notes_section
from ktconv.verify.report.html import escape, mapping, show_id
from ktconv.verify.report.layers import by_layer_section, layers_section
from ktconv.verify.report.model import model_section
from ktconv.verify.report.placement import mapping_section
from ktconv.verify.report.provenance import provenance_section
from ktconv.verify.report.style import SCRIPT, STYLE
from ktconv.verify.report.verdict import TITLES, name_of, tone_of, verdict
from ktconv.verify.report.weights import structure_section, weights_section


def render_report(result: Mapping[str, Any]) -> str:
    """The page for what `ktconv verify --json` prints, of one conversion or of two compared.

    The same result gives the same page.
    """
    if result.get("kind") == "comparison":
        return _page(result, comparison_title(result), comparison_sections(result))
    title = f"{TITLES[tone_of(result)]}: {escape(name_of(result.get('output')))}"
    weights, layers = mapping(result.get("weights")), mapping(result.get("layers"))
    sections = [
        verdict(result),
        failures_section(result),
        notes_section(result),
        structure_section(mapping(result.get("structure"))),
        weights_section(weights),
        layers_section(layers),
        by_layer_section(weights, layers),
        model_section(mapping(result.get("model"))),
        mapping_section(mapping(result.get("mapping"))),
        provenance_section(result),
    ]
    return _page(result, title, sections)


def _page(result: Mapping[str, Any], title: str, sections: Sequence[str]) -> str:
    """Everything around the sections; `title` and sections are HTML."""
    version = f"ktconv {show_id(result['ktconv_version'])}" if result.get("ktconv_version") else ""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
{DEFINITIONS}<div class="top"><strong>ktconv verify</strong><span>{version}</span></div>
<main>
{"".join(sections)}</main>
<footer>Errors are relative and without a unit: 0.1 is 10 %. A dash (–) or hatching marks what
was not measured; it is not zero.</footer>
<script>{SCRIPT}</script>
</body>
</html>
"""
