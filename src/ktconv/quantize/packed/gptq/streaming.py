"""Calibration by a text: the model reads it layer by layer, and each layer is converted as soon as
the second moments of its experts are there. They are removed then, so the disk has those of one
layer at a time.

What a pass is between two layers is kept next to the journal. A run that is killed goes on there,
and writes the same bytes as one with the second moments of the same text in a directory.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from ktconv.errors import UsageError
from ktconv.model.load import running, way_out
from ktconv.model.text import open_text
from ktconv.quantize.packed.gptq.inputs import Calibration, check_enough, record_of
from ktconv.source import Checkpoint, MoELayer
from ktconv.stats.hessian import HessianTap, nbytes, open_hessians
from ktconv.stats.origin import Origin, Sizes
from ktconv.stats.record import Recorder, Recording, Wanted
from ktconv.system.arrays import I64, Array
from ktconv.system.files import make_directory
from ktconv.system.text import Notify, path_text
from ktconv.system.units import counted, format_size, listed
from ktconv.targets.packed.target import CalibrationRecord

MOST_TOKENS = 1 << 17  # that are read of a text
PASS = "calibration"  # folder beside the journal
_WAY_OUT = "use a release of transformers that supports this architecture"

LayerReady = Callable[[int, Calibration], None]  # number of a layer, and its inputs


class LostLayer(Exception):
    """The text has passed a layer whose converted weights are not there any more."""


class TextCalibration:
    """A planned calibration by a text. Raises UsageError for a text without tokens, and where torch
    or transformers cannot run the model; ResourceError where memory is too small."""

    def __init__(
        self,
        text: Path,
        checkpoint: Checkpoint,
        config: Path | None,
        layers: Sequence[MoELayer],
        max_memory: int,
        folder: Path,
    ) -> None:
        self._text, self._checkpoint, self._config = text, checkpoint, config
        self._max_memory, self._folder = max_memory, folder
        self.layers = [one.index for one in layers if not one.is_mtp]
        self.counts: dict[int, I64] = {}  # by layer the tokens of experts, of layers that were read
        self._sizes = {one.index: Sizes.of(one) for one in layers}
        with self._recording(None) as planned:
            self.record: CalibrationRecord = record_of("text", text.name, planned.origin)
            self._peak = planned.plan.peak_memory
            self.disk = planned.plan.disk + max(nbytes(self._sizes[n]) for n in self.layers)
            tokens = planned.origin.tokens
        check_enough(tokens, text)
        mtp = [one.index for one in layers if one.is_mtp]
        self.notes = [
            f"{path_text(text)} is read by the model, {counted(tokens, 'token')}; it takes up to "
            f"{format_size(self.disk)} of disk for a while"
        ]
        if mtp:
            self.notes.append(
                f"the model is run without {listed('MTP layer', mtp)}: the search chooses "
                "scales there, and all errors count the same"
            )

    def memory(self, layers: int) -> int:
        """Bytes: of the pass, and the diagonals of the layer that is converted."""
        widest = max((self._sizes[n] for n in self.layers), key=nbytes)
        return self._peak + 64 * widest.experts * (widest.hidden + widest.intermediate)

    def run(self, done: Callable[[int], bool], ready: LayerReady, notify: Notify) -> None:
        """Reads the text. `done`: whether a layer is converted already; `ready` converts one."""
        while True:
            make_directory(self._folder)
            try:
                with self._recording(
                    partial(_LayerTap, done=done, ready=self._given(ready))
                ) as one:
                    with way_out(_WAY_OUT):
                        one.run(notify=notify)
                    one.complete()
                break
            except LostLayer:
                shutil.rmtree(self._folder, ignore_errors=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _given(self, ready: LayerReady) -> Callable[[int, Path], None]:
        def call(layer: int, directory: Path) -> None:
            inputs = Calibration(open_hessians(directory), self.record, [])
            self.counts |= inputs.counts
            ready(layer, inputs)

        return call

    def _recording(self, tap: Callable[..., HessianTap] | None) -> Recording:
        pieces, name = _opened(self._text)
        wanted = Wanted(
            # A plan looks at no files: another process may be at work with them.
            hessian=self._folder / ("planned" if tap is None else "second-moments"),
            layers=self.layers,
            hessian_tap=tap or partial(_LayerTap, done=lambda _: False, ready=lambda *_: None),
        )
        with ExitStack() as stack:
            stack.enter_context(way_out(_WAY_OUT))
            stack.enter_context(running(self._checkpoint.path))
            checkpoint, pruning = self._checkpoint, self._checkpoint.pruning
            prune = None if pruning is None else pruning.record()
            recorder = Recorder(checkpoint.path, self._config, checkpoint.adapters, prune=prune)
            return recorder.prepare(
                pieces, MOST_TOKENS, wanted, text=name, max_memory=self._max_memory,
                work=self._folder,
            )  # fmt: skip


def _opened(text: Path) -> tuple[Iterator[str], str]:
    """Open a text like `open_text`, whose errors name another option."""
    try:
        return open_text(text)
    except UsageError as error:
        message = str(error).replace("--text", "--calibrate", 1)
        raise UsageError(message, "give a UTF-8 text file of a few pages") from error


class _LayerTap(HessianTap):
    """Second moments of one layer at a time, for `ready`; they are removed behind it."""

    def __init__(
        self,
        layers: Mapping[int, Sizes],
        origin: Origin,
        directory: Path,
        *,
        done: Callable[[int], bool],
        ready: Callable[[int, Path], None],
    ) -> None:
        shutil.rmtree(directory, ignore_errors=True)  # of a run that was killed
        super().__init__(layers, origin, directory)
        self._done, self._ready, self._place = done, ready, directory
        self._behind: list[int] = []

    @property
    def missing_bytes(self) -> int:
        return max(map(nbytes, self._layers.values()))

    def _wants(self, layer: int) -> bool:
        return super()._wants(layer) and not self._done(layer)

    def layer_done(self, layer: int) -> None:
        wanted = self._wants(layer)
        super().layer_done(layer)
        if wanted:
            self._ready(layer, self._place)
            shutil.rmtree(self._place, ignore_errors=True)
        if layer in self._layers:
            self._behind.append(layer)

    def state(self) -> Mapping[str, Array]:
        return {"layers": np.array(self._behind, np.int64)}

    def restore(self, state: Mapping[str, Array]) -> None:
        """LostLayer for a state behind a layer that has to be converted again."""
        self._behind = [int(layer) for layer in state["layers"]]
        if not all(map(self._done, self._behind)):
            raise LostLayer
