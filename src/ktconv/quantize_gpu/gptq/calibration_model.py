"""The model that calibration runs: each expert's projections are linear layers of their own.

transformers keeps the experts of a layer in two three-dimensional parameters, which a quantizer
of linear layers silently skips; llm-compressor splits them into linear layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ktconv.checkpoint import Checkpoint, Projection
from ktconv.errors import CheckpointError, ResourceError
from ktconv.families.family import PROJECTIONS, UNGATED, USUAL
from ktconv.families.names import layer_number
from ktconv.model.decoded import SourceWeights
from ktconv.model.load import first_line, load_language_model, out_of_memory, way_out
from ktconv.model.stored import stored_in
from ktconv.quantize_gpu.gptq.calibration import WITHOUT_MODEL
from ktconv.quantize_gpu.llm_compressor import quiet

_LEAST_LIKENESS = 0.99  # cosine; the same weights in bf16
OF_LIBRARIES = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class LinearExperts:
    """The experts of one layer: linear layers named `path`.EXPERT.PROJECTION_proj."""

    layer: int
    path: str
    module: Any  # llmcompressor's LinearExperts2D

    @property
    def count(self) -> int:
        return int(self.module.num_experts)

    def linear(self, expert: int, projection: Projection) -> nn.Linear:
        found: nn.Linear = getattr(self.module[expert], USUAL.of(projection))
        return found

    def linears(self) -> Iterator[tuple[int, Projection, nn.Linear]]:
        for expert in range(self.count):
            for projection in PROJECTIONS if self.module.has_gate else UNGATED:
                yield expert, projection, self.linear(expert, projection)


def model_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype to load a checkpoint in: that of its experts' scales in the output.

    CheckpointError where experts do not agree.
    """
    layers = checkpoint.layers
    dtypes = {matrix.tensor.dtype for layer in layers for matrix in layer.kinds}
    if "F16" in dtypes and len(dtypes) > 1:
        raise CheckpointError("experts of different dtypes cannot be calibrated together")
    return torch.float16 if dtypes == {"F16"} else torch.bfloat16


def load_linear_model(
    directory: Path,
    dtype: torch.dtype = torch.bfloat16,
    max_cpu_memory: int | None = None,
    offload: Path | None = None,
    name: Path | None = None,
    decoded: SourceWeights | None = None,
    layers: int | None = None,
) -> Any:
    """A model of transformers with linear experts from a local checkpoint, which errors call
    `name` if it is given. `decoded`, `layers`: see `load_language_model`.

    With `max_cpu_memory`, weights beyond that many bytes are kept in the folder `offload` and read
    when their layer is computed. Raises CheckpointError where transformers cannot load the
    checkpoint or would initialise missing weights at random, ResourceError when out of memory.
    """
    name = name or directory
    placement: dict[str, Any] = {}
    if max_cpu_memory is not None:
        placement |= {"device_map": "auto", "max_memory": {"cpu": max_cpu_memory}}
        placement |= {"offload_folder": str(offload), "offload_buffers": True}
    with quiet(), way_out(WITHOUT_MODEL):
        model = load_language_model(
            directory, dtype, name, decoded=decoded, layers=layers, **placement
        )
        try:
            _take_experts_apart(model)
        except (MemoryError, *OF_LIBRARIES) as error:
            if out_of_memory(error):
                raise ResourceError(f"out of memory while loading {name}") from error
            raise CheckpointError(
                f"llm-compressor cannot take the experts of {name} apart: {first_line(error)}"
            ) from error
    return model


def _take_experts_apart(model: Any) -> None:
    """One layer after the other, so that only one layer is in memory twice.

    llm-compressor's own loop keeps all fused experts to its end. Its loading straight into linear
    layers patches transformers for the whole process, and not every family has it.
    """
    from compressed_tensors.offload import disable_offloading, from_accelerate
    from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
    from llmcompressor.modeling.moe.linearize import get_non_linearized_moes

    if hasattr(model, "hf_device_map"):
        from_accelerate(model)
    for path in [path for path, _ in get_non_linearized_moes(model)]:
        fused = model.get_submodule(path)
        linear_class = LinearExperts2D.get_linear_experts_cls(type(fused))
        with disable_offloading():
            config = getattr(fused, "config", model.config)
            linear = linear_class.from_experts_module(fused, config)
            _check_alike(path, fused, linear)
            model.set_submodule(path, linear)


def _check_alike(path: str, fused: Any, linear: Any) -> None:
    """ValueError unless both answer a random token alike: llm-compressor knows a family's experts
    by its config, and not what some compute beside that."""
    own = stored_in(fused)
    if own is None or own.call != "routed":
        return
    token = torch.randn((1, own.hidden), generator=torch.Generator().manual_seed(0))
    first, all_of_it = torch.zeros((1, 1), dtype=torch.int64), torch.ones((1, 1))

    def answer(module: Any) -> Any:
        dtype = next(module.parameters()).dtype  # that of a config without one is not the weights'
        return module(token.to(dtype), first, all_of_it.to(dtype)).float().flatten()

    with torch.no_grad():
        theirs, ours = answer(fused), answer(linear)
    likeness = torch.nn.functional.cosine_similarity(theirs, ours, dim=0)
    if theirs.any() and not likeness > _LEAST_LIKENESS:
        raise ValueError(f"{path} would compute something else")


def linear_experts(model: nn.Module) -> dict[int, LinearExperts]:
    """Layer -> its experts. CheckpointError for experts that were not taken apart, or that are not
    in a numbered layer."""
    from llmcompressor.modeling.moe.linearize import get_linearized_moes, get_non_linearized_moes

    if left := get_non_linearized_moes(model):
        raise CheckpointError(
            f"the experts {left[0][0]} are fused and llm-compressor cannot take them apart",
            WITHOUT_MODEL,
        )
    found: dict[int, LinearExperts] = {}
    for path, module in get_linearized_moes(model):
        number = layer_number(path)
        if number is None or number in found:
            raise CheckpointError(
                f"the experts {path} have an unsupported structure and cannot be calibrated"
            )
        found[number] = LinearExperts(number, path, module)
    return found
