"""What can be verified: each kind of output does every level in its own way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from ktconv.reading.buffers import BufferSizes
from ktconv.verify.findings import Facts, Findings, Progression
from ktconv.verify.memory import Budget, Need
from ktconv.verify.reading import Context
from ktconv.verify.runner import Item
from ktconv.verify.subject import Subject
from ktconv.verify.totals import Totals


class Kind(Protocol):
    """The functions of a kind's module: `cpu` or `gpu.kind`. A request is `run.Request`."""

    def open_output(self, output: Path, source: str | None) -> Subject: ...

    def refuse_impossible(self, level: str, subject: Subject, request: Any) -> None:
        """KtconvError for what cannot be run: told now, not after an hour of reading."""

    def check_structure(self, subject: Subject, findings: Findings) -> Facts: ...

    def check_more(self, subject: Subject, request: Any, findings: Findings) -> Facts:
        """Facts by name that only this kind has, from headers alone."""

    def items_of(self, context: Context, sample: float, seed: int) -> Sequence[Item]: ...

    def buffer_sizes(self, subject: Subject) -> BufferSizes: ...

    def memory_need(self, level: str, subject: Subject, request: Any) -> Need:
        """What each portion of the work up to a level takes."""

    def weights_facts(self, totals: Totals, subject: Subject) -> Facts: ...

    def check_layers(
        self,
        subject: Subject,
        request: Any,
        budget: Budget,
        findings: Findings,
        progression: Progression,
        say: Callable[[str], None],
    ) -> Facts: ...

    def check_model(
        self, subject: Subject, request: Any, findings: Findings, say: Callable[[str], None]
    ) -> Facts | None: ...


def kind_of(output: Path) -> Kind:
    """By what lies there; for anything unknown, the kind that says what is wrong with it."""
    from ktconv.verify import cpu
    from ktconv.verify.gpu import kind as gpu
    from ktconv.verify.gpu.opened import is_gpu_output

    return gpu if output.is_dir() and is_gpu_output(output) else cpu
