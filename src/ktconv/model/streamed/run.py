"""The pass: all windows go through one layer after the other.

For each layer its dense weights are read once, for both sides. Each window's run stops before the
experts; then the experts run for all windows together, so that each is read once as well; then the
runs go on. Runs beyond `parked` are dropped when they stop, and repeated up to there: that costs
their attention twice, and no memory. Outputs of layers are kept in `States`, which makes each
boundary of layers a point where a killed pass goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ktconv.conversion.pipeline import Observer
from ktconv.errors import CheckpointError
from ktconv.model.load import running
from ktconv.model.streamed.calls import (
    Call,
    ExpertRunner,
    Watcher,
    joined_state,
    restore_joined,
)
from ktconv.model.streamed.cut import Asked, CutModel, Run
from ktconv.model.streamed.parts import PartedModel
from ktconv.model.streamed.states import Scratch, States
from ktconv.source.reading.matrices import experts_bytes
from ktconv.source.reading.reader import Span, advise
from ktconv.system.text import Notify, silent

HEAD = "head"  # the unit of progress behind the layers


class StreamedPass:
    """One pass of `windows` (int64 [1, T] each) through a model.

    `states` and `scratch` are where tensors are kept, for as many `sides`: 0 is the source, 1 the
    converted model. `parked`: how many runs may wait in memory; None: all.
    """

    def __init__(
        self,
        parted: PartedModel,
        windows: Sequence[Tensor],
        states: States,
        scratch: Scratch,
        *,
        sides: int = 1,
        parked: int | None = None,
        observer: Observer | None = None,
        notify: Notify = silent,
    ) -> None:
        self._parted, self.device, self.states, self.scratch = (
            parted,
            parted.device,
            states,
            scratch,
        )
        self.windows = [ids.to(parted.device) for ids in windows]
        self.sides, self._observer, self._notify = sides, observer or Observer(), notify
        self.parked = sides * len(windows) if parked is None else parked
        self._unread = 0  # bytes of the unit under way that are not reported yet
        parted.on_read(self.read)

    def read(self, nbytes: int) -> None:
        """Report more bytes of the source as read."""
        reported = min(nbytes, self._unread)
        self._unread -= reported
        self._observer.advanced(reported)
        self.scratch.trim()  # else pages of its file gather until the last expert has run

    def run(
        self,
        runner: ExpertRunner,
        watchers: Sequence[Watcher] = (),
        *,
        head: bool = False,
        layers: int | None = None,
    ) -> None:
        """Pass all layers, or the first ones, and the `head`, from where an earlier run stopped.

        Raises NotCut for a model that cannot be run like this, and other KtconvErrors. States are
        kept then, and by an interrupt.
        """
        first = self._resume(runner, watchers)
        count = len(self._parted.layers) if layers is None else layers
        keys = [f"layer-{index}" for index in range(first, count)]
        self._observer.begin([*keys, HEAD] if head else keys)
        sizes = unit_sizes(self._parted)
        with CutModel(self._parted) as cut:
            if first:
                cut.check(first - 1, self.windows[0], self.before(0, 0))
            for index in range(first, count):
                self._begin(f"layer-{index}", sizes)
                self._pass_layer(cut, index, runner, watchers)
                self._parted.check_unchanged()
                self.states.commit(index + 1, arrays=joined_state([runner, *watchers]))
                cut.check(index, self.windows[0], self.before(0, 0))
                self._end(f"layer-{index}")
            if head:
                self._begin(HEAD, sizes)
                for window, ids in enumerate(self.windows):
                    found = [cut.logits(ids, self.before(side, window)) for side in self._apart]
                    for watcher in watchers:
                        watcher.logits(window, found * (self.sides // len(found)))
                self._parted.check_unchanged()
                self._end(HEAD)

    def _resume(self, runner: ExpertRunner, watchers: Sequence[Watcher]) -> int:
        found = self.states.resume(self._notify)
        if found is None:
            return 0
        restore_joined([runner, *watchers], found.arrays)
        self._notify(f"continuing behind layer {found.position - 1}")
        return found.position

    @property
    def _apart(self) -> range:
        """Sides whose hidden states differ."""
        return range(self.sides if self.states.split else 1)

    def before(self, side: int, window: int) -> Any:
        """Output of the layer before."""
        return _moved(self.states.get(side, window), self.device)

    # ---- a layer ----

    def _pass_layer(
        self, cut: CutModel, index: int, runner: ExpertRunner, watchers: Sequence[Watcher]
    ) -> None:
        experts = self._parted.experts.get(index)
        sides = range(self.sides) if experts is not None else self._apart
        with self._parted.layer(index):
            waiting = _Waiting(self, cut, index, len(sides), watchers)
            try:
                for window in range(len(self.windows)):
                    for side in sides:
                        waiting.start(side, window)
                self._read_ahead(index + 1, runner)
                if experts is not None:
                    runner.run(experts, waiting.calls, waiting.outputs)
                waiting.finish()
            finally:
                waiting.close()
        self.scratch.clear()

    def _read_ahead(self, index: int, runner: ExpertRunner) -> None:
        """Ask the system to read the next layer while this one is computed."""
        tensors = self._parted.tensors(index)
        advise([Span(tensor.file, tensor.offset, tensor.nbytes) for tensor in tensors])
        if (experts := self._parted.experts.get(index)) is not None:
            runner.ahead(experts.source)

    # ---- progress ----

    def _begin(self, key: str, sizes: Mapping[str, int]) -> None:
        self._unread = sizes[key]
        self._observer.unit_started(key)

    def _end(self, key: str) -> None:
        self.read(self._unread)  # of experts that nobody chose
        self._observer.unit_finished(key)


class _Waiting:
    """The runs of all windows through a layer: those that wait for experts, and what they ask."""

    def __init__(
        self,
        owner: StreamedPass,
        cut: CutModel,
        index: int,
        sides: int,
        watchers: Sequence[Watcher],
    ) -> None:
        self._owner, self._cut, self._index = owner, cut, index
        self._sides, self._watchers = sides, watchers
        self._values: list[Any] = []  # of the window that is finished next
        self._runs: list[Run | None] = []
        self._waiting = 0
        self.calls: list[Call] = []
        self.outputs: list[Tensor] = []

    def start(self, side: int, window: int) -> None:
        """Run a window to the experts, or through a layer without them."""
        run, found = self._started(side, window)
        if not isinstance(found, Asked):
            self._finished(side, window, found)
            return
        rows, ids, weights = (part.detach().to("cpu") for part in found)
        if side == 0 and not rows.isfinite().all():
            # Routers choose some expert all the same: counts and moments would be of nothing.
            raise CheckpointError(
                f"the hidden states before the experts of layer {self._index} are not finite",
                "the weights are damaged, or the model overflows in the dtype of its config.json",
            )
        scratch = self._owner.scratch
        if self._waiting < self._owner.parked:
            self._waiting += 1
            self._runs.append(run)
        else:
            rows = scratch.empty(rows.shape, rows.dtype).copy_(rows)
            run.drop()
            self._runs.append(None)
        self.calls.append(Call(side, window, rows, ids, weights))
        self.outputs.append(scratch.empty(rows.shape, rows.dtype).zero_())

    def finish(self) -> None:
        """Run all windows that wait to the end of the layer."""
        for place, (call, outputs) in enumerate(zip(self.calls, self.outputs, strict=True)):
            run, self._runs[place] = self._runs[place], None
            if run is None:
                run, _ = self._started(call.side, call.window)
            with running(self._cut.name):
                found = run.go_on(outputs.to(self._owner.device))
            self._finished(call.side, call.window, found)

    def close(self) -> None:
        """Drop what still waits."""
        for run in self._runs:
            if run is not None:
                run.drop()

    def _started(self, side: int, window: int) -> tuple[Run, Any]:
        owner = self._owner
        before = owner.before(side, window) if self._index else None
        run = self._cut.run(self._index, owner.windows[window], before)
        with running(self._cut.name):
            return run, run.start()

    def _finished(self, side: int, window: int, found: Any) -> None:
        self._owner.states.put(side, window, found)
        self._values.append(found)
        if len(self._values) < self._sides:
            return
        values, self._values = self._values, []
        for watcher in self._watchers:
            watcher.layer(self._index, window, values * (self._owner.sides // len(values)))


def unit_sizes(parted: PartedModel) -> dict[str, int]:
    """Bytes in the source of what a pass reports: of each layer, and of all that is outside."""
    sizes = {f"layer-{index}": nbytes for index, nbytes in enumerate(parted.layer_bytes)}
    for index, layer in parted.experts.items():
        sizes[f"layer-{index}"] += experts_bytes(layer.source)
    return {**sizes, HEAD: parted.outside_bytes}


def _moved(value: Any, device: str) -> Any:
    """All tensors of a layer's output on a device."""
    if device == "cpu":
        return value
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(one, device) for one in value)
    if isinstance(value, dict):
        return {key: _moved(one, device) for key, one in value.items()}
    return value
