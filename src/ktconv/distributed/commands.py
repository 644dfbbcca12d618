"""Commands whose units nodes convert."""

from __future__ import annotations

from ktconv.distributed.units import Command, OneUnit
from ktconv.quantize.encoded.conversion import Encode
from ktconv.quantize.encoded.request import Request as EncodedRequest
from ktconv.quantize.llm_compressor.run import prepare as prepare_encoded
from ktconv.quantize.packed.run import QuantizeCpu, Request, prepare
from ktconv.targets.encoded.target import Options as EncodedOptions
from ktconv.targets.packed.target import Options


class PackedUnit(OneUnit, QuantizeCpu):
    """One unit of quantize-cpu."""


class EncodedUnit(OneUnit, Encode):
    """One unit of quantize-gpu, rounded to nearest."""


def packed() -> Command:
    """`ktconv quantize-cpu`."""
    return Command(Request, Options, prepare, PackedUnit)


def encoded() -> Command:
    """`ktconv quantize-gpu`."""
    return Command(EncodedRequest, EncodedOptions, prepare_encoded, EncodedUnit)
