"""From times to a row: simple arithmetic that everything else rests on."""

from __future__ import annotations

from typing import Any

import pytest
from bench.reports import EXPERT_BYTES, LIMITS, SCHEMA, SHAPE, case, problems, report, row
from msgspec.structs import asdict, replace

from ktconv.bench.rows import Errors, Sample, judge

TIMES = tuple(1e-3 * (1 + 0.01 * i) for i in range(11))
ERRORS = Errors(0.01)
OPERATIONS = 6 * 256 * 128


def test_rates() -> None:
    row = judge(case(tokens=3), Sample(TIMES, 12.0, 8.0), LIMITS, LIMITS, Errors(0.01, 0.2, 0.001))
    median = 1.05e-3
    assert row.median_us == pytest.approx(1e6 * median)
    assert (row.p10_us, row.p90_us) == pytest.approx((1010, 1090))
    assert row.iterations == 11
    assert row.tokens_per_s == pytest.approx(3 / median)
    assert row.weight_gb_s == pytest.approx(8 * EXPERT_BYTES / median / 1e9)
    assert row.gops == pytest.approx(12 * OPERATIONS / median / 1e9)
    assert (row.tokens_per_expert, row.distinct_experts) == (1.5, 8.0)
    assert (row.relative_error, row.source_error, row.kernel_error) == (0.01, 0.2, 0.001)
    assert (row.threads, row.isa, row.engine) == (2, "avx512", "ktconv")


def test_the_limit_that_takes_longer_binds() -> None:
    few = judge(case(), Sample(TIMES, 12.0, 8.0), LIMITS, LIMITS, ERRORS)
    assert few.bound == "memory"
    assert few.share_of_bound == pytest.approx(8 * EXPERT_BYTES / 10e9 / 1.05e-3)
    many = judge(case(tokens=5000), Sample(TIMES, 20000.0, 16.0), LIMITS, LIMITS, ERRORS)
    assert many.bound == "compute"
    assert many.share_of_bound == pytest.approx(20000 * OPERATIONS / 500e9 / 1.05e-3)
    floats = judge(case(unit="bf16"), Sample(TIMES, 20000.0, 16.0), LIMITS, LIMITS, ERRORS)
    assert floats.peak_gops == 200.0
    assert floats.share_of_bound == pytest.approx(2.5 * many.share_of_bound)


@pytest.mark.parametrize(("unit", "peak"), [("int8", 500.0), ("bf16", 200.0)])
def test_each_row_has_its_share_of_memory_and_of_the_peak_of_its_unit(
    unit: str, peak: float
) -> None:
    for pairs, bound in ((12.0, "memory"), (20000.0, "compute")):
        row = judge(case(unit=unit), Sample(TIMES, pairs, 8.0), LIMITS, LIMITS, ERRORS)
        assert (row.unit, row.bound) == (unit, bound)
        assert row.share_of_memory == pytest.approx(row.weight_gb_s / 10.0)
        assert row.share_of_peak == pytest.approx(row.gops / peak)
        assert row.share_of_bound == max(row.share_of_memory, row.share_of_peak)


def test_the_better_of_the_limits_before_and_after_counts() -> None:
    slower = replace(LIMITS, read_gb_s=9.0, int8_gops=450.0)
    for before, after in ((LIMITS, slower), (slower, LIMITS)):
        row = judge(case(), Sample(TIMES, 12.0, 8.0), before, after, ERRORS)
        assert (row.read_gb_s, row.peak_gops) == (10.0, 500.0)
        assert not row.disturbed


def test_arithmetic_is_held_against_the_best_of_the_run() -> None:
    best = replace(LIMITS, read_gb_s=99.0, int8_gops=600.0)
    row = judge(case(), Sample(TIMES, 12.0, 8.0), LIMITS, LIMITS, ERRORS, best)
    assert (row.read_gb_s, row.peak_gops) == (10.0, 600.0)


@pytest.mark.parametrize(
    ("sample", "after", "disturbed"),
    [
        (Sample(TIMES, 12.0, 8.0), LIMITS, False),
        (Sample((1e-3,) * 8 + (2e-3,) * 3, 12.0, 8.0), LIMITS, True),
        (Sample(TIMES, 12.0, 8.0, taken=0.1), LIMITS, True),
        (Sample(TIMES, 12.0, 8.0), replace(LIMITS, read_gb_s=20.0), True),
        (Sample(TIMES, 12.0, 8.0), replace(LIMITS, int8_gops=100.0), True),
        (Sample(TIMES, 12.0, 8.0), replace(LIMITS, bf16_gflops=1.0), False),
    ],
    ids=["quiet", "spread", "others", "memory", "unit", "another unit"],
)
def test_what_disturbs(sample: Sample, after: object, disturbed: bool) -> None:
    row = judge(case(), sample, LIMITS, after, ERRORS)  # type: ignore[arg-type]
    assert row.disturbed is disturbed


def test_an_iteration_without_tokens_divides_by_nothing() -> None:
    row = judge(case(), Sample((1e-6,), 0.0, 0.0), LIMITS, LIMITS, ERRORS)
    assert (row.weight_gb_s, row.gops, row.share_of_bound, row.tokens_per_expert) == (0, 0, 0, 0)


def test_rows_with_the_same_key_measure_the_same() -> None:
    assert row(1e-3).key == row(2e-3).key
    changes: dict[str, Any] = {
        "engine": "ggml",
        "method": "int8",
        "shape": replace(SHAPE, experts=15),
        "routing": "zipf:1",
        "tokens": 4,
        "parts": 2,
        "isa": "scalar",
        "layer": 0,
    }
    keys = {row(**{name: value}).key for name, value in changes.items()}
    assert len(keys | {row().key}) == len(changes) + 1


def test_keys_are_known_before_anything_is_measured() -> None:
    for changes in ({}, {"layer": 4}, {"isa": "own", "engine": "torch"}):
        assert case(**changes).key == row(**changes).key


def test_facts_follow_the_schema() -> None:
    facts = report(row(), row(engine="torch", isa="own")).facts()
    found = problems(facts, SCHEMA)
    assert all("$.machine" in problem for problem in found)  # only a real run has them
    row_schema = SCHEMA["properties"]["rows"]["items"]
    assert set(asdict(row())) == set(row_schema["properties"]) == set(row_schema["required"])
