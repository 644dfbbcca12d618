"""Reasons why a weight cannot be read: sentences that name the tensor, and the way out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import NamedTuple

from ktconv.errors import CheckpointError
from ktconv.source.config import ModelConfig
from ktconv.source.encodings.base import BIAS, SCALE, SHAPE, WEIGHT, Encoding, Parts, Roles
from ktconv.source.types import TensorRef
from ktconv.source.views import StoredView

_HINT = (
    "Supported are expert weights in BF16, FP16, FP32, FP8 (E4M3), MXFP4, NVFP4, "
    "integers of compressed-tensors, GPTQ and AWQ, and llama.cpp's types in GGUF files; use a "
    "version of this model in one of them."
)
_GROUP_SIZE = "quantization_config.group_size"
_BLOCK_SIZE = "quantization_config.weight_block_size"
_DAMAGED = "The checkpoint is inconsistent; download it again."
# What words in the name of a tensor beside (or in place of) a weight are a sign of.
_FOREIGN = {
    "bitmask": "sparse compression (sparse-24-bitmask)",
    "compressed": "sparse compression (sparse-24-bitmask)",
    "scale_packed": "2:4 sparse compression (marlin-24)",
    "pre_quant_scale": "a scale of the inputs (AWQ or SmoothQuant of ModelOpt)",
    "absmax": "bitsandbytes",
    "quant_map": "bitsandbytes",
    "SCB": "bitsandbytes",
    "weight_format": "bitsandbytes",
    "scale_bias": "msModelSlim's W4A8, whose order of nibbles is not specified,",
    "biases": "MLX quantization",
    "qbiases": "MLX quantization",
    "W_q": "HQQ or SINQ",
    "weight_scales": "EETQ",
    "q_weight": "EXL2",
    "q_invperm": "EXL2",
    "trellis": "EXL3",
    "suh": "EXL3",
    "svh": "EXL3",
    "_data": "torchao or quanto",
    "qdata": "torchao",
    "tensor_impl": "torchao",
    "_weight_qdata": "torchao",
    "centroids": "VPTQ",
    "codebooks": "AQLM",
    "Qidxs": "QuIP#",
    "B": "Marlin packing",
    "s_group": "QQQ",
    "s_channel": "QQQ",
    "zeros": "BitBLAS packing",
    "tables2": "HIGGS",
    "dense_weights": "SpQR",
    "weight_sf": "NVFP4 in the order of kernels (transformers)",
    "quantized_weight_values": "Four Over Six",
    "input_activation_scale": "a static scale of inputs and outputs (Gemma)",
    "act_global_scale": "FP-Quant",
}
# Words in the names of a model that PEFT saved with an adapter in it.
_ADAPTED = ("base_layer", "lora_A", "lora_B", "lora_magnitude_vector")
_ONLINE = "a rotation of the inputs while the model runs (SpinQuant, QuaRot)"
_KNOWN_TYPES = ("FLOAT", "W8A8", "W8A8_DYNAMIC")  # of msModelSlim


def _foreign(part: str) -> str | None:
    if part.startswith(("spinquant", "input_rotation")) or "hadamard" in part.lower():
        return _ONLINE
    words = part.replace(":", ".").split(".")
    return next((_FOREIGN[word] for word in words if word in _FOREIGN), None)


def check_described(parts: Parts, described: Mapping[str, str]) -> None:
    """CheckpointError if msModelSlim's description gives a weight a type that cannot be read."""
    for tensor in parts.values():
        kind = described.get(tensor.name, _KNOWN_TYPES[0])
        if kind not in _KNOWN_TYPES:
            raise CheckpointError(
                f"{tensor.name} is {kind} in quant_model_description.json, which is not supported "
                "as an input, because how msModelSlim packs it is not specified",
                f"Supported are {', '.join(_KNOWN_TYPES)}.",
            )


def check_rotation(weight: TensorRef, config: ModelConfig) -> None:
    """CheckpointError if config.json says that inputs are rotated while the model runs."""
    if config.online_rotation:
        raise CheckpointError(
            f"{weight.name}: {_ONLINE} is not supported as an input "
            f"(quantization_config.{config.online_rotation} in config.json)",
            "Use a version of this model whose rotations are all inside its weights.",
        )


def packed_without_straddling(
    weight: TensorRef, view: StoredView, config: ModelConfig
) -> CheckpointError | None:
    """The error for integers of 3, 5, 6 or 7 bits as compressed-tensors packed them before 2026,
    whole ones in every word; None if these are none. Four of 7 bits take what four of 8 do."""
    if weight.dtype != "I32" or not weight.name.endswith("_packed") or not weight.shape:
        return None
    for bits in (3, 5, 6, 7):
        each = 32 // bits
        if -(-view.stored_cols // each) != weight.shape[-1]:
            continue
        if bits == 7 and config.packed_bits != 7:
            continue
        return CheckpointError(
            f"{weight.name} has {weight.shape[-1]} words for {view.stored_cols} weights: {bits} "
            f"bits each, {each} in a word, which is not supported as an input",
            "Older versions of compressed-tensors packed so; save the model again with one from "
            "2026, which uses all bits.",
        )
    return None


def packed_floats(
    weight: TensorRef, scale: TensorRef | None, view: StoredView
) -> CheckpointError | None:
    """The error for floats of 4 and 6 bits that nothing here decodes; None if these are none."""
    if weight.dtype != "U8" or not weight.shape:
        return None
    if 4 * weight.shape[-1] == 3 * view.stored_cols:
        return CheckpointError(
            f"{weight.name} {list(weight.shape)}: MXFP6 is only supported as compressed-tensors "
            "writes it",
            _HINT,
        )
    of_16 = scale is not None and scale.shape[-1:] == (-(-view.stored_cols // 16),)
    if scale is not None and scale.dtype == "U8" and of_16:
        return CheckpointError(
            f"{scale.name} {list(scale.shape)}: a scale in U8 for 16 inputs is only supported in "
            "E5M3, which quantization_config.format in config.json does not say",
            _HINT,
        )
    return None


def unsupported(parts: Parts, encodings: Iterable[Encoding]) -> CheckpointError:
    """The error for tensors that are no known encoding."""
    for part, tensor in parts.items():
        if any(word in _ADAPTED for word in part.split(".")):
            raise CheckpointError(
                f"{tensor.name}: the model was saved with a LoRA adapter that is not merged",
                "Merge it (merge_and_unload of PEFT) and save the model again, or use the model "
                "without it.",
            )
        if part == "weight_scales" and "weight_blocks" in parts:
            return CheckpointError(
                f"{tensor.name} and {parts['weight_blocks'].name}: MXFP4 in blocks, as gpt-oss has "
                "it, is read of all experts of a layer in one tensor, not of one expert",
                _HINT,
            )
        if part == "weight_scale" and parts.get("weight", tensor).dtype == "I32":
            return CheckpointError(
                f"{parts['weight'].name} (I32): integers in words as Quark packs them are not "
                "supported as an input",
                _HINT,
            )
        if what := _foreign(part):
            return CheckpointError(
                f"{tensor.name} ({tensor.dtype}): {what} is not supported as an input", _HINT
            )
    encodings = tuple(encodings)
    known = {BIAS}.union(*(one.names for one in encodings))
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
        return _without_primary(parts, encodings)
    return _by_weight(parts, found[0], [one for one in encodings if one.primary == found[0]])


def _without_primary(parts: Parts, encodings: Iterable[Encoding]) -> CheckpointError:
    """The tensors next to a weight are there, but not the weight."""
    part, tensor = next(iter(parts.items()))
    beside = parts.keys() - {BIAS}
    primaries = [one.primary for one in encodings if beside and beside <= one.names] or [WEIGHT]
    owner = tensor.name.removesuffix(f".{part}")
    if owner != tensor.name:
        names = [f"{owner}.{primary}" for primary in primaries]
    else:  # fused: down_proj_scale_inv
        owner = tensor.name.removesuffix(_behind(part))
        names = [f"{owner}{_behind(primary)}" for primary in primaries]
    return CheckpointError(
        f"{' or '.join(dict.fromkeys(names))} is missing, although {tensor.name} is there",
        "Download the checkpoint again.",
    )


def _behind(part: str) -> str:
    """Ending behind the name of a stack: nothing for `weight`, _scale, _blocks."""
    return part.removeprefix(WEIGHT) if part.startswith(WEIGHT) else f"_{part}"


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
    faults = [_faults(parts, weight, one) for one in near]
    # Of the encoding that lacks least; rather a missing tensor than one of another kind.
    return min(faults, key=lambda found: (len(found), found[0].order))[0].error


class _Fault(NamedTuple):
    order: int
    error: CheckpointError


def _faults(parts: Parts, weight: TensorRef, encoding: Encoding) -> list[_Fault]:
    """Reasons why `parts` are not a weight of `encoding`, which has its primary tensor."""
    faults = []
    for one in encoding.companions:
        there = [parts[name] for name in one.names if name in parts]
        if not there and not one.optional:
            text = f"{weight.name} is {weight.dtype}, but it has no {one.role}"
            hint = "Download the checkpoint again; a quantized weight cannot be read without it."
            faults.append(_Fault(1, CheckpointError(f"{text} ({' or '.join(one.names)})", hint)))
        if len(there) > 1:
            text = f"{there[0].name} and {there[1].name} are two of a kind"
            faults.append(_Fault(0, CheckpointError(text, _DAMAGED)))
        for tensor in there:
            if tensor.dtype not in one.dtypes:
                faults.append(_Fault(2, _not_beside(tensor, weight)))
    unused = parts.keys() - encoding.names - {BIAS}
    faults += [_Fault(3, _not_beside(parts[name], weight)) for name in parts if name in unused]
    return sorted(faults, key=lambda fault: fault.order)


def _not_beside(tensor: TensorRef, weight: TensorRef) -> CheckpointError:
    return CheckpointError(
        f"{tensor.name} is {tensor.dtype}, which is not supported next to {weight.name} "
        f"({weight.dtype})",
        _HINT,
    )


def wrong_scales(
    encoding: Encoding, roles: Roles, view: StoredView, config: ModelConfig
) -> CheckpointError:
    """The shapes of what stands next to a weight belong to no way to share scales."""
    weight = roles[WEIGHT]
    beside = [tensor for role, tensor in roles.items() if role != WEIGHT]
    scale = roles.get(SCALE, beside[0])
    more = (tensor for tensor in beside if tensor not in (scale, roles.get(SHAPE)))
    shapes = " and ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in more)
    others = f" (with {shapes})" if shapes else ""
    fp8 = encoding.name.startswith("fp8")
    blocks = f", in blocks of {list(config.block_size)} or otherwise" if config.block_size else ""
    return CheckpointError(
        f"{scale.name} has shape {list(scale.shape)}{others}, which fits no way to scale the "
        f"{view.rows} x {view.cols} weights of {weight.name} {list(weight.shape)} as "
        f"{encoding.name}{blocks if fp8 else ''}",
        f"Check {_BLOCK_SIZE} in config.json; if it is right, download the checkpoint again."
        if fp8
        else _hint_of_groups(scale, view, config),
    )


def _hint_of_groups(scale: TensorRef, view: StoredView, config: ModelConfig) -> str:
    """The way out where the shape of scales is one of groups that do not divide the inputs."""
    outputs, inputs = view.outputs_and_inputs
    groups, rest = divmod(prod(scale.shape), outputs * (view.experts or 1))
    if rest or groups < 2 or not inputs % groups or groups > inputs:
        return _DAMAGED
    least, most = -(-inputs // groups), (inputs - 1) // (groups - 1)
    if least > most:
        return _DAMAGED
    said = ", ".join(map(str, sorted(config.group_sizes))) or "nothing"
    return (
        f"{groups} groups of {inputs} inputs can have {least} to {most} each; {_GROUP_SIZE} in "
        f"config.json says {said}. Correct it there, or download the checkpoint again."
    )
