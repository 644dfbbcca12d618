"""The input encodings that can be read: one file each, and a row in `ENCODINGS`."""

from __future__ import annotations

from ktconv.checkpoint.encodings.base import WEIGHT, Encoding, Parts
from ktconv.checkpoint.encodings.fp8 import FP8_BLOCK
from ktconv.checkpoint.encodings.fp8 import SCALE as FP8_SCALE
from ktconv.checkpoint.encodings.unquantized import BF16, FP16, FP32
from ktconv.errors import CheckpointError

ENCODINGS = (BF16, FP16, FP32, FP8_BLOCK)

_GPT_OSS_HINT = (
    "No version of gpt-oss can be converted: its experts have biases, which "
    "the packed formats do not support."
)
_SUPPORTED_HINT = (
    "Supported are expert weights without biases in BF16, FP16, FP32 and FP8-E4M3 with block "
    "scales (weight_scale_inv); use a version of this model in one of them."
)
# What a tensor with (or instead of) a weight shows about its encoding.
_FOREIGN = {
    "bias": "expert biases",
    "qweight": "AWQ or GPTQ packing",
    "qzeros": "AWQ or GPTQ packing",
    "g_idx": "GPTQ packing",
    "scales": "AWQ or GPTQ packing",
    "weight_packed": "compressed-tensors packing",
    "weight_shape": "compressed-tensors packing",
    "weight_zero_point": "asymmetric quantization",
    "weight_scale": "quantization with weight_scale",
    "weight_scale_2": "NVFP4",
    "weight_global_scale": "NVFP4",
    "input_scale": "static activation scales",
    "input_global_scale": "static activation scales",
    "scale": "block scales named .scale (DeepSeek V4)",
}


def choose_encoding(parts: Parts) -> Encoding:
    """The encoding of the weight whose tensors are `parts`.

    Raises CheckpointError that names the unsupported tensor.
    """
    for encoding in ENCODINGS:
        if encoding.fits(parts):
            return encoding
    raise _unsupported(parts)


def gpt_oss_refusal(sign: str) -> CheckpointError:
    """The error for gpt-oss; `sign` is what identified it."""
    return CheckpointError(f"{sign}: gpt-oss is not supported yet", _GPT_OSS_HINT)


def _unsupported(parts: Parts) -> CheckpointError:
    for part, tensor in parts.items():
        if part in ("blocks", "weight_blocks"):
            return gpt_oss_refusal(f"{tensor.name} contains MXFP4 blocks")
        if part in _FOREIGN:
            return CheckpointError(
                f"{tensor.name} ({tensor.dtype}): {_FOREIGN[part]} is not supported as an input",
                _SUPPORTED_HINT,
            )
    for part, tensor in parts.items():
        if part not in (WEIGHT, FP8_SCALE):
            return CheckpointError(
                f"{tensor.name} ({tensor.dtype}) is not a known companion of an expert weight",
                _SUPPORTED_HINT,
            )
    if WEIGHT not in parts:
        scale = parts[FP8_SCALE].name
        return CheckpointError(
            f"{scale.removesuffix('_scale_inv')} is missing, although {scale} is there",
            "Download the checkpoint again.",
        )
    return _unsupported_weight(parts)


def _unsupported_weight(parts: Parts) -> CheckpointError:
    weight = parts[WEIGHT]
    if weight.dtype in FP8_BLOCK.dtypes:
        return CheckpointError(
            f"{weight.name} is {weight.dtype}, but its block scales {FP8_SCALE} are missing",
            "FP8 weights need block scales; a scale per tensor or row is not supported.",
        )
    known = any(weight.dtype in encoding.dtypes for encoding in ENCODINGS)
    if known and FP8_SCALE in parts:
        return CheckpointError(
            f"{parts[FP8_SCALE].name} contains block scales, but {weight.name} is "
            f"{weight.dtype} and needs none",
            "The checkpoint is inconsistent; download it again.",
        )
    return CheckpointError(
        f"{weight.name} has dtype {weight.dtype}, which is not supported as an input",
        _SUPPORTED_HINT,
    )
