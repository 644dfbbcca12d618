"""A conversion whose source is packed weights.

Journal, locks, resume, disk check, pipeline and final files are those of quantize-cpu. What
differs is where the bytes come from; the record of that (`Preflight.origin`) is written into
run.json and manifest, and a run into an output with another one is refused.
"""

from __future__ import annotations

import json
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktconv import __version__, conversion
from ktconv.checkpoint import TensorRef
from ktconv.conversion import (
    MANIFEST_EXPANSION,
    MEMORY_MARGIN,
    BufferedTask,
    Conversion,
    OutputState,
)
from ktconv.conversion.copying import CopyTask
from ktconv.conversion.pipeline import Observer
from ktconv.reading.buffers import Buffers, BufferSizes
from ktconv.reading.reader import SourceReader, Span
from ktconv.repack.tasks import check_sum
from ktconv.system import machine
from ktconv.system.units import format_ranges, format_size
from ktconv.targets.card import expert_counts
from ktconv.targets.ktransformers import Options, Plan
from ktconv.writer.journal import Journal, Record
from ktconv.writer.staging import Staging

BUFFERS = BufferSizes()
MOST_THREADS = 8  # copying is bound by the disk


@dataclass(frozen=True, slots=True)
class Preflight(conversion.Preflight[Options]):
    """A planned job with what it will need here, and what its bytes come from."""

    origin: Record  # for run.json and manifest: {"merged_from": {...}}
    about: str  # for the model card: what the weights come from
    base: str | None  # the model's name, if it is known
    command: str  # the command that was given


@dataclass(frozen=True, slots=True)
class CheckedCopy:
    """One other tensor, copied unchanged, with the checksum that its manifest tells."""

    copy: CopyTask
    known: Mapping[str, Record]

    @property
    def source_bytes(self) -> int:
        return self.copy.source_bytes

    def spans(self) -> Sequence[Span]:
        return self.copy.spans()

    def run(
        self, staging: Staging, buffers: Buffers, advance: Callable[[int], None]
    ) -> dict[str, Any]:
        result, name = self.copy.run(staging, buffers, advance), self.copy.name
        check_sum(
            result[name]["sha256"], self.known.get(name), f"{name} in {self.copy.tensor.file}"
        )
        return result


class Derived(Conversion[Options], ABC):
    """One run; subclasses say which tasks a layer takes."""

    def __init__(self, preflight: Preflight, observer: Observer) -> None:
        super().__init__(preflight, observer)
        self.derived = preflight

    def buffers(self) -> BufferSizes:
        return BUFFERS

    def origin(self) -> Record:
        return self.derived.origin

    def card(self) -> str:
        return card(self.derived)

    def known_copies(self) -> Mapping[str, Record]:
        """What a manifest tells of the other tensors."""
        return {}

    def copy_task(self, reader: SourceReader, tensor: TensorRef, name: str) -> BufferedTask:
        copy = CopyTask(reader, tensor, name, self.request.verify)
        return CheckedCopy(copy, self.known_copies())


def check_output(plan: Plan, output: Path) -> None:
    """Refuse an output directory that holds foreign files."""
    OutputState(plan, Journal(output)).refuse_foreign_files()


def expected_memory(threads: int, per_thread: int, manifests: Sequence[Path]) -> int:
    """The peak to expect; the manifests are read at once."""
    base = machine.resident_memory() + MEMORY_MARGIN
    known = sum(path.stat().st_size for path in manifests if path.is_file())
    return base + MANIFEST_EXPANSION * known + threads * (BUFFERS.nbytes + per_thread)


def card(preflight: Preflight) -> str:
    """README.md of the output: what it holds and where that comes from."""
    plan = preflight.plan
    layers = [unit.layer for unit in plan.layers if unit.layer]
    content = "all tensors" if plan.others else "expert weights only"
    base = (
        f"base_model: {json.dumps(preflight.base, ensure_ascii=False)}\n" if preflight.base else ""
    )
    return f"""---
{base}library_name: ktransformers
tags:
- ktconv
- mixture-of-experts
- {plan.options.method}
---

# CPU experts in {plan.target.name}

Routed experts for KTransformers' CPU kernels, from {preflight.about}:
{plan.target.name}, {plan.options.numa} NUMA part(s), {content}, {format_size(plan.output_bytes)}.

- MoE layers: {format_ranges([layer.index for layer in layers])}
- Experts per layer: {expert_counts(plan)}
- Tensors: `blk.{{layer}}.ffn_{{gate,up,down}}_exps.{{expert}}.numa.{{part}}.{{weight,scale}}`
- `ktconv.json` holds a checksum of every tensor.

Made with ktconv {__version__}:

    {preflight.command}
"""
