"""Commands whose units nodes convert."""

from __future__ import annotations

from ktconv.distributed.units import Command, OneUnit
from ktconv.quantize.encoded.conversion import Encode
from ktconv.quantize.encoded.request import Request as EncodedRequest
from ktconv.quantize.gguf.run import Request as GgufRequest
from ktconv.quantize.gguf.run import ToGguf
from ktconv.quantize.gguf.run import prepare as prepare_gguf
from ktconv.quantize.llm_compressor.run import prepare as prepare_encoded
from ktconv.quantize.packed.run import QuantizeCpu, Request, prepare
from ktconv.targets.encoded.target import Options as EncodedOptions
from ktconv.targets.gguf.target import Options as GgufOptions
from ktconv.targets.packed.target import Options


class PackedUnit(OneUnit, QuantizeCpu):
    """One unit of quantize-cpu."""


class EncodedUnit(OneUnit, Encode):
    """One unit of quantize-gpu, rounded to nearest."""


class GgufUnit(OneUnit, ToGguf):
    """One unit of quantize-cpu that writes GGUF files."""


def packed() -> Command:
    """`ktconv quantize-cpu`."""
    return Command(Request, Options, prepare, PackedUnit)


def encoded() -> Command:
    """`ktconv quantize-gpu`."""
    return Command(EncodedRequest, EncodedOptions, prepare_encoded, EncodedUnit)


def gguf() -> Command:
    """`ktconv quantize-cpu --method gguf-…`."""
    return Command(GgufRequest, GgufOptions, prepare_gguf, GgufUnit)
