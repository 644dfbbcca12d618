"""What mkdocs cannot know: pages that are made from the program, and links out of docs/.

Commands have a page each, from their own options; index.md is README.md, contributing.md is
CONTRIBUTING.md. Links to files that are not pages lead to the repository.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OF_ROOT = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md"}
PUBLIC = ("ktconv.model", "ktconv.train", "ktconv.moe", "ktconv.runtime", "ktconv.errors")
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name, text in generated().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_config(config: Any) -> Any:
    """The pages of commands, in the order of --help."""
    for entry in config.nav:
        if isinstance(entry, dict) and entry.get("Commands") == "commands/":
            entry["Commands"] = [f"commands/{name}.md" for name in commands()]
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """With links as the site has them."""
    here = page.file.src_uri
    base = "" if here in OF_ROOT else "docs/" + posixpath.dirname(here)

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
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"]({config.repo_url}/{kind}/main/{path}{anchor})"

    return _LINK.sub(changed, markdown)


def generated() -> dict[str, str]:
    """Pages that no file in docs/ has."""
    pages = {name: (ROOT / source).read_text("utf-8") for name, source in OF_ROOT.items()}
    pages |= {f"commands/{name}.md": page(name, one) for name, one in commands().items()}
    api = "\n\n".join(f"::: {name}" for name in PUBLIC)
    return pages | {"api.md": f"# Python API\n\n{api}\n"}


def commands() -> dict[str, Any]:
    import typer

    from ktconv.cli.app import application

    found: dict[str, Any] = vars(typer.main.get_command(application()))["commands"]
    return found


def page(name: str, command: Any) -> str:
    """What `ktconv NAME --help` says."""
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option"]
    words = " ".join(f"[{one.metavar or one.name.upper()}]" for one in arguments)
    parts = [f"# ktconv {name}\n", f"    ktconv {name} [OPTIONS] {words}\n", command.help or ""]
    for title, rows in (("Arguments", arguments), ("Options", options)):
        if rows:
            parts.append(f"\n## {title}\n\n| | |\n| --- | --- |")
            parts += [f"| {_names(one)} | {_cell(' '.join(_meaning(one)))} |" for one in rows]
    return "\n".join(parts) + "\n"


def _names(one: Any) -> str:
    if one.param_type_name == "argument":
        return f"`{one.metavar or one.name.upper()}`"
    both = [*one.opts, *one.secondary_opts]
    value = "" if one.is_flag else f" {one.metavar or one.type.name.upper()}"
    return ", ".join(f"`{_cell(name + value)}`" for name in both)


def _meaning(one: Any) -> Iterator[str]:
    yield one.help or ""
    default = one.default
    if default not in (None, False, (), [], "") and not callable(default) and one.show_default:
        yield f"Default: `{getattr(default, 'value', default)}`."


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
