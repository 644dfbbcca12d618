"""The description of one input encoding; each encoding's file makes one or more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ktconv.checkpoint.config import ModelConfig
from ktconv.checkpoint.types import BlockScale, TensorRef
from ktconv.checkpoint.views import StoredView

# The tensors of one stored weight by what follows its name: weight, weight_scale_inv, ...
Parts = Mapping[str, TensorRef]
WEIGHT = "weight"


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the numbers of an expert weight are stored.

    A weight has this encoding if its dtype is `dtype` and the tensors beside it are
    exactly `companions`. `make_scale` finds a view's block scales, and checks them;
    `check` refuses a config.json that declares another encoding.
    """

    name: str
    dtype: str
    companions: tuple[str, ...] = ()
    make_scale: Callable[[Parts, StoredView, ModelConfig], BlockScale] | None = None
    check: Callable[[TensorRef, ModelConfig], None] | None = None
