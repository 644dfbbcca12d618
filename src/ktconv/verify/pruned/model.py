"""Level model of a pruned checkpoint: perplexity and divergence against the whole model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from ktconv.model.load import check_language_model, context_length, load_tokenizer, way_out
from ktconv.model.text import read_text
from ktconv.source import open_checkpoint
from ktconv.system.text import Notify
from ktconv.verify.findings import Facts, Findings, Progression
from ktconv.verify.model import LEVEL, MODEL_PACKAGES, MORE_MEMORY, WINDOW, require
from ktconv.verify.pruned.output import PrunedOutput
from ktconv.verify.request import VerifyRequest
from ktconv.writer.option_files import check_written_directory

if TYPE_CHECKING:
    from ktconv.model.streamed.stream import PlannedPass
    from ktconv.verify.unpruned import Unpruned

_OTHERWISE = "run --level weights, which needs no model code"
_WORDS = {"max_ppl_increase": "the perplexity increases by", "max_kl": "the mean KL divergence is"}


class PrunedModelCheck:
    """Passes the whole model and the output, each layer by layer."""

    def __init__(self, output: PrunedOutput, request: VerifyRequest, findings: Findings) -> None:
        self._output, self._request, self._findings = output, request, findings
        self._unpruned: Unpruned | None = None
        self._pass: PlannedPass | None = None
        self._text_name = ""

    def prepare(self) -> None:
        """Raises UsageError for missing packages and too short a text, ResourceError for too little
        memory, CheckpointError for a model that transformers does not support."""
        require(**MODEL_PACKAGES)
        whole, request = self._output.source.unpruned, self._request
        assert whole is not None
        if request.work_dir is not None:
            apart = [whole.path, self._output.directory]
            check_written_directory(request.work_dir, "--work-dir", apart)
        with way_out(_OTHERWISE, MORE_MEMORY):
            from ktconv.model.evaluate import windows
            from ktconv.model.streamed.parts import PartedModel
            from ktconv.model.streamed.stream import PlannedPass, content_of
            from ktconv.verify.unpruned import Unpruned

            directory = whole.side_directory or whole.path
            check_language_model(directory)
            tokenizer = load_tokenizer(directory, whole.path)
            text, self._text_name = read_text(request.text)
            parted = PartedModel(open_checkpoint(self._output.directory))
            length = context_length(parted.model.config, WINDOW)
            chosen = windows(tokenizer, text, length, request.windows)
            self._unpruned = Unpruned(
                whole,
                chosen,
                threads=request.threads,
                max_memory=request.max_memory,
                work_dir=request.work_dir,
            )
            self._pass = PlannedPass(
                "verify pruned",
                parted,
                chosen,
                threads=request.threads,
                max_memory=request.max_memory,
                work_dir=request.work_dir,
                more={"output": content_of(self._output.directory)},
            )

    @property
    def memory(self) -> int:
        """Largest memory of the whole process, in bytes."""
        assert self._pass is not None and self._unpruned is not None
        return max(self._pass.plan.peak_memory, self._unpruned.memory)

    @property
    def lines(self) -> Sequence[str]:
        """Lines for people about what is going to be done."""
        assert self._pass is not None
        return [f"level model: {line}" for line in self._pass.plan.lines()]

    def run(self, progression: Progression, notify: Notify) -> Facts:
        """Facts for the report. Fails only where a threshold was asked for."""
        unpruned, planned = self._unpruned, self._pass
        assert unpruned is not None and planned is not None
        with way_out(_OTHERWISE, MORE_MEMORY), planned, unpruned:
            unpruned.run(progression, notify)
            notify("passing it through the output")
            planned.run(watchers=[unpruned], progression=progression, notify=notify)
            planned.complete()
            unpruned.complete()
        limits = {
            name: math.inf if value is None else value
            for name, value in asdict(self._request.thresholds).items()
        }
        facts = unpruned.facts() | {
            "text": self._text_name,
            "windows": len(unpruned.predictions.texts),
            "experts_of_source": 0,
            "layers": [],
            "thresholds": limits,
            "generation": None,
        }
        measured = {
            "max_ppl_increase": facts["perplexity_increase"],
            "max_kl": facts["kl_mean"],
        }
        for name, value in measured.items():
            if not value <= limits.get(name, math.inf):
                self._findings.fail(
                    LEVEL,
                    name,
                    f"{_WORDS[name]} {value:.4g}, {limits[name]:.4g} allowed.",
                    value=value,
                )
        return facts
