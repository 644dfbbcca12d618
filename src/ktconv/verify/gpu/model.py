"""Level 4 for experts on GPUs: the source model against the checkpoint, reading the same text.

A checkpoint with every expert is loaded by transformers, as a user would: compressed-tensors
unpacks it. One that holds only some experts is no model by itself; its experts are dequantized by
us and put into the source model, whose other experts stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktconv.checkpoint import PROJECTIONS
from ktconv.errors import CheckpointError, ResourceError
from ktconv.system import machine
from ktconv.system.units import format_size
from ktconv.verify.findings import Facts
from ktconv.verify.gpu.output import GpuOutput
from ktconv.verify.gpu.weights import dequantized
from ktconv.verify.model import MODEL_PACKAGES, MORE_MEMORY, ModelCheck, ModelPair, require

if TYPE_CHECKING:
    from torch import Tensor

_MODULES_WITH_BARS = (
    "compressed_tensors.compressors.model_compressors.model_compressor",
    "compressed_tensors.offload.dispatch",
    "compressed_tensors.quantization.lifecycle.apply",
)
_BESIDE = 1.1  # of a model's weights while it is loaded


class GpuModelCheck(ModelCheck):
    _output: GpuOutput

    @property
    def _named(self) -> Path:
        return self._output.directory

    @property
    def _bits(self) -> int:
        return min(group.bits for group in self._output.quantization.groups)

    def check_request(self) -> None:
        if not self._output.is_partial:
            require(**MODEL_PACKAGES, compressed_tensors="compressed-tensors")
        super().check_request()

    def _check_memory(self) -> None:
        """Two models as the source has them: experts are unpacked when they are loaded."""
        size = sum(source.nbytes for source in self._output.source.sources)
        free, total = machine.available_memory(), int(2 * _BESIDE * size)
        if total > free:
            raise ResourceError(
                f"--level model needs about {format_size(total)} of memory for both "
                f"models, but only {format_size(free)} are free",
                MORE_MEMORY,
            )

    def _run(self) -> Facts:
        if self._output.is_partial:
            return super()._run()
        from ktconv.quantize_gpu.llm_compressor import silenced

        # compressed-tensors draws bars when a model is first called, too, and warns of names that
        # only engines know.
        with silenced(_MODULES_WITH_BARS, ["compressed_tensors.utils.match"]):
            return super()._run()

    @contextmanager
    def _pair(self, model: Any) -> Iterator[ModelPair]:
        from ktconv.model import load_model

        if self._output.is_partial:
            self._notify("replacing its experts with the dequantized ones")
            swapped = _Swapped(model, self._output)
            facts = {"loaded_by": "ktconv"}
            yield ModelPair(swapped, swapped, swapped.experts_of_source, facts)
        else:
            self._notify("loading the converted model")
            pair = _Pair(model, load_model(self._output.directory)[0])
            yield ModelPair(pair, pair, 0, {"loaded_by": "transformers"})


class _Pair:
    """Two models, of which one answers: what `ktconv.model.evaluate` compares."""

    def __init__(self, source: Any, converted: Any) -> None:
        self._source, self._current = source, converted

    @contextmanager
    def originals(self) -> Iterator[None]:
        """The source's model for a while."""
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
    """One model, with dequantized experts in place of some of its own."""

    def __init__(self, model: Any, output: GpuOutput) -> None:
        super().__init__(model, model)
        self._kept: list[tuple[Tensor, Tensor]] = []  # of a parameter: view, and other content
        self.experts_of_source = 0
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

        from ktconv.model.replace import find_experts

        sources, here, modules = output.source_layers, output.layers, output.experts
        with torch.no_grad():
            for index, site in find_experts(model).items():
                layer = sources[index]
                self.experts_of_source += len(layer.experts) - len(here.get(index, ()))
                for expert in here.get(index, ()):
                    views = _views(site.module, expert, layer.hidden_size, layer.intermediate_size)
                    for proj, view in zip(PROJECTIONS, views, strict=True):
                        matrix = layer.experts[expert][proj]
                        found = dequantized(output, modules[index, expert, proj], matrix).values()
                        self._kept.append((view, torch.from_numpy(found).to(view.dtype)))
        self._exchange()


def _views(module: Any, expert: int, hidden: int, inner: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gate [I, H], up [I, H] and down [H, I] of one expert within fused parameters, which may be
    transposed. CheckpointError for any other form."""
    gate_up, down = module.gate_up_proj.data[expert], module.down_proj.data[expert]
    if tuple(gate_up.shape) == (2 * inner, hidden) and tuple(down.shape) == (hidden, inner):
        return gate_up[:inner], gate_up[inner:], down
    raise CheckpointError(
        f"{type(module).__name__} stores its experts in an unsupported way",
        "run --level layers",
    )
