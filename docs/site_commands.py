"""The pages of commands on the site, made from the program.

Names, meanings, values, defaults and the usage line are what the command line has. An option's
detail stands where it is declared, for `--help-all` and for these pages; the page in `GUIDES` is
about the command as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ktconv.cli import help
from ktconv.cli.commands import exit_codes

ROOT = Path(__file__).resolve().parents[1]

# The page about a command: what an option's own text does not say.
GUIDES = {
    "quantize-cpu": "quantize-cpu",
    "quantize-gpu": "quantize-gpu",
    "merge": "repack",
    "verify": "verify",
    "bench": "performance",
    "generate": "generate",
    "compare": "compare",
    "reshard": "repack",
    "prune": "pruning",
    "push": "push",
    "inspect": "inspect",
    "plan": "plan",
    "stats": "hot-experts",
    "doctor": "inspect",
    "completion": "inspect",
}

# Further pages to read.
MORE = {
    "quantize-cpu": "which-method from-ktransformers methods gguf recipes calibration "
    "estimate hot-experts remote ray",
    "quantize-gpu": "calibration hot-experts remote ray",
    "merge": "from-ktransformers formats maps",
    "verify": "accuracy ray",
    "bench": "benchmarks/measuring benchmarks/results",
    "generate": "models security",
    "compare": "verify performance",
    "reshard": "formats calibration",
    "prune": "hot-experts which-method",
    "push": "security",
    "inspect": "families encodings maps",
    "plan": "hot-experts",
    "stats": "calibration",
    "doctor": "performance",
    "completion": "",
}


def commands() -> dict[str, Any]:
    from ktconv.cli.app import application

    return dict(application().commands)


def page(name: str, command: Any) -> str:
    """Usage, description, example, arguments, options by panel, exit codes, where to read on."""
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option"]
    words = " ".join(_word(one) for one in arguments)
    text, examples = _help(command)
    parts = [f"# ktconv {name}\n", text, f"\n```\nktconv {name} [OPTIONS] {words}".rstrip()]
    parts += ["```\n", *(f"Example:\n\n```\n{example}\n```\n" for example in examples)]
    if arguments:
        parts.append("## Arguments\n\n| argument | meaning |\n| --- | --- |")
        parts += [f"| `{_metavar(one)}` | {_meaning(one)} |" for one in arguments]
    parts.append("\n## Options")
    for panel in help.PANELS:
        rows = [one for one in options if one.panel == panel]
        own = panel == help.RUN  # which has the options about help
        if rows or own:
            parts.append(f"\n### {panel}\n\n| option | meaning |\n| --- | --- |")
        parts += [f"| {_names(one)} | {_meaning(one)} |" for one in rows]
        if own:
            parts.append("| `--help-all` | Show this in the terminal. |")
            parts.append("| `-h`, `--help` | Show what most users need of it. |")
    return "\n".join([*parts, *_exit_codes(name), *_read_on(name)]) + "\n"


def _help(command: Any) -> tuple[str, list[str]]:
    """Description and examples of a docstring."""
    paragraphs = [" ".join(one.split()) for one in (command.help or "").split("\n\n")]
    examples = [one.removeprefix("Example: ") for one in paragraphs if one.startswith("Example: ")]
    return "\n\n".join(one for one in paragraphs if not one.startswith("Example: ")), examples


def _word(argument: Any) -> str:
    word = _metavar(argument)
    word += "..." if argument.nargs != 1 else ""
    return word if argument.required else f"[{word}]"


def _metavar(one: Any) -> str:
    return str(one.metavar or one.name.upper())


def _names(one: Any) -> str:
    """The names of an option, without old spellings."""
    both = [*one.opts[:1], *one.secondary_opts[:1]]
    value = "" if one.is_flag else f" {_metavar(one)}"
    return ", ".join(f"`{_cell(name + value)}`" for name in both)


def _meaning(one: Any) -> str:
    """All that there is to say, as a cell of a table."""
    return _cell("<br>".join(_lines(one)))


def _lines(one: Any) -> Iterator[str]:
    """The help, what follows from the declaration, and the detail; items of lists are lines."""
    choices = help.choices_of(one)
    listed = [part for block in one.detail.split("\n\n") for part in help.items(block)]
    named = {part.removeprefix("- ").partition(":")[0] for part in listed}
    sentences = [_linked(one.help)]
    if len(choices) > 1 and not named >= set(choices):
        sentences.append("Values: " + ", ".join(f"`{value}`" for value in choices) + ".")
    if default := help.default_of(one):
        sentences.append(f"Default: `{default}`.")
    if one.required and one.param_type_name == "option":
        sentences.append("Required.")
    yield " ".join(sentences)
    for part in filter(None, listed):
        if part.startswith("- "):
            name, colon, rest = part.removeprefix("- ").partition(": ")
            yield f"- `{name}`{colon}{_linked(rest)}"
        else:
            yield _linked(part)


_PAGE = re.compile(r"docs/([a-z-]+)\.md(#[\w-]+)?")


def _linked(text: str) -> str:
    """A text of the terminal, with links to the pages that it names; the site gives them titles."""
    text = text.replace("<", "&lt;")
    return _PAGE.sub(lambda found: f"[docs/{found[1]}.md](../{found[1]}.md{found[2] or ''})", text)


def _cell(text: str) -> str:
    """Escape every bar of a table cell once."""
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split()))


def _exit_codes(name: str) -> Iterator[str]:
    yield "\n## Exit codes\n\n| code | meaning |\n| --- | --- |"
    for code, meaning in exit_codes(name).items():
        yield f"| {code} | {meaning} |"


def _read_on(name: str) -> Iterator[str]:
    yield "\n## Read on\n"
    for one in dict.fromkeys([GUIDES[name], *MORE[name].split()]):
        yield f"- [{_title(one)}]({_source(one)})"
    if name != "completion":
        yield "- [The same from Python](../api/functions.md)"
    yield "- [Troubleshooting, by message](../troubleshooting.md)"


def _source(page_name: str) -> str:
    of_benchmarks = {"benchmarks/measuring": "README.md", "benchmarks/results": "RESULTS.md"}
    name = of_benchmarks.get(page_name)
    return f"../../benchmarks/{name}" if name else f"../{page_name}.md"


def _title(page_name: str) -> str:
    path = (ROOT / "docs/commands" / _source(page_name)).resolve()
    return path.read_text("utf-8").split("\n", 1)[0].lstrip("# ")
