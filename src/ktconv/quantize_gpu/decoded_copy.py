"""A block-quantized matrix that is no expert's, written as bf16."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ktconv.checkpoint import ExpertMatrix
from ktconv.conversion.tasks import Advance, check_written
from ktconv.reading.buffers import Buffers
from ktconv.reading.decoded import decoded_rows
from ktconv.reading.matrices import span_of
from ktconv.reading.reader import SourceReader, Span
from ktconv.writer.staging import Staging


@dataclass(frozen=True, slots=True)
class DecodedCopy:
    """Decode and write, a few MiB at a time."""

    reader: SourceReader
    matrix: ExpertMatrix
    name: str
    verify: bool  # read back what was written

    @property
    def source_bytes(self) -> int:
        return self.matrix.tensor.nbytes

    def spans(self) -> Sequence[Span]:
        return [span_of(self.matrix)]

    def run(self, staging: Staging, buffers: Buffers, advance: Advance) -> dict[str, Any]:
        digest = hashlib.sha256()
        for first, rows in decoded_rows(self.reader, self.matrix, buffers, advance):
            offset = 2 * first * self.matrix.cols
            data = rows.view(np.uint8).reshape(-1)
            staging.write(self.name, data.data, offset)
            digest.update(data.data)
            if self.verify:
                check_written(self.name, data, staging, offset)
        return {self.name: {"sha256": digest.hexdigest(), "decoded_from": "fp8-block"}}
