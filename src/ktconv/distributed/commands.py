"""Commands whose units nodes convert."""

from __future__ import annotations

from ktconv.distributed.units import Command, OneUnit
from ktconv.encode.conversion import Encode
from ktconv.encode.request import Request as GpuRequest
from ktconv.quantize_cpu.run import QuantizeCpu, Request, prepare
from ktconv.quantize_gpu.run import prepare as prepare_gpu
from ktconv.targets.encoded.target import Options as GpuOptions
from ktconv.targets.ktransformers import Options


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
