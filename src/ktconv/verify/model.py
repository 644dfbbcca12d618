"""Level model: the model with its own and with the converted experts, on the same text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from ktconv.errors import ResourceError, UsageError
from ktconv.model.decoded import loaded_bytes
from ktconv.model.load import check_language_model, context_length, running, way_out
from ktconv.model.text import read_text
from ktconv.system import machine
from ktconv.system.text import Notify
from ktconv.system.units import format_size
from ktconv.verify.findings import Facts, Findings
from ktconv.verify.output import OpenedOutput
from ktconv.verify.request import Thresholds, VerifyRequest

LEVEL = "model"
WINDOW = 512  # tokens
MODEL_PACKAGES = {"transformers": "'ktconv[model]'", "torch": "'ktconv[model]'"}
WITHOUT_MODEL = "run --level layers, which needs no model code"
MORE_MEMORY = "run --level layers, or use a machine with more memory"
PROMPT_CHARACTERS, NEW_TOKENS = 200, 32
_LOADING = 1.1  # memory while a model is loaded, relative to its weights
# Relative increase of perplexity and mean KL divergence in nats, by bits per weight. Small trained
# models have 0.01 and 0.01 (4 bits), 0.001 and 0.001 (8); larger ones less.
DEFAULTS = {4: Thresholds(0.05, 0.05), 8: Thresholds(0.01, 0.01)}
_WORDS = {
    "perplexity_increase": "the perplexity increases by",
    "kl_mean": "the mean KL divergence is",
}


def require(**packages: str) -> None:
    """Raises UsageError for the first package that is not installed; values are pip's names."""
    for package, installed in packages.items():
        if find_spec(package) is None:
            raise UsageError(
                f"--level model needs {package}, which is not installed",
                f"install it with: pip install {installed}, or run --level layers",
            )


class ModelCheck(ABC):
    """Compares perplexity, divergence and generated text."""

    models_loaded: ClassVar[int]  # at the same time

    def __init__(
        self, output: OpenedOutput, request: VerifyRequest, findings: Findings, notify: Notify
    ) -> None:
        self._output, self._request = output, request
        self._findings, self._notify = findings, notify

    def check_request(self) -> None:
        """Raises, before anything is read, UsageError for missing packages, ResourceError for too
        little memory, CheckpointError for a model that transformers does not support."""
        require(**MODEL_PACKAGES)
        source = self._output.source
        if source.mapped is not None:
            raise UsageError(
                f"--level model is not possible for {source.path}: transformers loads the model by "
                "its own names, not by those of a map",
                WITHOUT_MODEL,
            )
        directory = source.path
        if source.is_gguf:
            from ktconv.model.evaluate import check_gguf

            directory = check_gguf(source.path, source.side_directory)
        with way_out(WITHOUT_MODEL, MORE_MEMORY):
            self._check_memory()
            check_language_model(directory)

    def _check_memory(self) -> None:
        size = loaded_bytes(self._output.source)
        needed, free = int(self.models_loaded * _LOADING * size), machine.available_memory()
        if needed > free:
            models = "both models" if self.models_loaded > 1 else "the source model"
            raise ResourceError(
                f"--level model needs about {format_size(needed)} of memory for {models}, but only "
                f"{format_size(free)} are free",
                MORE_MEMORY,
            )

    @property
    @abstractmethod
    def _named(self) -> Path:
        """The directory to name in errors of the model's own code."""

    def run(self) -> Facts | None:
        """Facts for the report; None if these are experts of another model.

        Raises ResourceError where the model does not fit, CheckpointError where its own code
        fails.
        """
        with way_out(WITHOUT_MODEL, MORE_MEMORY), running(self._named):
            return self._run()

    def _run(self) -> Facts:
        from ktconv.model import load_model
        from ktconv.model.evaluate import greedy_side_by_side, perplexity_and_divergence, windows

        text, name = read_text(self._request.text)
        self._notify("loading the source model")
        origin = self._output.source
        model, tokenizer = load_model(origin.path, config_directory=origin.side_directory)
        runs = windows(tokenizer, text, context_length(model, WINDOW), self._request.windows)
        prompt = text[:PROMPT_CHARACTERS]
        with self._pair(model) as (both, experts, about):
            self._notify(f"reading {len(runs)} windows of {runs[0].shape[1]} tokens with both")
            found = perplexity_and_divergence(both, experts, runs)
            self._notify(f"writing {NEW_TOKENS} tokens with both")
            source, converted = greedy_side_by_side(both, experts, tokenizer, prompt, NEW_TOKENS)
        if missing := about["experts_of_source"]:
            self._findings.note(
                f"level model: {missing} experts that are not in this output ran on the source's "
                "weights"
            )
        limits = self._thresholds()
        facts = asdict(found) | {
            "text": name,
            "windows": len(runs),
            **about,
            "perplexity_increase": found.perplexity_converted / found.perplexity_source - 1,
            "thresholds": asdict(limits),
            "generation": {"prompt": prompt, "source": source, "converted": converted},
        }
        self._check(facts, "perplexity", "perplexity_increase", "max_ppl_increase")
        self._check(facts, "divergence", "kl_mean", "max_kl")
        return facts

    @abstractmethod
    def _pair(self, model: Any) -> AbstractContextManager[tuple[Any, Any, Facts]]:
        """A context with a model that has the converted experts; an object whose `originals()`, as
        of what `ktconv.model.replace_experts` returns, is a context in which it has the source's;
        and facts, with `experts_of_source`: how many are missing in the output and run as the
        source's in both."""

    @property
    @abstractmethod
    def _bits(self) -> int:
        """The smallest number of bits per weight."""

    def _thresholds(self) -> Thresholds:
        """The requested thresholds, else the defaults."""
        asked = asdict(self._request.thresholds).items()
        return replace(DEFAULTS[self._bits], **{name: x for name, x in asked if x is not None})

    def _check(self, facts: Facts, check: str, measure: str, limit: str) -> None:
        value, allowed = facts[measure], facts["thresholds"][limit]
        if not value <= allowed:
            message = f"{_WORDS[measure]} {value:.4g}, more than the {allowed:.4g} allowed."
            self._findings.fail(LEVEL, check, message, value=value)
