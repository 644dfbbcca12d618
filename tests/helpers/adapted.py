"""Models with LoRA in their experts, and what they must compute."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor

from helpers.family_models import reading_text
from helpers.paths import EXAMPLE
from ktconv.model import load_model
from ktconv.train import Prepared

IDS = torch.randint(5, 60, (2, 9), generator=torch.Generator().manual_seed(0), device="cpu")


@cache
def _loaded() -> tuple[Any, Any]:
    return load_model(EXAMPLE, "float32")


def loaded() -> tuple[Any, Any]:
    """(model, tokenizer): the example in float32, so that only our own rounding is seen. Copies,
    which take a sixth of what loading does."""
    return example(), copy.deepcopy(_loaded()[1])


def example() -> Any:
    """The model alone."""
    return copy.deepcopy(_loaded()[0])


def train_a_little(prepared: Prepared, seed: int = 0) -> None:
    """Numbers for A and B that make a difference."""
    generator = torch.Generator().manual_seed(seed)
    for one in prepared.parameters():
        with torch.no_grad():
            one.copy_(torch.randn(one.shape, generator=generator) / 10)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return _called(model)


def _called(model: Any) -> Tensor:
    found: Tensor = reading_text(model)(input_ids=IDS, use_cache=False).logits
    return found


def with_gradient(model: Any) -> tuple[Tensor, Tensor]:
    """Logits, and the gradient of a random sum of them at the embedded tokens."""
    embedded: list[Tensor] = []

    def apart(_: Any, given: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    hook = model.get_input_embeddings().register_forward_hook(apart)
    found = _called(model)
    hook.remove()
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(5))
    (found.float() * upstream).sum().backward()
    assert embedded[0].grad is not None
    return found.detach(), embedded[0].grad


def apart(one: Tensor, other: Tensor) -> float:
    """The relative difference of a token in the middle of all tokens: where scores are near each
    other, one or two may get another expert in a later layer."""
    return float(((one - other).norm(dim=-1) / other.norm(dim=-1)).median())
