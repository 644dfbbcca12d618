"""Commands whose units nodes convert."""

from __future__ import annotations

from ktconv.distributed.units import Command, OneUnit
from ktconv.quantize.encoded.conversion import Encode
from ktconv.quantize.encoded.request import Request as GpuRequest
from ktconv.quantize.llm_compressor.run import prepare as prepare_gpu
from ktconv.quantize.packed.run import QuantizeCpu, Request, prepare
from ktconv.targets.encoded.target import Options as GpuOptions
from ktconv.targets.packed.target import Options


class CpuUnit(OneUnit, QuantizeCpu):
    """One unit of quantize-cpu."""


class GpuUnit(OneUnit, Encode):
    """One unit of quantize-gpu, rounded to nearest."""


def cpu() -> Command:
    """`ktconv quantize-cpu`."""
    return Command(Request, Options, prepare, CpuUnit)


def gpu() -> Command:
    """`ktconv quantize-gpu`."""
    return Command(GpuRequest, GpuOptions, prepare_gpu, GpuUnit)
