"""Small matrices as one task: calls of C and of the system would take longer than their work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct

from ktconv.conversion.pipeline import Task
from ktconv.conversion.run import BaseRequest
from ktconv.conversion.tasks import Advance
from ktconv.source import ExpertMatrix
from ktconv.source.reading.buffers import Buffers, BufferSizes
from ktconv.source.reading.reader import Span
from ktconv.writer.staging import Staging

# Of matrices that are converted together, as written and in the source. Python runs cold after a
# call that reads megabytes, and takes a third of the time for five matrices as for each alone;
# with twice as many a fifth less once more.
TOGETHER_BYTES = 8 << 20
TOGETHER_STORED = 4 * TOGETHER_BYTES
TOGETHER_FILES = 4  # of the source, which a worker has open at once: a process can have few


class MatrixTask(Task, Protocol):
    """A task of one matrix."""

    @property
    def matrix(self) -> ExpertMatrix: ...

    @property
    def packed_bytes(self) -> int:
        """Bytes of what is written of the matrix."""

    @property
    def buffer_bytes(self) -> int:
        """Bytes of a place for the whole matrix as it is read."""


One = TypeVar("One", bound=MatrixTask)
Run = Callable[[Sequence[One], Staging, Buffers, Advance], dict[str, Any]]


def with_room(
    request: BaseRequest, buffers: BufferSizes, threads: int, peak: int
) -> tuple[BufferSizes, int]:
    """Buffers of workers in which there is room for all matrices that `together` puts together,
    where --max-memory is enough; and the peak of memory with them."""
    roomy = buffers.with_those_of(BufferSizes(TOGETHER_STORED, TOGETHER_BYTES))
    more = threads * (roomy.nbytes - buffers.nbytes)
    return (roomy, peak + more) if peak + more <= request.max_memory else (buffers, peak)


def have_room(tasks: Sequence[MatrixTask], buffers: Buffers) -> bool:
    """Whether all matrices fit into the buffers of a worker at once."""
    stored = sum(task.buffer_bytes for task in tasks)
    packed = sum(task.packed_bytes for task in tasks)
    return stored <= len(buffers.source) and packed <= len(buffers.packed)


class Together(Struct, Generic[One], frozen=True):
    """Tasks that `run_all` runs as one."""

    tasks: Sequence[One]
    run_all: Run[One]

    @property
    def source_bytes(self) -> int:
        return sum(task.source_bytes for task in self.tasks)

    def spans(self) -> Sequence[Span]:
        return [span for task in self.tasks for span in task.spans()]

    def run(self, staging: Staging, buffers: Buffers, advance: Advance) -> dict[str, Any]:
        return self.run_all(self.tasks, staging, buffers, advance)


def together(
    tasks: Iterable[Task], small: Callable[[Task], One | None], run_all: Run[One]
) -> Iterator[Task]:
    """Put tasks of small matrices together, up to TOGETHER_BYTES; the order stays. `small`: a task
    if it can be run with others by `run_all`, else None."""
    few: list[One] = []
    packed = stored = 0
    files: set[Path] = set()
    for task in tasks:
        one = small(task)
        packed += one.packed_bytes if one else TOGETHER_BYTES
        stored += one.buffer_bytes if one else TOGETHER_STORED
        files |= {one.matrix.tensor.file} if one else set()
        fits = packed <= TOGETHER_BYTES and stored <= TOGETHER_STORED
        if one and fits and len(files) <= TOGETHER_FILES:
            few.append(one)
            continue
        if few:
            yield few[0] if len(few) == 1 else Together(few, run_all)
        few, packed, stored, files = [], 0, 0, set()
        if one is None:
            yield task
            continue
        few, packed, stored = [one], one.packed_bytes, one.buffer_bytes
        files = {one.matrix.tensor.file}
    if few:
        yield few[0] if len(few) == 1 else Together(few, run_all)
