"""Running a model token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from ktconv.errors import CheckpointError
from ktconv.generate.outside.cache import CACHE, with_room
from ktconv.generate.request import Sampling
from ktconv.system.threads import torch_threads

_ROOM = 1024  # tokens that memory is taken for at first
_CHUNK = 2048  # tokens of a prompt at a time, so that long ones need little memory


class Timing(Struct):
    """Seconds of a prompt of `prompt` tokens, and of each token after the first, which comes with
    it."""

    prompt: int
    prefill_s: float
    steps_s: list[float]


def end_tokens(model: Any, tokenizer: Any, name: Path) -> frozenset[int]:
    """Tokens at which the model has ended its text: of its generation config, else the
    tokenizer's. CheckpointError, with `name`, where that is something else than ids of tokens."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if found is None:
        found = tokenizer.eos_token_id
    if found is None:
        return frozenset()
    ids = found if isinstance(found, list | tuple) else [found]
    if any(type(one) is not int for one in ids):
        raise CheckpointError(
            f"the end tokens of {name} (eos_token_id) are {found!r}, not ids of tokens",
            "correct generation_config.json: a number, or a list of numbers",
        )
    return frozenset(ids)


def stop_strings(model: Any, name: Path) -> tuple[str, ...]:
    """Strings at which a text ends, of the model's generation config. CheckpointError, with `name`,
    where that has something else."""
    found = getattr(getattr(model, "generation_config", None), "stop_strings", None)
    if found is None:
        return ()
    strings = found if isinstance(found, list | tuple) else [found]
    if not all(isinstance(one, str) and one for one in strings):
        raise CheckpointError(
            f"the stop strings of {name} (stop_strings) are {found!r}, not strings",
            "correct generation_config.json: a string, or a list of strings",
        )
    return tuple(strings)


def generate(
    model: Any,
    prompt: Sequence[int],
    most: int,
    sampling: Sampling,
    ends: frozenset[int],
    told: Callable[[int], bool],
    step_threads: int | None = None,
) -> tuple[list[int], Timing]:
    """At most `most` tokens after `prompt`, of which the last may be one of `ends`; their times.

    `told` gets each token but the end as soon as it is there, and says whether to go on.
    `step_threads`: PyTorch's threads after the prompt, of a model with kernels outside its experts;
    None: transformers as it is.
    """
    choose = _Chooser(sampling)
    found: list[int] = []
    with torch.inference_mode(), ExitStack() as stack:
        began = perf_counter()
        logits, cache = _read(model, prompt)
        if step_threads is not None:
            with_room(cache, len(prompt) + min(most, _ROOM))
            stack.enter_context(torch_threads(step_threads))
        timing = Timing(len(prompt), 0.0, [])
        while True:
            found.append(choose(logits))
            took = perf_counter() - began
            if len(found) == 1:
                timing.prefill_s = took
            else:
                timing.steps_s.append(took)
            if found[-1] in ends or not told(found[-1]) or len(found) == most:
                return found, timing
            began = perf_counter()
            ids = torch.tensor([[found[-1]]])
            logits = model(input_ids=ids, use_cache=True, **{CACHE: cache}).logits[0, -1]


def _read(model: Any, prompt: Sequence[int]) -> tuple[Tensor, Any]:
    """The logits [V] after a prompt, and the cache of it."""
    cache, logits = None, None
    for first in range(0, len(prompt), _CHUNK):
        ids = torch.tensor([list(prompt[first : first + _CHUNK])])
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE: cache})
        cache, logits = getattr(out, CACHE), out.logits[0, -1]
    assert logits is not None
    return logits, cache


class _Chooser:
    """Chooses tokens by their logits [V]."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def __call__(self, logits: Tensor) -> int:
        if not logits.max().isfinite():  # which is NaN where any of them is
            raise CheckpointError(
                "the model's outputs are not finite numbers, so that no token can be chosen",
                "compare the output with its source: ktconv verify OUTPUT --source MODEL",
            )
        if not self._sampling.temperature:
            return int(logits.argmax())
        # In binary64, and relative to the greatest: any temperature but 0 is one, and any top_p.
        distances = logits.double() - logits.max().double()
        chances = torch.softmax(distances / self._sampling.temperature, dim=-1)
        order = torch.argsort(chances, descending=True, stable=True)
        sorted_chances = chances[order]
        before = sorted_chances.cumsum(0) - sorted_chances
        sorted_chances[before >= self._sampling.top_p] = 0  # the likeliest has none before it
        return int(order[torch.multinomial(sorted_chances, 1, generator=self._generator)])
