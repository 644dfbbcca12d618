"""The predictions of a model with all of its experts, for level model of outputs with fewer.

The two are two models: each is passed by itself. The logits of the first are kept in a file of its
pass, so that the second is compared with them window by window.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from msgspec.structs import asdict
from torch import Tensor

from ktconv.errors import DiskSpaceError
from ktconv.model.streamed.calls import Watcher
from ktconv.model.streamed.compare import Predictions
from ktconv.model.streamed.parts import PartedModel
from ktconv.model.streamed.stream import PlannedPass
from ktconv.source import Checkpoint
from ktconv.system import machine
from ktconv.system.text import Notify
from ktconv.system.units import format_size
from ktconv.verify.findings import Facts, Progression
from ktconv.verify.request import VerifyRequest


class _Kept(Watcher):
    """Writes the logits of each window to a file, and hands them out again."""

    def __init__(self) -> None:
        self.folder = Path()
        self._kinds: dict[int, tuple[torch.Size, torch.dtype]] = {}

    def logits(self, window: int, logits: Sequence[Tensor]) -> None:
        found = logits[0].detach().cpu().contiguous()
        self._kinds[window] = found.shape, found.dtype
        self._file(window).write_bytes(found.view(torch.uint8).numpy().data)

    def of(self, window: int) -> Tensor:
        shape, dtype = self._kinds[window]
        return torch.frombuffer(bytearray(self._file(window).read_bytes()), dtype=dtype).view(shape)

    def _file(self, window: int) -> Path:
        return self.folder / f"logits-{window}"


class Unpruned(Watcher):
    """The whole model; as a Watcher of the pass through the model with fewer experts, what is
    compared with it. At the end of its context an interrupted pass is kept, so that a later run
    goes on there."""

    def __init__(
        self, whole: Checkpoint, windows: Sequence[Tensor], request: VerifyRequest
    ) -> None:
        self._kept = _Kept()
        parted = PartedModel(whole)
        self._pass = PlannedPass(
            "verify unpruned",
            parted,
            windows,
            threads=request.threads,
            max_memory=request.max_memory,
            work_dir=request.work_dir,
        )
        self.predictions = Predictions(windows)
        vocabulary = whole.config.vocabulary
        if type(vocabulary) is int:
            tokens = sum(ids.shape[1] for ids in windows)
            self._check_disk(tokens * vocabulary * parted.dtype.itemsize)

    def _check_disk(self, needed: int) -> None:
        folder = self._pass.plan.folder or Path()
        free = machine.disk_free(folder)
        if needed > free:
            raise DiskSpaceError(
                f"the logits of the model with all experts need {format_size(needed)} in {folder}, "
                f"which has {format_size(free)} free",
                "give --work-dir on another disk, or fewer --windows",
            )

    @property
    def memory(self) -> int:
        """Largest memory of the process, in bytes."""
        return self._pass.plan.peak_memory

    def run(self, progression: Progression, notify: Notify) -> None:
        """Pass the whole model. Raises as `StreamedPass.run`."""
        notify("passing the text through the model with all experts, layer by layer")
        self._kept.folder = self._pass.open(notify)
        self._pass.run(watchers=[self._kept], progression=progression, notify=notify)

    def logits(self, window: int, logits: Sequence[Tensor]) -> None:
        """Compare those of the last side."""
        self.predictions.add(window, [self._kept.of(window), logits[-1]])

    def facts(self) -> Facts:
        """The figures of the model with fewer experts against that with all."""
        found = self.predictions.result()
        increase = found.perplexity_converted / found.perplexity_source - 1
        return asdict(found) | {"perplexity_increase": increase}

    def complete(self) -> None:
        """Remove the logits and the state of the pass."""
        self._pass.complete()

    def __enter__(self) -> Unpruned:
        return self

    def __exit__(self, *_: object) -> None:
        self._pass.close()
