"""Level model for experts on CPUs: our kernels run in place of the model's own experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktconv.formats import FORMATS
from ktconv.system.text import Notify
from ktconv.verify.findings import Facts, Progression
from ktconv.verify.model import LEVEL, ModelCheck
from ktconv.verify.packed.output import PackedOutput

if TYPE_CHECKING:
    from ktconv.model.streamed.calls import ExpertLayer, ExpertRunner
    from ktconv.model.streamed.experts import SourceExperts


class PackedModelCheck(ModelCheck):
    _output: PackedOutput
    models_loaded = 1

    @property
    def _named(self) -> Path:
        return self._output.source.path

    @property
    def _bits(self) -> int:
        return FORMATS[self._output.options.method].traits.bits

    def run(self, progression: Progression, notify: Notify) -> Facts | None:
        from ktconv.model.matching import UnlikeExperts

        try:
            return super().run(progression, notify)
        except UnlikeExperts as error:
            self._findings.fail(LEVEL, "experts", f"{error}.")
            return None

    def _runner(
        self, own: SourceExperts, layers: Mapping[int, ExpertLayer]
    ) -> AbstractContextManager[ExpertRunner]:
        from ktconv.model.streamed.packed import BothExperts

        output, settings = self._output.directory, self._output.source.config
        return BothExperts(own, output, layers, settings, self._request.threads)

    @contextmanager
    def _pair(self, model: Any, notify: Notify) -> Iterator[tuple[Any, Any]]:
        from ktconv.model import replace_experts

        directory, threads = self._output.directory, self._request.threads
        with replace_experts(model, directory, threads=threads, keep=True) as replaced:
            yield model, replaced
