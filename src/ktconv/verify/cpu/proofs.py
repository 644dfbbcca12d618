"""What level weights proves of each matrix, by how the manifest says that it was quantized."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ktconv import native
from ktconv.errors import UsageError
from ktconv.formats import Projection, TensorId
from ktconv.formats.folding import FoldError, decode, folded_importance
from ktconv.formats.multiples import MULTIPLES
from ktconv.packed.proof import CODES, COMPENSATED, ROW_ERROR_BOUND, Proof
from ktconv.packed.weights import name_of
from ktconv.system.arrays import I8
from ktconv.targets.card import codes_in_words
from ktconv.verify.cpu.output import CpuOutput
from ktconv.writer.journal import Record

if TYPE_CHECKING:
    from ktconv.quantize_cpu.importance import ExpertWeights


@dataclass(frozen=True)
class Proofs:
    """Of an output. `unproven`: sentences on what is not proven, and which option proves it."""

    rule: str
    words: str  # how scales and codes were chosen
    fold: bool
    records: Mapping[str, Record]  # of the manifest, by tensor
    weights: ExpertWeights | None = None  # of squared errors
    unproven: Sequence[str] = ()
    exact: bool = True

    def exponents(self, layer: int, expert: int, widths: Sequence[int]) -> I8 | None:
        """Of folding [I], from parts of up with so many rows; None: nothing is folded. FoldError
        where they are not recorded."""
        if not self.fold:
            return None
        records = [self._record(layer, expert, "up", part) for part in range(len(widths))]
        if not all("fold" in one for one in records):
            raise FoldError("it has no exponents of folding for that")
        return np.concatenate(
            [decode(one.get("fold"), width) for one, width in zip(records, widths, strict=True)]
        )

    def of(self, layer: int, expert: int, proj: Projection, exponents: I8 | None = None) -> Proof:
        """Of a whole matrix; its parts take columns of it. `exponents`: of folding."""
        found = self.weights.of(layer, expert, proj) if self.weights else None
        if exponents is not None and proj == "down" and self.rule == "search":
            found = folded_importance(found, exponents)
        codes = self._record(layer, expert, proj, 0).get(CODES)
        exact = self.exact and (codes is None or self.weights is not None)
        proof = Proof(native.Choice(self.rule, found), exact)
        return replace(proof, factors=MULTIPLES) if codes == COMPENSATED else proof

    def row_error(
        self, layer: int, expert: int, proj: Projection, parts: Iterable[int]
    ) -> float | None:
        """What the manifest says that no row of these parts exceeds; None: codes are by the rule.
        NaN where it says nothing that can be."""
        records = [self._record(layer, expert, proj, part) for part in parts]
        if not any(record.get(CODES) == COMPENSATED for record in records):
            return None
        bounds = [record.get(ROW_ERROR_BOUND, math.nan) for record in records]
        sound = all(type(bound) is float and 0 <= bound < math.inf for bound in bounds)
        return max(bounds) if sound else math.nan

    def _record(self, layer: int, expert: int, proj: Projection, part: int) -> Record:
        return self.records.get(name_of(TensorId(layer, proj, expert, part, "weight")), {})

    @property
    def memory(self) -> int:
        """Bytes."""
        return self.weights.memory(2) if self.weights else 0

    def as_dict(self) -> dict[str, Any]:
        """For the report."""
        return {"codes_by": self.words, "rule": self.rule, "unproven": list(self.unproven)}


def _calibrated(output: CpuOutput, given: bool) -> list[str]:
    """What is not proven of codes that were calibrated, `given` the inputs they follow from."""
    codes = [record[CODES] for record in output.records.values() if CODES in record]
    compensated, sentences = codes.count(COMPENSATED), []
    if compensated:
        sentences.append(
            f"the codes of {compensated:,} of {len(codes):,} calibrated tensors follow from data: "
            "proven are that they are levels, and that no row has a larger error than recorded"
        )
    if codes and not given:
        sentences.append(
            "the scales of calibrated matrices are proven to be possible, but not that they make "
            "the error on the calibration data smallest: give its second moments with "
            "--calibrate DIR"
        )
    return sentences


def proofs_of(output: CpuOutput, importance: Path | None) -> Proofs:
    """`importance`: the file given. UsageError for one that the output was not made with."""
    rule, recorded = output.options.scale, output.options.importance
    words, fold = codes_in_words(output.options), bool(output.options.fold)
    if recorded is None:
        if importance is not None:
            raise UsageError(
                f"{output.directory} was converted without --importance", "omit --importance"
            )
        unproven = _calibrated(output, given=False)
        return Proofs(rule, words, fold, output.records, unproven=unproven)
    if importance is None:
        unproven = [_UNKNOWN.format(file=recorded.file)]
        return Proofs(rule, words, fold, output.records, exact=False, unproven=unproven)
    if output.checkpoint is None or output.plan is None:
        return Proofs(rule, words, fold, output.records, exact=False)  # nothing is compared
    from ktconv.quantize_cpu.importance import open_weights

    weights = open_weights(importance, output.checkpoint, output.plan.moe_layers)
    if weights.record.sha256 != recorded.sha256:
        raise UsageError(
            f"{output.directory} was converted with another file of importance than {importance}: "
            f"its {recorded.file} has the SHA-256 {recorded.sha256[:12]}..., not "
            f"{weights.record.sha256[:12]}...",
            "give the file that the conversion was given",
        )
    return Proofs(rule, words, fold, output.records, weights)


_UNKNOWN = (
    "scales are proven to be possible, and codes to be the nearest under them, but not that those "
    "scales make the error weighted by {file} smallest: give it with --importance FILE"
)
