"""Level model: the model with its own and with the converted experts, on the same text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec.structs import asdict, replace

from ktconv import native
from ktconv.errors import KtconvError, MemoryShortError, UsageError
from ktconv.model.load import (
    check_language_model,
    context_length,
    load_tokenizer,
    running,
    way_out,
)
from ktconv.model.text import read_text
from ktconv.source import Checkpoint
from ktconv.source.gguf.hub_names import HUB_NAMES
from ktconv.system import machine
from ktconv.system.text import Notify
from ktconv.system.units import counted, format_size
from ktconv.verify.findings import Facts, Findings, Progression
from ktconv.verify.memory import level_model_bytes
from ktconv.verify.output import OpenedOutput
from ktconv.verify.request import Thresholds, VerifyRequest
from ktconv.writer.option_files import check_written_directory

if TYPE_CHECKING:
    from torch import Tensor

    from ktconv.model.streamed.calls import ExpertLayer, ExpertRunner, Watcher
    from ktconv.model.streamed.compare import LayerDrift, Predictions
    from ktconv.model.streamed.experts import Converted, SourceExperts
    from ktconv.model.streamed.stream import PlannedPass
    from ktconv.verify.unpruned import Unpruned

LEVEL = "model"
WINDOW = 512  # tokens
MODEL_PACKAGES = {"transformers": "'ktconv[model]'", "torch": "'ktconv[model]'"}
WITHOUT_MODEL = "run --level layers, which needs no model code"
MORE_MEMORY = "run --level layers, or use a machine with more memory"
PROMPT_CHARACTERS, NEW_TOKENS = 200, 32
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


class ModelLevel(ABC):
    """Level model of an output. `otherwise`: the way out where it cannot be run."""

    otherwise: ClassVar[str] = WITHOUT_MODEL

    def __init__(self, output: OpenedOutput, request: VerifyRequest, findings: Findings) -> None:
        self._output, self._request, self._findings = output, request, findings
        self._pass: PlannedPass | None = None
        self._unpruned: Unpruned | None = None  # the model with all experts, where some are dropped
        self._text_name = ""

    def prepare(self) -> None:
        """Raises UsageError for missing packages and too short a text, ResourceError for too little
        memory, CheckpointError for a model that transformers does not support or that has no
        tokenizer."""
        require(**MODEL_PACKAGES)
        source = self._output.source
        if source.mapped is not None:
            raise UsageError(
                f"--level model is not possible for {source.path}: transformers loads the model by "
                "its own names, not by those of a map",
                self.otherwise,
            )
        if self._request.work_dir is not None:
            # Time stamps of the output say whether an interrupted run goes on.
            check_written_directory(
                self._request.work_dir, "--work-dir", [source.path, self._output.directory]
            )
        with way_out(self.otherwise, MORE_MEMORY):
            self._prepare()

    def _read_text(self, source: Checkpoint) -> None:
        """The text, and the tokenizer of a model, whose config.json is looked at."""
        from ktconv.model.evaluate import directory_of

        directory = directory_of(source.path, source.side_directory)
        check_language_model(directory)
        self._tokenizer = load_tokenizer(directory, source.path)
        self._text, self._text_name = read_text(self._request.text)

    def _cut(self, model: Any) -> list[Tensor]:
        """The windows of the text for a model."""
        from ktconv.model.evaluate import windows

        length = context_length(model.config, WINDOW)
        return windows(self._tokenizer, self._text, length, self._request.windows)

    @abstractmethod
    def _prepare(self) -> None:
        """Plans the passes."""

    @property
    @abstractmethod
    def memory(self) -> int:
        """Largest memory of the whole process, in bytes."""

    @property
    def lines(self) -> Sequence[str]:
        """Lines for people about what is going to be done."""
        return [f"level model: {line}" for line in self._pass.plan.lines()] if self._pass else []

    @abstractmethod
    def run(self, progression: Progression, notify: Notify) -> Facts | None:
        """Facts for the report; None if these are experts of another model."""


class ModelCheck(ModelLevel):
    """Compares perplexity, divergence, hidden states and generated text.

    A pass reads source and converted model together, layer by layer, so that models of any size
    can be compared. Where a model's code does not allow that, both are loaded. Text is generated
    only where they can be.
    """

    models_loaded: ClassVar[int]  # at the same time

    _why_not_passed = ""

    # ---- before anything is read ----

    def _prepare(self) -> None:
        from ktconv.model.streamed.parts import NotCut, PartedModel
        from ktconv.model.streamed.stream import PlannedPass, content_of
        from ktconv.verify.unpruned import Unpruned

        source, request = self._output.source, self._request
        self._read_text(source)
        kind = source.architecture  # of a GGUF model
        if kind is not None and kind not in HUB_NAMES:
            self._not_passed(
                f"{source.path} cannot be run layer by layer: names and order of rows of GGUF "
                f"architecture {kind} are not known"
            )
            return
        try:
            parted = PartedModel(source)
            self._pass = PlannedPass(
                "verify",
                parted,
                self._cut(parted.model),
                sides=2,
                converted=self._converted,
                threads=request.threads,
                max_memory=request.max_memory,
                work_dir=request.work_dir,
                more={"output": content_of(self._output.directory), "isa": native.isa()},
            )
            if source.unpruned is not None:
                self._unpruned = Unpruned(source.unpruned, self._pass.windows, request)
        except NotCut as error:
            self._not_passed(str(error))

    def _not_passed(self, why: str) -> None:
        """Raises MemoryShortError where the model cannot be loaded either."""
        self._pass, self._why_not_passed = None, why
        if self._why_not_loaded:
            raise MemoryShortError(f"{why}, and {self._why_not_loaded}")

    @cached_property
    def _why_not_loaded(self) -> str | None:
        """Reason why the models are not loaded into memory; None where they can be."""
        source, limit = self._output.source, self._request.max_memory
        try:
            self._check_loadable()
        except KtconvError as error:
            return str(error)
        needed = level_model_bytes(source, self.models_loaded)
        models = "both models" if self.models_loaded > 1 else "the source model"
        words = f"loading {models} needs about {format_size(needed)} of memory, but only"
        if needed > (free := machine.available_memory()):
            return f"{words} {format_size(free)} are free"
        if limit is not None and needed + machine.resident_memory() > limit:
            return f"{words} {format_size(limit)} may be used (--max-memory)"
        return None

    def _check_loadable(self) -> None:
        """Raises KtconvError where transformers cannot load the models, whatever their size."""
        from ktconv.model.evaluate import check_gguf

        source = self._output.source
        if source.is_gguf:
            check_gguf(source.path, source.side_directory)
        if source.pruning is not None:
            raise UsageError("a model that is pruned while it is converted is not loaded whole")

    @property
    def memory(self) -> int:
        passed = self._pass.plan.peak_memory if self._pass else 0
        if self._why_not_loaded:
            return passed
        loaded = level_model_bytes(self._output.source, self.models_loaded)
        return max(passed, machine.resident_memory() + loaded)

    # ---- running ----

    @property
    @abstractmethod
    def _named(self) -> Path:
        """The directory to name in errors of the model's own code."""

    def run(self, progression: Progression, notify: Notify) -> Facts | None:
        """Raises ResourceError where neither a pass nor loading is possible, CheckpointError where
        the model's own code fails."""
        whole = self._unpruned or nullcontext()
        with way_out(WITHOUT_MODEL, MORE_MEMORY), self._pass or nullcontext(), whole:
            predictions, layers = self._passed(progression, notify)
            facts = self._facts(predictions, layers, notify)
            if self._pass:
                self._pass.complete()
            if self._unpruned is not None:
                facts["unpruned"] = self._unpruned.facts()
                self._unpruned.complete()
        if missing := facts["experts_of_source"]:
            self._findings.note(
                f"level model: {counted(missing, 'expert')} that are not in this output ran on "
                "the source's "
                "weights"
            )
        self._check(facts, "perplexity", "perplexity_increase", "max_ppl_increase")
        self._check(facts, "divergence", "kl_mean", "max_kl")
        return facts

    def _passed(
        self, progression: Progression, notify: Notify
    ) -> tuple[Predictions | None, Sequence[LayerDrift]]:
        """Result of a pass; nothing where it is not possible."""
        from ktconv.model.streamed.compare import Comparison
        from ktconv.model.streamed.parts import NotCut

        if self._pass is None:
            return None, ()
        notify(f"passing {counted(len(self._pass.windows), 'window')} through both, layer by layer")
        found = Comparison(self._pass.windows)
        watchers: list[Watcher] = [found]
        try:
            layers = self._pass.parted.experts
            if self._unpruned is not None:
                self._unpruned.run(progression, notify)
                watchers.append(self._unpruned)
            self._pass.run(
                lambda own: self._runner(own, layers),
                watchers=watchers,
                progression=progression,
                notify=notify,
            )
        except NotCut as error:  # what only its layers tell
            self._not_passed(str(error))
            return None, ()
        return found.predictions, found.drift.result()

    def _facts(
        self, predictions: Predictions | None, layers: Sequence[LayerDrift], notify: Notify
    ) -> Facts:
        from ktconv.model.matching import UnlikeExperts

        limits, generation, why_not = self._thresholds(), None, self._why_not_loaded
        if why_not is None:
            notify("loading the source model")
            try:
                with running(self._named), self._loaded(notify) as (both, experts):
                    if predictions is None:
                        predictions = self._in_memory(both, experts, notify)
                    else:
                        self._check_loaded(both, experts, predictions, limits)
                    generation = self._generated(both, experts, notify)
            except KtconvError as error:
                if predictions is None or isinstance(error, UnlikeExperts):
                    raise
                why_not = str(error)  # the figures are there all the same
        if why_not is not None:
            self._findings.note(f"level model: no text was generated, because {why_not}")
        assert predictions is not None  # else the models were loaded
        found = predictions.result()
        return asdict(found) | {
            "text": self._text_name,
            "windows": len(predictions.texts),
            **self._about,
            "perplexity_increase": found.perplexity_converted / found.perplexity_source - 1,
            "layers": [asdict(layer) for layer in layers],
            "thresholds": asdict(limits),
            "generation": generation,
        }

    @property
    def _about(self) -> Facts:
        """Facts about the experts: how many are missing in the output and run as the source's in
        both."""
        layers = [one for one in self._output.source_layers.values() if not one.is_mtp]
        missing = (len(one.experts) - len(self._output.experts_in(one.index)) for one in layers)
        return {"experts_of_source": sum(missing)}

    def _runner(
        self, own: SourceExperts, layers: Mapping[int, ExpertLayer]
    ) -> AbstractContextManager[ExpertRunner]:
        """The experts of both sides; `own` are the source's, `layers` those of the model."""
        return nullcontext(own)

    @property
    def _converted(self) -> Converted | None:
        """Converted experts, given to `own` of `_runner` for side 1; None: the source's own."""
        return None

    # ---- loaded models ----

    @contextmanager
    def _loaded(self, notify: Notify) -> Iterator[tuple[Any, Any]]:
        """Load both models, as `_pair`."""
        from ktconv.model import load_model

        source = self._output.source
        model, _ = load_model(
            source.path, config_directory=source.side_directory, adapters=source.adapters
        )
        model.config._experts_implementation = "eager"  # the arithmetic of a pass
        with self._pair(model, notify) as pair:
            yield pair

    @abstractmethod
    def _pair(self, model: Any, notify: Notify) -> AbstractContextManager[tuple[Any, Any]]:
        """A context with a model that has the converted experts, and an object whose `originals()`,
        as of what `ktconv.model.replace_experts` returns, is a context in which it has the
        source's."""

    def _in_memory(self, both: Any, experts: Any, notify: Notify) -> Predictions:
        from ktconv.model.evaluate import predictions_of_both

        why = self._why_not_passed
        self._findings.note(f"level model: both models were loaded, because {why}")
        runs = self._cut(both)
        notify(
            f"reading {counted(len(runs), 'window')} of "
            f"{counted(runs[0].shape[1], 'token')} with both"
        )
        return predictions_of_both(both, experts, runs)

    def _check_loaded(
        self, both: Any, experts: Any, predictions: Predictions, limits: Thresholds
    ) -> None:
        """Whether loaded models say the same as in a pass."""

    def _generated(self, both: Any, experts: Any, notify: Notify) -> Facts:
        from ktconv.model.evaluate import greedy_side_by_side

        prompt = self._text[:PROMPT_CHARACTERS]
        notify(f"writing {counted(NEW_TOKENS, 'token')} with both")
        texts = greedy_side_by_side(both, experts, self._tokenizer, prompt, NEW_TOKENS)
        return {"prompt": prompt, "source": texts[0], "converted": texts[1]}

    # ---- verdict ----

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
