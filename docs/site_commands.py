"""The pages of commands on the site, made from the program.

Names, meanings, values, defaults and the usage line are what the command line has; what there is to
say beyond that is on the page in `GUIDES`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

# The page about a command: what an option's own text does not say.
GUIDES = {
    "quantize-cpu": "quantize-cpu",
    "quantize-gpu": "quantize-gpu",
    "merge": "repack",
    "reshard": "repack",
    "verify": "verify",
    "compare": "compare",
    "push": "push",
    "inspect": "inspect",
    "stats": "hot-experts",
    "plan": "plan",
    "bench": "performance",
    "doctor": "inspect",
    "completion": "inspect",
}

# Further pages to read.
MORE = {
    "quantize-cpu": "which-method from-ktransformers methods recipes calibration estimate "
    "hot-experts remote ray",
    "quantize-gpu": "calibration hot-experts remote ray",
    "merge": "from-ktransformers formats maps",
    "reshard": "formats calibration",
    "verify": "accuracy ray",
    "compare": "verify performance",
    "push": "security",
    "inspect": "families encodings maps",
    "stats": "calibration",
    "plan": "hot-experts",
    "bench": "benchmarks/measuring benchmarks/results",
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


def commands() -> dict[str, Any]:
    import typer

    from ktconv.cli.app import application

    found: dict[str, Any] = vars(typer.main.get_command(application()))["commands"]
    return found


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
    parts.append("\n## Options\n\n| option | meaning |\n| --- | --- |")
    parts += [f"| {_names(one)} | {_cell(' '.join(_meaning(one)))} |" for one in options]
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


def _meaning(one: Any) -> Iterator[str]:
    """In sentences."""
    yield _sentence(one.help)
    if choices := _choices(one):
        yield "Values: " + ", ".join(f"`{value}`" for value in choices) + "."
    default = one.default
    shown = one.show_default and "default:" not in (one.help or "")
    if one.secondary_opts and default is not None:
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
