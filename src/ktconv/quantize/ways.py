"""The ways to choose the codes of INT4 and INT8, one row each: its class, its option, its place.

The command line takes its options from here, a conversion and `verify` the classes, whose base is
in `packed/ways.py`. Reading the table imports none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple


def _same(value: Any) -> Any:
    return value


def importance_of(given: str | None) -> Path | Literal["weights"] | None:
    """The meaning of --importance. A file of that name is given as ./weights."""
    if given == "weights":
        return "weights"
    return None if given is None else Path(given)


class WayRow(NamedTuple):
    """One way. Without an option it is a rule for scales, which --scale names."""

    place: str  # module:class, below ktconv.quantize.packed
    option: str = ""  # of quantize-cpu: fold; the name of what the manifest records of it
    takes: Any = None  # the type of the option's value; its default is False, or None
    words: str = ""  # its line of --help
    detail: str = ""  # what --help-all and the site say besides
    metavar: str = ""  # for a value that is no choice
    advanced: bool = False  # in the panel of options that few need
    others: str = ""  # why methods other than int4 and int8 do not have it
    value: Callable[[Any], Any] = _same  # what a request has, from what was given
    # Where a request has the value: a field `option` of its own, one of its options, or `ways`.
    kept: Literal["request", "options", "ways"] = "ways"


# In the order in which they change the tasks of an expert.
WAYS = (
    WayRow("rules:Amax"),
    WayRow("rules:Search"),
    WayRow(
        "folding:Folding",
        "fold",
        Literal["up-down"] | None,
        "Cross-layer equalization of up and down.",
        "Moves a factor for each channel between up and down of every expert, which evens out the "
        "columns of down. Errors become smaller, and the expert computes the same: "
        "docs/formats.md, section 9.",
        others="its weights are the model's own",
        value=lambda given: given or "",
        kept="options",
    ),
    WayRow(
        "backward:Backward",
        "save_backward",
        bool,
        "Add transposed matrices for kt-kernel's fine-tuning.",
        "Twice the bytes. ktconv's own fine-tuning needs none: docs/fine-tuning.md.",
        advanced=True,
        others="KTransformers trains on int4 and int8 only",
        kept="options",
    ),
    WayRow(
        "importance.way:Importance",
        "importance",
        str | None,
        "Importance of input channels, to weigh errors by.",
        "The search for scales weighs squared errors by the inputs of each expert: "
        "docs/calibration.md.\n\n- FILE: of `ktconv stats MODEL --importance FILE`, or an imatrix "
        "of llama.cpp in GGUF form\n- weights: derived from the weights of norms, up and gate, "
        "without a text",
        "FILE|weights",
        others="its scales follow from the largest weights",
        value=importance_of,
        kept="request",
    ),
    WayRow(
        "gptq.way:Compensation",
        "calibrate",
        Path | None,
        "Quantize by GPTQ, on Hessians or on a text.",
        "GPTQ error compensation on the inputs of each expert: docs/calibration.md.\n\n- DIR: "
        "Hessians of `ktconv stats MODEL --hessian DIR`\n- FILE: a text, which the model reads "
        "layer by layer while it is converted",
        "DIR|FILE",
        others="its codes are the nearest",
        kept="request",
    ),
)
