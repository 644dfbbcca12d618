"""Level model for experts on GPUs: the source model and the checkpoint, reading the same text.

A checkpoint with every expert is loaded by transformers, as users would: compressed-tensors unpacks
it. If it has only some of the experts, or is of a family whose experts transformers reads in fused
form alone, we dequantize them and put them into the source model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktconv.verify.findings import Facts
from ktconv.verify.gpu.output import GpuOutput
from ktconv.verify.gpu.weights import dequantized
from ktconv.verify.model import MODEL_PACKAGES, ModelCheck, require

if TYPE_CHECKING:
    from torch import Tensor

_MODULES_WITH_BARS = (
    "compressed_tensors.compressors.model_compressors.model_compressor",
    "compressed_tensors.offload.dispatch",
    "compressed_tensors.quantization.lifecycle.apply",
)


class GpuModelCheck(ModelCheck):
    _output: GpuOutput
    models_loaded = 2  # experts are unpacked when they are loaded

    @property
    def _named(self) -> Path:
        return self._output.directory

    @property
    def _bits(self) -> int:
        return min(group.bits for group in self._output.quantization.groups)

    @cached_property
    def _swapped(self) -> bool:
        from ktconv.targets.pack_quantized.loading import transformers_reads_packed

        output = self._output
        return output.is_partial or not transformers_reads_packed(output.source)

    def check_request(self) -> None:
        require(**MODEL_PACKAGES)
        if not self._swapped:
            require(compressed_tensors="compressed-tensors")
        super().check_request()

    def _run(self) -> Facts:
        if self._swapped:
            return super()._run()
        from ktconv.quantize_gpu.llm_compressor import silenced

        # compressed-tensors draws bars when a model is first called, too, and warns of names that
        # only engines know.
        with silenced(_MODULES_WITH_BARS, ["compressed_tensors.utils.match"]):
            return super()._run()

    @contextmanager
    def _pair(self, model: Any) -> Iterator[tuple[Any, Any, Facts]]:
        from ktconv.model import load_model

        if self._swapped:
            self._notify("replacing its experts with the dequantized ones")
            pair: _Pair = _Swapped(model, self._output)
        else:
            self._notify("loading the converted model")
            pair = _Pair(model, load_model(self._output.directory, decode=False)[0])
        facts = {"experts_of_source": pair.experts_of_source, "loaded_by": pair.loaded_by}
        yield pair, pair, facts


class _Pair:
    """Two models behind the interface of one, for `ktconv.model.evaluate`."""

    experts_of_source, loaded_by = 0, "transformers"

    def __init__(self, source: Any, converted: Any) -> None:
        self._source, self._current = source, converted

    @contextmanager
    def originals(self) -> Iterator[None]:
        """A context in which the source's model runs."""
        converted, self._current = self._current, self._source
        try:
            yield
        finally:
            self._current = converted

    def __call__(self, **arguments: Any) -> Any:
        return self._current(**arguments)

    def generate(self, *arguments: Any, **named: Any) -> Any:
        return self._current.generate(*arguments, **named)


class _Swapped(_Pair):
    """One model with dequantized experts in place of some of its own."""

    loaded_by = "ktconv"

    def __init__(self, model: Any, output: GpuOutput) -> None:
        super().__init__(model, model)
        self._kept: list[tuple[Tensor, Tensor]] = []  # view of a parameter, its other content
        self._put_all(model, output)

    @contextmanager
    def originals(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for view, other in self._kept:
            now = view.clone()
            view.copy_(other)
            other.copy_(now)

    def _put_all(self, model: Any, output: GpuOutput) -> None:
        import torch

        from ktconv.model.sites import find_experts

        sources, here, modules = output.source_layers, output.layers, output.experts
        with torch.no_grad():
            for index, site in find_experts(model).items():
                layer = sources[index]
                self.experts_of_source += len(layer.experts) - len(here.get(index, ()))
                for expert in here.get(index, ()):
                    for proj, view in site.own.matrices(expert).items():
                        matrix = layer.experts[expert][proj]
                        found = dequantized(output, modules[index, expert, proj], matrix).values()
                        self._kept.append((view, torch.from_numpy(found).to(view.dtype)))
        self._exchange()
