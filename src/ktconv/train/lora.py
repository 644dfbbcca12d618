"""The experts of a layer with LoRA, as a module."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ktconv.errors import UsageError
from ktconv.families.family import PROJECTIONS, UNGATED, Projection
from ktconv.native.training import LORA_MATRICES, MAX_RANK
from ktconv.runtime import MoELayer
from ktconv.runtime.compiled import uncompiled
from ktconv.runtime.layers.experts import OutputNorm
from ktconv.system.numbers import real, whole
from ktconv.system.units import counted
from ktconv.train.function import DTYPES, Setting, base_gradients, computed, fetched, returned
from ktconv.train.reference import Lora


class LoRAExperts(nn.Module):
    """Packed experts that stay as they are, and thin matrices next to them that are trained: each
    W of an expert counts as W + alpha / rank * B A (docs/fine-tuning.md).

    Parameters, None for matrices that are not among the targets:
        gate_a, up_a [E, rank, H]   gate_b, up_b [E, I, rank]
        down_a [E, rank, I]         down_b [E, H, rank]
    A begins as `nn.Linear` does, of torch's random numbers, B with zeros.

    Weights and parameters are on the CPU, and stay there when a model is moved; inputs may be on
    any device. Any number of forwards may be waiting for their backwards.
    """

    gate_a: nn.Parameter | None
    gate_b: nn.Parameter | None
    up_a: nn.Parameter | None
    up_b: nn.Parameter | None
    down_a: nn.Parameter | None
    down_b: nn.Parameter | None

    def __init__(
        self,
        layer: MoELayer,
        rank: int | None,
        alpha: float | None = None,
        dropout: float = 0.0,
        *,
        targets: Iterable[str] = PROJECTIONS,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`rank` None: nothing is trained here, and gradients pass through. `alpha`: default
        `rank`. `dropout`: the chance of each element that an A reads to be 0, in train() only.
        `targets`: experts without a gate have none to train. `dtype` of parameters: float32, or
        bfloat16, in which torch adds up the gradients of several backwards, too.

        UsageError for a rank that is not 1 to 1024, an alpha of 0 or less, a dropout that is not
        at least 0 and below 1, unknown targets and other dtypes.
        """
        super().__init__()
        self.layer = layer
        self.rank = None if rank is None else whole("rank", rank, 1, MAX_RANK)
        self.dropout = _dropout(dropout)
        self.alpha = _alpha(alpha, self.rank, self.dropout)
        self.targets = _targets(targets, layer) if self.rank else ()
        if dtype not in DTYPES:
            raise UsageError(f"parameters of LoRA are float32 or bfloat16, not {dtype}")
        for name, shape in self._shapes().items():
            made = None if shape is None else torch.empty(shape, dtype=dtype, device="cpu")
            self.register_parameter(name, None if made is None else nn.Parameter(made))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Makes A and B those of a new module: A random, B zeros."""
        for name, parameter in self.named_parameters():
            if name.endswith("_b"):
                nn.init.zeros_(parameter)
            else:  # kaiming_uniform with a = sqrt(5), of each expert's matrix
                bound = 1 / math.sqrt(parameter.shape[-1])
                nn.init.uniform_(parameter, -bound, bound)

    @uncompiled
    def forward(
        self, x: Tensor, ids: Tensor, weights: Tensor, *, skip: Tensor | None = None
    ) -> Tensor:
        """y[t] = sum over k of weights[t, k] * expert ids[t, k] of x[t], as `MoELayer.__call__`.

        x [..., H] bf16, fp16 or fp32; ids and weights [..., K]; skip: bool [E], experts that
        contribute nothing. y has the shape, dtype and device of x. Gradients: of x, weights and
        the parameters, each summed in fp32 and rounded once.

        UsageError for arguments and parameters that do not fit, and where a token goes to an
        expert whose weights are not here.
        """
        y = self._computed(*fetched(x, ids, weights, skip))
        return returned(y, x.device)

    @torch.no_grad()
    def base_gradients(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        dy: Tensor,
        *,
        skip: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The gradients of BF16 weights, which stay as they are: gate and up [E, I, H] and down
        [E, H, I] in fp32, where `dy` [..., H] is that of the result. Of tensors on the CPU; without
        dropout.

        UsageError for other formats, layers with norms of outputs or weights on inputs, and as a
        call.
        """
        packed = self.layer.packed
        if packed.format.code != "bf16" or packed.norm is not None or packed.weight_on_input:
            raise UsageError(
                f"weights of {packed.format.key} have no gradients here: only those of bf16 have, "
                "without norms of outputs or weights on inputs",
                "load or pack the layer as bf16",
            )
        matrices = self.matrices()
        setting = self._setting(matrices)
        return base_gradients(setting, x, ids, weights, skip, dy, *matrices.values())

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank if self.rank else 1.0

    @property
    def lora(self) -> Lora | None:
        """Matrices as `ktconv.train.reference` takes them."""
        if self.rank is None:
            return None
        return Lora._make([*(getattr(self, name) for name in LORA_MATRICES), self.scale])

    def extra_repr(self) -> str:
        """Sizes and rank, for `print(module)`."""
        e = self.layer
        sizes = (
            f"{counted(e.experts, 'expert')} of {e.method}, hidden {e.hidden}, intermediate "
            f"{e.intermediate}"
        )
        if self.rank is None:
            return f"{sizes}, nothing trained"
        numbers = f"rank={self.rank}, alpha={self.alpha:g}, dropout={self.dropout:g}"
        return f"{sizes}, {'+'.join(self.targets)}, {numbers}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Apply a change of the tensors of all modules: a dtype changes here, the device does
        not."""

        def here(tensor: Tensor) -> Tensor:
            found = fn(tensor)
            return found if found.is_meta else found.to("cpu")

        return super()._apply(here, recurse)  # type: ignore[no-untyped-call]

    def _shapes(self) -> dict[str, tuple[int, int, int] | None]:
        """Shapes of each parameter."""
        e, h, i, r = self.layer.experts, self.layer.hidden, self.layer.intermediate, self.rank or 0
        found = zip(
            LORA_MATRICES,
            ((e, r, h), (e, i, r), (e, r, h), (e, i, r), (e, r, i), (e, h, r)),
            strict=True,
        )
        return {name: shape if name[:-2] in self.targets else None for name, shape in found}

    def _computed(self, x: Tensor, ids: Tensor, weights: Tensor, skip: Tensor | None) -> Tensor:
        """`forward` on the CPU."""
        packed, dtype = self.layer.packed, x.dtype
        if packed.weight_on_input or packed.norm is not None:
            weights = torch.where(self._used(ids, skip), weights.float(), 0)
        if packed.weight_on_input:
            if ids.shape[-1] != 1:
                raise UsageError(
                    "this model's router weights multiply inputs, which needs one expert per "
                    f"token, not {ids.shape[-1]}"
                )
            x, weights = x.float() * weights, torch.ones_like(weights)
        if packed.norm is not None:
            return self._normed(packed.norm, x, ids, weights, skip).to(dtype)
        return self._summed(x, ids, weights, skip).to(dtype)

    def _summed(self, x: Tensor, ids: Tensor, weights: Tensor, skip: Tensor | None) -> Tensor:
        matrices = self.matrices()
        setting = self._setting(matrices)
        if self.training and self.dropout and matrices:
            # Of torch's own numbers, so that checkpointing drops the same elements again.
            seed = int(torch.randint(1 << 62, (), device="cpu"))
            setting = setting._replace(dropout=self.dropout, seed=seed)
        return computed(setting, x, ids, weights, skip, *matrices.values())

    def _normed(
        self, norm: OutputNorm, x: Tensor, ids: Tensor, weights: Tensor, skip: Tensor | None
    ) -> Tensor:
        """Each expert of a token runs as if it were a token's only one, with weight 1."""
        rows, slots = x.reshape(-1, x.shape[-1]).to(torch.bfloat16), ids.reshape(-1, 1)
        each = rows.repeat_interleave(ids.shape[-1], dim=0)
        alone = self._summed(each, slots, torch.ones_like(slots, dtype=torch.float32), skip)
        scaled = alone.float() * (1 + torch.from_numpy(norm.weight))
        outputs = scaled / (scaled.square().mean(dim=1, keepdim=True) + norm.epsilon).sqrt()
        return (outputs.reshape(*ids.shape, -1) * weights[..., None]).sum(dim=-2)

    def _used(self, ids: Tensor, skip: Tensor | None) -> Tensor:
        """Ids that contribute."""
        there = (ids >= 0) & (ids < self.layer.experts)
        return there if skip is None else there & ~skip[torch.where(there, ids, 0).long()]

    def _setting(self, matrices: dict[str, Tensor]) -> Setting:
        """Setting of a call without dropout."""
        return Setting(self.layer, tuple(matrices), self.rank or 0, self.scale)

    def matrices(self) -> dict[str, Tensor]:
        """The parameters that there are, by name. UsageError if they cannot be multiplied with: of
        other shapes or dtypes, not on the CPU, or a share of what several processes have."""
        shapes = {name: shape for name, shape in self._shapes().items() if shape}
        found: dict[str, Tensor] = {name: getattr(self, name) for name in shapes}
        for name, one in found.items():
            if hasattr(one, "device_mesh"):
                raise UsageError(
                    f"{name} is cut up among several processes",
                    "use DistributedDataParallel, which keeps parameters whole",
                )
            if one.shape != shapes[name]:
                raise UsageError(
                    f"{name} is {list(one.shape)}, but must be {list(shapes[name])}",
                    "load an adapter of this layer and rank",
                )
            if not one.is_cpu or not one.is_contiguous():
                place = f"on {one.device}" if not one.is_cpu else "not contiguous"
                raise UsageError(f"{name} is {place}", "keep it contiguous, on the CPU")
        dtypes = {one.dtype for one in found.values()}
        if len(dtypes) > 1 or not dtypes <= DTYPES.keys():
            raise UsageError(
                f"parameters of LoRA are {' and '.join(sorted(map(str, dtypes)))}",
                "they must all be float32 or all bfloat16",
            )
        return found


def _alpha(alpha: float | None, rank: int | None, dropout: float) -> float:
    found = float(rank or 1) if alpha is None else real("alpha", alpha)
    scale = _single(found / (rank or 1))
    if not (scale > 0 and math.isfinite(_single(scale / (1 - dropout)))):
        raise UsageError(
            f"alpha must be above 0, not {found:g}, and alpha / rank within float32",
            "leave it out: it is rank then",
        )
    return found


def _dropout(dropout: float) -> float:
    found = _single(given := real("dropout", dropout))
    if not 0 <= found < 1:
        raise UsageError(f"dropout must be at least 0 and below 1, not {given:g}")
    return given


def _single(number: float) -> float:
    """A number in float32, as the kernels have it."""
    return torch.tensor(number, dtype=torch.float32, device="cpu").item()


def _targets(targets: Iterable[str], layer: MoELayer) -> tuple[Projection, ...]:
    """Targets in the order of PROJECTIONS, without a gate where experts have none."""
    alone = isinstance(targets, str) or not isinstance(targets, Iterable)
    named = [targets] if alone else list(targets)
    for name in named:
        if name not in PROJECTIONS:
            raise UsageError(f"target {name!r} is none of {', '.join(PROJECTIONS)}")
    there = PROJECTIONS if layer.activation.gated else UNGATED
    found = tuple(name for name in there if name in named)
    if not found:
        raise UsageError(
            f"no matrix of the experts, {', '.join(there)}, is among the targets",
            "name one of them, or give rank=None to train nothing here",
        )
    return found
