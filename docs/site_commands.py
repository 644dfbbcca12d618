"""The pages of commands on the site.

Names, values, defaults and the usage line are the program's. What an option means is what --help
says about it, or, where the hand-written documentation (`PLACES`) says more, what that says; tests
hold the two to each other.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]

# Where the options of a command are documented by hand: page and heading.
PLACES = {
    "quantize-cpu": ("README.md", "Convert"),
    "quantize-gpu": ("docs/quantize-gpu.md", "quantize-gpu: formats of compressed-tensors"),
    "merge": ("README.md", "Change"),
    "reshard": ("README.md", "Change"),
    "verify": ("README.md", "Verify"),
    "compare": ("docs/compare.md", "Conversions side by side"),
    "push": ("README.md", "Publish"),
    "inspect": ("README.md", "Look"),
    "stats": ("docs/hot-experts.md", "Counting"),
    "plan": ("README.md", "Plan"),
    "bench": ("README.md", "Measure"),
    "doctor": ("README.md", "Look"),
    "completion": ("README.md", "Look"),
}

# Pages that explain what a command does.
MORE = {
    "quantize-cpu": "which-method methods recipes calibration estimate hot-experts remote ray",
    "quantize-gpu": "quantize-gpu calibration hot-experts remote ray",
    "merge": "formats maps",
    "reshard": "formats calibration",
    "verify": "verify accuracy ray",
    "compare": "compare verify performance",
    "push": "verify security",
    "inspect": "families encodings maps",
    "stats": "hot-experts calibration",
    "plan": "plan hot-experts",
    "bench": "performance benchmarks/measuring benchmarks/results",
    "doctor": "performance",
    "completion": "",
}

_MISMATCH = "what was written does not match its source; the message names the tensor"
# What exit code 1 means, of commands that have it.
CHECKS = {
    "quantize-cpu": _MISMATCH,
    "quantize-gpu": _MISMATCH,
    "merge": _MISMATCH,
    "reshard": _MISMATCH,
    "verify": "a check failed",
    "compare": "a check failed",
    "bench": "a kernel was wrong, a row became slower than in `--compare`, or an error of "
    "`--mode sft` exceeds its bound",
}


_WORDS = re.compile(r"`[^`]*`")


class Row(NamedTuple):
    """A row of a hand-written table: the options that it names, as they stand there, and its text
    with links from the site's pages of commands."""

    options: frozenset[str]
    cell: str
    text: str


def commands() -> dict[str, Any]:
    import typer

    from ktconv.cli.app import application

    found: dict[str, Any] = vars(typer.main.get_command(application()))["commands"]
    return found


def section_of(name: str) -> str:
    """What the hand-written documentation says about a command."""
    page, heading = PLACES[name]
    _, *found = re.split(r"^#+ (.+)\n", (ROOT / page).read_text("utf-8"), flags=re.MULTILINE)
    return dict(zip(found[::2], found[1::2], strict=True))[heading]


def rows_of(name: str) -> list[Row]:
    """The tables of options there, without one row for each value of an option."""
    found = re.findall(r"^\| (`--.*?`) \| (.*) \|$", section_of(name), re.MULTILINE)
    return [
        Row(frozenset(re.findall(r"--[a-z][a-z-]+", cell)), cell, _relinked(text, PLACES[name][0]))
        for cell, text in found
        if text != "what is checked"  # the head of a table of levels
    ]


def _relinked(text: str, page_of: str) -> str:
    def changed(match: re.Match[str]) -> str:
        file = match[2] or posixpath.basename(page_of)
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page_of), file))
        title = match[1].removeprefix("docs/")
        return f"[{title}]({posixpath.relpath(path, 'docs/commands')}{match[3] or ''})"

    return re.sub(r"\[([^]]+)\]\(([^)#\s]*)(#[^)\s]*)?\)", changed, text)


def page(name: str, command: Any) -> str:
    """Usage, description, example, arguments, options, exit codes, and where to read on."""
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option"]
    words = " ".join(_word(one) for one in arguments)
    text, examples = _help(command)
    parts = [f"# ktconv {name}\n", text, f"\n```\nktconv {name} [OPTIONS] {words}".rstrip()]
    parts += ["```\n", *(f"Example:\n\n```\n{example}\n```\n" for example in examples)]
    if arguments:
        parts.append("## Arguments\n\n| argument | meaning |\n| --- | --- |")
        parts += [f"| `{_metavar(one)}` | {_cell(one.help)} |" for one in arguments]
    rows = rows_of(name)
    parts.append("\n## Options\n\n| option | meaning |\n| --- | --- |")
    parts += [f"| {_names(one)} | {_cell(' '.join(_meaning(one, rows)))} |" for one in options]
    parts += ["| `-h`, `--help` | Show this text in the terminal. |", *_exit_codes(name)]
    return "\n".join([*parts, *_read_on(name)]) + "\n"


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
    both = [*one.opts, *one.secondary_opts]
    value = "" if one.is_flag else f" {_value(one)}"
    return ", ".join(f"`{_cell(name + value)}`" for name in both)


def _value(one: Any) -> str:
    return one.opts[0].lstrip("-").upper() if _choices(one) else _metavar(one)


def _choices(one: Any) -> list[str]:
    """The values of an option that has no others: its metavar, where that names no FILE or DIR."""
    values = [] if one.is_flag else _metavar(one).split("|")
    return [] if any(re.fullmatch(r"[A-Z]+(\..*)?|\[.*\]", value) for value in values) else values


def _meaning(one: Any, rows: list[Row]) -> Iterator[str]:
    """In sentences."""
    names = {*one.opts, *one.secondary_opts}
    mine = [row for row in rows if row.options & names]
    own = [row for row in mine if row.options <= names]
    if len(own) == 1 and re.match(r"`(?!--)|also (?!measure)", own[0].text):  # goes on from --help
        yield _sentence(one.help)
        yield from (
            [_sentence(own[0].text)] if re.search(r"[a-z]", _WORDS.sub("", own[0].text)) else []
        )
    elif len(own) == 1 and len(own[0].text) > len(one.help):
        off = own[0].options <= set(one.secondary_opts)  # it is about --no-...
        yield from (_sentence(one.help),) if off else ()
        yield _sentence(f"{own[0].cell}: {own[0].text}" if off else own[0].text)
    else:
        yield _sentence(one.help)
        yield from (_sentence(f"{row.cell}: {row.text}") for row in own if len(own) > 1)
        links = [link for row in mine for link in re.findall(r"\[[^]]+\]\([^)]+\)", row.text)]
        yield from (f"More: {', '.join(links)}." for _ in links[:1] if not own)
    if choices := _choices(one):
        yield "Values: " + ", ".join(f"`{value}`" for value in choices) + "."
    default = one.default
    shown = one.show_default and "default:" not in (one.help or "")
    if one.secondary_opts:
        yield f"Default: `{(one.opts if default else one.secondary_opts)[0]}`."
    elif shown and default not in (None, False, (), [], "") and not callable(default):
        yield f"Default: `{getattr(default, 'value', default)}`."


def _sentence(text: str) -> str:
    """With a capital, unless it begins with a value, like "rtn: memory limit"."""
    text = text.strip()
    first = text[:1] if re.match(r"\w+[:,]", text) else text[:1].upper()
    return first + text[1:] + ("" if text.endswith(".") else ".")


def _cell(text: str) -> str:
    """With every bar of a table escaped once."""
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split())).replace("<", "&lt;")


def _exit_codes(name: str) -> Iterator[str]:
    yield "\n## Exit codes\n\n| code | meaning |\n| --- | --- |"
    yield "| 0 | done |"
    if name in CHECKS:
        yield f"| 1 | {CHECKS[name]} |"
    yield "| 2 | bad usage or input: the message says what, and what to do |"
    yield "| 3 | I/O or resources: a disk, memory, the network, a permission |"
    yield "| 130 | interrupted |"


def _read_on(name: str) -> Iterator[str]:
    yield "\n## Read on\n"
    page_of, heading = PLACES[name]
    anchor = re.sub(r"[^\w]+", "-", heading.lower()).strip("-")
    target = posixpath.relpath(page_of, "docs/commands")
    title = f"Overview: {heading}" if page_of == "README.md" else heading
    yield f"- [{title}]({target}#{anchor})"
    for one in MORE[name].split():
        if f"docs/{one}.md" != page_of:
            yield f"- [{_title(one)}]({_source(one)})"
    yield "- [Troubleshooting, by message](../troubleshooting.md)"


def _source(page_name: str) -> str:
    of_benchmarks = {"benchmarks/measuring": "README.md", "benchmarks/results": "RESULTS.md"}
    name = of_benchmarks.get(page_name)
    return f"../../benchmarks/{name}" if name else f"../{page_name}.md"


def _title(page_name: str) -> str:
    path = (ROOT / "docs/commands" / _source(page_name)).resolve()
    return path.read_text("utf-8").split("\n", 1)[0].lstrip("# ")
