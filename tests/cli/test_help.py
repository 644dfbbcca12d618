"""Help texts: what `--help` and `--help-all` show, how wide they are, how they are written."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
from click.testing import CliRunner
from helpers.cli import ktconv, process
from helpers.paths import DOCS

from ktconv.cli import help
from ktconv.cli.app import app
from ktconv.cli.commands import COMMANDS, MAIN, exit_codes
from ktconv.formats.specs import names_in

PARSED: dict[str, Any] = dict(app.commands)
PARAMETERS = [(name, one) for name, command in PARSED.items() for one in command.params]
LONGEST = 60  # lines of --help at 80 columns
MOST_CHARACTERS = 60  # of the help of an option


def shown(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0
    return str(result.stdout)


# ---- the list of commands ------------------------------------------------------------------


def test_the_main_commands_come_first_and_no_line_is_cut() -> None:
    text = shown("--help")
    headings = re.findall(r"^(\w[\w ]+):$", text, re.MULTILINE)
    assert headings == ["Main commands", "Outputs", "Planning", "This machine", "Options"]
    main = [name for name, row in COMMANDS.items() if row.panel == MAIN]
    assert main == ["quantize-cpu", "quantize-gpu", "merge", "verify", "bench", "generate"]
    for name, row in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(row.summary)}$", text, re.MULTILINE)
    assert "..." not in text.replace("[ARGS]...", "")
    assert "completion" not in text.split("Options:")[1]


def test_the_summary_counts_the_formats() -> None:
    methods = [name for name in names_in("quantize-cpu") if not name.startswith("gguf-")]
    summary = f"INT4, INT8, {len(methods) - 2} others, or GGUF"
    assert summary in COMMANDS["quantize-cpu"].summary


def test_without_arguments_it_is_the_same_text() -> None:
    done = process(COLUMNS="80")
    assert done.returncode == 2
    text = done.stdout + done.stderr
    assert (
        text.replace("\n\n", "\n").strip()
        == process("--help", COLUMNS="80").stdout.replace("\n\n", "\n").strip()
    )


# ---- one command -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("columns", [60, 78])
def test_lines_fit(name: str, columns: int) -> None:
    command = PARSED[name]
    for word in ("--help", "--help-all"):
        context = command.make_context(name, [], resilient_parsing=True, terminal_width=columns)
        context.meta[help.EVERYTHING] = word == "--help-all"
        lines = command.get_help(context).splitlines()
        assert max(map(len, lines)) <= columns
        assert len(lines) > 10


def test_a_terminal_has_its_width_up_to_80_columns() -> None:
    longest = {
        columns: max(map(len, process("plan", "--help", COLUMNS=str(columns)).stdout.splitlines()))
        for columns in (60, 80, 120)
    }
    assert longest[60] <= 58 < longest[80] == longest[120] <= 78


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_screen(name: str) -> None:
    assert len(shown(name, "--help").splitlines()) <= LONGEST


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_exit_codes_and_panels(name: str) -> None:
    text = " ".join(shown(name, "--help").split())
    for code, meaning in exit_codes(name).items():
        assert f"{code} {meaning.replace('`', '')}" in text
    assert (" 1 a " in text) or 1 not in exit_codes(name) or "1 what was" in text
    for one in PARSED[name].params:
        if one.param_type_name == "option":
            assert one.panel in help.PANELS


@pytest.mark.parametrize("name", COMMANDS)
def test_help_all_has_every_detail(name: str) -> None:
    text = " ".join(shown(name, "--help-all").split())
    short = shown(name, "--help")
    for one in PARSED[name].params:
        assert one.help in text
        for block in one.detail.split("\n\n"):
            for part in help.items(block):
                assert part in text
        if one.param_type_name == "option":
            hidden = one.panel == help.ADVANCED
            assert bool(re.search(rf"^  {one.opts[0]}\b(?!-)", short, re.MULTILINE)) != hidden
    advanced = f"\n{help.ADVANCED}:\n" in shown(name, "--help-all")
    assert bool(re.search(r"\b(1 advanced option|\d+ advanced options), and", short)) == advanced
    assert (f"ktconv {name} --help-all" in short) == any(
        one.detail for one in PARSED[name].params if one.param_type_name == "option"
    )


def test_methods_have_a_line_each() -> None:
    text = shown("quantize-cpu", "--help-all")
    option = next(one for one in PARSED["quantize-cpu"].params if one.opts[0] == "--method")
    for value in help.choices_of(option):
        assert len(re.findall(rf"^ +- {value}: ", text, re.MULTILINE)) == 1
    assert "--method METHOD " in text


def test_help_is_plain_text() -> None:
    plain = process("verify", "--help", COLUMNS="80").stdout
    assert "\x1b" not in plain and "╭" not in plain
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb"), ("FORCE_COLOR", "1")):
        assert process("verify", "--help", **{name: value}, COLUMNS="80").stdout == plain, name


def test_help_of_a_pipe_has_a_width_without_columns() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    done = process("inspect", "--help", **environment)
    assert max(map(len, done.stdout.splitlines())) <= 80


# ---- old spellings -----------------------------------------------------------------------------


def test_old_spellings_are_taken_and_not_shown() -> None:
    context = PARSED["quantize-gpu"].make_context("quantize-gpu", ["m", "o", "--method=gptq"])
    assert context.params["algorithm"] == "gptq"
    assert not re.search("^  --method", shown("quantize-gpu", "--help-all"), re.MULTILINE)
    assert "--algorithm rtn|gptq" in shown("quantize-gpu", "--help")


# ---- how texts are written ----------------------------------------------------------------------

# What a text that needs the name above it begins with.
OPENERS = re.compile(
    r"(Of|Those|That|As|For|In|By|With|Without|Where|Beside|From|Its|It|What|Which|Why|How|This|They"
    r"|Also|The same)\b",
    re.IGNORECASE,
)


@pytest.mark.parametrize(
    ("name", "one"), PARAMETERS, ids=[f"{name} {one.opts[0]}" for name, one in PARAMETERS]
)
def test_a_help_text_is_short_and_says_something(name: str, one: Any) -> None:
    assert 8 <= len(one.help) <= MOST_CHARACTERS
    words = re.sub(r"^(rtn|gptq): ", "", one.help)
    parts = [part for block in one.detail.split("\n\n") for part in help.items(block)]
    for text in (words, *parts):
        assert not OPENERS.match(text), text
    assert one.help.endswith(".") and (words[0].isupper() or words.startswith(("auto,", "number",
        "maximum", "split", "dampening", "seed", "test", "memory", "GPU", "CPU")))  # fmt: skip
    for page in re.findall(r"docs/([\w-]+\.md)", f"{one.help} {one.detail}"):
        assert (DOCS / page).is_file()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_summary_is_one_line_that_begins_with_a_verb(name: str) -> None:
    row = COMMANDS[name]
    assert len(row.summary) <= 58 and not row.summary.endswith(".")
    assert row.summary.split()[0] in {
        "Change", "Check", "Compare", "Convert", "Count", "Drop", "Measure", "Merge", "Plan",
        "Print", "Quantize", "Send", "Show", "Write",
    }  # fmt: skip
    first = (PARSED[name].help or "").split()[0]
    assert not OPENERS.match(first)


def test_a_parsed_command_has_no_options_of_its_help() -> None:
    """`--help-all` is added for a command line only: `import ktconv` has arguments for others."""
    assert all("--help-all" not in one.opts for _, one in PARAMETERS)
    assert ktconv("inspect", "--help-all").exit_code == 0
