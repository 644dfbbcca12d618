"""Parameters of commands: what click makes of their declarations, and what it refuses."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import pytest
from click.testing import CliRunner
from helpers.cli import ktconv
from helpers.paths import EXAMPLE

from ktconv.cli.parameters import (
    argument,
    callback_of,
    choice,
    flag,
    option,
    parameters_of,
    with_options,
)

Kind = Literal["int4", "FP8"]
SEEN: list[dict[str, Any]] = []


def declared(
    context: click.Context,
    place: Annotated[Path, argument("Place.", "PLACE")],
    more: Annotated[list[Path] | None, argument("More.", "MORE")] = None,
    text: Annotated[str, option("Text.", "T")] = "none",
    whole_number: Annotated[int | None, option("Number.", "N", min=0, max=8)] = None,
    part: Annotated[float, option("Part.", "F", min=0.0, max=1.0)] = 0.5,
    any_number: Annotated[float, option("Number.", "F")] = 1.5,
    least: Annotated[float, option("Number.", "F", min=0.0)] = 0.0,
    kind: Annotated[Kind, choice(Kind, "Kind.", "--kind", "--old")] = "int4",
    many: Annotated[list[str] | None, option("Many.", "M")] = None,
    deep: Annotated[bool, flag("--deep", "Deep.")] = False,
    mtp: Annotated[bool | None, flag("--mtp/--no-mtp", "MTP.")] = None,
) -> None:
    SEEN.append({**locals(), "context": type(context)})


def called(*words: str) -> tuple[dict[str, Any], str]:
    """The values that the command gets, and the text on stderr."""
    SEEN.clear()
    command = click.Command("x", callback=callback_of(declared), params=parameters_of(declared))
    result = CliRunner().invoke(command, list(words))
    assert result.exit_code == (0 if SEEN else 2)
    return (SEEN or [{}])[0], result.stderr


def test_defaults_and_types() -> None:
    assert called("here")[0] == {
        "context": click.Context, "place": Path("here"), "more": None, "text": "none",
        "whole_number": None, "part": 0.5, "any_number": 1.5, "least": 0.0, "kind": "int4",
        "many": None, "deep": False, "mtp": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["a"], "more", [Path("a")]),
        (["--text", "a b"], "text", "a b"),
        (["--whole-number=8"], "whole_number", 8),
        (["--whole-number=2.0"], "whole_number", 2),
        (["--part", "1"], "part", 1.0),
        (["--kind", "fp8"], "kind", "FP8"),
        (["--old=INT4"], "kind", "int4"),
        (["--many", "a", "--many", "b"], "many", ["a", "b"]),
        (["--deep"], "deep", True),
        (["--no-mtp"], "mtp", False),
        (["--mtp"], "mtp", True),
    ],
    ids=str,
)
def test_values(words: list[str], name: str, value: object) -> None:
    assert called("here", *words)[0][name] == value


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Missing argument 'PLACE'"),
        (["here", "--whole-number=9"], "9 is not in the range 0<=x<=8"),
        (["here", "--whole-number=x"], "'x' is not a valid integer"),
        (["here", "--part=2"], "2.0 is not in the range 0.0<=x<=1.0"),
        (["here", "--whole-number=2.5"], "'2.5' is not a valid integer"),
        (["here", "--whole-number=9.0"], "9 is not in the range"),
        (["here", "--part=nan"], "nan is not a number"),
        (["here", "--least=nan"], "nan is not a number"),
        (["here", "--any-number=nan"], "nan is not a number"),
        (["here", "--any-number=x"], "'x' is not a valid number"),
        (["here", "--kind=x"], "'x' is not one of 'int4', 'FP8'"),
        (["here", "--deep=x"], "does not take a value"),
        (["here", "--no-deep"], "No such option"),
    ],
    ids=str,
)
def test_what_is_refused(words: list[str], said: str) -> None:
    assert said in called(*words)[1]


def test_a_scheme_is_named_as_its_table_has_it() -> None:
    said = ktconv("quantize-gpu", EXAMPLE, "out", "--scheme=x").stderr
    assert "'x' is not one of 'W4A16', 'W8A16', 'FP8_BLOCK'" in said


def test_a_parameter_becomes_options() -> None:
    def command(place: dict[str, Any], *, last: Annotated[bool, flag("--last", "Last.")]) -> None:
        SEEN.append(place)

    of_declared = signature(declared, eval_str=True).parameters
    SEEN.clear()
    changed: Any = with_options(command, "place", [of_declared["part"], of_declared["deep"]], dict)
    assert [one.name for one in parameters_of(changed)] == ["part", "deep", "last"]
    changed(part=1.0, deep=True, last=False)
    assert SEEN == [{"part": 1.0, "deep": True}]
