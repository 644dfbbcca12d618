"""Level model for experts on CPUs: our kernels run in place of the model's own experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ktconv.formats import FORMATS
from ktconv.verify.cpu.output import CpuOutput
from ktconv.verify.findings import Facts
from ktconv.verify.model import LEVEL, ModelCheck


class CpuModelCheck(ModelCheck):
    _output: CpuOutput
    models_loaded = 1

    @property
    def _named(self) -> Path:
        return self._output.source.path

    @property
    def _bits(self) -> int:
        return FORMATS[self._output.options.method].traits.bits

    def run(self) -> Facts | None:
        from ktconv.model.matching import UnlikeExperts

        try:
            return super().run()
        except UnlikeExperts as error:
            self._findings.fail(LEVEL, "experts", f"{error}.")
            return None

    @contextmanager
    def _pair(self, model: Any) -> Iterator[tuple[Any, Any, Facts]]:
        from ktconv.model import replace_experts

        directory, threads = self._output.directory, self._request.threads
        with replace_experts(model, directory, threads=threads, keep=True) as replaced:
            yield model, replaced, {"experts_of_source": sum(map(len, replaced.own.values()))}
