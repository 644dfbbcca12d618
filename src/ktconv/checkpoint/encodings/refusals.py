"""Why a weight cannot be read: sentences that name the tensor, and the way out."""

from __future__ import annotations

from collections.abc import Iterable

from ktconv.checkpoint.config import ModelConfig
from ktconv.checkpoint.encodings.base import BIAS, SCALE, WEIGHT, Encoding, Parts, Roles
from ktconv.checkpoint.views import StoredView
from ktconv.errors import CheckpointError

_HINT = (
    "Supported are expert weights in BF16, FP16, FP32, FP8 (E4M3), MXFP4, NVFP4, "
    "integers of compressed-tensors, GPTQ and AWQ; use a version of this model in one of them."
)
_DAMAGED = "The checkpoint is inconsistent; download it again."
# What a tensor beside (or in place of) a weight is a sign of.
_FOREIGN = {
    "bitmask": "sparse compression is",
    "compressed": "sparse compression is",
    "pre_quant_scale": "a scale of the inputs (AWQ of ModelOpt) is",
    "absmax": "bitsandbytes is",
    "quant_map": "bitsandbytes is",
    "weight_offset": "msModelSlim is",
    "biases": "MLX quantization is",
}


def unsupported(parts: Parts, encodings: Iterable[Encoding]) -> CheckpointError:
    """The error for tensors that are no known encoding."""
    for part, tensor in parts.items():
        if part in _FOREIGN:
            return CheckpointError(
                f"{tensor.name} ({tensor.dtype}): {_FOREIGN[part]} not supported as an input", _HINT
            )
    encodings = tuple(encodings)
    known = {BIAS, *(name for one in encodings for name in _names(one))}
    for part, tensor in parts.items():
        if part not in known:
            return CheckpointError(
                f"{tensor.name} ({tensor.dtype}) is not a known companion of an expert weight",
                _HINT,
            )
    found = [part for part in parts if any(part == one.primary for one in encodings)]
    if len(found) > 1:
        return CheckpointError(
            f"{parts[found[0]].name} and {parts[found[1]].name} are two ways to store one weight",
            "Remove one of them from the checkpoint.",
        )
    if not found:
        part, tensor = next(iter(parts.items()))
        owner = tensor.name.removesuffix(f".{part}")
        weight = f"{owner}.weight"
        if owner == tensor.name and part == BIAS:  # fused: down_proj_bias
            weight = owner.removesuffix(f"_{part}")
        elif owner == tensor.name:  # fused: down_proj_scale_inv
            weight = tensor.name.removesuffix(part.removeprefix("weight"))
        return CheckpointError(
            f"{weight} is missing, although {tensor.name} is there",
            "Download the checkpoint again.",
        )
    return _by_weight(parts, found[0], [one for one in encodings if one.primary == found[0]])


def _names(encoding: Encoding) -> set[str]:
    names = {name for companion in encoding.companions for name in companion.names}
    return names | {encoding.primary, *encoding.ignored}


def _by_weight(parts: Parts, primary: str, encodings: list[Encoding]) -> CheckpointError:
    """The primary tensor is there, but its dtype or its companions are those of no encoding."""
    weight = parts[primary]
    near = [one for one in encodings if weight.dtype in one.dtypes]
    others = [tensor for part, tensor in parts.items() if part != primary]
    if not near:
        return CheckpointError(
            f"{weight.name} has dtype {weight.dtype}, which is not supported as an input", _HINT
        )
    if all(not one.companions for one in near):
        return CheckpointError(
            f"{others[0].name} ({others[0].dtype}) is there, but {weight.name} is "
            f"{weight.dtype} and needs none",
            _DAMAGED,
        )
    companions = [one for encoding in near for one in encoding.companions]
    for companion in companions:
        there = [name for name in companion.names if name in parts]
        if not there and not companion.optional:
            spelt = " or ".join(dict.fromkeys(n for c in companions if c.role == companion.role
                                              for n in c.names))  # fmt: skip
            return CheckpointError(
                f"{weight.name} is {weight.dtype}, but it has no {companion.role} ({spelt})",
                "Download the checkpoint again; a quantized weight cannot be read without it.",
            )
        if len(there) > 1:
            return CheckpointError(
                f"{parts[there[0]].name} and {parts[there[1]].name} are two of a kind", _DAMAGED
            )
    odd = next(
        (
            parts[name]
            for one in companions
            for name in one.names
            if name in parts and parts[name].dtype not in one.dtypes
        ),
        others[0] if others else weight,
    )
    return CheckpointError(
        f"{odd.name} is {odd.dtype}, which is not supported beside {weight.name} ({weight.dtype})",
        _HINT,
    )


def wrong_scales(
    encoding: Encoding, roles: Roles, view: StoredView, config: ModelConfig
) -> CheckpointError:
    """The shapes of what stands beside a weight are those of no way to share scales."""
    weight = roles[WEIGHT]
    beside = [tensor for role, tensor in roles.items() if role != WEIGHT]
    scale = roles.get(SCALE, beside[0])
    shapes = " and ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in beside[1:])
    return CheckpointError(
        f"{scale.name} has shape {list(scale.shape)}"
        + (f" (with {shapes})" if shapes else "")
        + f", which fits no way to scale the {view.rows} x {view.cols} weights of {weight.name} "
        f"{list(weight.shape)} as {encoding.name}"
        + (f", in blocks of {list(config.block_size)} or otherwise" if config.block_size else ""),
        "Check quantization_config.weight_block_size in config.json; if it is right, download the "
        "checkpoint again.",
    )
