"""Passes of windows through streamed models, and the same windows through a model in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ktconv.source import ModelSource

LENGTHS = (9, 1, 14)


def windows(lengths: Sequence[int] = LENGTHS, vocabulary: int = 60) -> list[Any]:
    """Token ids [1, T]."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return [torch.randint(5, vocabulary, (1, length), generator=generator) for length in lengths]


class Kept:
    """A Watcher that keeps all that it sees: {(layer, window): values by side}, and logits."""

    def __init__(self) -> None:
        self.layers: dict[tuple[int, int], Sequence[Any]] = {}
        self.outputs: list[Sequence[Any]] = []

    def layer(self, index: int, window: int, values: Sequence[Any]) -> None:
        self.layers[index, window] = values

    def logits(self, window: int, logits: Sequence[Any]) -> None:
        assert window == len(self.outputs)
        self.outputs.append(logits)

    def state(self) -> Mapping[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        assert not state


class Passed:
    """A model, and all that a pass of it needs, in a folder of its own."""

    def __init__(
        self, source: Path, folder: Path, dtype: str = "auto", *, config: Path | None = None
    ) -> None:
        import torch

        from ktconv.model.streamed.experts import SourceExperts
        from ktconv.model.streamed.parts import PartedModel
        from ktconv.source import open_checkpoint

        kind = getattr(torch, dtype) if dtype != "auto" else "auto"
        checkpoint = open_checkpoint(ModelSource(source, config))
        self.parted = PartedModel(checkpoint, kind)
        self.experts = SourceExperts(checkpoint, self.parted.dtype)
        self.folder = folder

    @contextlib.contextmanager
    def opened(
        self,
        ids: Sequence[Any],
        sides: int = 1,
        parked: int | None = None,
        notify: Callable[[str], None] = lambda _: None,
    ) -> Iterator[Any]:
        from ktconv.model.streamed.run import StreamedPass
        from ktconv.model.streamed.states import Scratch, States

        self.folder.mkdir(exist_ok=True)
        with States(self.folder, sides, len(ids)) as states, Scratch(self.folder, 0) as scratch:
            yield StreamedPass(
                self.parted, ids, states, scratch, sides=sides, parked=parked, notify=notify
            )

    def run(
        self,
        ids: Sequence[Any],
        sides: int = 1,
        parked: int | None = None,
        runner: Any = None,
        notify: Callable[[str], None] = lambda _: None,
    ) -> Kept:
        kept = Kept()
        with self.opened(ids, sides, parked, notify) as streamed:
            streamed.run(runner or self.experts, [kept], head=True)
        return kept


def in_memory(model: Any, ids: Sequence[Any]) -> list[Any]:
    """Logits of the model itself, window by window."""
    import torch

    with torch.inference_mode():
        return [model(input_ids=one, use_cache=False).logits for one in ids]
