"""Levels layers and model for experts on GPUs, of which no kernel runs here.

Level model compares the source and what ours dequantize to, on the same text. To write text, a
checkpoint with every expert is loaded by transformers, as users would: compressed-tensors unpacks
it, and must come to the same as we. If it has only some of the experts, or is of a family whose
experts transformers reads in fused form alone, we put them into the source model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ktconv.errors import CheckpointError
from ktconv.system.text import Notify
from ktconv.verify.dequantized_model import DequantizedLayersCheck, DequantizedModelCheck, Pair
from ktconv.verify.encoded.output import EncodedOutput
from ktconv.verify.encoded.weights import dequantized
from ktconv.verify.findings import Facts
from ktconv.verify.model import LEVEL, require
from ktconv.verify.request import Thresholds

if TYPE_CHECKING:
    from ktconv.model.streamed.compare import Predictions

_LEAST_KL = 0.005  # what other orders of sums can make

_MODULES_WITH_BARS = (
    "compressed_tensors.compressors.model_compressors.model_compressor",
    "compressed_tensors.offload.dispatch",
    "compressed_tensors.quantization.lifecycle.apply",
)


class EncodedModelCheck(DequantizedModelCheck):
    _output: EncodedOutput
    _dequantized = staticmethod(dequantized)

    @property
    def _bits(self) -> int:
        return min(8, *(group.bits for group in self._output.quantization.groups))

    @cached_property
    def _swapped(self) -> bool:
        from ktconv.targets.encoded.readers import transformers_reads_packed

        output, target = self._output, self._output.source_target
        if target is not None and not target.read_by_transformers(output.source_layers.values()):
            return True
        return output.is_partial or not transformers_reads_packed(output.source)

    @property
    def _about(self) -> Facts:
        by_transformers = self._why_not_loaded is None and not self._swapped
        return super()._about | {"loaded_by": "transformers" if by_transformers else "ktconv"}

    def _check_loadable(self) -> None:
        super()._check_loadable()
        if not self._swapped:
            require(compressed_tensors="compressed-tensors")

    @contextmanager
    def _loaded(self, notify: Notify) -> Iterator[tuple[Any, Any]]:
        from ktconv.quantize.llm_compressor.library import silenced

        with ExitStack() as stack:
            if not self._swapped:
                # compressed-tensors draws bars when a model is first called, too, and warns of
                # names that only engines know.
                names = ["compressed_tensors.utils.match"]
                stack.enter_context(silenced(_MODULES_WITH_BARS, names))
            yield stack.enter_context(super()._loaded(notify))

    @contextmanager
    def _pair(self, model: Any, notify: Notify) -> Iterator[tuple[Any, Any]]:
        from ktconv.model import load_model

        if self._swapped:
            with super()._pair(model, notify) as swapped:
                yield swapped
            return
        notify("loading the converted model")
        try:
            converted, _ = load_model(self._output.directory, decode=False)
        except CheckpointError as error:
            self._findings.fail(LEVEL, "loading", f"{error}.")
            raise
        converted.config._experts_implementation = "eager"
        pair = Pair(model, converted)
        yield pair, pair

    def _check_loaded(
        self, both: Any, experts: Any, predictions: Predictions, limits: Thresholds
    ) -> None:
        """Whether compressed-tensors unpacks what we dequantize, on the first window."""
        from ktconv.model.evaluate import predictions_of_both

        if self._swapped:
            return
        loaded = predictions_of_both(both, experts, predictions.texts[:1]).result().kl_mean
        passed = predictions.result(1).kl_mean
        if not abs(loaded - passed) <= max(limits.max_kl or 0.0, _LEAST_KL):
            self._findings.fail(
                LEVEL,
                "loading",
                f"as transformers loads {self._output.directory}, the mean KL divergence of the "
                f"first window is {loaded:.4g}, but {passed:.4g} by what its tensors contain.",
                value=loaded,
            )


class EncodedLayersCheck(DequantizedLayersCheck):
    _dequantized = staticmethod(dequantized)
