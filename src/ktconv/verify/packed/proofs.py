"""Proofs of level weights for each matrix, by how the manifest says that it was quantized."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ktconv import native
from ktconv.errors import UsageError
from ktconv.formats import Projection, TensorId
from ktconv.formats.folding import FoldError, decode, folded_importance
from ktconv.formats.search import MULTIPLES
from ktconv.quantize.packed.ways import Converted, ErrorWeights, ways_of_table
from ktconv.system.arrays import I8
from ktconv.targets.card import codes_in_words
from ktconv.targets.packed.proof import CODES, COMPENSATED, ROW_ERROR_BOUND, Proof
from ktconv.targets.packed.target import BY_WEIGHTS
from ktconv.targets.packed.weights import name_of
from ktconv.verify.packed.output import PackedOutput
from ktconv.writer.journal import Record
from ktconv.writer.manifest import MANIFEST


class Proofs(Struct, frozen=True):
    """Proofs of an output. `unproven`: sentences on what is not proven, and which option proves
    it."""

    rule: str
    words: str  # how scales and codes were chosen
    fold: bool
    calibrated: bool  # else no record of codes counts: it would ask for less than the rule
    records: Mapping[str, Record]  # of the manifest, by tensor
    weights: ErrorWeights | None = None
    unproven: Sequence[str] = ()
    exact: bool = True

    def exponents(self, layer: int, expert: int, widths: Sequence[int]) -> I8 | None:
        """Exponents of folding [I], from parts of up with `widths` rows; None: nothing is folded.
        FoldError where they are not recorded."""
        if not self.fold:
            return None
        records = [self._record(layer, expert, "up", part) for part in range(len(widths))]
        if not all("fold" in one for one in records):
            raise FoldError("it has no exponents of folding for that")
        return np.concatenate(
            [decode(one.get("fold"), width) for one, width in zip(records, widths, strict=True)]
        )

    def of(self, layer: int, expert: int, proj: Projection, exponents: I8 | None = None) -> Proof:
        """Proof of a whole matrix; its parts take columns of it. `exponents`: of folding."""
        found = self.weights.of(layer, expert, proj) if self.weights else None
        if exponents is not None and proj == "down" and self.rule != "amax":
            found = folded_importance(found, exponents)
        codes = self._codes(layer, expert, proj, 0)
        exact = self.exact and (codes is None or self.weights is not None)
        proof = Proof(native.Choice(self.rule, found), exact)
        return replace(proof, factors=MULTIPLES) if codes == COMPENSATED else proof

    def row_error(
        self, layer: int, expert: int, proj: Projection, parts: Iterable[int]
    ) -> float | None:
        """Error that, by the manifest, no row of these parts exceeds; None: codes are by the rule.
        NaN where it says nothing that can be."""
        parts = list(parts)
        if all(self._codes(layer, expert, proj, part) != COMPENSATED for part in parts):
            return None
        records = [self._record(layer, expert, proj, part) for part in parts]
        bounds = [record.get(ROW_ERROR_BOUND, math.nan) for record in records]
        sound = all(type(bound) is float and 0 <= bound < math.inf for bound in bounds)
        return max(bounds) if sound else math.nan

    def _codes(self, layer: int, expert: int, proj: Projection, part: int) -> object:
        """The record of how codes of a calibrated part were chosen; None: by the rule."""
        return self._record(layer, expert, proj, part).get(CODES) if self.calibrated else None

    def _record(self, layer: int, expert: int, proj: Projection, part: int) -> Record:
        return self.records.get(name_of(TensorId(layer, proj, expert, part, "weight")), {})

    @property
    def memory(self) -> int:
        """Bytes."""
        return self.weights.memory if self.weights else 0

    def as_dict(self) -> dict[str, Any]:
        """Proofs for the report."""
        return {"codes_by": self.words, "rule": self.rule, "unproven": list(self.unproven)}


def proofs_of(output: PackedOutput, importance: Path | None, calibrate: Path | None) -> Proofs:
    """`importance`, `calibrate`: what is given of that. UsageError for anything that the output was
    not converted with."""
    ways = ways_of_table()
    options, given = output.options, {"importance": importance, "calibrate": calibrate}
    for option, path in given.items():
        if path is not None and getattr(options, option) is None:
            how = "was converted without" if output.manifest else f"has no sound {MANIFEST} with"
            raise UsageError(f"{output.directory} {how} --{option}", f"omit --{option}")
    if importance is not None and options.importance == BY_WEIGHTS:
        raise UsageError(
            f"{output.directory} was converted with --importance {BY_WEIGHTS.kind}, which follow "
            "from the source",
            "omit --importance",
        )
    known = None
    if output.checkpoint is not None and output.plan is not None:
        done = Converted(output.directory, options, output.checkpoint, output.plan.moe_layers)
        found = (way.error_weights(done, given.get(way.option)) for way in ways)
        known = next((one for one in found if one is not None), None)
    records = output.records.values() if options.calibrate is not None else ()
    codes = [record[CODES] for record in records if CODES in record]
    sentences = (way.unproven(options, codes, known is not None) for way in ways)
    return Proofs(
        rule=options.rule,
        words=codes_in_words(options),
        fold=bool(options.fold),
        calibrated=options.calibrate is not None,
        records=output.records,
        weights=known,
        unproven=[one for some in sentences for one in some],
        exact=options.importance is None or known is not None,
    )
