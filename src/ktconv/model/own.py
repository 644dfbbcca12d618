"""The experts that a model has itself, however it stores them: weights, names, devices, calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from ktconv.families.family import Projection
from ktconv.source.adapter.parameters import ExpertParameter as ExpertParameter

# What an experts module gets: hidden states, ids and weights; each expert's inputs, already times
# their weights (Llama 4); hidden states and the router's logits (Aria); it is the whole block with
# its router (JetMoE); or it is a list whose experts each get their tokens.
Call = Literal["routed", "sorted", "logits", "block", "each"]


class OwnExperts(ABC):
    """The experts of a layer in `module`: `count` of them, sizes in elements."""

    module: nn.Module
    count: int
    hidden: int
    intermediate: int

    @property
    @abstractmethod
    def call(self) -> Call | None:
        """Arguments that the module is called with; None if they are not known."""

    @property
    @abstractmethod
    def gated(self) -> bool:
        """Whether experts have a gate projection."""

    @property
    @abstractmethod
    def biased(self) -> bool:
        """Whether their matrices have biases."""

    @property
    @abstractmethod
    def weights(self) -> Iterator[Tensor]:
        """All parameters with matrices and biases of experts; what else the module has belongs to
        its router or its norm."""

    @abstractmethod
    def matrices(self, expert: int) -> dict[Projection, Tensor]:
        """gate [I, H], up [I, H] and down [H, I] of an expert, without gate where there is none."""

    @abstractmethod
    def biases(self, expert: int) -> dict[Projection, Tensor]:
        """Biases added to the outputs of each matrix, of those that have any."""

    @property
    def identities(self) -> int:
        """Number of further ids whose outputs are their inputs."""
        return 0

    @property
    def norm(self) -> nn.Module | None:
        """Module that normalizes the output of each expert."""
        return None

    @property
    def names(self) -> dict[Projection, str]:
        """The model's names of the matrices of an expert; empty where they have no own names."""
        return {}

    @property
    def parameters_of_all(self) -> tuple[ExpertParameter, ...]:
        """Parameters in the order of the module; empty if there are none."""
        return ()

    @property
    def adapted(self) -> bool:
        """Whether an adapter such as LoRA changes what the experts compute."""
        return False

    @property
    def device(self) -> torch.device:
        """Device of the first of `weights`."""
        return next(iter(self.weights)).device

    @property
    def devices(self) -> set[torch.device]:
        """Devices of the parameters of `weights`."""
        return {one.device for one in self.weights}

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matrices."""
        return next(iter(self.weights)).dtype

    @property
    def runs(self) -> bool:
        """Whether an expert can be asked: all weights are in memory, on one device, no shards that
        several processes have, and numbers, no codes that only the library which made them reads.
        """
        floats = self.dtype in (torch.bfloat16, torch.float16, torch.float32)
        there = len(self.devices) == 1 and self.device.type != "meta"
        return floats and there and not any(hasattr(one, "device_mesh") for one in self.weights)
