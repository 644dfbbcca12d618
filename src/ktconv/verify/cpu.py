"""Expert weights for CPUs: what each level does with them, see `kinds.Kind`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ktconv.errors import UsageError
from ktconv.formats import FORMATS
from ktconv.verify.cover import LEVEL as COVERAGE
from ktconv.verify.cover import check_cover
from ktconv.verify.findings import Facts, Findings, Progression
from ktconv.verify.hidden_states import experts_per_token
from ktconv.verify.memory import Budget, Need, capture_bytes, layers_need, level_model_bytes
from ktconv.verify.structure import check_structure
from ktconv.verify.subject import Subject
from ktconv.verify.subject import open_subject as open_output
from ktconv.verify.totals import Totals
from ktconv.verify.weights import buffer_sizes, items_of

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

_CHECK_BYTES = 2 << 20  # of a thread: what the check of a matrix has of each of its rows


def refuse_impossible(level: str, subject: Subject, request: Any) -> None:
    for option in ("tp", "ep"):
        if getattr(request, option) is not None:
            raise UsageError(
                f"--{option} is about experts for GPUs, and {subject.directory} holds none",
                "leave it out",
            )
    if level in ("layers", "model"):
        from ktconv.verify import hidden_states

        hidden_states.refuse_impossible(subject)
    if level == "model":
        from ktconv.verify import model

        model.refuse_impossible(subject, request)


def check_more(subject: Subject, request: Any, findings: Findings) -> Facts:
    """Whether this output and another hold every expert once, if that was asked for."""
    if not request.beside:
        return {COVERAGE: None}
    return {COVERAGE: check_cover(subject, request.beside, findings)}


def memory_need(level: str, subject: Subject, request: Any) -> Need:
    need = Need(buffer_sizes(subject).nbytes + _CHECK_BYTES)
    checkpoint = subject.checkpoint
    if checkpoint is None or level not in ("layers", "model"):
        return need
    geometries = subject.packed.layers.values()
    layers = layers_need(checkpoint.layers, geometries, request, experts_per_token(subject))
    model = level_model_bytes(checkpoint, models=1) if level == "model" else None
    return Need(need.thread, layers, capture_bytes(checkpoint), model)


def weights_facts(totals: Totals, subject: Subject) -> Facts:
    counts = {layer: geometry.experts for layer, geometry in subject.packed.layers.items()}
    return totals.as_dict(FORMATS[subject.options.method].max_error_steps, counts)


def check_layers(
    subject: Subject,
    request: Any,
    budget: Budget,
    findings: Findings,
    progression: Progression,
    say: Callable[[str], None],
) -> Facts:
    from ktconv.verify import layers

    return layers.check_layers(subject, request, budget, findings, progression, say)


def check_model(
    subject: Subject, request: Any, findings: Findings, say: Callable[[str], None]
) -> Facts | None:
    from ktconv.verify import model

    return model.check_model(subject, request, findings, say)
