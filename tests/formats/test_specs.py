"""Names of formats: each dialect's own, those of the others, and the tables that follow."""

from __future__ import annotations

from ktconv.formats import FORMATS, output_formats
from ktconv.formats.specs import SPECS, kernel_of, names_in
from ktconv.targets.consumers import METHODS
from ktconv.targets.encoded.scheme import ROWS


def test_every_table_has_the_names() -> None:
    assert set(names_in("kernel")) == FORMATS.keys()
    rows = {row.name for row in ROWS}
    assert {*names_in("quantize-cpu"), *names_in("quantize-gpu")} - output_formats().keys() == rows
    kt = {name for one in SPECS for name in one.kt}
    assert kt == {method.name for method in METHODS} - {"LLAMAFILE"}
    assert {row.kt_method for row in ROWS} - {""} <= kt


def test_kernels_of_numbers() -> None:
    assert kernel_of("int4", 64) == "gint4-64" and kernel_of("int8", -1) == "int8"
    assert kernel_of("mxfp8", 32) == "mxfp8" and kernel_of("int4", 16) is None
