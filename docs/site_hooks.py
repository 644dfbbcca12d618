"""Hooks for mkdocs: pages that are made from the program, and links out of docs/.

Commands have a page each (`site_commands`), public packages one of the API reference; some files
outside docs/ are pages. Links to other files lead to the repository, if they exist.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from site_commands import commands, page

ROOT = Path(__file__).resolve().parents[1]
LOG = logging.getLogger("mkdocs.hooks.ktconv")  # a warning ends a strict build
# Pages that are files beside docs/.
OF_ROOT = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "benchmarks/measuring.md": "benchmarks/README.md",
    "benchmarks/results.md": "benchmarks/RESULTS.md",
}
WIDE = ("families.md",)  # whose tables get the room of the table of contents
# Pages of the API reference: what they are about, and their packages, modules and classes, which
# can be followed by those of their members that the page has.
API = {
    "functions": (
        "The commands as functions",
        "What `import ktconv` offers: `ktconv.quantize_cpu(...)` and the others.",
        ["ktconv.cli.library"],
    ),
    "converting": (
        "Converting",
        "What `ktconv quantize-cpu`, `merge` and `reshard` do, as functions. A request says what "
        "to do, `prepare` plans it and writes nothing, the function does it and returns a report.",
        [
            "ktconv.quantize_cpu",
            "ktconv.targets.packed.target.Options",
            "ktconv.conversion.run.BaseRequest",
            "ktconv.conversion.pipeline.Observer",
            "ktconv.conversion.run.Report",
            "ktconv.merge: Request Preflight prepare merge",
            "ktconv.reshard: Request Preflight prepare reshard",
        ],
    ),
    "verifying": ("Verifying", "The checks of `ktconv verify`, as a function.", ["ktconv.verify"]),
    "runtime": (
        "Layers to call",
        "With examples: [runtime.md](../runtime.md).",
        ["ktconv.runtime"],
    ),
    "moe": (
        "Experts of a layer",
        "What `ktconv.runtime` is made of: weights in any format, the forward, and the reference.",
        ["ktconv.runtime.layers"],
    ),
    "route": ("Routers", "With examples: [routers.md](../routers.md).", ["ktconv.runtime.route"]),
    "model": ("Models", "With examples: [models.md](../models.md).", ["ktconv.model"]),
    "train": (
        "Fine-tuning",
        "With examples: [fine-tuning.md](../fine-tuning.md).",
        ["ktconv.train"],
    ),
    "plan": ("Placement", "What a plan has: [plan.md](../plan.md).", ["ktconv.plan"]),
    "kt-wrapper": (
        "KTransformers' interface",
        "What differs on purpose: [kt-wrapper.md](../kt-wrapper.md).",
        ["ktconv.compat.kt"],
    ),
    "errors": (
        "Errors",
        "What to do about one: [troubleshooting.md](../troubleshooting.md).",
        ["ktconv.errors"],
    ),
}
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
_NAMED = re.compile(r"\[[\w/-]+\.md\]\(([\w./-]+\.md)(#[^)\s]*)?\)")  # [a.md](a.md)
# What a browser loads from another host; links are not.
_LOADED = re.compile(
    r"""<(?:script|img|iframe|source)[^>]+src=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|<link[^>]+rel=["']?(?:stylesheet|preconnect|preload|icon)[^>]+href=["']?(?:https?:)?//[^"'\s>]+"""
)
_CODE = re.compile(r"(<td[^>]*>)(.*?)(</td>)", re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name, text in generated().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_config(config: Any) -> Any:
    """Commands in the order of --help, the API in that of `API`."""
    pages = {
        "commands/": [{name: f"commands/{name}.md"} for name in commands()],
        "api/": ["api/index.md", *({title: f"api/{name}.md"} for name, (title, *_) in API.items())],
    }
    for entry in config.nav:
        for title, place in entry.items() if isinstance(entry, dict) else ():
            if isinstance(place, str) and place in pages:
                entry[title] = pages[place]
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Change links to those of the site; a link named after a file is named after its page."""
    here = page.file.src_uri
    if here in WIDE:
        page.meta["hide"] = ["toc"]
    base = posixpath.dirname(OF_ROOT.get(here, f"docs/{here}"))

    def changed(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(base, target))
        site = next((name for name, source in OF_ROOT.items() if source == path), None)
        if site is None and path.startswith("docs/"):
            site = path.removeprefix("docs/")
        if site is not None and files.get_file_from_path(site) is not None:
            start = posixpath.dirname(here) or "."
            return f"]({posixpath.relpath(site, start)}{anchor})"
        if not (ROOT / path).exists():
            LOG.warning("%s has a link to %s, which does not exist", here, target)
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"]({config.repo_url}/{kind}/main/{path}{anchor})"

    def titled(match: re.Match[str]) -> str:
        file = files.get_file_from_path(posixpath.normpath(posixpath.join(start, match[1])))
        title = _title(file.content_string) if file is not None else match[1]
        return f"[{title}]({match[1]}{match[2] or ''})"

    start = posixpath.dirname(here)
    return _NAMED.sub(titled, _LINK.sub(changed, markdown))


def _title(text: str) -> str:
    """The first heading, as far as its colon."""
    return text.split("\n", 1)[0].lstrip("# ").partition(":")[0]


def on_page_content(html: str, **_: Any) -> str:
    """Bars in the code of tables, which GitHub and this site want escaped, as bars."""
    return _CODE.sub(lambda found: found[1] + found[2].replace("\\|", "|") + found[3], html)


def on_post_page(output: str, page: Any = None, **_: Any) -> str:
    """Remove what makes the theme ask api.github.com; warn about all that is loaded elsewhere."""
    for found in _LOADED.findall(output):
        LOG.warning("%s loads %s", page.file.src_uri if page else "a template", found)
    return output.replace(' data-md-component="source"', "")


def on_post_template(output: str, **_: Any) -> str:
    return on_post_page(output)


def generated() -> dict[str, str]:
    """Pages that no file in docs/ has."""
    pages = {name: (ROOT / source).read_text("utf-8") for name, source in OF_ROOT.items()}
    pages |= {f"commands/{name}.md": page(name, one) for name, one in commands().items()}
    pages |= {f"api/{name}.md": _reference(*about) for name, about in API.items()}
    rows = [f"| [{about[0]}]({name}.md) | {_code(about[2])} |" for name, about in API.items()]
    listed = "\n".join(["| page | packages and modules |", "| --- | --- |", *rows])
    return pages | {"api/index.md": f"# Python API\n\n{_ABOUT}\n\n{listed}\n"}


_ABOUT = (
    "From the docstrings. Arrays are NumPy's; shapes stand in brackets, [M, K] or [tokens, top-k]. "
    "Every error that ktconv raises on purpose is a [KtconvError](errors.md): a sentence, a hint "
    "and an exit code. Modules that are not listed here are internal and can change."
)


def _reference(title: str, text: str, names: list[str]) -> str:
    return "\n\n".join([f"# {title}", text, *map(_directive, names)]) + "\n"


def _directive(name: str) -> str:
    """Return a directive of mkdocstrings, with the members named after a colon, else with all."""
    module, _, members = name.partition(": ")
    options = f"\n    options:\n      members: [{', '.join(members.split())}]" if members else ""
    return f"::: {module}{options}"


def _code(names: list[str]) -> str:
    parts = [name.partition(":")[0].split(".") for name in names]
    modules = [".".join(word for word in one if word.islower()) for one in parts]
    return ", ".join(f"`{name}`" for name in dict.fromkeys(modules))
