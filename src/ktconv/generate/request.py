"""Requests of `ktconv generate`."""

from __future__ import annotations

from math import isfinite
from pathlib import Path

from msgspec import Struct, field

from ktconv.errors import UsageError
from ktconv.source.model_source import ModelSource


class Sampling(Struct, frozen=True):
    """Settings of choosing a token: the likeliest with a temperature of 0, else at random, with
    `seed`, of the fewest tokens whose probabilities add up to `top_p`. UsageError for numbers that
    cannot be.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError(f"--temperature {self.temperature} must be a number from 0 on")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p {self.top_p} must be above 0 and at most 1")


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """`output` has the experts; everything else of the model is that of `source`, or of `output`
    where that is a whole checkpoint."""

    output: Path
    source: ModelSource | None
    prompt: str
    chat: bool | None = None  # None: the chat template, where the tokenizer has one
    max_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    threads: int | None = None
    memory: str = "auto"
    outside: bool = True  # kernels compute single tokens outside the experts
