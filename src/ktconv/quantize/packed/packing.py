"""Steps that all tasks of quantize-cpu share: packing some rows, writing, reading back,
comparing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ktconv import native
from ktconv.conversion.tasks import ExpertTask, four_digits, refuse_other, write_tensor, written
from ktconv.errors import VerificationError
from ktconv.formats import FORMATS, Kind, Matrix, Slice, TensorId, split, tensor_name
from ktconv.native import Layout
from ktconv.source.reading.buffers import Buffers
from ktconv.system.arrays import U8
from ktconv.system.checksums import Checksum
from ktconv.targets.packed.matrix_check import MatrixCheck, Packed, Violation
from ktconv.targets.packed.proof import Proof
from ktconv.targets.packed.target import Options
from ktconv.writer.journal import Record
from ktconv.writer.staging import Staging


class Part:
    """One part of a matrix while its rows arrive: checksum, scales, comparison. `shape` is that of
    what is packed, `owned` what it has of the source."""

    def __init__(
        self,
        index: int,
        owned: Slice,
        shape: tuple[int, int],
        layout: Layout,
        choice: native.Choice,
        check: MatrixCheck,
    ) -> None:
        self.index, self.owned, self.layout, self.check = index, owned, layout, check
        self.cols, self.choice = shape[1], choice
        self.names = check.weight_name, check.scale_name
        self.digest = Checksum()
        self.scale_sum = 0  # of what was compared
        self.scale = native.aligned_bytes(layout.scale_size(*shape))
        self.rows_done = 0
        self.bytes_done = 0


@dataclass(frozen=True)
class PackingTask(ExpertTask):
    """Packs a matrix of one expert, a few rows at a time."""

    options: Options

    @property
    def packed_as(self) -> Matrix:
        """Name of the packed matrix."""
        return self.proj

    def _owned(self, index: int) -> Slice:
        """Slice of the source that a part has."""
        layer = self.layer
        return split(
            self.proj, layer.hidden_size, layer.intermediate_size, index, self.options.numa
        )

    def _new_part(
        self, index: int, shape: tuple[int, int], choice: native.Choice, proof: Proof
    ) -> Part:
        fmt = FORMATS[self.options.method]
        weight = TensorId(self.layer.index, self.packed_as, self.expert, index, "weight")
        check = MatrixCheck(fmt, weight, *shape, _refuse, proof)
        return Part(index, self._owned(index), shape, fmt.layout, choice, check)

    def _name(self, part: Part, kind: Kind) -> str:
        return tensor_name(self.layer.index, self.packed_as, self.expert, part.index, kind)

    def _write_rows(
        self, view: native.Matrix, part: Part, staging: Staging, buffers: Buffers
    ) -> None:
        """Quantize, pack and write the next rows of a part. NonFiniteError for a NaN or Inf."""
        packed = buffers.packed[: native.packed_size(part.layout, view.rows, part.cols)]
        done = part.rows_done, part.rows_done + view.rows
        start, stop = (part.layout.scale_size(rows, part.cols) for rows in done)
        scale = part.scale[start:stop]
        audit, sums = self._pack(part, view, packed, scale, buffers)
        # Before it is written: caches have it. The sums tell whether this is what was written.
        part.check.judge(audit, view, part.rows_done, Packed(packed, scale, view.rows))
        name = part.names[0]
        staging.write(name, packed.data, part.bytes_done)
        if self.verify:
            target = buffers.readback[: packed.nbytes]
            with written(staging, name, target, part.bytes_done) as found:
                _refuse_changed(name, refuse_other(name, found, packed), sums.packed)
                part.digest.update(found.data)
        else:
            part.digest.update(packed.data)
        part.scale_sum = (part.scale_sum + sums.scale) % 2**64
        part.rows_done += view.rows
        part.bytes_done += packed.nbytes

    def _pack(
        self, part: Part, view: native.Matrix, packed: U8, scale: U8, buffers: Buffers
    ) -> tuple[native.Audit, native.ByteSums]:
        """The next rows of a part into `packed` and `scale`, their audit by the choice of the
        part's check, and the sums of what it compared. NonFiniteError for a NaN or Inf."""
        scratch = buffers.scratch
        return native.quantize_audit(part.layout, view, packed, scale, scratch, part.choice)

    def _facts(self, part: Part) -> dict[str, Any]:
        """Facts of a part's weights in the manifest besides checksum and errors."""
        return {}

    def _finish(self, parts: Sequence[Part], staging: Staging) -> dict[str, Record]:
        """Writes the scales; returns the manifest's record of each tensor."""
        records: dict[str, Record] = {}
        for part in parts:
            weight, name = part.names
            scale = write_tensor(name, [part.scale], staging, self.verify)
            if self.verify:  # what is read back was compared with these
                _refuse_changed(name, native.byte_sum(part.scale), part.scale_sum)
            errors = part.check.finish().as_dict()
            records[weight] = {
                **part.digest.record(),
                "relative_rms_error": four_digits(errors["relative_rms_error"]),
                "max_error_steps": four_digits(errors["max_error_steps"]),
                "zero_share": four_digits(errors["zero_share"]),
                **self._facts(part),
            }
            records[name] = scale
        return records


def _refuse_changed(name: str, found: int, wanted: int) -> None:
    """VerificationError unless the sum of bytes that were written is that of those that the audit
    has compared."""
    if found != wanted:
        raise VerificationError(
            f"{name} changed in memory between its comparison with the source and writing",
            "check this machine's memory, then run the same command again",
        )


def _refuse(violation: Violation) -> None:
    """Refuse what was just packed: it does not match its source."""
    raise VerificationError(
        violation.message,
        "check this machine's memory and disk, then run the same command again",
    )
