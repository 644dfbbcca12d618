"""What mutation testing changes, and the tests that must notice, those that take least first."""

from __future__ import annotations

from dataclasses import dataclass

PACKING = (
    "tests/native/test_golden.py", "tests/native/test_fixed_search.py",
    "tests/native/test_search.py",
    "tests/native/test_missing_buffers.py", "tests/native/test_refusals.py",
    "tests/native/test_layouts.py", "tests/native/test_memory.py::test_guard_pages",
)  # fmt: skip
ENCODING = (
    "tests/native/test_encoded_golden.py", "tests/native/test_encoding.py",
    "tests/native/test_encoded_floats.py", "tests/native/test_encoded_search.py",
    "tests/native/test_missing_buffers.py",
    "tests/native/test_memory.py::test_encodings_at_guard_pages",
)  # fmt: skip
AUDIT = (
    "tests/native/test_missing_buffers.py", "tests/native/test_ggml.py",
    "tests/native/test_stored_units.py", "tests/native/test_refusals.py",
    "tests/native/test_audit.py", "tests/native/test_memory.py::test_guard_pages",
    "tests/native/test_audit_groups.py", "tests/native/test_fixed_search.py",
)  # fmt: skip
OUTPUT = (
    "tests/writer", "tests/conversion/test_plan.py", "tests/quantize/packed/test_manifest.py",
    "tests/conversion/test_disk_space.py",
    "tests/quantize/packed/test_golden.py", "tests/conversion/test_kept_files.py",
)  # fmt: skip
RESUMED = (
    "tests/writer", "tests/conversion/test_restart.py", "tests/conversion/test_locks.py",
    "tests/quantize/packed/test_manifest.py", "tests/conversion/test_crash_points.py",
)  # fmt: skip
METHODS = (
    "tests/quantize/encoded/test_plan.py", "tests/quantize/encoded/test_golden_layouts.py",
    "tests/targets",
    "tests/quantize/encoded/test_methods.py",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Subject:
    """Sources, below native/src or src/ktconv, with their tests."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]


SUBJECTS = {
    "quantizing": Subject(
        (
            "quantize/quantize.c", "quantize/rows.c", "quantize/rounding.h", "quantize/search.h",
            "quantize/strip.h", "quantize/strip_avx2.h", "quantize/strip_avx512.h",
            "quantize/search_avx2.h", "quantize/search_avx512.h", "quantize/fixed.h",
            "quantize/fixed_avx2.h", "quantize/fixed_avx512.h", "quantize/fixed_sums.c",
            "quantize/fixed_sums_avx2.c", "quantize/fixed_sums_avx512.c", "format/int_tiles.h",
            "format/scales.c",
        ),
        (*PACKING, "tests/native/kernels/test_groups.py"),
    ),
    "compensation": Subject(
        ("quantize/compensate.c", "quantize/compensate_loop.h"),
        ("tests/native/test_compensate.py", "tests/native/test_missing_buffers.py"),
    ),
    "packers": Subject(
        (
            "int/int4.c", "int/int8.c", "int/int_pack_avx2.c", "int/int_pack_avx512.c",
            "group/gint4.c", "group/gint8.c",
        ),
        (
            *PACKING, "tests/native/kernels/test_integers.py",
            "tests/native/kernels/test_groups.py",
            "tests/native/test_programs.py::test_program[strips_check]",
        ),
    ),
    "stored formats": Subject(
        ("fp8/fp8.c", "fp8/mxfp8.c", "fp4/mxfp4.c", "fp4/nvfp4.c", "bf16/bf16.c"),
        (
            "tests/native/test_layouts.py", "tests/native/test_training.py",
            "tests/native/kernels/test_nvfp4.py", "tests/native/kernels/test_bf16.py",
            "tests/native/kernels/test_fp8.py", "tests/native/kernels/test_groups.py",
        ),
    ),
    "encoding": Subject(
        ("encode/encode.c", "encode/encode_loop.h", "encode/encode_search.h"), ENCODING
    ),
    "audit": Subject(
        (
            "audit/packed.c", "audit/packed_loop.h", "audit/packed_search.h", "audit/source.h",
            "audit/packed_fixed.h", "audit/packed_fixed_sums.c", "audit/packed_fixed_sums_avx2.c",
            "audit/packed_fixed_sums_avx512.c", "audit/packed_fixed_avx2.h",
            "audit/packed_fixed_avx512.h", "audit/packed_fixed_sums.h",
            "audit/source_numbers.h", "audit/packed_runs_avx512.h", "audit/source_ggml.h",
            "audit/packed_values.h", "audit/packed_runs_avx2.h",
        ),
        AUDIT,
    ),
    "audit of encodings": Subject(
        (
            "audit/encoded.c", "audit/encoded_loop.h", "audit/encoded_floats.h",
            "audit/encoded_integers_avx512.h",
        ),
        ENCODING,
    ),
    "plan": Subject(
        (
            "conversion/plan.py", "conversion/target.py", "writer/shards.py",
            "targets/ktransformers.py", "targets/renaming.py", "targets/consumers.py",
        ),
        (
            *OUTPUT, "tests/quantize/encoded/test_plan.py", "tests/targets",
            "tests/repack/test_reshard.py",
        ),
    ),
    "plan of encodings": Subject(
        (
            "targets/encoded/naming.py", "targets/encoded/layouts/base.py",
            "targets/encoded/layouts/words.py", "targets/encoded/layouts/plain.py",
            "targets/encoded/layouts/packed.py",
            "targets/encoded/scheme.py", "targets/encoded/target.py",
            "targets/encoded/other_tensors.py",
        ),
        METHODS,
    ),
    "journal": Subject(
        (
            "writer/journal.py", "writer/staging.py", "writer/manifest.py", "writer/metadata.py",
            "conversion/output.py", "conversion/records.py", "conversion/run.py",
        ),
        (
            "tests/conversion/test_needs.py", "tests/conversion/test_output_state.py", *RESUMED,
            "tests/conversion/test_disk_space.py",
        ),
    ),
    "durable files": Subject(
        ("system/files.py",),
        ("tests/system/test_files.py", "tests/system/test_write_behind.py", *RESUMED),
    ),
}  # fmt: skip
