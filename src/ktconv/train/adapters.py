"""Adapters of prepared models, saved and loaded in PEFT's layout.

A directory holds LoRA of the experts, under a name for each of their matrices, and next to it what
PEFT has put into other parts of the same model.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from math import isclose
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ktconv.errors import CheckpointError, UsageError
from ktconv.families.family import PROJECTIONS, Projection
from ktconv.model.adapters import layer_names
from ktconv.model.fitting import settings_of
from ktconv.model.module import PackedExperts
from ktconv.model.sites import Site, find_experts
from ktconv.source.adapter.beside import CONFIG, WEIGHTS
from ktconv.source.adapter.names import SIDES, LayerNames
from ktconv.source.adapter.parameters import Layout
from ktconv.system.files import make_directory, write_described
from ktconv.train import peft_part
from ktconv.train.adapter_files import Adapter, Matrices, Pair, stacked
from ktconv.train.lora import LoRAExperts
from ktconv.writer.shards import Tensor as Planned
from ktconv.writer.shards import plan_shard

_STORED = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def save(
    model: nn.Module,
    directory: str | Path,
    *,
    layout: Literal["experts", "parameters"] = "experts",
) -> None:
    """Write the LoRA of a prepared model's experts, with that of PEFT in its other parts, to
    `directory`/adapter_model.safetensors and adapter_config.json.

    `layout` "experts": keys are those that PEFT has for models with a linear layer for each matrix
    of an expert (base_model.model.model.layers.3.mlp.experts.5.gate_proj.lora_A.weight).
    "parameters": those of PEFT's target_parameters, for models whose parameters have the matrices
    of all experts; where gate and up are in one, its rank is the sum of theirs.

    Each file appears whole or not at all, and matrices never with the alpha of others. UsageError
    for a model that is not prepared, without LoRA in its experts or without such parameters;
    ResourceError where files cannot be written.
    """
    layers, config = adapted_layers(model), settings_of(model)
    names = {layer: layer_names(site, config.family) for layer, (site, _) in layers.items()}
    first = next(iter(layers.values()))[1]
    if first.rank is None:
        raise UsageError(
            "the experts of this model have no LoRA (rank=None)",
            "save what PEFT has in other parts with its own save_pretrained",
        )
    if layout not in ("experts", "parameters"):
        raise UsageError(f"layout must be experts or parameters, not {layout!r:.60}")
    whole = layout == "parameters"
    if whole and not all(one.parameters for one in names.values()):
        raise UsageError(
            f"the experts of this {type(model).__name__} are no parameters with all matrices",
            'leave layout out: it is "experts" then',
        )
    tensors = dict(peft_part.tensors(model))
    alpha, words, ranks = first.scale * first.rank, set[str](), dict[str, int]()
    for layer, (_, lora) in layers.items():
        lora.matrices()  # that they are whole
        if whole:
            tensors |= _of_parameters(names[layer], lora, ranks)
        else:
            tensors |= _of_experts(names[layer], lora)
            words |= {names[layer].words[one] for one in lora.targets}
    stated = peft_part.config(model, first.rank, alpha, first.dropout, words, ranks)
    path = Path(directory)
    make_directory(path)
    described = (json.dumps(stated, indent=2) + "\n").encode()
    write_described(path / WEIGHTS, _file(tensors), path / CONFIG, described)


def load(
    model: nn.Module,
    directory: str | Path,
    *,
    alpha: float | None = None,
    lora_b_layout: Layout | None = None,
) -> None:
    """Read an adapter into a model that `prepare` has given LoRA of the same rank, alpha and
    targets; where the adapter has LoRA outside the experts, PEFT must have put the same there.

    `directory` is one that `save` or PEFT has written, or of KTransformers, with
    fused_expert_lora.safetensors. `alpha` is needed where no file has it; `lora_b_layout`, how
    lora_B of PEFT's target_parameters is ordered, where Unsloth may have written it: "rank_major"
    as in PEFT, or "grouped_by_expert" as in Unsloth before September 2026. CheckpointError, and the
    model is as before, unless the adapter has exactly the matrices of the model, in their shapes
    and in a dtype whose numbers the model's has; UsageError for another alpha, and for a model
    that is not prepared.
    """
    layers, adapter = adapted_layers(model), opened(model, directory, alpha, lora_b_layout)
    _check_experts(adapter, layers)
    others = {name: adapter.read(tensor) for name, tensor in adapter.others.items()}
    peft_part.check(model, adapter.directory, others)
    _put_experts(adapter, layers)
    peft_part.put(model, others)


def load_experts(model: nn.Module, directory: str | Path) -> None:
    """`load` of the experts' LoRA alone, where PEFT reads its own part itself."""
    layers, adapter = adapted_layers(model), opened(model, directory)
    _check_experts(adapter, layers)
    _put_experts(adapter, layers)


def opened(
    model: nn.Module,
    directory: str | Path,
    alpha: float | None = None,
    lora_b_layout: str | None = None,
) -> Adapter:
    """The headers of an adapter, by the names that it must have for a prepared model."""
    config = settings_of(model)
    sites = {layer: site for layer, (site, _) in adapted_layers(model).items()}
    names = {layer: layer_names(site, config.family) for layer, site in sites.items()}
    return Adapter(Path(directory), names, alpha, lora_b_layout)


def _check_experts(adapter: Adapter, layers: Mapping[int, tuple[Any, LoRAExperts]]) -> None:
    """Raise the error that `load` raises for wrong or missing matrices of experts."""
    _check_projections(adapter, layers)
    for _, lora, projection, layer in _each(layers):
        pair = _pair(adapter, lora, projection, layer)
        _check(adapter.directory, lora, projection, layer, pair)


def _put_experts(adapter: Adapter, layers: Mapping[int, tuple[Any, LoRAExperts]]) -> None:
    with torch.no_grad():
        for _, lora, projection, layer in _each(layers):
            pair = _pair(adapter, lora, projection, layer)
            for side, tensor in (("a", pair.a), ("b", pair.b)):
                getattr(lora, f"{projection}_{side}").copy_(tensor)


def _each(
    layers: Mapping[int, tuple[Any, LoRAExperts]],
) -> Iterator[tuple[Any, LoRAExperts, Projection, int]]:
    """Site, LoRA, projection and layer of every pair of matrices."""
    for layer, (site, lora) in layers.items():
        for projection in lora.targets:
            yield site, lora, projection, layer


def _pair(adapter: Adapter, lora: LoRAExperts, projection: Projection, layer: int) -> Pair:
    """Pair of the adapter for these matrices."""
    a, b = _parameters(lora, projection)
    return adapter.pair(layer, projection, len(a), (b.shape[1], a.shape[2]))


def _parameters(lora: LoRAExperts, projection: Projection) -> tuple[Tensor, Tensor]:
    a: Tensor = getattr(lora, f"{projection}_a")
    b: Tensor = getattr(lora, f"{projection}_b")
    return a, b


def _check_projections(adapter: Adapter, layers: Mapping[int, tuple[Any, LoRAExperts]]) -> None:
    """CheckpointError unless the adapter has the matrices of the model's targets, and no others."""
    found = adapter.projections
    for layer, (_, lora) in layers.items():
        own, stored = set(lora.targets), found.get(layer, set())
        if own != stored:
            raise CheckpointError(
                f"{adapter.directory} has LoRA of {_listed(stored)} in layer {layer}, the model of "
                f"{_listed(own)}",
                "give ktconv.train.prepare the targets that the adapter has",
            )


def _listed(projections: set[Projection]) -> str:
    return ", ".join(one for one in PROJECTIONS if one in projections) or "no experts"


def _check(
    directory: Path, lora: LoRAExperts, projection: Projection, layer: int, pair: Pair
) -> None:
    """CheckpointError unless the model has these matrices with this rank, alpha and dtype."""
    where = f"{projection} in layer {layer}"
    own = _parameters(lora, projection)[0]
    if pair.a.shape != own.shape:
        raise CheckpointError(
            f"{where} has rank {pair.a.shape[1]} in {directory}, and {own.shape[1]} in the model",
            f"call ktconv.train.prepare with rank={pair.a.shape[1]}",
        )
    if not isclose(pair.scale, lora.scale, rel_tol=1e-6):
        raise UsageError(
            f"{where} has alpha {pair.scale * own.shape[1]:g} in {directory}, and "
            f"{lora.scale * own.shape[1]:g} in the model",
            f"call ktconv.train.prepare with alpha={pair.scale * own.shape[1]:g}",
        )
    for tensor in (pair.a, pair.b):
        if tensor.dtype != own.dtype and own.dtype != torch.float32:
            raise CheckpointError(
                f"{where} is {tensor.dtype} in {directory}, and {own.dtype} in the model, which "
                "would round it",
                "call ktconv.train.prepare with dtype=torch.float32",
            )


def _of_experts(names: LayerNames, lora: LoRAExperts) -> dict[str, Tensor]:
    """A layer's matrices by their names."""
    found = {}
    for projection in lora.targets:
        for side, stack in zip(SIDES, _parameters(lora, projection), strict=True):
            for expert, matrix in enumerate(stack.detach()):
                found[names.key(projection, side, expert)] = matrix
    return found


def _of_parameters(
    names: LayerNames, lora: LoRAExperts, ranks: dict[str, int]
) -> dict[str, Tensor]:
    """Tensors as LoRA of parameters, whose ranks are put into `ranks` by their names."""
    found, depths = {}, Counter[str]()
    for of in reversed(names.parameters):  # the last is the outermost
        matrices = {
            one: Matrices(*(side.detach() for side in _parameters(lora, one)))
            for one in of.projections
            if one in lora.targets
        }
        if not matrices:
            continue
        pair = stacked(of, matrices)
        for side, tensor in zip(SIDES, pair, strict=True):
            found[names.parameter_key(of, depths[of.module], side)] = tensor
        ranks[names.parameter(of)] = pair[0].shape[0] // of.entries
        depths[of.module] += 1
    return found


def _file(tensors: Mapping[str, Tensor]) -> Iterator[bytes]:
    """A safetensors file, a tensor at a time."""
    planned = [
        Planned(name, _STORED[one.dtype], tuple(one.shape), one.numel() * one.element_size())
        for name, one in tensors.items()
    ]
    shard = plan_shard(WEIGHTS, planned, {"format": "pt"})
    yield shard.header
    for name in sorted(shard.offsets, key=shard.offsets.__getitem__):
        one = tensors[name].detach().to("cpu").contiguous()
        yield one.view(torch.uint8).numpy().tobytes()


def adapted_layers(model: nn.Module) -> dict[int, tuple[Site, LoRAExperts]]:
    """Layers of a prepared model, in order. UsageError where it has none."""
    sites = find_experts(model)
    found = {
        layer: (site, site.module.lora)
        for layer, site in sorted(sites.items())
        if isinstance(site.module, PackedExperts) and isinstance(site.module.lora, LoRAExperts)
    }
    if not found:
        raise UsageError(
            f"the experts of this {type(model).__name__} have no LoRA",
            "call ktconv.train.prepare first",
        )
    return found


def trains_experts(model: nn.Module) -> bool:
    """Whether the experts of a model have LoRA with matrices (a rank that is not None)."""
    return any(isinstance(one, LoRAExperts) and one.rank is not None for one in model.modules())
