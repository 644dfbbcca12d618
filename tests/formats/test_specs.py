"""Names of formats: each dialect's own, those of the others, and the tables that follow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.cli import ktconv, ktconv_done
from helpers.paths import EXAMPLE

from ktconv.formats import FORMATS, format_named, output_formats
from ktconv.formats.specs import SPECS, kernel_of, names_in, spec_named
from ktconv.targets.consumers import METHODS
from ktconv.targets.encoded.scheme import ROWS


def test_every_table_has_the_names() -> None:
    assert set(names_in("kernel")) == FORMATS.keys()
    rows = {row.name for row in ROWS}
    assert {*names_in("quantize-cpu"), *names_in("quantize-gpu")} - output_formats().keys() == rows
    kt = {name for one in SPECS for name in one.kt}
    assert kt == {method.name for method in METHODS} - {"LLAMAFILE"}
    assert {row.kt_method for row in ROWS} - {""} <= kt


@pytest.mark.parametrize(
    ("names", "kernel", "cpu", "gpu"),
    [
        ("rawint4 int4-g32 gint4-32 gint4 RAWINT4 Int4-G32", "gint4-32", "rawint4", "W4A16"),
        ("int4-g128 gint4-128 W4A16", "gint4-128", "int4-g128", "W4A16"),
        ("GPTQ_INT4", "gint4-32", "gptq-int4", "W4A16"),
        ("gptq-int4", "gint4-128", "gptq-int4", ""),
        ("int8-g128 W8A16", "gint8-128", "int8-g128", "W8A16"),
        ("int8-g64", "gint8-64", "", "W8A16"),
        ("fp8 fp8-block FP8_BLOCK", "fp8", "fp8", "FP8_BLOCK"),
        ("fp8-channel FP8_DYNAMIC FP8_PERCHANNEL", "fp8-channel", "fp8-channel", "FP8_DYNAMIC"),
        ("mxfp4 MXFP4A16", "mxfp4", "mxfp4", "MXFP4A16"),
        ("mxfp8", "", "mxfp8", ""),
        ("nvfp4 NVFP4A16", "nvfp4", "nvfp4", "NVFP4A16"),
        ("AMXINT4", "int4", "int4", "W4A16"),
        ("moe_int4 fp7", "", "", ""),
    ],
)
def test_a_format_is_known_by_the_names_of_all_dialects(
    names: str, kernel: str, cpu: str, gpu: str
) -> None:
    for name in names.split():
        for dialect, expected in ("kernel", kernel), ("quantize-cpu", cpu), ("quantize-gpu", gpu):
            spec = spec_named(name, dialect)  # type: ignore[arg-type]
            assert (spec.name_in(dialect) if spec else "") == expected, (name, dialect)  # type: ignore[arg-type]
        if kernel:
            assert format_named(name).key == kernel


def test_kernels_of_numbers() -> None:
    assert kernel_of("int4", 64) == "gint4-64" and kernel_of("int8", -1) == "int8"
    assert kernel_of("mxfp8", 32) is None and kernel_of("int4", 16) is None


def planned(command: str, tmp_path: Path, *words: str) -> dict[str, object]:
    found = json.loads(
        ktconv_done(command, EXAMPLE, tmp_path / "out", *words, "--dry-run", "--json")
    )
    return {key: found[key] for key in ("scheme", "method", "group_size") if key in found}


@pytest.mark.parametrize("other", ["int4-g32", "RAWINT4", "gint4-32"])
def test_quantize_cpu_takes_names_of_other_dialects(tmp_path: Path, other: str) -> None:
    own = planned("quantize-cpu", tmp_path, "--method", "rawint4")
    assert own and planned("quantize-cpu", tmp_path, "--method", other) == own
    assert planned("quantize-cpu", tmp_path, f"--method={other}") == own


def test_quantize_gpu_takes_names_of_other_dialects(tmp_path: Path) -> None:
    own = planned("quantize-gpu", tmp_path, "--scheme=W4A16", "--group-size=32")
    assert own and planned("quantize-gpu", tmp_path, "--scheme", "int4-g32") == own
    assert planned("quantize-gpu", tmp_path, "--scheme", "rawint4", "--group-size=32") == own
    assert planned("quantize-gpu", tmp_path, "--scheme", "int4-g64", "--group-size=32") == own


def test_names_of_nothing_are_refused_as_they_were_given(tmp_path: Path) -> None:
    result = ktconv("quantize-cpu", EXAMPLE, tmp_path / "out", "--method=fp7")
    assert result.exit_code == 2 and "'fp7' is not one of 'int4', 'int8', 'raw" in result.output
