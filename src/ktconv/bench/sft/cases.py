"""The request of `--mode sft`, and what its layers take together."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from ktconv.bench import cases
from ktconv.bench.cases import Layer
from ktconv.errors import UsageError
from ktconv.system import machine
from ktconv.system.text import Notify
from ktconv.system.units import counted, format_size

_SHARE_OF_MEMORY = 0.8
# Bytes for each element: of LoRA matrices, which the call and the module have, with their gradients
# and those of the reference; of an expert's weights in fp32, read and multiplied with; of an
# expert's tokens in autograd, at most all; of what is saved for a token and an expert.
_OF_LORA, _OF_WEIGHTS, _OF_TOKENS, _OF_SAVED = 24, 12, 64, 10


class Request(Struct, frozen=True):
    """The settings of `ktconv bench --mode sft`: layers, and the ranks of LoRA."""

    layers: cases.Request
    ranks: tuple[int, ...] = (16,)


def prepare(request: Request, notify: Notify) -> list[list[Layer]]:
    """The layers of each shape, whose methods take turns. UsageError for what is impossible, or
    does not fit into this machine's memory."""
    groups: dict[str, list[Layer]] = {}
    for layer in cases.prepare(request.layers, notify).layers:
        groups.setdefault(layer.shape.name, []).append(layer)
    for layers in groups.values():
        _check_memory(request, layers)
    return list(groups.values())


def _check_memory(request: Request, layers: Sequence[Layer]) -> None:
    shape, tokens, rank = layers[0].shape, max(request.layers.tokens), max(request.ranks)
    hidden, inner, products = shape.hidden, shape.intermediate, shape.activation.products
    count = shape.experts if layers[0].experts is None else layers[0].experts.count
    packed = sum(layer.cases[0].expert_bytes * count for layer in layers if not layer.experts)
    lora = _OF_LORA * products * rank * (hidden + inner) * count
    work = tokens * (hidden + inner) * (_OF_TOKENS + _OF_SAVED * shape.top_k)
    work += _OF_WEIGHTS * products * hidden * inner
    if packed + lora + work > _SHARE_OF_MEMORY * machine.available_memory():
        sizes = f"{format_size(packed)} of weights, {format_size(lora)} of LoRA matrices"
        raise UsageError(
            f"{shape.name} takes {sizes} and {format_size(work)} for {counted(tokens, 'token')}, "
            "more than "
            "this machine has free",
            "give fewer --experts, --method, --rank or --tokens",
        )
