"""What the harness tells pytest, and what it learns: the tests that fail, and no shrinking."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import Phase, settings

KILLERS = "KTCONV_KILLERS"  # a file: names of tests that failed

settings.register_profile(
    "mutants", phases=(Phase.explicit, Phase.generate), derandomize=True, database=None
)
settings.load_profile("mutants")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and KILLERS in os.environ:
        with Path(os.environ[KILLERS]).open("a", encoding="utf-8") as file:
            file.write(report.nodeid + "\n")
