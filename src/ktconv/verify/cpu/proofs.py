"""What level weights proves of each matrix, by how the manifest says that it was quantized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktconv import native
from ktconv.errors import UsageError
from ktconv.formats import Projection
from ktconv.packed.proof import Proof
from ktconv.targets.card import codes_in_words
from ktconv.verify.cpu.output import CpuOutput

if TYPE_CHECKING:
    from ktconv.quantize_cpu.importance import ExpertWeights


@dataclass(frozen=True)
class Proofs:
    """Of an output. `unproven`: sentences on what is not proven, and which option proves it."""

    rule: str
    words: str  # how scales and codes were chosen
    weights: ExpertWeights | None = None  # of squared errors
    unproven: Sequence[str] = ()
    exact: bool = True

    def of(self, layer: int, expert: int, proj: Projection) -> Proof:
        """Of a whole matrix; its parts take columns of it."""
        found = self.weights.of(layer, expert, proj) if self.weights else None
        return Proof(native.Choice(self.rule, found), self.exact)

    @property
    def memory(self) -> int:
        """Bytes."""
        return self.weights.memory(2) if self.weights else 0

    def as_dict(self) -> dict[str, Any]:
        """For the report."""
        return {"codes_by": self.words, "rule": self.rule, "unproven": list(self.unproven)}


def proofs_of(output: CpuOutput, importance: Path | None) -> Proofs:
    """`importance`: the file given. UsageError for one that the output was not made with."""
    rule, recorded = output.options.scale, output.options.importance
    words = codes_in_words(output.options)
    if recorded is None:
        if importance is not None:
            raise UsageError(
                f"{output.directory} was converted without --importance", "omit --importance"
            )
        return Proofs(rule, words)
    if importance is None:
        return Proofs(rule, words, exact=False, unproven=[_UNKNOWN.format(file=recorded.file)])
    if output.checkpoint is None or output.plan is None:
        return Proofs(rule, words, exact=False)  # nothing is compared
    from ktconv.quantize_cpu.importance import open_weights

    weights = open_weights(importance, output.checkpoint, output.plan.moe_layers)
    if weights.record.sha256 != recorded.sha256:
        raise UsageError(
            f"{output.directory} was converted with another file of importance than {importance}: "
            f"its {recorded.file} has the SHA-256 {recorded.sha256[:12]}..., not "
            f"{weights.record.sha256[:12]}...",
            "give the file that the conversion was given",
        )
    return Proofs(rule, words, weights)


_UNKNOWN = (
    "scales are proven to be possible, and codes to be the nearest under them, but not that those "
    "scales make the error weighted by {file} smallest: give it with --importance FILE"
)
