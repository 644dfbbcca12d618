"""The result of a verification as one HTML page that needs nothing else.

The page contains its style and pictures, loads nothing from a network and can be read without its
script. It treats every text of the result as hostile, since tensor names and generated text can
come from anywhere: its content security policy forbids other scripts even if an escape were
forgotten.

`templates` has the pages, their style and their script; `values` formats values, `sections`
computes what the pages show, `charts` and `heat` draw.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ktconv.verify.report import charts, heat, outputs, scatter, sections, values

_PAGES = {"comparison": "comparison", "outputs": "outputs"}


def render_report(result: Mapping[str, Any]) -> str:
    """The page for what `ktconv verify --json` prints, of one conversion or of two compared, or
    `ktconv compare --json`, of several.

    The same result gives the same page.
    """
    facts = values.mapping(result)
    page = _PAGES.get(str(facts["kind"]), "verification")
    return _environment().get_template(f"{page}.html").render(result=facts)


@cache
def _environment() -> Environment:
    """Every value that a template prints goes through `values.show`, which escapes it."""
    environment = Environment(
        loader=PackageLoader("ktconv.verify.report"),
        autoescape=True,
        finalize=values.show,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "cosine": values.show_cosine,
        "duration": values.show_duration,
        "entries": values.items,
        "error": values.show_error,
        "figure": _figure,
        "id": values.show_id,
        "mapping": values.mapping,
        "named": outputs.named,
        "number": values.number,
        "path": values.show_path,
        "records": values.records,
        "share": values.show_share,
        "text": values.escape,
    }
    environment.globals |= {"charts": charts, "heat": heat, "sections": sections, "values": values}
    environment.globals |= {"outputs": outputs, "scatter_sizes": scatter}
    style, script = (_asset(environment, name) for name in ("report.css", "report.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.globals |= {"style": style, "script": script, "script_digest": digest}
    return environment


def _figure(value: float) -> Markup:
    return Markup(values.figure(value))


def _asset(environment: Environment, name: str) -> Markup:
    assert environment.loader is not None
    return Markup(environment.loader.get_source(environment, name)[0])
