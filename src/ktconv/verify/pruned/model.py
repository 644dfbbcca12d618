"""Level model of a pruned checkpoint: perplexity and divergence against the whole model."""

from __future__ import annotations

import math

from msgspec.structs import asdict

from ktconv.model.load import way_out
from ktconv.source import open_checkpoint
from ktconv.system.text import Notify
from ktconv.verify.findings import Facts, Progression
from ktconv.verify.model import LEVEL, MORE_MEMORY, ModelLevel

_WORDS = {
    "max_ppl_increase": ("perplexity_increase", "the perplexity increases by"),
    "max_kl": ("kl_mean", "the mean KL divergence is"),
}


class PrunedModelCheck(ModelLevel):
    """Passes the whole model and the output, each layer by layer."""

    otherwise = "run --level weights, which needs no model code"

    def _prepare(self) -> None:
        from ktconv.model.streamed.parts import PartedModel
        from ktconv.model.streamed.stream import PlannedPass, content_of
        from ktconv.verify.unpruned import Unpruned

        whole, request = self._output.source.unpruned, self._request
        assert whole is not None
        self._read_text(whole)
        parted = PartedModel(open_checkpoint(self._output.directory))
        chosen = self._cut(parted.model)
        self._unpruned = Unpruned(whole, chosen, request)
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
        assert self._pass is not None and self._unpruned is not None
        return max(self._pass.plan.peak_memory, self._unpruned.memory)

    def run(self, progression: Progression, notify: Notify) -> Facts:
        """Fails only where a threshold was asked for."""
        unpruned, planned = self._unpruned, self._pass
        assert unpruned is not None and planned is not None
        with way_out(self.otherwise, MORE_MEMORY), planned, unpruned:
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
        for name, (measure, words) in _WORDS.items():
            if not (value := facts[measure]) <= limits[name]:
                message = f"{words} {value:.4g}, {limits[name]:.4g} allowed."
                self._findings.fail(LEVEL, name, message, value=value)
        return facts
