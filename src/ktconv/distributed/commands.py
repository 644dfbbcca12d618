"""Commands whose units nodes convert: what the driver runs of each, and what a node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from ktconv.conversion.pipeline import Observer
from ktconv.conversion.run import Report
from ktconv.distributed.conversion import Distribution, OnCluster
from ktconv.distributed.units import OneUnit
from ktconv.errors import UsageError
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


class PackedOnCluster(OnCluster, QuantizeCpu):
    """quantize-cpu."""

    def settled(self) -> dict[str, Any]:
        return {"numa": self.plan.target.options.numa}


class EncodedOnCluster(OnCluster, Encode):
    """quantize-gpu, rounding to nearest."""


class GgufOnCluster(OnCluster, ToGguf):
    """quantize-cpu that writes GGUF files."""


class Command(Struct, frozen=True):
    """A command on both ends: its request and options, its plan, its conversions."""

    request: type[Any]
    options: type[Any]
    prepare: Callable[[Any], Any]
    on_cluster: type[OnCluster]
    unit: type[OneUnit]


COMMANDS: dict[str, Command] = {
    "quantize-cpu": Command(Request, Options, prepare, PackedOnCluster, PackedUnit),
    "quantize-gpu": Command(
        EncodedRequest, EncodedOptions, prepare_encoded, EncodedOnCluster, EncodedUnit
    ),
    "gguf": Command(GgufRequest, GgufOptions, prepare_gguf, GgufOnCluster, GgufUnit),
}


def refuse_on_cluster(request: Any) -> None:
    """UsageError for what needs the whole model in one process."""
    if isinstance(request, EncodedRequest):
        if request.options.method != "rtn":
            raise UsageError(
                f"--algorithm {request.options.method} runs the whole model in one process, and "
                "cannot be combined with --ray",
                "use --algorithm rtn, or omit --ray",
            )
        return
    if (
        isinstance(request, Request)
        and request.calibrate is not None
        and request.calibrate.is_file()
    ):
        raise UsageError(
            "--calibrate with a text runs the whole model in one process, and cannot be combined "
            "with --ray",
            "record second moments first: ktconv stats MODEL --hessian DIR; then give DIR",
        )


def convert_on(
    distribution: Distribution,
    request: Any,
    observer: Observer | None = None,
    preflight: Any = None,
    **more: Any,
) -> Report:
    """Convert as the command of this request does on one machine, with the units converted by the
    nodes of a cluster. `more`: what its conversion takes besides, such as `notify`."""
    refuse_on_cluster(request)
    name = next(name for name, one in COMMANDS.items() if type(request) is one.request)
    command = COMMANDS[name]
    preflight = preflight or command.prepare(distribution.fitted(request))
    conversion = command.on_cluster(preflight, observer or Observer(), **more)
    conversion.command, conversion.distribution = name, distribution
    return conversion.run()
