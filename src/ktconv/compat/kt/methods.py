"""KTransformers' names of methods, and the weight formats of the kernels that they stand for."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from ktconv.errors import UsageError
from ktconv.formats.specs import kernels_of_kt


class Method(Struct, frozen=True):
    """`formats`: keys of ktconv.formats.FORMATS that its weights may have; the first is the one
    that weights from tensors get. None at all: whatever a GGUF file has."""

    name: str
    formats: tuple[str, ...]


METHODS: Mapping[str, Method] = {
    name: Method(name, formats)
    for name, formats in {
        **kernels_of_kt(),
        "LLAMAFILE": (),
        "MOE_INT4": ("int4",),
        "MOE_INT8": ("int8",),
    }.items()
}
# What LLAMAFILE packs other types of GGUF in than those that a kernel has: the first that sizes
# allow.
REPACKED = ("int8", "bf16")

# Of fine-tuning: what is before _SFT, and what comes behind it where LoRA is left out.
_SFT, _SKIP = "_SFT", "_SkipLoRA"
_OF_SFT = {
    "AMXBF16": "BF16",
    "AMXINT8": "AMXINT8",
    "INT8": "AMXINT8",
    "AMXINT4": "AMXINT4",
    "RAWINT4": "RAWINT4",
    "AMXINT4_KGroup": "RAWINT4",
    "AMXFP8": "FP8",
    "MXFP4": "MXFP4",
}

_NOT_HERE = {
    "SYCL_GPTQ_INT4": "ktconv has no code for SYCL devices",
}


def method_named(name: object) -> Method:
    """UsageError, with the list, for one that is not in METHODS."""
    if isinstance(name, str) and name in METHODS:
        return METHODS[name]
    reason = _NOT_HERE.get(name, "unknown") if isinstance(name, str) else "not a string"
    raise UsageError(
        f"the method {name!r} cannot be used: {reason}", f"supported: {', '.join(METHODS)}"
    )


def sft_method(name: object) -> str:
    """The method of inference whose weights a method of fine-tuning has. UsageError, with the list,
    for one that is not known."""
    base = name.removesuffix(_SKIP) if isinstance(name, str) else ""
    found = _OF_SFT.get(base.removesuffix(_SFT)) if base.endswith(_SFT) else None
    if found is None:
        listed = ", ".join(f"{one}{_SFT}" for one in _OF_SFT)
        raise UsageError(
            f"the method {name!r} cannot be used with mode='sft'",
            f"supported: {listed}, each with {_SKIP} behind it where LoRA is to be left out",
        )
    return found


def methods_for(formats: list[str]) -> list[str]:
    """Methods whose weights have one of these formats."""
    return [name for name, method in METHODS.items() if set(method.formats) & set(formats)]
