"""Inputs of each expert, as a conversion with `--calibrate` knows them.

calibration = open_calibration(Path("hessians"), checkpoint, plan.moe_layers)
calibration.importance(3, 17, "down")            # float32 [I], by which scales are searched
calibration.layer(3).factor(17, "down")          # what compensation needs
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ktconv.errors import UsageError
from ktconv.formats.folding import factors
from ktconv.quantize.packed.importance.channel_weights import channel_weights, layer_profile
from ktconv.source import Checkpoint, MoELayer, Projection
from ktconv.stats.hessian import Hessians, open_hessians
from ktconv.stats.origin import Origin, Sizes
from ktconv.stats.router_sample import notes_on_origin
from ktconv.system.arrays import F32, F64, I8, I64
from ktconv.system.text import path_text
from ktconv.system.units import counted, listed
from ktconv.targets.packed.target import CalibrationRecord

if TYPE_CHECKING:
    from ktconv.quantize.packed.gptq.codes import Factor

# Experts with fewer tokens are rounded as the search says, weighted by importance. From here on
# compensation helps on other text, too (docs/calibration.md).
FEWEST_TOKENS = 16
LIBRARY_MEMORY = 250 << 20  # torch once imported
_AGAIN = "ktconv stats MODEL --hessian DIR"


class LayerInputs:
    """Inputs of one layer, of which the diagonals are in memory."""

    def __init__(self, hessians: Hessians, layer: int) -> None:
        self._hessians, self._layer = hessians, layer
        self.counts: I64 = hessians.counts(layer)
        self._importance: dict[bool, F32] = {}
        self._profile: dict[bool, F64] = {}
        divisor = np.maximum(self.counts, 1)[:, None]
        inputs: dict[bool, Projection] = {False: "up", True: "down"}
        for down, projection in inputs.items():
            means = (hessians.diagonal(layer, projection) / divisor).astype(np.float32)
            try:
                self._importance[down] = channel_weights(means, self.counts)
                self._profile[down] = layer_profile(means, self.counts)
            except ValueError as error:
                what = "down" if down else "gate and up"
                raise UsageError(
                    f"the second moments of layer {layer} have no inputs of {what}: {error}",
                    "record them with more text",
                ) from error

    def importance(self, expert: int, projection: Projection) -> F32:
        """[inputs] of mean 1: what squared errors of each column count for scales."""
        found: F32 = self._importance[projection == "down"][expert]
        return found

    def is_compensated(self, expert: int) -> bool:
        """Whether an expert has enough tokens."""
        return bool(self.counts[expert] >= FEWEST_TOKENS)

    def factor(
        self, expert: int, projection: Projection, exponents: I8 | None = None
    ) -> Factor | None:
        """None where all inputs are zero. `exponents` [I]: of folding, by which down's inputs are
        multiplied. UsageError for a matrix that is no second moment."""
        from ktconv.quantize.packed.gptq.codes import factor_of

        matrix = self._hessians.matrix(self._layer, expert, projection)
        if not matrix.diagonal().any():
            return None
        try:
            return factor_of(
                matrix,
                int(self.counts[expert]),
                self._profile[projection == "down"],
                factors(exponents) if exponents is not None and projection == "down" else None,
            )
        except ValueError as error:
            raise UsageError(
                f"the second moments of expert {expert} of layer {self._layer} ({projection}) "
                f"cannot be used: {error}",
                f"record them again: {_AGAIN}",
            ) from error


class Calibration:
    """An opened directory of second moments that fit a model. `counts`: by layer the tokens of
    experts; MTP layers that it lacks are not in it."""

    def __init__(self, hessians: Hessians, record: CalibrationRecord, notes: Sequence[str]) -> None:
        self.record, self.notes = record, notes
        self.counts = {layer: hessians.counts(layer) for layer in hessians.layers}
        self._hessians = hessians
        self._kept = lru_cache(1)(partial(LayerInputs, hessians))
        self._lock = threading.Lock()

    def layer(self, index: int) -> LayerInputs | None:
        """Inputs of a layer; None for an MTP layer that is not there. The last one is kept; for use
        from several threads."""
        if index not in self.counts:
            return None
        with self._lock:
            return self._kept(index)

    def memory(self, layers: int) -> int:
        """Bytes, with the diagonals of `layers`, and what reading those of one takes."""
        sizes = [self._hessians.sizes[index] for index in self.counts]
        values = max(one.experts * (one.hidden + one.intermediate) for one in sizes)
        widest = max(one.experts * max(one.hidden, one.intermediate) for one in sizes)
        return LIBRARY_MEMORY + 4 * values * (layers + 1) + 4 * 8 * widest

    def importance(self, layer: int, expert: int, projection: Projection) -> F32 | None:
        """[inputs], by which scales are searched; None for an MTP layer that is not there."""
        found = self.layer(layer)
        return None if found is None else found.importance(expert, projection)


def open_calibration(
    directory: Path, checkpoint: Checkpoint, layers: Sequence[MoELayer]
) -> Calibration:
    """Second moments that `ktconv stats --hessian` wrote, for `layers` of a checkpoint.

    Raises UsageError for a directory of another model, without a layer that is not an MTP layer, or
    with damaged files; ResourceError where the system refuses to read.
    """
    hessians = open_hessians(directory)
    _check_sizes(directory, hessians.sizes, checkpoint)
    missing = [one for one in layers if one.index not in hessians.sizes]
    if numbers := [one.index for one in missing if not one.is_mtp]:
        raise UsageError(
            f"{directory} has no second moments of {listed('layer', numbers)}",
            f"record all layers: {_AGAIN}, without --layers",
        )
    check_enough(max(int(hessians.counts(layer).max()) for layer in hessians.layers), directory)
    notes = notes_on_origin(directory, hessians.origin, checkpoint)
    if missing:
        numbers = [one.index for one in missing]
        notes.append(
            f"{path_text(directory)} has no second moments of "
            f"{listed('MTP layer', numbers)}: the search chooses scales there, and all errors "
            "count the same"
        )
    return Calibration(hessians, record_of("hessian", directory.name, hessians.origin), notes)


def check_enough(tokens: int, path: Path) -> None:
    """UsageError where no expert gets more than `tokens`, and that is too few to calibrate any."""
    if tokens < FEWEST_TOKENS:
        raise UsageError(
            f"{path_text(path)} is too short to calibrate: no expert gets more than "
            f"{counted(tokens, 'token')}, and each needs {FEWEST_TOKENS}",
            "calibrate with a text of thousands of tokens, or omit --calibrate",
        )


def record_of(kind: str, name: str, origin: Origin) -> CalibrationRecord:
    """Record of a calibration by files or by a text: equal ones give equal codes."""
    return CalibrationRecord(name, kind, origin.text, origin.text_sha256, origin.run)


def _check_sizes(directory: Path, found: Mapping[int, Sizes], checkpoint: Checkpoint) -> None:
    there = {layer.index: Sizes.of(layer) for layer in checkpoint.layers}
    for index, sizes in found.items():
        if sizes != there.get(index):
            has = f"has {sizes.words}" if index in there else "has experts"
            own = there[index].words if index in there else "has none"
            raise UsageError(
                f"{directory} is of another model: layer {index} {has} there, and {own} in "
                f"{checkpoint.path}",
                f"give the second moments of this model: {_AGAIN}",
            )
