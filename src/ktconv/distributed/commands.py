"""Commands whose units nodes convert."""

from __future__ import annotations

from ktconv.distributed.units import Command, OneUnit
from ktconv.quantize_cpu.run import QuantizeCpu, Request, prepare
from ktconv.targets.ktransformers import Options


class CpuUnit(OneUnit, QuantizeCpu):
    """One unit of quantize-cpu."""


def cpu() -> Command:
    """`ktconv quantize-cpu`."""
    return Command(Request, Options, prepare, CpuUnit)
