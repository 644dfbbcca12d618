"""Names of formats: each name of the table means one thing in each command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from helpers.cli import ktconv, refused
from helpers.paths import DOCS, EXAMPLE

from ktconv.cli.quantize_cpu import Method
from ktconv.cli.quantize_gpu import Scheme
from ktconv.errors import UsageError
from ktconv.formats import FORMATS, format_named
from ktconv.formats.dialects import ROWS, all_names, row_named, translated
from ktconv.formats.gguf import GGUF_FORMATS
from ktconv.quantize.recipes.wish import method_named
from ktconv.targets.encoded.recipe import parse_recipe
from ktconv.targets.encoded.scheme import SCHEMES, names_of


def test_rows_name_what_commands_have() -> None:
    assert {row.method for row in ROWS} | GGUF_FORMATS.keys() == set(get_args(Method))
    assert {row.kernel for row in ROWS} - {""} <= FORMATS.keys()
    assert {row.scheme for row in ROWS} - {""} == set(get_args(Scheme))
    for row in ROWS:
        if row.group_size:
            assert row.group_size in SCHEMES[row.scheme].groups


def test_names_of_a_dialect_mean_themselves() -> None:
    for name in get_args(Method):
        assert translated(name, "method") == name
    for name in FORMATS:
        assert format_named(name).key == name
    for name in names_of("quantize-gpu"):
        assert translated(name.lower(), "scheme") == name


def test_numbers_are_the_same_in_every_dialect() -> None:
    """Kind of numbers and group size of quantize-cpu's row and quantize-gpu's."""
    for row in ROWS:
        if row.scheme and row.method in SCHEMES:
            ours, theirs = SCHEMES[row.method], SCHEMES[row.scheme]
            assert (ours.kind, ours.block) == (theirs.kind, theirs.block)
            assert ours.groups == ((row.group_size,) if row.group_size else theirs.groups)
        if row.kernel and row.method in SCHEMES and row.group_size:
            assert FORMATS[row.kernel].group == row.group_size


@pytest.mark.parametrize(
    ("name", "method", "kernel"),
    [
        ("rawint4", "rawint4", "gint4-32"),
        ("gint4-32", "rawint4", "gint4-32"),
        ("int4-g32", "rawint4", "gint4-32"),
        ("RAWINT4", "rawint4", "gint4-32"),
        ("INT4_G32", "rawint4", "gint4-32"),
        ("W4A16", "int4-g128", "gint4-128"),
        ("w8a16", "int8-g128", "gint8-128"),
        ("FP8_DYNAMIC", "fp8-channel", "fp8-channel"),
        ("FP8_PERCHANNEL", "fp8-channel", "fp8-channel"),
        ("FP8_BLOCK", "fp8", "fp8"),
        ("FP8", "fp8", "fp8"),
        ("AMXINT4", "int4", "int4"),
        ("AMXINT8", "int8", "int8"),
        ("GPTQ_INT4", "gptq-int4", "gint4-128"),
        ("MXFP4A16", "mxfp4", "mxfp4"),
        ("NVFP4", "nvfp4", "nvfp4"),
        ("MXFP8", "mxfp8", "mxfp8"),
    ],
)
def test_names_of_other_programs(name: str, method: str, kernel: str, tmp_path: Path) -> None:
    """In quantize-cpu, plan, bench and the runtime."""
    assert format_named(name).key == kernel
    planned = json_of("quantize-cpu", EXAMPLE, tmp_path / "o", "--method", name, "--dry-run")
    same = json_of("quantize-cpu", EXAMPLE, tmp_path / "o", f"--method={method}", "--dry-run")
    for key in ("output_bytes", "files", "disk_needed_bytes"):
        assert planned[key] == same[key]
    assert planned.get("method") == same.get("method")
    assert json_of("plan", EXAMPLE, "--method", name, "--numa", 1)["cpu"]["method"] == kernel


def json_of(*words: object) -> Any:
    result = ktconv(*words, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("name", "scheme", "group"),
    [
        ("rawint4", "W4A16", 32),
        ("int4-g64", "W4A16", 64),
        ("int4_g128", "W4A16", 128),
        ("int8-g128", "W8A16", 128),
        ("fp8", "FP8_BLOCK", None),
        ("fp8-perchannel", "FP8_DYNAMIC", None),
        ("mxfp4", "MXFP4A16", None),
        ("mxfp8", "MXFP8", None),
    ],
)
def test_names_of_schemes(name: str, scheme: str, group: int | None, tmp_path: Path) -> None:
    """`--scheme rawint4` is W4A16 in groups of 32, byte for byte."""
    more = [f"--group-size={group}"] if group else []
    words = ["quantize-gpu", EXAMPLE, tmp_path / "out", "--dry-run"]
    found = json_of(*words, "--scheme", name)
    same = json_of(*words, "--scheme", scheme, *more)
    for key in found.keys() - {"disk_free_bytes", "peak_memory_bytes"}:  # of this process
        assert found[key] == same[key], key
    if group:
        assert json_of(*words, f"--scheme={name}", *more)
        other = 64 if group != 64 else 32
        result = ktconv(*words, "--scheme", name, "--group-size", other)
        assert result.exit_code == 2
        assert f"{name} has groups of {group}, and --group-size is {other}" in result.stderr


def test_a_scheme_keeps_the_group_size_that_is_given(tmp_path: Path) -> None:
    words = ["quantize-gpu", EXAMPLE, tmp_path / "o", "--scheme", "w4a16", "--dry-run"]
    found = json_of(*words, "--group-size", 32)
    assert found["group_size"] == 32


def test_recipes_know_the_names() -> None:
    assert method_named("int4-g32") == method_named("rawint4")
    assert method_named("W4A16:32").name == "W4A16"
    assert (
        parse_recipe('method = "FP8_PERCHANNEL"').toml
        == parse_recipe('method = "fp8-channel"').toml
    )


@pytest.mark.parametrize("name", ["int5", "", "moe_int4", "gint4-33"])
def test_other_names_are_refused(name: str, tmp_path: Path) -> None:
    assert row_named(name) is None
    with pytest.raises(UsageError, match="unknown method"):
        format_named(name)
    if name:
        refused_words = ktconv("quantize-cpu", EXAMPLE, tmp_path / "o", "--method", name)
        assert refused_words.exit_code == 2 and "is not one of" in refused_words.stderr


def test_a_format_without_kernels_has_no_name_there() -> None:
    with pytest.raises(UsageError, match="unknown method 'awq'"):
        format_named("awq")
    refused(ktconv("bench", "--method", "awq"), 2, "unknown method 'awq'")


def test_the_page_has_the_names() -> None:
    """docs/methods.md: each name that stands there is of its row."""
    text = (DOCS / "methods.md").read_text("utf-8")
    section = text.split("## Names of formats")[1].split("\n## ")[0]
    lines = re.findall(r"^\| ([^|]+) \| `([^`]+)` \| (.*)\|$", section, re.MULTILINE)
    told = {method: set(re.findall("`([^`]+)`", rest)) for _, method, rest in lines}
    for row in ROWS:
        if row.method not in told:
            continue
        names = {one for one in told[row.method] if not one.startswith("--")}
        assert names >= {one for one in (row.kernel, row.scheme) if one}
        for one in names - {row.scheme}:
            assert row_named(one) is row, one
        assert (f"--group-size {row.group_size}" in told[row.method]) == (
            row.group_size not in (0, 128)
        )
    assert {row.method for row in ROWS if row.scheme} <= told.keys()
    assert all(all_names(row) for row in ROWS)
