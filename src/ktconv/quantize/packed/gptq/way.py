"""`--calibrate`: GPTQ error compensation, on recorded second moments or on a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from ktconv.conversion.pipeline import Task
from ktconv.conversion.plan import LayerUnit, Unit
from ktconv.errors import UsageError
from ktconv.model import require_packages
from ktconv.quantize.packed.coverage import facts_of, table
from ktconv.quantize.packed.gptq.inputs import FEWEST_TOKENS
from ktconv.quantize.packed.ways import (
    LAYERS_KEPT,
    Asked,
    Converted,
    ErrorWeights,
    Expert,
    Way,
)
from ktconv.system.arrays import I64
from ktconv.system.threads import torch_threads
from ktconv.system.units import counted
from ktconv.targets.packed.proof import COMPENSATED
from ktconv.targets.packed.target import Options, Plan
from ktconv.writer.journal import Journal

if TYPE_CHECKING:
    from pathlib import Path

    from ktconv.quantize.packed.gptq.inputs import Calibration
    from ktconv.quantize.packed.gptq.streaming import TextCalibration
    from ktconv.quantize.packed.run import QuantizeCpu


class Compensation(Way):
    """The inputs that codes are calibrated on: all recorded, or of one layer after the other while
    a text passes the model."""

    def __init__(self, found: Calibration | TextCalibration, text: TextCalibration | None) -> None:
        self.found, self.text = found, text
        self.record = {"calibrate": found.record}
        self._inputs: Calibration | None = None if text is not None else found  # type: ignore[assignment]

    @staticmethod
    def open(asked: Asked) -> Compensation | None:
        """UsageError too where an output that is converted again was calibrated."""
        request, options = asked.request, asked.options
        if request.calibrate is None:
            if options.calibrate is None:
                return None
            raise UsageError(
                f"the weights were converted with --calibrate {options.calibrate.name}, without "
                "which other codes would result",
                "convert the model again: ktconv quantize-cpu MODEL OUTPUT --calibrate DIR",
            )
        if options.scale != "search":
            given = "--compat" if options.compat else f"--scale {options.scale}"
            raise UsageError(
                f"--calibrate chooses scales by search, and cannot be combined with {given}",
                "omit one of them",
            )
        if request.importance is not None:
            raise UsageError(
                "--calibrate knows the importance of each channel, and cannot be combined with "
                "--importance",
                "omit --importance",
            )
        if find_spec("torch") is None:
            raise UsageError(
                "--calibrate needs torch, which is not installed",
                "install it with: pip install 'ktconv[model]'",
            )
        if request.calibrate.is_file():
            found = _of_text(asked, request.calibrate)
            return Compensation(found, found)
        from ktconv.quantize.packed.gptq.inputs import open_calibration

        recorded = open_calibration(request.calibrate, asked.checkpoint, asked.layers)
        return Compensation(recorded, None)

    @staticmethod
    def error_weights(output: Converted, given: Path | None) -> ErrorWeights | None:
        recorded = output.options.calibrate
        if given is None or recorded is None:
            return None
        from ktconv.quantize.packed.gptq.inputs import open_calibration

        found = open_calibration(given, output.checkpoint, output.layers)
        same = (found.record.text_sha256, found.record.run)
        if same != (recorded.text_sha256, recorded.run):
            raise UsageError(
                f"{output.directory} was converted with other calibration data than {given}: its "
                f"{recorded.name} was recorded on {recorded.text}",
                "give the directory that the conversion was given, or record it again: "
                + _recording(recorded.kind),
            )
        return ErrorWeights(found.importance, found.memory(LAYERS_KEPT))

    @staticmethod
    def unproven(options: Options, codes: Sequence[object], known: bool) -> list[str]:
        sentences = []
        if compensated := codes.count(COMPENSATED):
            sentences.append(
                f"the codes of {compensated:,} of {len(codes):,} calibrated tensors follow from "
                "data: proven are that they are levels, and that no row has a larger error than "
                "recorded"
            )
        if codes and not known:
            factors = ", and the factors of folding of compensated ones," if options.fold else ""
            sentences.append(
                f"the scales of calibrated matrices{factors} are proven to be possible, but not "
                "that they make the error on the calibration data smallest: give its second "
                "moments with --calibrate DIR"
            )
        return sentences

    def notes(self, plan: Plan) -> list[str]:
        return list(self.found.notes)

    def about(self) -> tuple[dict[str, Any], list[str]]:
        counts, used = self.found.counts, asdict(self.found.record)
        if not counts:  # a text that was not read yet
            return {"calibrate": used}, []
        facts = used | coverage_facts(counts)
        return {"calibrate": facts}, coverage_lines(counts)

    def shared_memory(self, units: int) -> int:
        return self.found.memory(units)

    def passing_bytes(self, units: Sequence[Unit]) -> int:
        if self.text is None:
            return 0
        calibrated = set(self.text.layers)
        layers = (unit.layer.index for unit in units if isinstance(unit, LayerUnit))
        return 0 if calibrated.isdisjoint(layers) else self.text.disk

    def worker_memory(self, plan: Plan) -> int:
        from ktconv.quantize.packed.gptq.task import expert_memory

        return expert_memory(plan.moe_layers)

    def tasks(self, expert: Expert, tasks: list[Task]) -> list[Task]:
        inputs = self._inputs.layer(expert.layer.index) if self._inputs else None
        if inputs is None:
            return tasks
        from ktconv.quantize.packed.gptq.task import CompensatedExpert

        return [CompensatedExpert(expert, inputs)]

    def convert(self, run: QuantizeCpu, pending: Sequence[Unit]) -> Sequence[Unit]:
        """The layers that a text passes, each once its inputs exist."""
        text = self.text
        if text is None:
            return pending

        units = {unit.layer.index: unit for unit in run.plan.layers}
        waiting = {index for index in text.layers if units[index] in pending}

        def ready(layer: int, inputs: Calibration) -> None:
            self._inputs = inputs
            run.run_pipeline([units[layer]])
            self._inputs = None
            waiting.discard(layer)

        if waiting:
            text.run(lambda layer: units[layer].key in run.done, ready, run.observer.noted)
            for line in coverage_lines(text.counts):
                run.observer.noted(line)
        calibrated = {units[index].key for index in text.layers}
        return [unit for unit in pending if unit.key not in calibrated]

    def running(self) -> AbstractContextManager[object]:
        if self._inputs is None:
            return nullcontext()
        # Workers that begin meanwhile are enough; sums have the same bits for any number of them.
        return torch_threads(1)

    def report(self) -> dict[str, Any]:
        """Tokens of experts in the layers that a text has passed in this run."""
        if self.text is None or not self.text.counts:
            return {}

        return {"calibration_coverage": coverage_facts(self.text.counts)}


def _recording(kind: str) -> str:
    """The command that records what a conversion was calibrated on, from a directory or a text."""
    from ktconv.quantize.packed.gptq.streaming import MOST_TOKENS

    tokens = f" --max-tokens {MOST_TOKENS}" if kind == "text" else ", with as many tokens"
    return f"ktconv stats MODEL --hessian DIR --text with the same text{tokens}"


def _of_text(asked: Asked, text: Path) -> TextCalibration:
    """UsageError for options that the model cannot be run with."""
    request, source = asked.request, asked.request.source
    given = {"layers": request.layers, "map": source.map, "tower": source.tower}
    for name, value in given.items():
        if value is not None:
            raise UsageError(
                f"--{name} cannot be combined with a text for --calibrate, which the whole model "
                "reads by the names of transformers",
                "record second moments first: ktconv stats MODEL --hessian DIR; then give DIR",
            )
    require_packages()
    from ktconv.quantize.packed.gptq.streaming import PASS, TextCalibration

    folder = Journal(request.output).directory / PASS
    half = request.max_memory // 2
    return TextCalibration(text, asked.checkpoint, source.config, asked.layers, half, folder)


_FELL = "experts_fell_back"


def coverage_facts(layers: Mapping[int, I64]) -> dict[str, Any]:
    """Facts for JSON, of tokens [E] by layer: totals and every layer."""
    return facts_of(layers, {_FELL: lambda counts: int((counts < FEWEST_TOKENS).sum())})


def coverage_lines(layers: Mapping[int, I64]) -> list[str]:
    """Lines for people: the layers whose experts saw least, and the totals."""
    facts = coverage_facts(layers)
    return [
        *table(
            "tokens of each expert in the calibration",
            facts["layers"],
            {_FELL: "fell back"},
            lambda row: (-row[_FELL], row["tokens_min"]),
        ),
        f"{facts[_FELL]} of {counted(facts['experts'], 'expert')} got fewer than "
        f"{counted(FEWEST_TOKENS, 'token')}: they are rounded to nearest, by a search weighted "
        "by importance",
    ]
