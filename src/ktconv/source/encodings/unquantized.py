"""Plain floating-point weights: one tensor, no scales."""

from __future__ import annotations

from ktconv.source import elements
from ktconv.source.encodings.base import Encoding

BF16 = Encoding("bf16", ("BF16",), elements.BF16)
FP16 = Encoding("fp16", ("F16",), elements.F16)
FP32 = Encoding("fp32", ("F32",), elements.F32)
UNQUANTIZED = tuple(one.name for one in (BF16, FP16, FP32))
