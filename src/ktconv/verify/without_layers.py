"""Verification of outputs whose layers the kernels do not compute."""

from __future__ import annotations

from typing import ClassVar

from ktconv.errors import UsageError
from ktconv.system.text import Notify
from ktconv.verify.findings import Facts, Progression
from ktconv.verify.layers import LayersCheck
from ktconv.verify.verifier import LEVELS_WITH_MODEL_CODE, OutputVerifier


class _NoLayers:
    """Level layers, of which there is nothing to compute."""

    def run(self, progression: Progression) -> Facts | None:
        return None


class VerifierWithoutLayers(OutputVerifier):
    """Runs the levels but layers, which is left out with a note."""

    layers_class = LayersCheck
    kind: ClassVar[str]  # what outputs have for which options of packed ones mean nothing
    why_no_layers: ClassVar[str]

    def check_options(self) -> None:
        request = self.request
        given = {
            "tp": request.tp,
            "ep": request.ep,
            "importance": request.importance,
            "calibrate": request.calibrate,
            "gradients": request.gradients,
            "with": request.beside,
        }
        for option in (name for name, value in given.items() if value):
            raise UsageError(
                f"--{option} does not apply to {self.output.directory}, which has {self.kind}",
                "omit it",
            )

    def check_more(self) -> Facts:
        return {}

    def prepare(self) -> None:
        self.check_options()
        if self.level in LEVELS_WITH_MODEL_CODE:
            self.findings.note(f"level layers was not run: {self.why_no_layers}")
        if self.level == "layers":
            self.level = "weights"  # the level that the output is verified to
        if self.level == "model":
            self.model = self.model_class(self.output, self.request, self.findings)
            self.model.prepare()
        self.more = self.check_more()
        self.structure = self.structure_class(self.output, self.findings).run()
        self.budget = self._budget()
        self.checks = self._checks()

    def thread_bytes(self) -> int:
        return self.buffer_sizes().nbytes

    def layers_check(self, notify: Notify) -> LayersCheck:
        return _NoLayers()  # type: ignore[return-value]
