"""Expert weights for CPUs: what each level does with them, see `kinds.Kind`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ktconv.errors import UsageError
from ktconv.formats import FORMATS
from ktconv.verify.cover import LEVEL as COVERAGE
from ktconv.verify.cover import check_cover
from ktconv.verify.findings import Findings
from ktconv.verify.kinds import Facts, Progression
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
    "open_output",
    "refuse_impossible",
    "weights_facts",
]


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


def weights_facts(totals: Totals, subject: Subject) -> Facts:
    counts = {layer: geometry.experts for layer, geometry in subject.packed.layers.items()}
    return totals.as_dict(FORMATS[subject.options.method].max_error_steps, counts)


def check_layers(
    subject: Subject,
    request: Any,
    findings: Findings,
    progression: Progression,
    say: Callable[[str], None],
) -> Facts:
    from ktconv.verify import layers

    return layers.check_layers(subject, request, findings, progression, say)


def check_model(
    subject: Subject, request: Any, findings: Findings, say: Callable[[str], None]
) -> Facts | None:
    from ktconv.verify import model

    return model.check_model(subject, request, findings, say)
