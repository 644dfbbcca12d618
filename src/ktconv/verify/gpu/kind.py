"""Expert weights for GPUs: what each level does with them, see `kinds.Kind`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ktconv.errors import UsageError
from ktconv.verify.findings import Facts, Findings, Progression
from ktconv.verify.gpu.mapping import LEVEL as MAPPING
from ktconv.verify.gpu.mapping import check_mapping, check_sizes
from ktconv.verify.gpu.opened import GpuOutput, open_gpu_output
from ktconv.verify.gpu.structure import check_structure
from ktconv.verify.gpu.weights import buffer_sizes, items_of, thread_bytes, weights_facts
from ktconv.verify.hidden_states import experts_per_token
from ktconv.verify.memory import Budget, Need, capture_bytes, layers_need, level_model_bytes
from ktconv.verify.subject import Subject

__all__ = [
    "buffer_sizes",
    "check_layers",
    "check_model",
    "check_more",
    "check_structure",
    "items_of",
    "memory_need",
    "open_output",
    "refuse_impossible",
    "weights_facts",
]


def open_output(output: Path, source: str | None) -> Subject:
    return open_gpu_output(output, source)


def refuse_impossible(level: str, subject: Subject, request: Any) -> None:
    check_sizes("tp", request.tp)
    check_sizes("ep", request.ep)
    if request.beside is not None:
        raise UsageError(
            f"--with is for an output of quantize-cpu, and {subject.directory} is one of "
            "quantize-gpu",
            f"turn it around: ktconv verify {request.beside} --with {subject.directory}",
        )
    if level in ("layers", "model"):
        from ktconv.verify import hidden_states

        hidden_states.refuse_impossible(subject)
    if level == "model":
        from ktconv.verify.gpu import model

        model.refuse_impossible(subject)


def check_more(subject: Subject, request: Any, findings: Findings) -> Facts:
    """How an engine would load and split the experts."""
    assert isinstance(subject, GpuOutput)
    return {MAPPING: check_mapping(subject, request, findings)}


def memory_need(level: str, subject: Subject, request: Any) -> Need:
    assert isinstance(subject, GpuOutput)
    checkpoint, thread = subject.checkpoint, thread_bytes(subject)
    if checkpoint is None or level not in ("layers", "model"):
        return Need(thread)
    top_k = experts_per_token(subject)
    layers = layers_need(subject.sources().values(), (), request, top_k)
    model = level_model_bytes(checkpoint, models=2) if level == "model" else None
    return Need(thread, layers, capture_bytes(checkpoint), model)


def check_layers(
    subject: Subject,
    request: Any,
    budget: Budget,
    findings: Findings,
    progression: Progression,
    say: Callable[[str], None],
) -> Facts:
    from ktconv.verify.gpu import layers

    return layers.check_layers(subject, request, budget, findings, progression, say)


def check_model(
    subject: Subject, request: Any, findings: Findings, say: Callable[[str], None]
) -> Facts | None:
    from ktconv.verify.gpu import model

    return model.check_model(subject, request, findings, say)
