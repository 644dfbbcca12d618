"""Commands whose units nodes convert."""

from __future__ import annotations

from ktconv.distributed.units import Command, OneUnit
from ktconv.quantize_cpu.run import QuantizeCpu, Request, prepare
from ktconv.quantize_gpu.common import Request as GpuRequest
from ktconv.quantize_gpu.rtn import Rtn
from ktconv.quantize_gpu.run import prepare as prepare_gpu
from ktconv.targets.ktransformers import Options
from ktconv.targets.pack_quantized.target import Options as GpuOptions


class CpuUnit(OneUnit, QuantizeCpu):
    """One unit of quantize-cpu."""


class GpuUnit(OneUnit, Rtn):
    """One unit of quantize-gpu, rounded to nearest."""


def cpu() -> Command:
    """`ktconv quantize-cpu`."""
    return Command(Request, Options, prepare, CpuUnit)


def gpu() -> Command:
    """`ktconv quantize-gpu`."""
    return Command(GpuRequest, GpuOptions, prepare_gpu, GpuUnit)
