"""Level 4: the model itself, with its own experts and with the converted ones, on the same text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ktconv.errors import UsageError
from ktconv.model.load import load_config, running, way_out
from ktconv.system.text import Notify
from ktconv.verify.corpus import read_text
from ktconv.verify.findings import Facts, Findings
from ktconv.verify.output import OpenedOutput
from ktconv.verify.request import Thresholds, VerifyRequest

LEVEL = "model"
WINDOW = 512  # tokens
MODEL_PACKAGES = {"transformers": "'ktconv[model]'", "torch": "'ktconv[model]'"}
WITHOUT_MODEL = "run --level layers, which needs no model code"
MORE_MEMORY = "run --level layers, or use a machine with more memory"
PROMPT_CHARACTERS, NEW_TOKENS = 200, 32
# Relative increase of perplexity and mean KL divergence in nats, by bits per weight. Small trained
# models lie at 0.01 and 0.01 (4 bits), 0.001 and 0.001 (8); larger ones lie lower.
DEFAULTS = {4: Thresholds(0.05, 0.05), 8: Thresholds(0.01, 0.01)}
_WORDS = {
    "perplexity_increase": "the perplexity increases by",
    "kl_mean": "the mean KL divergence is",
}


def require(**packages: str) -> None:
    """UsageError for the first package that is not installed; each with what pip installs."""
    for package, installed in packages.items():
        if find_spec(package) is None:
            raise UsageError(
                f"--level model needs {package}, which is not installed",
                f"install it with: pip install {installed}, or run --level layers",
            )


@dataclass(frozen=True, slots=True)
class ModelPair:
    """The model with converted experts, and what exchanges them for the source's for a while:
    its `originals()` is that of what `ktconv.model.replace_experts` returns."""

    model: Any
    experts: Any
    from_source: int  # experts that are not in the output, so that the source's run in both
    facts: Facts = field(default_factory=dict)


class ModelCheck(ABC):
    """Perplexities, divergence and a generation."""

    def __init__(
        self, output: OpenedOutput, request: VerifyRequest, findings: Findings, notify: Notify
    ) -> None:
        self._output, self._request = output, request
        self._findings, self._notify = findings, notify

    def check_request(self) -> None:
        """Before anything is read: UsageError without the packages, ResourceError for what does
        not fit into memory, CheckpointError for what transformers does not have."""
        require(**MODEL_PACKAGES)
        with way_out(WITHOUT_MODEL, MORE_MEMORY):
            self._check_memory()
            load_config(self._output.source.path)

    @abstractmethod
    def _check_memory(self) -> None: ...

    @property
    @abstractmethod
    def _named(self) -> Path:
        """In errors of the model's own code."""

    def run(self) -> Facts | None:
        """Facts for the report, None where the experts are not the model's.

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
        model, tokenizer = load_model(self._output.source.path)
        length = min(WINDOW, getattr(model.config, "max_position_embeddings", None) or WINDOW)
        runs = windows(tokenizer, text, length, self._request.windows)
        prompt = text[:PROMPT_CHARACTERS]
        with self._pair(model) as pair:
            self._notify(f"reading {len(runs)} windows of {runs[0].shape[1]} tokens with both")
            found = perplexity_and_divergence(pair.model, pair.experts, runs)
            self._notify(f"writing {NEW_TOKENS} tokens with both")
            source, converted = greedy_side_by_side(
                pair.model, pair.experts, tokenizer, prompt, NEW_TOKENS
            )
        if pair.from_source:
            self._findings.note(
                f"level model: {pair.from_source} experts that are not in this output ran on the "
                "source's weights"
            )
        limits = self._thresholds()
        facts = asdict(found) | {
            "text": name,
            "windows": len(runs),
            "experts_of_source": pair.from_source,
            **pair.facts,
            "perplexity_increase": found.perplexity_converted / found.perplexity_source - 1,
            "thresholds": asdict(limits),
            "generation": {"prompt": prompt, "source": source, "converted": converted},
        }
        self._check(facts, "perplexity", "perplexity_increase", "max_ppl_increase")
        self._check(facts, "divergence", "kl_mean", "max_kl")
        return facts

    @abstractmethod
    def _pair(self, model: Any) -> AbstractContextManager[ModelPair]:
        """`model` with the converted experts, until the comparison ends."""

    @property
    @abstractmethod
    def _bits(self) -> int:
        """Of a weight, the fewest."""

    def _thresholds(self) -> Thresholds:
        """What is accepted: as asked for, else the default."""
        asked, default = self._request.thresholds, DEFAULTS[self._bits]
        return Thresholds(
            default.max_ppl_increase if asked.max_ppl_increase is None else asked.max_ppl_increase,
            default.max_kl if asked.max_kl is None else asked.max_kl,
        )

    def _check(self, facts: Facts, check: str, measure: str, limit: str) -> None:
        value, allowed = facts[measure], facts["thresholds"][limit]
        if not value <= allowed:
            message = f"{_WORDS[measure]} {value:.4g}, more than the {allowed:.4g} allowed."
            self._findings.fail(LEVEL, check, message, value=value)
