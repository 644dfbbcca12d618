"""What level weights proves of each matrix, by how the manifest says that it was quantized."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ktconv import native
from ktconv.errors import UsageError
from ktconv.formats import Projection, TensorId
from ktconv.formats.folding import FoldError, decode, folded_importance
from ktconv.formats.multiples import MULTIPLES
from ktconv.system.arrays import F32, I8
from ktconv.targets.card import codes_in_words
from ktconv.targets.packed.proof import CODES, COMPENSATED, ROW_ERROR_BOUND, Proof
from ktconv.targets.packed.target import BY_WEIGHTS
from ktconv.targets.packed.weights import name_of
from ktconv.verify.packed.output import CpuOutput
from ktconv.writer.journal import Record
from ktconv.writer.manifest import MANIFEST


@dataclass(frozen=True, slots=True)
class ErrorWeights:
    """What squared errors count: of a matrix [inputs], None: all the same; and bytes of memory."""

    of: Callable[[int, int, Projection], F32 | None]  # layer, expert, projection
    memory: int


@dataclass(frozen=True)
class Proofs:
    """Of an output. `unproven`: sentences on what is not proven, and which option proves it."""

    rule: str
    words: str  # how scales and codes were chosen
    fold: bool
    calibrated: bool  # else no record of codes counts: it would ask for less than the rule
    records: Mapping[str, Record]  # of the manifest, by tensor
    weights: ErrorWeights | None = None
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
        codes = self._codes(layer, expert, proj, 0)
        exact = self.exact and (codes is None or self.weights is not None)
        proof = Proof(native.Choice(self.rule, found), exact)
        return replace(proof, factors=MULTIPLES) if codes == COMPENSATED else proof

    def row_error(
        self, layer: int, expert: int, proj: Projection, parts: Iterable[int]
    ) -> float | None:
        """What the manifest says that no row of these parts exceeds; None: codes are by the rule.
        NaN where it says nothing that can be."""
        parts = list(parts)
        if all(self._codes(layer, expert, proj, part) != COMPENSATED for part in parts):
            return None
        records = [self._record(layer, expert, proj, part) for part in parts]
        bounds = [record.get(ROW_ERROR_BOUND, math.nan) for record in records]
        sound = all(type(bound) is float and 0 <= bound < math.inf for bound in bounds)
        return max(bounds) if sound else math.nan

    def _codes(self, layer: int, expert: int, proj: Projection, part: int) -> object:
        """How those of a calibrated part were chosen; None: by the rule."""
        return self._record(layer, expert, proj, part).get(CODES) if self.calibrated else None

    def _record(self, layer: int, expert: int, proj: Projection, part: int) -> Record:
        return self.records.get(name_of(TensorId(layer, proj, expert, part, "weight")), {})

    @property
    def memory(self) -> int:
        """Bytes."""
        return self.weights.memory if self.weights else 0

    def as_dict(self) -> dict[str, Any]:
        """For the report."""
        return {"codes_by": self.words, "rule": self.rule, "unproven": list(self.unproven)}


def proofs_of(output: CpuOutput, importance: Path | None, calibrate: Path | None) -> Proofs:
    """`importance`, `calibrate`: what is given of that. UsageError for anything that the output was
    not converted with."""
    options = output.options
    for option, given, recorded in (
        ("importance", importance, options.importance),
        ("calibrate", calibrate, options.calibrate),
    ):
        if given is not None and recorded is None:
            how = "was converted without" if output.manifest else f"has no sound {MANIFEST} with"
            raise UsageError(f"{output.directory} {how} --{option}", f"omit --{option}")
    known = _importance(output, importance) or _calibration(output, calibrate)
    return Proofs(
        rule=options.scale,
        words=codes_in_words(options),
        fold=bool(options.fold),
        calibrated=options.calibrate is not None,
        records=output.records,
        weights=known,
        unproven=_unproven(output, known is not None),
        exact=options.importance is None or known is not None,
    )


def _importance(output: CpuOutput, path: Path | None) -> ErrorWeights | None:
    recorded = output.options.importance
    if recorded == BY_WEIGHTS:
        return _by_weights(output, path)
    if path is None or recorded is None or output.checkpoint is None or output.plan is None:
        return None
    from ktconv.quantize.packed.importance.load import open_weights

    weights = open_weights(path, output.checkpoint, output.plan.moe_layers)
    if weights.record.sha256 != recorded.sha256:
        raise UsageError(
            f"{output.directory} was converted with another file of importance than {path}: its "
            f"{recorded.file} has the SHA-256 {recorded.sha256[:12]}..., not "
            f"{weights.record.sha256[:12]}...",
            "give the file that the conversion was given",
        )
    return ErrorWeights(weights.of, weights.memory(_LAYERS_KEPT))


def _by_weights(output: CpuOutput, path: Path | None) -> ErrorWeights | None:
    """All that they follow from is in the source; `path` must not be given."""
    if path is not None:
        raise UsageError(
            f"{output.directory} was converted with --importance {BY_WEIGHTS.kind}, which follow "
            "from the source",
            "omit --importance",
        )
    if output.checkpoint is None or output.plan is None:
        return None
    from ktconv.quantize.packed.importance.source_weights import SourceWeights

    weights = SourceWeights(output.checkpoint, output.plan.moe_layers)
    return ErrorWeights(weights.of, weights.memory(_LAYERS_KEPT))


def _calibration(output: CpuOutput, path: Path | None) -> ErrorWeights | None:
    recorded = output.options.calibrate
    if path is None or recorded is None or output.checkpoint is None or output.plan is None:
        return None
    from ktconv.quantize.packed.gptq.inputs import open_calibration

    found = open_calibration(path, output.checkpoint, output.plan.moe_layers)
    same = (found.record.text_sha256, found.record.run)
    if same != (recorded.text_sha256, recorded.run):
        raise UsageError(
            f"{output.directory} was converted with other calibration data than {path}: its "
            f"{recorded.name} was recorded on {recorded.text}",
            "give the directory that the conversion was given, or record it again: "
            + _recording(recorded.kind),
        )
    return ErrorWeights(found.importance, found.memory(_LAYERS_KEPT))


def _recording(kind: str) -> str:
    """The command that records what a conversion was calibrated on, from a directory or a text."""
    from ktconv.quantize.packed.gptq.streaming import MOST_TOKENS

    tokens = f" --max-tokens {MOST_TOKENS}" if kind == "text" else ", with as many tokens"
    return f"ktconv stats MODEL --hessian DIR --text with the same text{tokens}"


_LAYERS_KEPT = 2  # with weights in memory


def _unproven(output: CpuOutput, known: bool) -> list[str]:
    """Sentences; `known`: what errors count."""
    sentences, options = [], output.options
    records = output.records.values() if options.calibrate is not None else ()
    codes = [record[CODES] for record in records if CODES in record]
    if compensated := codes.count(COMPENSATED):
        sentences.append(
            f"the codes of {compensated:,} of {len(codes):,} calibrated tensors follow from data: "
            "proven are that they are levels, and that no row has a larger error than recorded"
        )
    if codes and not known:
        factors = ", and the factors of folding of compensated ones," if options.fold else ""
        sentences.append(
            f"the scales of calibrated matrices{factors} are proven to be possible, but not that "
            "they make the error on the calibration data smallest: give its second moments with "
            "--calibrate DIR"
        )
    if options.importance not in (None, BY_WEIGHTS) and not known:
        sentences.append(
            "scales are proven to be possible, and codes to be the nearest under them, but not "
            f"that those scales make the error weighted by {options.importance.file} smallest: "
            "give it with --importance FILE"
        )
    return sentences
