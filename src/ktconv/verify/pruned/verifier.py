"""Every level on a pruned checkpoint: each byte is the source's."""

from __future__ import annotations

import random
from collections.abc import Iterator

from ktconv.source import TensorRef
from ktconv.system.units import counted
from ktconv.verify.findings import Facts
from ktconv.verify.kept_check import KeptCheck
from ktconv.verify.pruned.model import PrunedModelCheck
from ktconv.verify.pruned.output import PrunedOutput, open_pruned_output
from ktconv.verify.reading import Context
from ktconv.verify.runner import OTHER, Check
from ktconv.verify.structure import StructureCheck
from ktconv.verify.totals import ItemResult, Totals
from ktconv.verify.verifier import OutputVerifier
from ktconv.writer.manifest import MANIFEST


class PrunedStructureCheck(StructureCheck):
    _output: PrunedOutput

    def tensors(self) -> int:
        if not self._output.layers:
            words = "cannot be read as a checkpoint"
            self._fail("damaged file", f"{self._directory} {words}.")
        if self._output.plan is not None:
            return self._check_planned(self._output.plan.units)
        return self._check_names({*self._output.records})


class PrunedVerifier(OutputVerifier):
    """Runs the levels but layers, which is left out with a note."""

    output: PrunedOutput
    structure_class = PrunedStructureCheck
    model_class = PrunedModelCheck
    open = staticmethod(open_pruned_output)

    def check_options(self) -> None:
        self.refuse_packed_options("the encoding of its source")

    def check_source(self) -> None:
        self.findings.note(
            "level layers was not run: experts have the bytes of the source, and no kernel is "
            "part of the output"
        )
        if self.level == "layers":
            self.level = "weights"  # the level that the output is verified to

    def expert_checks(
        self, context: Context, share: float, rng: random.Random
    ) -> Iterator[Check[ItemResult]]:
        return iter(())

    def copy_checks(
        self, context: Context, tensor: TensorRef, origin: TensorRef | None
    ) -> Iterator[Check[ItemResult]]:
        if context.second is None:
            yield from super().copy_checks(context, tensor, None)
            return
        found = context.second.kept_origin(tensor.name, tensor.shape)
        yield KeptCheck(context, OTHER, tensor, found)

    def weights_facts(self, totals: Totals) -> Facts | None:
        """None: no weight was rounded. That the bytes are the source's is a part of level
        structure."""
        if not self.findings.count():
            self.findings.note(
                f"{counted(totals.copied_tensors, 'tensor', 'have')} the bytes of the experts and "
                f"router rows of the source that {MANIFEST} names"
            )
        return None
