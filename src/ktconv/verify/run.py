"""Runs the levels of verification in order; see `verify`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

from msgspec import Struct

from ktconv import __version__
from ktconv.conversion.pipeline import Observer
from ktconv.errors import KtconvError, UsageError
from ktconv.model.text import read_text
from ktconv.system.opened import store_of
from ktconv.system.text import Notify, silent
from ktconv.verify.encoded.output import is_gpu_output
from ktconv.verify.encoded.verifier import EncodedVerifier
from ktconv.verify.findings import Facts, Failure, Progression
from ktconv.verify.gguf.output import is_gguf_output
from ktconv.verify.gguf.verifier import GgufVerifier
from ktconv.verify.memory import memory_facts
from ktconv.verify.packed.verifier import PackedVerifier
from ktconv.verify.pruned.output import is_pruned_output
from ktconv.verify.pruned.verifier import PrunedVerifier
from ktconv.verify.request import LEVELS, VerifyRequest, check_sample
from ktconv.verify.runner import run_checks, sizes_by_unit
from ktconv.verify.totals import ItemResult, Totals
from ktconv.verify.verifier import OutputVerifier

# Runs all checks of a verifier, with progress for an observer; results in the order of the checks.
Reading = Callable[[OutputVerifier, Any], Iterable[ItemResult]]


def unwatched(sizes: dict[str, int]) -> AbstractContextManager[Any]:
    """A progression without an observer."""
    return nullcontext()


class Result(Struct, frozen=True):
    """All findings. `facts` is the document of `verify --json`, in which numbers that are not
    finite are strings."""

    passed: bool
    failures: Sequence[Failure]
    facts: Mapping[str, Any]


def read_here(verifier: OutputVerifier, observer: Observer | None) -> Iterator[ItemResult]:
    """Runs the checks in threads of this process; results in their order."""
    sizes, threads = verifier.buffer_sizes(), verifier.budget.threads
    return run_checks(verifier.checks, sizes, threads, observer)


def prepare(request: VerifyRequest) -> OutputVerifier:
    """Opens everything and runs level structure on headers. Raises KtconvError for what cannot be
    verified."""
    level = _level(request)
    _check_gradients(request, level)
    check_sample(request.sample)
    if request.text is not None:
        read_text(request.text)  # a KtconvError now, not after an hour of reading
    verifier = _kind(request)(request, level)
    verifier.prepare()
    return verifier


def _kind(request: VerifyRequest) -> type[OutputVerifier]:
    output = request.output
    if output.is_dir() and is_gguf_output(output):
        return GgufVerifier
    if output.is_dir() and is_pruned_output(output):
        return PrunedVerifier
    if output.is_dir() and is_gpu_output(output, bool(request.source)):
        return EncodedVerifier
    return PackedVerifier  # which says what is wrong with anything that is none of these


def _level(request: VerifyRequest) -> str:
    for option, given in (("importance", request.importance), ("calibrate", request.calibrate)):
        if given is not None and not request.source:
            raise UsageError(f"--{option} belongs to --source", "give --source MODEL too")
    if request.level is None:
        return "layers" if request.source else "structure"
    if request.level not in LEVELS:
        raise UsageError(f"unknown level {request.level!r}", f"available: {', '.join(LEVELS)}")
    if request.level != "structure" and not request.source:
        raise UsageError(
            f"--level {request.level} needs the source",
            "give the original checkpoint with --source MODEL",
        )
    return request.level


def _check_gradients(request: VerifyRequest, level: str) -> None:
    """UsageError for --gradients where nothing computes them."""
    if not request.gradients:
        return
    if level not in LEVELS[2:]:
        raise UsageError(
            f"--gradients belongs to level layers, not {level}",
            "give --source MODEL and --level layers",
        )
    if find_spec("torch") is None:
        raise UsageError(
            "--gradients compares with those of torch, which is not installed",
            "install it with: pip install 'ktconv[model]'",
        )


def verify(
    request: VerifyRequest,
    progression: Progression = unwatched,
    prepared: OutputVerifier | None = None,
    notify: Notify = silent,
    read: Reading | None = None,
) -> Result:
    """Runs all levels up to the requested one. `notify` gets a line for each step; `progression`
    makes an observer from sizes of units, first for reading, then for the computed layers. `read`
    runs the checks of levels structure and weights, elsewhere than in this process.

    Raises KtconvError where something cannot be run; failed checks are failures of the result.
    """
    started = time.monotonic()
    verifier, totals = prepared or prepare(request), Totals()
    with progression(sizes_by_unit(verifier.checks)) as observer:
        for found in (read or read_here)(verifier, observer):
            totals.add(found)
    _confirm(verifier)
    levels: dict[str, Facts | None] = {
        "structure": verifier.structure
        | {
            "bytes_checked": totals.bytes_checked,
            "checksums": totals.checksums,
            "copied_tensors": totals.copied_tensors,
        },
        **dict.fromkeys(LEVELS[1:]),
        **verifier.more,
    }
    if verifier.level != "structure":
        levels["weights"] = verifier.weights_facts(totals)
        for warning in totals.warnings():
            verifier.findings.note(warning)
    levels |= _computed(verifier, progression, notify)
    _confirm(verifier)
    return _result(verifier, levels, time.monotonic() - started)


def _confirm(verifier: OutputVerifier) -> None:
    """SourceChangedError where a remote source is not what it was."""
    if (source := verifier.output.checkpoint) is not None:
        store_of(source.path).confirm()


def _computed(
    verifier: OutputVerifier, progression: Progression, notify: Notify
) -> dict[str, Facts | None]:
    """Levels layers and model, as far as they are requested and can be run."""
    findings = verifier.findings
    wanted = LEVELS[2 : LEVELS.index(verifier.level) + 1]
    if wanted and findings.count("structure"):  # nothing to run kernels on
        findings.note("levels layers and model were not run: level structure failed")
        return {}
    levels: dict[str, Facts | None] = {}
    for name in wanted:
        try:
            if name == "layers":
                levels[name] = verifier.run_layers(progression, notify)
            elif verifier.model is not None:
                levels[name] = verifier.model.run(progression, notify)
        except KtconvError as error:
            if not findings.count():
                raise
            # The failures explain it and must be reported.
            findings.note(f"level {name} could not be run: {error}")
            break
    return levels


def _result(verifier: OutputVerifier, levels: dict[str, Facts | None], seconds: float) -> Result:
    from ktconv.bench.fingerprint import fingerprint

    output, request, findings = verifier.output, verifier.request, verifier.findings
    for name, about in levels.items():
        if about is not None:
            about["passed"] = findings.count(name) == 0
    record = output.manifest.record if output.manifest else None
    facts = {
        "schema": 1,
        "kind": "verification",
        "ktconv_version": __version__,
        "passed": findings.count() == 0,
        "level": verifier.level,
        "output": str(output.directory),
        "source": str(output.checkpoint.path) if output.checkpoint else None,
        **output.described,
        "sample": request.sample,
        "seed": request.seed,
        "seconds": round(seconds, 3),
        **memory_facts(verifier.budget),
        "failure_count": findings.count(),
        "failures": [failure.as_dict() for failure in findings.listed],
        "notes": list(findings.notes),
        **levels,
        "provenance": {
            "manifest": {key: record.get(key) for key in _ORIGIN} if record else None,
            "machine": fingerprint(),
        },
    }
    return Result(findings.count() == 0, findings.listed, facts)


_ORIGIN = ("ktconv_version", "options", "source", "geometry")
