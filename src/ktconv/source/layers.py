"""Layers with experts: stacks get their index, and are compared with config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ktconv.errors import CheckpointError
from ktconv.families import table
from ktconv.families.names import MTP_MARKS, dense_mlp, looked_for
from ktconv.source.config import ModelConfig
from ktconv.source.counts import CONTRADICTION, Counts
from ktconv.source.experts import build_layer
from ktconv.source.stacks import Split, Stack
from ktconv.source.types import MoELayer
from ktconv.system.units import counted, listed

_SHOWN = 3  # patterns that an error shows


def build_layers(
    split: Split, config: ModelConfig, with_routers: bool = True
) -> tuple[list[MoELayer], list[str]]:
    """All MoE layers, ascending, compared with config.json; and notes about them for the user.
    `with_routers`: whether routers next to the experts are theirs.

    Raises CheckpointError naming the layer or tensor for every contradiction.
    """
    stacks = _number(split, config)
    left = sum(_without_identity(split, stack, config) for stack in stacks.values())
    _check_layers_present(split, stacks, config)
    _check_not_dense(stacks, config)
    sources = [stack.source for stack in stacks.values()]
    counts = Counts(config, sources, split.others if with_routers else ())
    layers = [
        build_layer(stack, index, _is_mtp(index, stack, config), counts)
        for index, stack in sorted(stacks.items())
    ]
    odd = counts.check(layers)
    for layer in layers:
        if fault := config.top_k_fault(len(layer.experts), layer.index):
            raise CheckpointError(fault, CONTRADICTION)
    _check_gates(layers, config)
    _check_biases(layers, config)
    notes = [*_notes(split, layers, config), *odd]
    if left:
        notes.append(
            f"{counted(left, 'tensor', 'are')} of experts that have no down projection, because "
            "they give their "
            "inputs back; they are treated as other tensors"
        )
    return layers, notes


def _without_identity(split: Split, stack: Stack, config: ModelConfig) -> int:
    """Makes other tensors of those of LongCat's identity experts, which follow the numbered ones
    and have no weights that are used; returns how many there are."""
    if not config.zero_experts:
        return 0
    names: dict[int, list[str]] = {}
    for rest in stack.tensors:
        number = rest.partition(".")[0]
        if number.isdecimal() and len(number) < 7:
            names.setdefault(int(number), []).append(rest)
    whole = max((number for number, own in names.items() if any(map(_is_down, own))), default=-1)
    spare = [number for number in names if number > whole]
    if whole < 0 or len(spare) > config.zero_experts:
        return 0
    gone = [rest for number in spare for rest in names[number]]
    split.others.extend(stack.tensors.pop(rest) for rest in gone)
    return len(gone)


def _is_down(rest: str) -> bool:
    return table.FAMILIES.projections.get(rest.split(".")[1]) == "down"


def _number(split: Split, config: ModelConfig) -> dict[int, Stack]:
    """Layer index -> stack; MTP layers follow the decoder's."""
    stacks: dict[int, Stack] = {}
    for stack in split.stacks:
        index = _index_of(stack, config)
        other = stacks.setdefault(index, stack)
        if other is not stack:
            raise CheckpointError(
                f"{other.source} and {stack.source} both claim to be layer {index}",
                "Checkpoints with two decoders or with stray tensors are not supported.",
            )
    for index, stack in stacks.items():
        _check_within_config(split, index, stack, config)
    return stacks


def _index_of(stack: Stack, config: ModelConfig) -> int:
    if not stack.path.in_mtp:
        return stack.path.number
    if config.num_layers is None:
        raise CheckpointError(
            f"{stack.source} is an MTP layer whose index follows num_hidden_layers, which "
            "config.json does not have",
            "Add num_hidden_layers to config.json.",
        )
    return config.num_layers.value + stack.path.number


def _is_mtp(index: int, stack: Stack, config: ModelConfig) -> bool:
    return stack.path.in_mtp or (config.num_layers is not None and index >= config.num_layers.value)


def _check_within_config(split: Split, index: int, stack: Stack, config: ModelConfig) -> None:
    """A layer beyond num_hidden_layers is an MTP layer, or the config is of another model."""
    if config.num_layers is None or stack.path.in_mtp:
        return
    if index < config.num_layers.value + config.num_mtp_layers:
        return
    marks = tuple(f"{stack.path.layer}.{mark}" for mark in MTP_MARKS)
    if not any(tensor.name.startswith(marks) for tensor in split.others):
        raise CheckpointError(
            f"{stack.source} is layer {index}, but config.json has "
            f"{config.num_layers.key} {config.num_layers.value} and does not declare "
            "it as an MTP layer",
            CONTRADICTION,
        )


def _check_layers_present(split: Split, stacks: Mapping[int, Stack], config: ModelConfig) -> None:
    """CheckpointError if a decoder layer has no experts, unless it is dense by config.json or its
    tensors."""
    decoder = [index for index, stack in stacks.items() if not _is_mtp(index, stack, config)]
    count = config.num_layers.value if config.num_layers else max(decoder, default=-1) + 1
    absent = [index for index in range(count) if index not in stacks]
    pattern = next(iter(stacks[index].source for index in decoder), looked_for())
    if config.dense_layers is not None:
        absent = [index for index in absent if config.dense_layers.key_of(index) is None]
        reason = "but config.json declares it as an MoE layer"
    else:
        dense = _seen_dense(split, stacks)
        absent = [index for index in absent if index not in dense]
        reason = "and no dense MLP either"
    if absent:
        others = len(absent) - 1
        have = "has" if others == 1 else "have"
        more = f" (nor {have} {counted(others, 'other layer')})" if others else ""
        raise CheckpointError(
            f"layer {absent[0]} has no experts, {reason}{more}; other layers have them under "
            f"names like {pattern}.*",
            "Download the checkpoint again; if the layer is dense by design, say so with "
            "mlp_layer_types in config.json; if its experts have other names, give them with --map "
            "(docs/maps.md).",
        )


def _check_not_dense(stacks: Mapping[int, Stack], config: ModelConfig) -> None:
    """CheckpointError if a layer has experts that config.json declares as dense."""
    if config.dense_layers is None:
        return
    for index, stack in sorted(stacks.items()):
        key = config.dense_layers.key_of(index)
        if key is not None and not _is_mtp(index, stack, config):
            raise CheckpointError(
                f"layer {index} has experts ({stack.source}), but {key} in config.json "
                "declares it as a dense layer",
                f"{CONTRADICTION} If the weights are right, correct {key}.",
            )


def _seen_dense(split: Split, stacks: Mapping[int, Stack]) -> set[int]:
    """Decoder layers with an ordinary MLP, by the names under the decoder's prefix."""
    decoders = [stack.path for stack in stacks.values() if not stack.path.in_mtp]
    pattern = dense_mlp({path.layer.rpartition(".")[0] + "." for path in decoders})
    found = (pattern.match(tensor.name) for tensor in split.others)
    return {int(match[1]) for match in found if match}


def _check_gates(layers: Sequence[MoELayer], config: ModelConfig) -> None:
    """CheckpointError unless the experts of all layers have a gate, or none has, as their
    activation needs it."""
    gated = next((layer for layer in layers if layer.gated), None)
    if gated is None:
        if config.gated is None:
            raise CheckpointError(
                f"the experts of {layers[0].source} have no gate projection, and neither family "
                "nor activation in config.json say that they have none",
                'If they compute down(relu(up x)^2), add "mlp_hidden_act": "relu2" to config.json; '
                'if GELU or ReLU of up, give a map with like = "nomic_bert" (docs/maps.md).',
            )
        return
    name = gated.experts[0]["gate"].tensor.name
    if config.gated is False:
        raise CheckpointError(
            f"{name} is the gate of an expert, but experts of this model have none by config.json",
            CONTRADICTION,
        )
    bare = next((layer for layer in layers if not layer.gated), None)
    if bare is not None:
        raise CheckpointError(
            f"the experts of {bare.source} have no gate, but {name} is there",
            "Download the checkpoint again; incomplete layers are not converted.",
        )


def _check_biases(layers: Sequence[MoELayer], config: ModelConfig) -> None:
    """CheckpointError if a weight of a family whose experts have biases has none."""
    families = [(kind, table.FAMILIES.of(kind)) for kind in sorted(config.model_types)]
    kind = next((kind for kind, row in families if row is not None and row.expert_biases), None)
    if kind is None:
        return
    matrices = (one for layer in layers for expert in layer.experts for one in expert.values())
    bare = next((matrix for matrix in matrices if matrix.bias is None), None)
    if bare is not None:
        raise CheckpointError(
            f"{bare.tensor.name} has no bias, but all experts of {kind} have",
            "Download the checkpoint again.",
        )


def _notes(split: Split, layers: Sequence[MoELayer], config: ModelConfig) -> list[str]:
    notes = []
    mtp = [layer for layer in layers if layer.is_mtp]
    for layer in mtp:
        notes.append(f"layer {layer.index} is an MTP layer ({layer.source})")
    if config.num_mtp_layers > len(mtp):
        notes.append(
            f"config.json declares {counted(config.num_mtp_layers, 'MTP layer')}, but the "
            f"checkpoint has experts of {counted(len(mtp), 'MTP layer')}"
        )
    if config.num_experts is None and not config.listed_experts:
        notes.append(f"config.json has no expert count; the tensors have {len(layers[0].experts)}")
    if biased := [layer.index for layer in layers if layer.biased]:
        notes.append(f"the experts of {listed('layer', biased)} have biases")
    if split.unrecognised:
        notes.append(
            f"{counted(len(split.unrecognised), 'tensor', 'have')} names like experts but an "
            "unknown location; they are treated as other tensors: "
            f"{split.unrecognised[0]} ..."
        )
    return notes
