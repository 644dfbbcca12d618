"""Puts experts with LoRA into a model, in the place of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ktconv.errors import UsageError
from ktconv.families.family import PROJECTIONS, Projection
from ktconv.formats import format_named
from ktconv.model import fitting
from ktconv.model.forms import packed_class
from ktconv.model.matching import check_match
from ktconv.model.module import PackedExperts
from ktconv.model.own import OwnExperts
from ktconv.model.replace import ReplacedExperts
from ktconv.model.sites import Site, find_experts
from ktconv.native import Activation
from ktconv.runtime import MoELayer, Pool, sources
from ktconv.runtime.layers import Experts
from ktconv.runtime.layers.load import activation_of
from ktconv.source import Checkpoint
from ktconv.source.settings import ModelSettings
from ktconv.train.lora import LoRAExperts
from ktconv.train.saving import include_experts

_OWN = "the model itself"


class Prepared(ReplacedExperts):
    """Result of `prepare`. `layers` have LoRA on packed experts of format `method`; `lora` are
    their modules by layer. `untried` are layers whose packed experts could not be compared with the
    model's own.

    As a context manager it puts the model's own experts back at the end if they were kept.
    """

    def __init__(
        self,
        sites: Mapping[int, Site],
        packed: Mapping[int, PackedExperts],
        keep: bool,
        untried: Sequence[int],
        lora: Mapping[int, LoRAExperts],
    ) -> None:
        super().__init__(sites, packed, keep, ExitStack(), untried)
        self.lora, self._guard = lora, _Guard()
        self._guard.lora = tuple(lora.values())
        for one in lora.values():
            one.register_forward_pre_hook(self._guard)

    def parameters(self) -> list[nn.Parameter]:
        """Parameters of LoRA in all layers."""
        return [one for lora in self.lora.values() for one in lora.parameters()]

    def requires_grad_(self, wanted: bool = True) -> None:
        """Train LoRA of the experts, or leave it as it is. To be called after PEFT's
        `get_peft_model`, which makes whatever is not its own require no gradients."""
        include_experts()
        for one in self.parameters():
            one.requires_grad_(wanted)
        self._guard.trains = wanted


def prepare(
    model: nn.Module,
    weights: str | Path | None = None,
    *,
    rank: int | None,
    alpha: float | None = None,
    dropout: float = 0.0,
    targets: Sequence[Projection] = PROJECTIONS,
    method: str | None = None,
    dtype: torch.dtype = torch.float32,
    keep: bool = False,
    pool: Pool | None = None,
    memory: str = "auto",
) -> Prepared:
    """Make the experts of every MoE layer of `model` trainable by LoRA, on packed weights.

    `model` is as for `ktconv.model.replace_experts`, with PEFT adapters in other parts or without.
    All its parameters are frozen, but for such adapters; its routers stay, and gradients pass
    through them. From now on `save_pretrained` of such models saves LoRA of the experts, too, and
    PEFT's `load_adapter` loads it (see `ktconv.train.saving`). `weights`:

    - an OUTPUT of ktconv quantize-cpu, in `memory` as for `MoELayer.load`, so that the model's own
      experts need not be loaded (`ktconv.model.load_model(..., experts=False)`);
    - a checkpoint whose weights a kernel has as they are, see `MoELayer.load`;
    - None: the model's own, packed now as `method` ("bf16" if not told), so that both are in memory
      for a while.

    `rank` (None: no LoRA in experts, gradients pass through them), `alpha`, `dropout`, `targets`
    and `dtype` are those of `LoRAExperts`. With `weights`, `method` chooses among the formats that
    they have. Without `keep` the model's own experts are freed. The kernels run on `pool`, else on
    the process's own.

    Raises CheckpointError, and leaves the model as it was, where no experts are found, or layers,
    sizes, activation or the experts' answers to a trial do not match; UsageError for options that
    cannot be used, for experts under an adapter, and for weights that leave out experts.
    """
    sites, settings = find_experts(model), fitting.settings_of(model)
    for site in sites.values():
        fitting.check_place(site)
    experts = _experts(model, sites, settings, weights, method, pool or Pool.shared(), memory)
    _check_whole(experts, weights)
    lora = {
        layer: LoRAExperts(
            MoELayer(one, pool),
            rank,
            alpha,
            dropout,
            targets=targets,
            dtype=dtype,
        )
        for layer, one in experts.items()
    }
    packed = {
        layer: packed_class(site.own)(experts[layer], pool, site.own, lora[layer])
        for layer, site in sites.items()
    }
    untried = _compared(sites, packed, weights, settings)
    for layer, module in packed.items():
        module.train(sites[layer].module.training)
    _freeze(model)
    include_experts()
    return Prepared(sites, packed, keep, untried, lora)


# ---- weights ----------------------------------------------------------------------------


def _experts(
    model: nn.Module,
    sites: Mapping[int, Site],
    settings: ModelSettings,
    weights: str | Path | None,
    method: str | None,
    pool: Pool,
    memory: str,
) -> dict[int, Experts]:
    """Experts of each layer. Norms of their outputs and weights on their inputs are left to the
    model."""
    hold = sources.holder(pool, memory)
    if weights is None:
        if memory in ("map", "shared"):
            raise UsageError(
                f'memory "{memory}" is for converted models: own experts are packed now',
                "give an OUTPUT of ktconv quantize-cpu as `weights`, or leave memory out",
            )
        return {
            layer: _packed_now(site, settings, method or "bf16", pool)
            for layer, site in sites.items()
        }
    path = Path(weights)
    source = sources.opened(path)
    if not isinstance(source, Checkpoint):
        found = fitting.converted_experts(model, sites, settings, path, hold)
        _check_method(found, method, path)
        return found
    found = {}
    for layer, site in sites.items():
        found[layer] = sources.loaded(source, layer, None, method, None, pool, memory)
        found[layer].norm, found[layer].weight_on_input = None, False
        check_match(settings, layer, site.own, found[layer], path)
    return found


def _packed_now(site: Site, settings: ModelSettings, method: str, pool: Pool) -> Experts:
    own = site.own
    if not own.runs:
        raise UsageError(
            f"the experts {site.path} are not in memory as bf16, fp16 or fp32, so they cannot be "
            "packed",
            "give an OUTPUT of ktconv quantize-cpu as `weights`",
        )
    matrices = [own.matrices(expert) for expert in range(own.count)]
    gate, up, down = (
        [_contiguous(one[projection]) for one in matrices] if projection in matrices[0] else None
        for projection in PROJECTIONS
    )
    activation = activation_of(settings, site.layer) if settings else Activation()
    biases = _biases(own) if own.biased else None
    found = sources.packed(gate, up, down, method, activation, biases, "search", None, None, pool)
    check_match(settings, site.layer, own, found, _OWN)
    return found


def _contiguous(tensor: Tensor) -> Tensor:
    """On the CPU, as the kernels' packer reads it."""
    return tensor.detach().to("cpu").contiguous()


def _biases(own: OwnExperts) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """fp32 [E, N] of gate, up and down."""
    found = [own.biases(expert) for expert in range(own.count)]
    gate, up, down = (
        torch.stack([_contiguous(one[projection]).float() for one in found])
        if projection in found[0]
        else None
        for projection in PROJECTIONS
    )
    return gate, up, down


# ---- checks ---------------------------------------------------------------------------


def _check_method(found: Mapping[int, Experts], method: str | None, path: Path) -> None:
    wanted = None if method is None else format_named(method).key
    for experts in found.values():
        if wanted not in (None, experts.format.key):
            raise UsageError(
                f"the method of {path} is {experts.format.key}, not {wanted}",
                "leave it out, or convert the model with that method",
            )


def _check_whole(experts: Mapping[int, Experts], weights: str | Path | None) -> None:
    for layer, one in experts.items():
        if missing := fitting.elsewhere(one):
            raise UsageError(
                f"{weights} leaves out experts {missing} of layer {layer}, which cannot be trained",
                "convert all experts, without --exclude-experts",
            )


def _compared(
    sites: Mapping[int, Site],
    packed: Mapping[int, PackedExperts],
    weights: str | Path | None,
    settings: ModelSettings,
) -> list[int]:
    """Layers that could not be compared with the model's own experts."""
    source, stated = weights or _OWN, bool(settings)
    return [
        layer
        for layer, site in sites.items()
        if not fitting.compare(site, packed[layer], source, stated)
    ]


# ---- what is trained --------------------------------------------------------------------


def _freeze(model: nn.Module) -> None:
    """All parameters; in a model under an adapter, which has frozen it, none."""
    if not any(hasattr(one, "peft_config") for one in model.modules()):
        model.requires_grad_(False)


class _Guard:
    """Refuses to train experts that something has frozen behind the user's back: training would go
    on without them and without a word. Called before each forward."""

    def __init__(self) -> None:
        self.lora: Sequence[LoRAExperts] = ()  # of all layers
        self.trains = True  # as the user wants it

    def __call__(self, lora: nn.Module, _: Any) -> None:
        include_experts()  # in PEFT too, which may have come later
        if not (self.trains and lora.training and torch.is_grad_enabled()):
            return
        parameters = [one for layer in self.lora for one in layer.parameters()]
        if parameters and not any(one.requires_grad for one in parameters):
            raise UsageError(
                "LoRA of the experts requires no gradients and would not be trained: PEFT's "
                "get_peft_model freezes all parameters that are not its own",
                "call requires_grad_() of what ktconv.train.prepare returned, before the optimizer "
                "is made (requires_grad_(False) where experts are to stay as they are)",
            )
