"""Level 4: the model itself, with its own experts and with ours, reading the same text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from ktconv.errors import UsageError
from ktconv.model.load import load_config, running, way_out
from ktconv.verify.findings import Findings
from ktconv.verify.subject import Subject
from ktconv.verify.text import read_text

LEVEL = "model"
WINDOW = 512  # tokens
MODEL_PACKAGES = {"transformers": "'ktconv[model]'", "torch": "'ktconv[model]'"}
WITHOUT_MODEL = "run --level layers, which needs no model code"
MORE_MEMORY = "run --level layers, or use a machine with more memory"
PROMPT_CHARACTERS, NEW_TOKENS = 200, 32
# Relative increase of perplexity and mean KL divergence in nats. Small trained models lie at
# 0.01 and 0.01 (INT4), 0.001 and 0.001 (INT8); larger ones lie lower.
DEFAULTS = {"int4": (0.05, 0.05), "int8": (0.01, 0.01)}


def refuse_impossible(subject: Subject, request: Any) -> None:
    """Before anything is read: UsageError without the packages, ResourceError for a model that
    does not fit into memory, CheckpointError for one that transformers does not have."""
    assert subject.checkpoint is not None
    require(**MODEL_PACKAGES)
    from ktconv.model import check_memory

    with way_out(WITHOUT_MODEL, MORE_MEMORY):
        check_memory(subject.checkpoint.path, "auto")
        load_config(subject.checkpoint.path)


def require(**packages: str) -> None:
    """UsageError for the first package that is not installed; each with what pip installs."""
    for package, installed in packages.items():
        if find_spec(package) is None:
            raise UsageError(
                f"--level model needs {package}, which is not installed",
                f"install it with: pip install {installed}, or run --level layers",
            )


def check_model(
    subject: Subject, request: Any, findings: Findings, say: Callable[[str], None]
) -> dict[str, Any] | None:
    """Perplexities, divergence and a generation; facts for the report, None
    where the experts are not the model's.

    Raises UsageError without transformers, ResourceError where the model does not fit,
    CheckpointError where the model's own code fails.
    """
    assert subject.checkpoint is not None
    from ktconv.model.replace import UnlikeExperts

    try:
        with way_out(WITHOUT_MODEL, MORE_MEMORY), running(subject.checkpoint.path):
            return _check(subject, request, findings, say)
    except UnlikeExperts as error:
        findings.fail(LEVEL, "experts", f"{error}.")
        return None


def _check(
    subject: Subject, request: Any, findings: Findings, say: Callable[[str], None]
) -> dict[str, Any]:
    from ktconv.model import (
        greedy_side_by_side,
        load_model,
        perplexity_and_divergence,
        replace_experts,
        windows,
    )

    assert subject.checkpoint is not None
    text, name = read_text(request.text)
    say("loading the source model")
    model, tokenizer = load_model(subject.checkpoint.path)
    length = min(WINDOW, getattr(model.config, "max_position_embeddings", None) or WINDOW)
    runs = windows(tokenizer, text, length, request.windows)
    with replace_experts(model, subject.directory, threads=request.threads, keep=True) as replaced:
        say(f"reading {len(runs)} windows of {runs[0].shape[1]} tokens with both")
        found = perplexity_and_divergence(model, replaced, runs)
        say(f"writing {NEW_TOKENS} tokens with both")
        prompt = text[:PROMPT_CHARACTERS]
        source, converted = greedy_side_by_side(model, replaced, tokenizer, prompt, NEW_TOKENS)
        own = sum(map(len, replaced.own.values()))
    if own:
        findings.note(
            f"level model: {own} experts that are not in this output ran on the source's weights"
        )
    limits = thresholds(subject.options.method, request.thresholds)
    facts = asdict(found) | {
        "text": name,
        "windows": len(runs),
        "experts_of_source": own,
        "perplexity_increase": found.perplexity_converted / found.perplexity_source - 1,
        "thresholds": limits,
        "generation": {"prompt": prompt, "source": source, "converted": converted},
    }
    judge(facts, limits, findings)
    return facts


def thresholds(method: str, wanted: Any) -> dict[str, float]:
    """What is accepted: as asked for, else the method's defaults."""
    increase, divergence = DEFAULTS[method]
    return {
        "max_ppl_increase": increase
        if wanted.max_ppl_increase is None
        else wanted.max_ppl_increase,
        "max_kl": divergence if wanted.max_kl is None else wanted.max_kl,
    }


def judge(facts: dict[str, Any], limits: dict[str, float], findings: Findings) -> None:
    measures = (
        ("perplexity", "perplexity_increase", "max_ppl_increase", "the perplexity grows by"),
        ("divergence", "kl_mean", "max_kl", "the mean KL divergence is"),
    )
    for check, measure, limit, words in measures:
        if not facts[measure] <= limits[limit]:
            findings.fail(
                LEVEL,
                check,
                f"{words} {facts[measure]:.4g}, more than the {limits[limit]:.4g} allowed.",
                value=facts[measure],
            )
