"""Measures variants of a model, one after the other, and appends a row of results for each."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.accuracy.conversion import (
    CommandFailed,
    Converted,
    Statistics,
    convert,
    record_statistics,
)
from benchmarks.accuracy.evaluation import Evaluation
from benchmarks.accuracy.results import Row, add_result, key_of, read_results
from benchmarks.accuracy.texts import Text, cut_in_blocks, cut_in_halves, subset
from benchmarks.accuracy.variants import Variant
from benchmarks.accuracy.weights import (
    recorded_folds,
    values_of_format,
    values_of_output,
    weight_errors,
)
from ktconv.system import machine


def _swapped(file: Path) -> tuple[Text, Text]:
    first, second = cut_in_halves(file)
    return second, first


# How a file becomes a text to calibrate on and one to evaluate on.
SPLITS = {"halves": cut_in_halves, "swapped": _swapped, "blocks": cut_in_blocks}


@dataclass(frozen=True)
class Job:
    """A model, and what is measured of it."""

    model: Path
    text: Path  # is cut into one to calibrate on and one to evaluate on
    split: str  # a key of SPLITS
    calibrations: Sequence[str]  # "split", "subset:SEED", or a file
    variants: Sequence[Variant]
    parts: Sequence[int]
    kernels: bool  # evaluate on the kernels, too
    work: Path
    results: Path

    def texts(self) -> tuple[Text, Text]:
        """For calibration and for evaluation."""
        return SPLITS[self.split](self.text)

    def calibration(self, name: str) -> Text:
        """The text that a name of `calibrations` stands for."""
        whole, _ = self.texts()
        if name == "split":
            return whole
        kind, _, seed = name.partition(":")
        if kind == "subset" and seed.isdecimal():
            return subset(whole, int(seed))
        file = Path(name)
        return Text(file.name, file.read_text(encoding="utf-8"))


def run(job: Job) -> None:
    """Measure what `job.results` lacks. A variant whose command fails is reported and left out."""
    missing = list(_missing(job))
    if not missing:
        print(f"{job.model.name}: nothing is missing")
        return
    evaluation = Evaluation(job.model, job.texts()[1])
    measured = _Measured(job, evaluation)
    for row, variant, calibration in missing:
        if not variant.format.multiplies(*measured.sizes, row["numa"]):
            continue  # INT4 needs multiples of 128 columns per part
        try:
            found = {**row, **measured.row(variant, row["numa"], calibration)}
        except CommandFailed as error:
            print(error)
            continue
        add_result(job.results, found)
        print(_summary(found), flush=True)


def _missing(job: Job) -> Iterator[tuple[dict[str, Any], Variant, Text | None]]:
    """The keys of the rows that are not there yet, with variant and calibration text."""
    there = {key_of(row) for row in read_results(job.results)}
    _, evaluated = job.texts()
    for variant in job.variants:
        for numa in job.parts if variant.options is not None else [1]:
            for kind in job.calibrations if variant.needs else [None]:
                text = None if kind is None else job.calibration(kind)
                key = {
                    "model": job.model.name,
                    "variant": variant.key,
                    "numa": numa,
                    "calibration": text and text.name,
                    "evaluation": evaluated.name,
                    "split": job.split,
                    "kind": kind if kind is None or ":" in kind else Path(kind).name,
                }
                if key_of(key) not in there:
                    yield key, variant, text


class _Measured:
    """Rows of one model, without their keys."""

    def __init__(self, job: Job, evaluation: Evaluation) -> None:
        self._job, self._evaluation = job, evaluation
        own = next(iter(evaluation.sites.values())).own
        self.sizes = own.hidden, own.intermediate
        self._output = job.work / "output" / job.model.name
        self._about = {
            "commit": commit(),
            "date": date.today().isoformat(),
            "cpu": machine.cpu_model(),
        }

    def row(self, variant: Variant, numa: int, calibration: Text | None) -> dict[str, Any]:
        """Raises CommandFailed."""
        evaluation = self._evaluation
        if variant.options is None:
            values = values_of_format(variant.format, evaluation.source)
            return {
                "weights": weight_errors(evaluation.source, values),
                "values": evaluation.of_values(values).as_record(),
                **self._about,
            }
        statistics = None if calibration is None else self._statistics(calibration, variant)
        converted = convert(self._job.model, variant, numa, statistics, self._output)
        settings = evaluation.model.config.to_dict()
        values = values_of_output(self._output, list(evaluation.sites), settings)
        folds = recorded_folds(self._output) if variant.folded else None
        row = {
            "weights": weight_errors(evaluation.source, values, folds),
            "values": evaluation.of_values(values).as_record(),
            **self._on_kernels(),
            **_times(converted, statistics),
            **self._about,
        }
        shutil.rmtree(self._output)
        return row

    def _on_kernels(self) -> dict[str, Any]:
        if not self._job.kernels:
            return {}
        return {"kernels": self._evaluation.of_output(self._output).as_record()}

    def _statistics(self, text: Text, variant: Variant) -> Statistics:
        digest = hashlib.sha256(text.content.encode()).hexdigest()[:16]
        folder = self._job.work / "statistics" / self._job.model.name / digest
        return record_statistics(self._job.model, text, folder, variant.needs)


def _times(converted: Converted, statistics: Statistics | None) -> dict[str, float]:
    recorded = 0.0 if statistics is None else statistics.seconds
    return {
        "seconds": converted.seconds,
        "statistics_seconds": round(recorded, 3),
        "source_bytes": converted.source_bytes,
    }


def _summary(row: Row) -> str:
    values, kernels = row["values"], row.get("kernels")
    with_kernels = f"{kernels['kl_mean']:.5f}" if kernels else "-"
    return (
        f"{row['model']:24} {row['variant']:16} numa {row['numa']} {row['calibration'] or '-':28} "
        f"weights {row['weights']['all']:.4f} KL {values['kl_mean']:.5f}, kernels {with_kernels}"
    )


def commit() -> str:
    """Of the repository that this is run in, with a "+" where files were changed."""
    describe = ["git", "describe", "--always", "--dirty=+", "--abbrev=7", "--exclude=*"]
    return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
