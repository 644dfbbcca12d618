"""Each expert matrix encoded by itself, rounded to nearest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

from ktconv.conversion.pipeline import Observer, Task
from ktconv.conversion.plan import LayerUnit
from ktconv.conversion.run import Conversion
from ktconv.conversion.together import together
from ktconv.errors import UsageError
from ktconv.quantize.encoded.request import DecodedCopy, Preflight, Request
from ktconv.quantize.encoded.task import EncodeTask, encode_together, rounded
from ktconv.source import TensorRef
from ktconv.source.reading.buffers import BufferSizes
from ktconv.source.reading.reader import SourceReader
from ktconv.system.text import Notify, silent
from ktconv.targets.encoded import config
from ktconv.targets.encoded.ignored import names_in_transformers
from ktconv.targets.encoded.sections import ignored_in
from ktconv.targets.encoded.target import CONFIG, RECIPE, RECIPE_TOML, RENAMED, Plan
from ktconv.writer.journal import Record


class Encode(Conversion):
    """Every matrix by itself."""

    plan: Plan
    request: Request
    preflight: Preflight

    def __init__(self, preflight: Preflight, observer: Observer, notify: Notify = silent) -> None:
        super().__init__(preflight, observer)
        self.notify = notify

    @staticmethod
    def check(request: Request, plan: Plan) -> int:
        """Refuse what the method cannot do; bytes of memory that it needs besides the workers'."""
        if request.device.lower() not in ("auto", "cpu"):
            raise UsageError(
                f"--device {request.device} belongs to --algorithm gptq: rounding to nearest runs "
                "on the CPU, faster than weights reach a GPU",
                "omit it",
            )
        return 0

    def buffers(self) -> BufferSizes:
        return self.preflight.buffers

    def copy_task(self, reader: SourceReader, tensor: TensorRef, name: str) -> Task:
        weight = self.plan.target.decoded.get(tensor.name)
        if weight is None:
            return super().copy_task(reader, tensor, name)
        return DecodedCopy(reader, tensor, name, self.request.verify, weight)

    def made_files(self) -> Mapping[str, bytes]:
        files = dict(super().made_files())
        files[CONFIG] = config.config_json(self.plan, self._renamed)
        if RECIPE in self.plan.target.made_files:
            files[RECIPE] = config.recipe_yaml(self.plan)
        if RECIPE_TOML in self.plan.target.made_files:
            files[RECIPE_TOML] = self.plan.target.options.recipe.encode()
        return files

    @cached_property
    def _renamed(self) -> list[str]:
        """Transformers' names of modules that have other names in the output; empty if
        transformers does not read the output, or nothing in config.json names modules."""
        section = config.quantization_config(self.plan)
        if not self.plan.target.read_by_transformers(self.plan.moe_layers):
            return []
        if section is None or not (named := set(ignored_in(section))):
            return []
        others = (tensor for unit in self.plan.others for tensor in unit.tensors())
        rows = self.plan.checkpoint.config.families
        return sorted(names_in_transformers(others, rows) - named)

    def about_made_files(self) -> Record:
        return {RENAMED: self._renamed} if self._renamed else {}

    def card(self) -> str:
        return config.card(self.plan, self.source_card, self.errors)

    def expert_tasks(self, unit: LayerUnit, reader: SourceReader) -> Iterator[Task]:
        verify, target = self.request.verify, self.plan.target
        tasks = (
            EncodeTask(reader, unit.layer, expert, proj, verify, target)
            for expert in unit.experts
            for proj in unit.layer.projections
        )
        return together(tasks, rounded, encode_together)
