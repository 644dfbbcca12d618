"""A pass from the checkpoint to what watches it: its plan, its folder, and its run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from ktconv.errors import UsageError
from ktconv.model.streamed.calls import ExpertRunner, Tap, Watcher
from ktconv.model.streamed.experts import Converted, SourceExperts
from ktconv.model.streamed.packed import BothExperts
from ktconv.model.streamed.parts import NotCut, PartedModel
from ktconv.model.streamed.plan import measure_speed, plan_pass
from ktconv.model.streamed.run import StreamedPass, unit_sizes
from ktconv.model.streamed.states import Scratch, States
from ktconv.model.streamed.work import WorkFolder, pass_folder, pass_identity
from ktconv.source import open_checkpoint
from ktconv.source.settings import ModelSettings
from ktconv.system.machine import usable_cpus
from ktconv.system.text import Notify, silent
from ktconv.writer.option_files import check_written_directory

Progression = Callable[[dict[str, int]], AbstractContextManager[Any]]  # sizes -> observer
# Experts of all sides, given those of the source.
Runner = Callable[[SourceExperts], AbstractContextManager[ExpertRunner]]


class PlannedPass:
    """A pass of windows of text, int64 [1, T] each, through a model, and what it takes.

    `sides`: 1, or 2 with a converted model, whose experts are `converted`, or packed ones. `head`:
    whether there are logits. `layers`: how many are passed; None: all. `taps_memory`: bytes that
    taps take. `kind` and `more` say what the pass is for: runs in which they are the same go on
    with each other's state. Raises MemoryLimitError, MemoryShortError or DiskSpaceError where there
    is too little room.
    """

    def __init__(
        self,
        kind: str,
        parted: PartedModel,
        windows: Sequence[Tensor],
        *,
        sides: int = 1,
        converted: Converted | None = None,
        head: bool = True,
        layers: int | None = None,
        taps_memory: int = 0,
        threads: int | None = None,
        max_memory: int | None = None,
        work_dir: Path | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        self.parted, self.windows = parted, windows
        self._sides, self._head, self._layers, self._converted = sides, head, layers, converted
        self._work_dir = work_dir
        self._threads = threads or usable_cpus()
        tokens = [ids.shape[1] for ids in windows]
        ids = (ids.numpy().tobytes() for ids in windows)
        about = {"dtype": str(parted.dtype), "sides": sides, "layers": layers, **(more or {})}
        self._identity = pass_identity(kind, parted.checkpoint, ids, **about)
        self.plan = plan_pass(
            parted,
            tokens,
            sides,
            threads=self._threads,
            converted=converted is not None,
            head=head,
            layers=layers,
            taps=taps_memory,
            max_memory=max_memory,
            folder=pass_folder(self._identity, work_dir),
            speed=measure_speed(parted, sides * sum(tokens), max(tokens)),
        )
        self._folder: WorkFolder | None = None

    def __enter__(self) -> PlannedPass:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, notify: Notify = silent) -> Path:
        """The folder of the pass, which exists from now on until `complete`. Raises InUseError
        where another process makes the same pass."""
        if self._folder is None:
            self._folder = WorkFolder(self._identity, self._work_dir, notify)
        return self._folder.path

    def run(
        self,
        runner: Runner = nullcontext,
        *,
        taps: Sequence[Tap] = (),
        watchers: Sequence[Watcher] = (),
        progression: Progression = lambda sizes: nullcontext(),
        notify: Notify = silent,
    ) -> None:
        """Make the pass, from where an earlier run of it was interrupted. Then `complete` it.

        Raises as `StreamedPass.run`.
        """
        checkpoint, plan, parted = self.parted.checkpoint, self.plan, self.parted
        place = self.open(notify)
        with ExitStack() as stack:
            states = stack.enter_context(States(place, self._sides, len(self.windows)))
            scratch = stack.enter_context(Scratch(place, plan.scratch_memory))
            observer = stack.enter_context(progression(unit_sizes(parted)))
            one = StreamedPass(
                parted,
                self.windows,
                states,
                scratch,
                sides=self._sides,
                parked=plan.parked,
                observer=observer,
                notify=notify,
            )
            own = SourceExperts(
                checkpoint,
                parted.dtype,
                threads=self._threads,
                memory=plan.experts_memory,
                taps=taps,
                read=one.read,
                converted=self._converted,
            )
            try:
                experts = stack.enter_context(runner(own))
                one.run(experts, watchers, head=self._head, layers=self._layers)
            except NotCut:
                stack.close()
                self.complete()
                raise

    def complete(self) -> None:
        """The results are safe: remove what the pass has kept."""
        if self._folder is not None:
            self._folder.complete()

    def close(self) -> None:
        """Let go of what the pass has kept, for a run that goes on with it."""
        if self._folder is not None:
            self._folder.close()


def stream(
    source: str | Path,
    windows: Sequence[Tensor],
    *,
    output: str | Path | None = None,
    watchers: Sequence[Watcher] = (),
    head: bool = False,
    threads: int | None = None,
    max_memory: int | None = None,
    work_dir: str | Path | None = None,
    progression: Progression = lambda sizes: nullcontext(),
    notify: Notify = silent,
) -> None:
    """Pass windows of tokens (int64 [1, T]) through the model of a local checkpoint, layer by
    layer, reading each weight once and never holding more than a layer's.

    With `output`, what ktconv quantize-cpu made of the source, the windows pass as a second side
    too, with the experts in there. `watchers` see what each layer returns, and with `head` the
    logits, of each side: see `ktconv.model.streamed.calls.Watcher`. `progression` makes an observer
    from the bytes of each unit. Hidden states are kept in `work_dir`, by default in the user's
    cache; after a kill the same call goes on behind the last layer that was passed, and gives
    watchers, which have to be new ones, their state back.

    Raises NotCut for a model whose code does not allow this, MemoryLimitError where `max_memory`
    bytes are too few, and other KtconvErrors.
    """
    if not windows:
        raise UsageError("no text to read", "give at least one window")
    if work_dir is not None:
        apart = [Path(source)] if output is None else [Path(source), Path(output)]
        check_written_directory(Path(work_dir), "work_dir", apart)
    names = [type(one).__name__ for one in watchers]
    more = {"watchers": names, "output": None if output is None else content_of(Path(output))}
    with PlannedPass(
        "stream",
        PartedModel(open_checkpoint(source)),
        windows,
        sides=1 if output is None else 2,
        head=head,
        threads=threads,
        max_memory=max_memory,
        work_dir=None if work_dir is None else Path(work_dir),
        more=more,
    ) as planned:

        def runner(own: SourceExperts) -> AbstractContextManager[ExpertRunner]:
            if output is None:
                return nullcontext(own)
            layers = planned.parted.experts
            settings = ModelSettings(planned.parted.model.config.to_dict())
            return BothExperts(own, Path(output), layers, settings, threads)

        planned.run(runner, watchers=watchers, progression=progression, notify=notify)
        planned.complete()


def content_of(directory: Path) -> list[list[Any]]:
    """Names, sizes and times of change of the files of a converted model."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return [
        [str(path.relative_to(directory)), (about := path.stat()).st_size, about.st_mtime_ns]
        for path in paths
    ]
