"""The rules for scales, with which every conversion to INT4 and INT8 begins: amax and search."""

from __future__ import annotations

from typing import ClassVar

from ktconv.conversion.pipeline import Task
from ktconv.formats import FORMATS
from ktconv.quantize.packed.task import QuantizeTask, quantize_buffers
from ktconv.quantize.packed.ways import Asked, Expert, Way
from ktconv.source.reading.buffers import BufferSizes
from ktconv.targets.packed.target import Plan, ScaleRule

_DOWN_LAST = ("gate", "up", "down")


class Rule(Way):
    """A rule for the scales of rows; the nearest codes follow from them. `QuantizeTask` hands its
    name to the C library."""

    name: ClassVar[ScaleRule]

    @classmethod
    def open(cls, asked: Asked) -> Rule | None:
        return cls() if asked.options.scale == cls.name else None

    def buffers(self, plan: Plan) -> BufferSizes:
        return quantize_buffers(plan.moe_layers, FORMATS[plan.target.options.method])

    def tasks(self, expert: Expert, tasks: list[Task]) -> list[Task]:
        """A task for each matrix of the expert, down last."""
        one, weights = expert, expert.weights
        return [
            *tasks,
            *(
                QuantizeTask(
                    one.reader, one.layer, one.number, proj, one.verify, one.options,
                    weights.of(one.number, proj) if weights else None,
                )
                for proj in sorted(one.layer.projections, key=_DOWN_LAST.index)
            ),
        ]  # fmt: skip


class Amax(Rule):
    """Scales from the largest absolute weight of a row, as KTransformers' converter has them."""

    name = "amax"


class Search(Rule):
    """Scales for the smallest squared error of a row, which importance can weigh."""

    name = "search"
