"""`--importance`: squared errors of some channels count more, by a file or by the model's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ktconv.conversion.pipeline import Task
from ktconv.errors import UsageError
from ktconv.quantize.packed.coverage import Row, facts_of, table
from ktconv.quantize.packed.importance.channel_weights import SHRINKAGE
from ktconv.quantize.packed.importance.load import ExpertWeights, LayerWeights, open_weights
from ktconv.quantize.packed.importance.source_weights import NormWeights, SourceWeights, WeighedTask
from ktconv.quantize.packed.ways import (
    LAYERS_KEPT,
    Asked,
    Converted,
    ErrorWeights,
    Expert,
    Way,
)
from ktconv.system.arrays import I64
from ktconv.system.units import counted
from ktconv.targets.packed.target import BY_WEIGHTS, Options, Plan


class Importance(Way):
    """Weights of squared errors, from a file or from the model's own matrices."""

    def __init__(self, found: ExpertWeights | SourceWeights) -> None:
        self.found, self.record = found, {"importance": found.record}

    @staticmethod
    def open(asked: Asked) -> Importance | None:
        """UsageError too where those of an output that is converted again followed from a file."""
        request, options = asked.request, asked.options
        if request.importance is None:
            if options.importance == BY_WEIGHTS:
                return Importance(SourceWeights(asked.checkpoint, asked.layers))
            if options.importance is None:
                return None
            raise UsageError(
                f"the weights were converted with --importance {options.importance.file}, without "
                "which other scales would result",
                "convert the model again: ktconv quantize-cpu MODEL OUTPUT --importance FILE",
            )
        if request.calibrate is not None:
            return None  # refused there
        if options.scale != "search":
            given = "--compat" if options.compat else f"--scale {options.scale}"
            raise UsageError(
                "--importance says what the errors count that --scale search makes small, and "
                f"cannot be combined with {given}",
                "omit one of them",
            )
        if not isinstance(request.importance, Path):
            return Importance(SourceWeights(asked.checkpoint, asked.layers))
        return Importance(open_weights(request.importance, asked.checkpoint, asked.layers))

    @staticmethod
    def error_weights(output: Converted, given: Path | None) -> ErrorWeights | None:
        """Weights that follow from the model's own matrices need no file, only the source."""
        recorded = output.options.importance
        if recorded == BY_WEIGHTS:
            own = SourceWeights(output.checkpoint, output.layers)
            return ErrorWeights(own.of, own.memory(LAYERS_KEPT))
        if given is None or recorded is None:
            return None
        weights = open_weights(given, output.checkpoint, output.layers)
        if weights.record.sha256 != recorded.sha256:
            raise UsageError(
                f"{output.directory} was converted with another file of importance than {given}: "
                f"its {recorded.file} has the SHA-256 {recorded.sha256[:12]}..., not "
                f"{weights.record.sha256[:12]}...",
                "give the file that the conversion was given",
            )
        return ErrorWeights(weights.of, weights.memory(LAYERS_KEPT))

    @staticmethod
    def unproven(options: Options, codes: Sequence[object], known: bool) -> list[str]:
        if known or options.importance is None or options.importance == BY_WEIGHTS:
            return []
        return [
            "scales are proven to be possible, and codes to be the nearest under them, but not "
            f"that those scales make the error weighted by {options.importance.file} smallest: "
            "give it with --importance FILE"
        ]

    def notes(self, plan: Plan) -> list[str]:
        return list(self.found.notes)

    def about(self) -> tuple[dict[str, Any], list[str]]:
        record, found = self.found.record.as_dict(), self.found.coverage
        if not found:  # without a text
            return {"importance": record}, []
        return {"importance": record | coverage_facts(found)}, coverage_lines(found)

    def shared_memory(self, units: int) -> int:
        return self.found.memory(units)

    def weights(self, layer: int) -> LayerWeights | NormWeights | None:
        return self.found.layer(layer)

    def tasks(self, expert: Expert, tasks: list[Task]) -> list[Task]:
        """Workers compute the weights of down, the last one, where they follow from the model."""
        if not isinstance(self.found, SourceWeights):
            return tasks
        last: Any = tasks[-1]
        return [*tasks[:-1], WeighedTask(last, self.found)]


# ---- tokens of the experts, as a table -----------------------------------------------------


_WITHOUT = "experts_without_tokens"  # their weights are those of the layer
_SELDOM = "experts_mostly_of_layer"  # so few tokens that the layer counts more than they do


def coverage_facts(layers: Mapping[int, I64]) -> dict[str, Any]:
    """Facts for JSON, of tokens [E] by layer: totals and every layer."""
    few = {
        _WITHOUT: lambda counts: int((counts == 0).sum()),
        _SELDOM: lambda counts: int(((counts > 0) & (counts < SHRINKAGE)).sum()),
    }
    return facts_of(layers, few)


def coverage_lines(layers: Mapping[int, I64]) -> list[str]:
    """Lines for people: the layers whose experts saw least, and the totals."""
    facts = coverage_facts(layers)
    heads = {_WITHOUT: "none", _SELDOM: f"below {SHRINKAGE}"}
    return [
        *table("tokens of each expert in the file of importance", facts["layers"], heads, _order),
        f"of {counted(facts['experts'], 'expert')} {facts[_WITHOUT]} got no token and "
        f"{facts[_SELDOM]} fewer than {SHRINKAGE}: their weights are mostly those of their layer",
    ]


def _order(row: Row) -> tuple[int, int, int]:
    return -row[_WITHOUT], -row[_WITHOUT] - row[_SELDOM], row["tokens_median"]
