"""The ways of choosing codes that are compared, as options of `ktconv quantize-cpu`."""

from __future__ import annotations

from dataclasses import dataclass

from ktconv.formats import FORMATS, Format

PLACEHOLDERS = ("importance", "hessian", "text")


@dataclass(frozen=True)
class Variant:
    """`options` of quantize-cpu; {text} stands for the calibration text, {importance} and {hessian}
    for what `ktconv stats` recorded of it. Without `options`, the format is no output format, and
    its reference quantizes.
    """

    key: str
    label: str
    format: Format
    options: tuple[str, ...] | None

    @property
    def folded(self) -> bool:
        """Whether weights of up and down differ by factors from the source's."""
        return "--fold" in (self.options or ())

    @property
    def needs(self) -> tuple[str, ...]:
        """The placeholders in the options."""
        named = " ".join(self.options or ())
        return tuple(one for one in PLACEHOLDERS if f"{{{one}}}" in named)


def _output(key: str, label: str, method: str, options: str) -> Variant:
    return Variant(key, label, FORMATS[method], tuple(options.split()))


VARIANTS = {
    one.key: one
    for one in (
        _output("amax", "amax", "int4", "--scale amax"),
        _output("search", "search", "int4", "--scale search"),
        _output("importance", "importance", "int4", "--scale search --importance {importance}"),
        _output("weights", "importance by weights", "int4", "--scale search --importance weights"),
        _output("fold", "search + fold", "int4", "--scale search --fold up-down"),
        _output(
            "fold-importance",
            "importance + fold",
            "int4",
            "--scale search --fold up-down --importance {importance}",
        ),
        _output(
            "fold-weights",
            "by weights + fold",
            "int4",
            "--scale search --fold up-down --importance weights",
        ),
        _output("gptq", "GPTQ", "int4", "--calibrate {hessian}"),
        _output("fold-gptq", "GPTQ + fold", "int4", "--fold up-down --calibrate {hessian}"),
        _output("int8-amax", "INT8 amax", "int8", "--scale amax"),
        _output("int8-search", "INT8 search", "int8", "--scale search"),
        _output("int8-gptq", "INT8 GPTQ", "int8", "--calibrate {hessian}"),
        Variant("gint4-32", "INT4, groups of 32", FORMATS["gint4-32"], None),
    )
}
BASE = {
    "int4": "amax",
    "int8": "int8-amax",
    "gint4-32": "amax",
}  # by format: what KL is compared with
