"""Predictions of an estimate: errors by method and scale rule, layer and projection, as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from ktconv.conversion.plan import LayerUnit
from ktconv.formats import FORMATS
from ktconv.quantize.estimate.sampling import Limits, Sample
from ktconv.source import Projection
from ktconv.targets.packed.target import BY_WEIGHTS, Options, ScaleRule

F64 = npt.NDArray[np.float64]
Cell = tuple[int, Projection]

# What options of a conversion do that a sample of rows does not show, by their names in its record.
NOT_SHOWN = {
    "fold": "the factors of --fold follow from whole experts; the errors are those without it",
    "calibrate": "codes of --calibrate follow from all inputs of an expert; the errors are those "
    "of scales alone",
}

_NOT_OF_DOWN = (
    "importance of down's inputs follows from whole matrices of up and gate; its errors are those "
    "of the search without it"
)


class Candidate(Struct, frozen=True):
    """One way to choose codes and scales."""

    method: str
    rule: ScaleRule
    weighted: bool = False  # the search by the importance of inputs

    def options(self, options: Options) -> Options:
        """Options of a conversion with it, as far as they decide how rows are read and which are
        kept. Only amax can be that of the reference converter."""
        compat = options.compat and self.rule == "amax"
        return Options(
            method=self.method, scale=self.rule, compat=compat, requantize=options.requantize
        )


class Errors(Struct, frozen=True):
    """Errors of one cell or of several: relative RMS errors by candidate, [candidates, 2], where
    the second counts inputs by their importance. `deviation`: the standard error of these means;
    NaN where one matrix alone was sampled."""

    mean: F64
    deviation: F64


class Estimate(Struct, frozen=True):
    """Predicted errors of a conversion, by candidate, layer and projection."""

    options: Options
    units: Sequence[LayerUnit]
    candidates: Sequence[Candidate]
    left_out: Mapping[str, str]  # methods that cannot represent the model -> why
    measured: Sequence[tuple[Sample, F64]]  # [candidates, 2] each
    planned: int  # samples
    weighted: bool  # whether the importance of inputs was known
    limits: Limits
    bytes_read: int
    seconds: float

    def cells(self) -> dict[Cell, Errors]:
        """Errors by layer and projection, in their order; those that time was left for."""
        members: dict[Cell, list[tuple[Sample, F64]]] = {}
        for sample, errors in self.measured:
            members.setdefault(sample.cell, []).append((sample, errors))
        experts = {unit.layer.index: len(unit.experts) for unit in self.units}
        every = ((unit.layer.index, proj) for unit in self.units for proj in unit.layer.projections)
        return {
            cell: _errors_of_cell(members[cell], experts[cell[0]])
            for cell in every
            if cell in members
        }

    def facts(self) -> dict[str, Any]:
        """JSON-ready; docs/estimate.md describes the names."""
        cells, samples = self.cells(), [sample for sample, _ in self.measured]
        rows = [len(sample.rows) for sample in samples]
        experts = [sum(sample.cell == cell for sample in samples) for cell in cells]
        present = [len(unit.experts) for unit in self.units]
        every = ((unit.layer.index, proj) for unit in self.units for proj in unit.layer.projections)
        missing = {layer for layer, proj in every if (layer, proj) not in cells}
        return {
            "seed": self.limits.seed,
            "experts": [min(present), max(present)],
            "experts_sampled": [min(experts), max(experts)],
            "rows_sampled": [min(rows), max(rows)],
            "matrices_sampled": len(samples),
            "matrices_planned": self.planned,
            "complete": len(samples) == self.planned,
            "layers_not_sampled": sorted(missing),
            "bytes_read": self.bytes_read,
            "seconds": round(self.seconds, 3),
            "weighted": self.weighted,
            "left_out": dict(self.left_out),
            "not_estimated": not_estimated(self.options.as_dict()),
            "candidates": [self._candidate(i, cells) for i in range(len(self.candidates))],
        }

    def _candidate(self, i: int, cells: Mapping[Cell, Errors]) -> dict[str, Any]:
        candidate = self.candidates[i]
        worst = max(cells, key=lambda cell: float(cells[cell].mean[i, 0]))
        projections = dict.fromkeys(proj for _, proj in cells)
        return {
            "method": candidate.method,
            "scale": candidate.rule,
            "weighted": candidate.weighted,
            "compat": candidate.options(self.options).compat,
            "chosen": self._chosen(candidate),
            "expert_bytes": self._bytes(candidate.method),
            **self._numbers(i, list(cells.values())),
            "worst": {
                "layer": worst[0],
                "projection": worst[1],
                **self._numbers(i, [cells[worst]]),
            },
            "by_projection": {
                proj: self._numbers(i, [one for cell, one in cells.items() if cell[1] == proj])
                for proj in projections
            },
            "layers": [
                self._layer(i, layer, cells) for layer in dict.fromkeys(layer for layer, _ in cells)
            ],
        }

    def _layer(self, i: int, layer: int, cells: Mapping[Cell, Errors]) -> dict[str, Any]:
        """Facts of one layer, by projection."""
        own: dict[str, Any] = {
            proj: self._numbers(i, [one]) for (at, proj), one in cells.items() if at == layer
        }
        return {"layer": layer, **own}

    def _chosen(self, candidate: Candidate) -> bool:
        """Whether it is what the options say."""
        weighted = self.weighted and candidate.rule == "search"
        return (candidate.method, candidate.rule, candidate.weighted) == (
            self.options.method,
            self.options.scale,
            weighted,
        )

    def _bytes(self, method: str) -> int:
        """Bytes of all converted experts, scales included."""
        return sum(
            len(unit.experts)
            * FORMATS[method].expert_bytes(
                unit.layer.hidden_size,
                unit.layer.intermediate_size,
                self.options.numa,
                gated=unit.layer.gated,
            )
            for unit in self.units
        )

    def _numbers(self, i: int, errors: Sequence[Errors]) -> dict[str, Any]:
        """Means over cells of one candidate, and the standard error of the first."""
        mean = np.mean([one.mean[i] for one in errors], axis=0)
        deviation = math.sqrt(sum(float(one.deviation[i, 0]) ** 2 for one in errors)) / len(errors)
        found: dict[str, Any] = {
            "relative_rms_error": _rounded(float(mean[0])),
            "standard_error": None if math.isnan(deviation) else _rounded(deviation),
        }
        if self.weighted:
            found["weighted_relative_rms_error"] = _rounded(float(mean[1]))
        return found


def not_estimated(record: Mapping[str, object]) -> list[str]:
    """A sentence for each option in the record of a conversion whose effect is not predicted."""
    found = [sentence for name, sentence in NOT_SHOWN.items() if name in record]
    return found + ([_NOT_OF_DOWN] if record.get("importance") == BY_WEIGHTS.as_dict() else [])


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _errors_of_cell(members: Sequence[tuple[Sample, F64]], experts: int) -> Errors:
    """Mean and standard error, which is 0 where all rows of all experts were sampled."""
    errors = np.stack([errors for _, errors in members])
    rows = sum(len(sample.rows) for sample, _ in members)
    share = rows / (experts * members[0][0].matrix.rows)
    if share == 1:
        return Errors(errors.mean(axis=0), np.zeros(errors.shape[1:]))
    if len(members) == 1:
        return Errors(errors[0], np.full(errors.shape[1:], np.nan))
    deviation = errors.std(axis=0, ddof=1) * math.sqrt((1 - share) / len(members))
    return Errors(errors.mean(axis=0), deviation)
