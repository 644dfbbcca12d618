"""Engines that load a whole checkpoint by its config.json, and the formats that they do not read.

A format that no row names is read where the experts have the model's own names. Failures of vLLM
and transformers were run, those of SGLang and sglang-kt were seen in their own loading code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, field

from ktconv.families import table
from ktconv.source import Checkpoint
from ktconv.targets.consumers import model_types
from ktconv.targets.encoded.stacking import NUMBERED


class Reader(Struct, frozen=True, eq=False):
    """An engine, the version that was tried, and what it does with formats that it does not read:
    a predicate, by format. `types`: model types that it reads a format of all the same."""

    engine: str
    version: str
    fails: Mapping[str, str] = field(default_factory=dict)
    types: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Name and version."""
        return f"{self.engine} {self.version}"

    def failure(self, name: str, model_types: Iterable[str] = ()) -> str | None:
        """Describe how the engine fails on the format `name` of a model; None if it reads it."""
        if not self.types.get(name, frozenset()).isdisjoint(model_types):
            return None
        return self.fails.get(name)


_UNKNOWN = "does not know the format"
_MINIMAX_M3 = frozenset({"minimax_m3_vl"})  # the class renames weight_scale_inv

VLLM = Reader(
    "vLLM",
    "0.32",
    {"mxfp8": "ends with an error about weight_scale_inv", "awq": _UNKNOWN},
    {"mxfp8": _MINIMAX_M3},
)
SGLANG = Reader(
    "SGLang",
    "0.5.23",
    {
        "MXFP8": "refuses it",
        "MXFP4A16": "leaves the experts out without an error",
        "awq": _UNKNOWN,
        "mixed": "has one method for all experts",
    },
)
SGLANG_KT = Reader(
    "sglang-kt",
    "0.7.2",
    {
        "MXFP8": "refuses it",
        "MXFP4A16": "refuses it",
        "NVFP4A16": "refuses it",
        "awq": _UNKNOWN,
        "mixed": "has one method for all experts",
    },
)
TRANSFORMERS = Reader(
    "transformers",
    "5.17",
    {
        "FP8_BLOCK": "fails on blocks of compressed-tensors",
        "MXFP8": "fails on groups of FP8 of compressed-tensors",
        "NVFP4A16": "computes wrong results without an error: it ignores weight_global_scale",
        "mxfp4": _UNKNOWN,
        "nvfp4": _UNKNOWN,
        "gptq-int4": "needs GPTQModel for it, which was not tried",
        "awq": _UNKNOWN,
        "mixed": "ends with an error",
    },
)
READERS = (VLLM, SGLANG, SGLANG_KT, TRANSFORMERS)
# What each does with the experts of a layer in one tensor, by --expert-layout. transformers 5.17
# and 5.24, and vLLM 0.32, were run; vLLM has another way for each model, and reads W4A16 in the
# second layout of those in `_FLAT_IN_VLLM` to the same logits as numbered experts.
_RANDOM = "fills stacked experts with random numbers, and warns"
_LEFT_OUT = "leaves stacked experts out without an error"
_FLAT = "stacked-flat"
_FLAT_IN_VLLM = frozenset({"olmoe", "qwen2_moe", "qwen3_moe"})
_OUT_IN_VLLM = frozenset({"mixtral"})  # whose class knows other names
_TRIED_FLAT_IN_VLLM = "W4A16"
# Formats whose codes are named as weights are there, in a dtype that can be one.
_TAKEN_FOR_WEIGHTS = frozenset({"FP8_BLOCK", "FP8_DYNAMIC"})
STACKED = {
    "stacked": {
        VLLM: "ends with an error about the names of stacked experts",
        SGLANG: _LEFT_OUT,
        SGLANG_KT: _LEFT_OUT,
        TRANSFORMERS: _RANDOM,
    },
    _FLAT: {SGLANG: _LEFT_OUT, SGLANG_KT: _LEFT_OUT, TRANSFORMERS: _RANDOM},
}


def why_not_stacked(
    reader: Reader, name: str, layout: str, model_types: Iterable[str]
) -> str | None:
    """Describe how an engine fails on the experts of a model in the format `name` and this layout;
    None if it reads them."""
    if layout not in STACKED:
        return None
    if reader is VLLM and layout == _FLAT:
        types = frozenset(model_types)
        if types & _OUT_IN_VLLM and not types & _FLAT_IN_VLLM:
            return _LEFT_OUT
        if not types & _FLAT_IN_VLLM:
            return f"was tried with stacked experts of {listed(sorted(_FLAT_IN_VLLM))} alone"
        if name != _TRIED_FLAT_IN_VLLM:
            return f"was tried with stacked experts in {_TRIED_FLAT_IN_VLLM} alone"
    if reader is TRANSFORMERS and layout == _FLAT and name in _TAKEN_FOR_WEIGHTS:
        return "takes codes of stacked experts for weights, without their scales, and warns"
    return STACKED[layout].get(reader)


def listed(titles: Iterable[str]) -> str:
    """Join titles: "vLLM 0.32, SGLang 0.5.23 and transformers 5.17"."""
    *most, last = titles
    return f"{', '.join(most)} and {last}" if most else last


def transformers_reads_packed(checkpoint: Checkpoint) -> bool:
    """False for families whose experts transformers reads in fused form alone: weights of an output
    would not be found, and be initialised at random with a warning."""
    if all(len(layer.experts[0]["up"].tensor.shape) < 3 for layer in checkpoint.layers):
        return True
    types = checkpoint.config.checked.model_types
    rows = (table.FAMILIES.of(kind) for kind in types)
    return any(row is not None and not row.fused_only for row in rows)


def readers_of(
    name: str, checkpoint: Checkpoint, layout: str = NUMBERED
) -> Mapping[Reader, str | None]:
    """Each engine that loads whole models, with why it does not read the format `name` of this one
    in the layout `layout` of experts; None where it does. Of experts with the model's own names."""
    types = model_types(checkpoint)
    found = {
        reader: reader.failure(name, types) or why_not_stacked(reader, name, layout, types)
        for reader in READERS
    }
    if found[TRANSFORMERS] is None and not transformers_reads_packed(checkpoint):
        kind = checkpoint.config.model_type or "this model"
        found[TRANSFORMERS] = f"reads the experts of {kind} only in fused form"
    return found
