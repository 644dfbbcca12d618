"""A recipe that fits, from a request and a wish.

    recipe = Fitting(request, Wish(bits=4.6)).run(observer).recipe

Planned from headers; then a sample of weights is read and rounded by every method. The same model
and wish give the same recipe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ktconv.conversion.pipeline import Observer
from ktconv.conversion.plan import LayerUnit, plan_checkpoint
from ktconv.errors import UsageError
from ktconv.quantize.encoded.request import Request
from ktconv.quantize.encoded.run import prepare
from ktconv.quantize.packed.importance.load import open_weights
from ktconv.quantize.recipes.choose import Choice, choose, smallest
from ktconv.quantize.recipes.measure import Measured, Measurement
from ktconv.quantize.recipes.wish import Wish, fitting
from ktconv.source import PROJECTIONS, Projection
from ktconv.system.units import counted, format_size
from ktconv.targets.encoded.recipe import Method, Recipe, Rule
from ktconv.targets.encoded.scheme import MIXED
from ktconv.targets.encoded.target import EncodedTarget, encoded_bytes, matrix_kinds

Item = tuple[int, tuple[Projection, ...]]  # a layer's projections that have one method
_WHOLE = Method("bf16", 0)  # which every model can have


class Fitted(Struct, frozen=True):
    """Result of a choice, and how its error compares."""

    recipe: Recipe
    measured: Measured
    nbytes: int  # of the output
    bits: float  # per weight of the experts
    error: float  # relative, root of the mean over all matrices of the squares
    uniform: Mapping[Method, tuple[float, float]]  # bits and error with one method for all
    left_out: Mapping[Method, str]  # methods that the model cannot have

    def facts(self) -> dict[str, Any]:
        return {
            "output_bytes": self.nbytes,
            "bits": round(self.bits, 4),
            "relative_rms_error": round(self.error, 5),
            "samples": self.measured.samples,
            "bytes_read": self.measured.bytes_read,
            "one_method": [
                {
                    "method": method.words,
                    "bits": round(bits, 4),
                    "relative_rms_error": round(err, 5),
                }
                for method, (bits, err) in self.uniform.items()
            ],
            "left_out": {method.words: why for method, why in self.left_out.items()},
        }

    def table(self) -> list[str]:
        """Bits per weight and error of the recipe among those of each method alone."""
        rows = [("this recipe", self.bits, self.error)]
        rows += [(method.words, *both) for method, both in self.uniform.items()]
        rows.sort(key=lambda row: row[1])
        return [f"  {name:<20} {bits:7.3f}  {error:.4f}" for name, bits, error in rows]

    def lines(self) -> list[str]:
        """Lines for people."""
        lines = [
            f"Chosen by the errors of {counted(self.measured.samples, 'sample')} "
            f"({format_size(self.measured.bytes_read)} read). Bits per weight, relative RMS error:"
        ]
        lines += self.table()
        return [*lines, *(f"{one.words} is left out: {why}" for one, why in self.left_out.items())]


class Fitting:
    """A wish for a planned conversion."""

    def __init__(self, request: Request, wish: Wish, importance: Path | None = None) -> None:
        """Reads headers only. UsageError for a wish that nothing fulfils."""
        wish.check()
        self._wish = wish
        recipe = Recipe(_WHOLE, "compressed-tensors").toml
        options = replace(request.options, scheme=MIXED.name, group_size=0, recipe=recipe)
        possible = prepare(replace(request, options=options))
        layers = possible.plan.moe_layers
        found = fitting(wish.candidates, layers)
        self._left_out = {method: why for method, why in found.items() if why is not None}
        self._methods = [method for method, why in found.items() if why is None]
        if not self._methods:
            first = next(iter(self._left_out.values()))
            raise UsageError(f"no method of --methods fits this model: {first}", "name others")
        self._preflight = possible
        self._units = [unit for unit in possible.plan.layers if unit.experts]
        self._sizes = {
            method: {
                unit.layer.index: {
                    proj: encoded_bytes(
                        method.scheme(search=False),
                        matrix_kinds(unit.layer.experts[expert][proj] for expert in unit.experts),
                    )
                    for proj in unit.layer.projections
                }
                for unit in self._units
            }
            for method in self._methods
        }
        self._weights = sum(
            matrix.rows * matrix.cols
            for unit in self._units
            for expert in unit.experts
            for matrix in unit.layer.experts[expert].values()
        )
        given = None
        if importance is not None:
            given = open_weights(importance, possible.plan.checkpoint, layers).of
        self._measurement = Measurement(
            possible.plan.checkpoint,
            self._units,
            self._methods,
            search=request.options.scale == "search",
            requantize=request.options.requantize,
            threads=request.threads or possible.threads,
            weights=given,
        )
        self._refuse_too_small()

    @property
    def stages(self) -> dict[str, int]:
        """Stages for an observer of `run`."""
        return self._measurement.stages

    def run(self, observer: Observer | None = None) -> Fitted:
        """Measure and choose."""
        measured = self._measurement.run(observer)
        items = {
            (unit.layer.index, part): [
                Choice(
                    method,
                    sum(self._sizes[method][unit.layer.index][proj] for proj in part),
                    sum(
                        len(unit.experts) * measured.errors[method][unit.layer.index, proj]
                        for proj in part
                    ),
                )
                for method in self._methods
            ]
            for unit in self._units
            for part in self._parts(unit)
        }
        recipe, nbytes = self._within(items)
        chosen = {
            (unit.layer.index, proj): recipe.of(unit.layer.index, unit.experts[0], proj)
            for unit in self._units
            for proj in unit.layer.projections
        }
        uniform = {
            method: (
                self._bits(dict.fromkeys(chosen, method)),
                self._error(dict.fromkeys(chosen, method), measured),
            )
            for method in self._methods
        }
        return Fitted(
            recipe, measured, nbytes, self._bits(chosen), self._error(chosen, measured), uniform,
            self._left_out,
        )  # fmt: skip

    def _parts(self, unit: LayerUnit) -> list[tuple[Projection, ...]]:
        there = unit.layer.projections
        parts = (tuple(proj for proj in part if proj in there) for part in self._wish.parts)
        return [part for part in parts if part]

    def _output_bytes(self, recipe: Recipe) -> int:
        """Bytes of a whole output, from the headers that were read. UsageError for an engine that
        cannot load it."""
        plan = self._preflight.plan
        options = replace(plan.target.options, recipe=recipe.toml)
        target = EncodedTarget(options, plan.checkpoint)
        selection = {unit.layer.index: unit.experts for unit in plan.layers}
        return plan_checkpoint(plan.checkpoint, target, selection).output_bytes

    def _within(self, items: Mapping[Item, Sequence[Choice[Method]]]) -> tuple[Recipe, int]:
        """The recipe, and the bytes of the output with its headers."""
        budget = self._budget()
        while True:
            found = choose(items, max(budget, smallest(items)))
            recipe = self._recipe(
                {(layer, proj): one.what for (layer, part), one in found.items() for proj in part}
            )
            nbytes = self._output_bytes(recipe)
            if self._wish.nbytes is None or nbytes <= self._wish.nbytes:
                return recipe, nbytes
            if budget <= smallest(items):
                raise self._too_small(nbytes)
            # Headers are longer or shorter by method.
            used = sum(one.nbytes for one in found.values())
            budget = min(budget, used) - (nbytes - self._wish.nbytes)

    def _budget(self) -> int:
        """Bytes of experts' tensors."""
        if self._wish.nbytes is None:
            assert self._wish.bits is not None
            return int(self._wish.bits * self._weights / 8)
        plan = self._preflight.plan
        experts = sum(unit.data_bytes for unit in plan.layers)
        return self._wish.nbytes - (plan.output_bytes - experts)

    def _smallest(self) -> dict[tuple[int, Projection], Method]:
        return {
            (unit.layer.index, proj): min(
                self._methods, key=lambda one: self._sizes[one][unit.layer.index][proj]
            )
            for unit in self._units
            for proj in unit.layer.projections
        }

    def _refuse_too_small(self) -> None:
        least = self._smallest()
        needed = sum(self._sizes[one][layer][proj] for (layer, proj), one in least.items())
        if needed <= self._budget():
            return
        raise self._too_small(self._output_bytes(self._recipe(least)))

    def _too_small(self, nbytes: int) -> UsageError:
        bits = self._bits(self._smallest())
        names = ", ".join(method.words for method in self._methods)
        return UsageError(
            f"{self._wish.words} is too small: with the smallest of {names} the output has "
            f"{format_size(nbytes)}, {bits:.3f} bits per weight of the experts",
            f"use at least --target-size {nbytes} or --target-bits {bits + 0.001:.3f}, or other "
            "--methods",
        )

    def _bits(self, chosen: Mapping[tuple[int, Projection], Method]) -> float:
        nbytes = sum(self._sizes[one][layer][proj] for (layer, proj), one in chosen.items())
        return 8 * nbytes / self._weights

    def _error(self, chosen: Mapping[tuple[int, Projection], Method], measured: Measured) -> float:
        counts = {unit.layer.index: len(unit.experts) for unit in self._units}
        total = sum(counts[cell[0]] * measured.errors[one][cell] for cell, one in chosen.items())
        return sqrt(total / sum(counts[cell[0]] for cell in chosen))

    def _recipe(self, chosen: Mapping[tuple[int, Projection], Method]) -> Recipe:
        """Recipe with a rule for each method but the usual one, and for each set of projections."""
        counts = Counter(chosen.values())
        layers: dict[int, dict[Projection, Method]] = {}
        for (layer, proj), method in chosen.items():
            layers.setdefault(layer, {})[proj] = method
        usual = max(counts, key=lambda one: (counts[one], -self._methods.index(one)))
        shared: dict[tuple[Method, tuple[Projection, ...]], list[int]] = {}
        for layer, methods in layers.items():
            for method in dict.fromkeys(methods.values()):
                if method == usual:
                    continue
                some = tuple(proj for proj in PROJECTIONS if methods.get(proj) == method)
                whole = len(some) == len(methods)
                shared.setdefault((method, () if whole else some), []).append(layer)
        rules = [
            Rule(method, tuple(sorted(which)), some) for (method, some), which in shared.items()
        ]
        rules.sort(key=lambda rule: (self._methods.index(rule.method), rule.projections))
        return Recipe(usual, self._wish.engine, tuple(rules))
