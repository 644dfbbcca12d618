"""Names of tensors by the spellings of all families, whatever the model_type."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice

from msgspec import Struct

from ktconv.errors import CheckpointError, UsageError
from ktconv.families import table
from ktconv.families.family import PROJECTIONS, Family, Projection
from ktconv.families.table import one_of

# What only multi-token-prediction layers have, in addition to attention and experts.
MTP_MARKS = ("eh_proj", "enorm", "hnorm", "shared_head", "embed_tokens", "nextn")
_TWO_LAYER_MLP = ("fc1", "fc2")  # of a dense layer
_MOST_DIGITS = 6  # of a layer's number; no model comes near


# ---- experts ---------------------------------------------------------------------------


class ExpertsPath(Struct, frozen=True):
    """The name under which the experts of a layer are stored."""

    source: str  # model.layers.3.mlp.experts
    layer: str  # model.layers.3
    prefix: str  # "model." or ""
    number: int  # the layer's number as the name spells it
    in_mtp: bool  # the number counts MTP layers, not decoder layers


def split_name(name: str) -> tuple[str, str] | None:
    """model.layers.3.mlp.experts.5.gate_proj.weight -> (model.layers.3.mlp.experts,
    5.gate_proj.weight); None for names that are not of experts. An expert's number comes first
    in the second part, wherever the name has it."""
    for container in table.FAMILIES.containers:
        start, found, rest = name.partition(f".{container}.")
        if found:
            return f"{start}.{container}", rest
    for block, words in table.FAMILIES.bare_blocks.items():
        start, found, rest = name.partition(f".{block}.")
        if found and rest.partition(".")[0] in words:
            return f"{start}.{block}", rest
    return _split_bare(name)


def _split_bare(name: str) -> tuple[str, str] | None:
    """blk.3.ffn_gate_exps.weight -> (blk.3, ffn_gate_exps.weight); blk.3.ffn_gate.5.weight ->
    (blk.3, 5.ffn_gate.weight)."""
    words = name.split(".", 3)
    for count, word in enumerate(words[:2], start=2):  # with a word before it, or none
        if word in table.FAMILIES.bare_lists:
            rest = ".".join(words[count:])
            found = table.FAMILIES.bare_expert.fullmatch(rest)
            if found is None:
                return None
            if found["matrix"]:
                rest = f"{found['expert']}.{found['matrix']}.{found['part']}"
            return ".".join(words[:count]), rest
    return None


def matrix_name(source: str, expert: int, matrix: str) -> str:
    """The name of the matrix of a numbered expert, for messages."""
    spelt = (row.before_number for row in table.FAMILIES.rows if row.before_number)
    if any(matrix in one.projections for one in spelt):
        return f"{source}.{matrix}.{expert}.weight"
    return f"{source}.{expert}.{matrix}.weight"


def is_in_experts(name: str) -> bool:
    """Whether a name has a component called `experts`, or its end looks like that of experts.
    Not for what lies there and belongs to none of them, such as a router's correction bias."""
    source, rest = split_name(f".{name}") or (None, "")
    if source is None or rest in table.FAMILIES.beside:
        return False
    return not is_of_other_experts(source)


def is_of_other_experts(source: str) -> bool:
    """Whether a block of this name has experts that are no MLPs, as in JetMoE's attention."""
    block = source.rpartition(".")[0].rpartition(".")[2]
    return block in table.FAMILIES.names("other_experts")


def block_of(source: str) -> str | None:
    """model.layers.3.mlp.experts -> model.layers.3.mlp, the block of the experts; unchanged for a
    block or a layer that contains them directly. None if no experts can be under `source`."""
    block, _, last = source.rpartition(".")
    if last in table.FAMILIES.containers:
        return block
    bare = last in table.FAMILIES.bare_blocks or table.FAMILIES.bare_layer.fullmatch(source)
    return source if bare else None


def parse_source(source: str) -> ExpertsPath | None:
    """The parts of `source`; None if it is not the name of experts in a layer.

    Raises CheckpointError for a layer number with too many digits.
    """
    block = block_of(source) or ""
    match = table.FAMILIES.block_path.fullmatch(block) or table.FAMILIES.bare_layer.fullmatch(block)
    if match is None:
        return None
    if len(match["number"]) > _MOST_DIGITS:
        raise CheckpointError(
            f"{source} has a layer number of more than {_MOST_DIGITS} digits",
            "The checkpoint is damaged; download it again.",
        )
    mtp = table.FAMILIES.mtp_words
    in_mtp = match["list"] in mtp or not mtp.isdisjoint(match["prefix"].split("."))
    return ExpertsPath(source, match["layer"], match["prefix"], int(match["number"]), in_mtp)


def is_gguf(source: str) -> bool:
    """Whether these experts are named as in GGUF files: blk.3."""
    return table.FAMILIES.bare_layer.fullmatch(source) is not None


def mtp_prefix(source: str) -> str:
    """The prefix of all tensors of this MTP layer, or of all MTP layers."""
    words = source.split(".")
    for index, word in enumerate(words):
        if word in table.FAMILIES.mtp_words:
            return ".".join(words[: index + 1]) + "."
    path = parse_source(source)
    return f"{path.layer}." if path else source


def layer_number(name: str) -> int | None:
    """The number of the decoder layer in a tensor's name."""
    found = table.FAMILIES.numbered_layer.search(name)
    return int(found[2]) if found and found[1] not in table.FAMILIES.mtp_words else None


def looked_for() -> str:
    """The pattern of experts' names, for messages."""
    known = table.FAMILIES
    blocks = "|".join(known.names("block"))
    return f"[prefix.]{known.names('layers')[0]}.<L>.({blocks}).{known.containers[0]}.*"


def known_spellings() -> str:
    """ "gate_proj, up_proj, down_proj and w1, w3, w2", for messages."""
    spelt = (one for one in table.FAMILIES.matrices if one.gate and not one.rows_of_all)
    usual = islice((", ".join(one.projections) for one in spelt), 2)
    return " and ".join(usual)


class ExpertModule(Struct, frozen=True):
    """The expert and matrix that a module name refers to."""

    source: str  # "model.layers.3.mlp.experts"
    expert: int
    proj: Projection


def expert_module(module: str) -> ExpertModule | None:
    """
    >>> expert_module("model.layers.3.mlp.experts.5.w3").proj
    'up'
    """
    found = table.FAMILIES.expert_module.fullmatch(module)
    if found is None:
        return None
    return ExpertModule(found[1], int(found[2]), table.FAMILIES.projections[found[3]])


def dense_mlp(prefixes: Iterable[str]) -> re.Pattern[str]:
    """Finds the start of a dense layer's name under one of `prefixes` (model.layers.); its group
    is the layer's number."""
    blocks = one_of(table.FAMILIES.names("block"))
    words = one_of((*table.FAMILIES.matrix_words, *_TWO_LAYER_MLP))
    bare = one_of(table.FAMILIES.bare_words)
    return re.compile(
        rf"{one_of(prefixes)}([0-9]{{1,{_MOST_DIGITS}}})\.(?:{blocks}\.{words}|{bare})\."
    )


# ---- other tensors of the block --------------------------------------------------------


class RouterTensors(Struct, frozen=True):
    """Names that a layer's router may have; of each kind at most one exists. `routers.Stored` has
    what the others than `weight` are."""

    weight: tuple[str, ...]
    bias: tuple[str, ...]
    correction: tuple[str, ...]
    input_scale: tuple[str, ...]
    scale: tuple[str, ...]
    expert_scale: tuple[str, ...]
    table: tuple[str, ...]


class SharedExpert(Struct, frozen=True):
    """Names of a shared expert's matrices; `gating` [1, H], through a sigmoid, scales its output
    where it exists."""

    gate: str
    up: str
    down: str
    gating: str


class NamesBeside(Struct, frozen=True):
    """Names that the tensors around the experts of a layer may have."""

    block: str  # model.layers.3.mlp
    router: RouterTensors
    shared: tuple[SharedExpert, ...]
    norm: tuple[str, ...]  # before the block, the family's own name first
    post_norm: tuple[str, ...]  # of the experts' outputs


def names_beside(source: str, family: Family | None) -> NamesBeside:
    """The candidates for every tensor around the experts under `source`, found at once."""
    return NamesBeside(
        _block(source),
        router_tensors(source),
        shared_expert_tensors(source),
        norm_tensors(source, family),
        post_norm_tensors(source),
    )


def router_tensors(source: str) -> RouterTensors:
    """Candidates for the router of the layer whose experts are under `source`, which is like
    model.layers.3.mlp.experts."""
    block, layer, known = _block(source), _layer(source), table.FAMILIES

    def named(field: str, where: str = block, end: str = "") -> tuple[str, ...]:
        return tuple(f"{where}.{name}{end}" for name in known.names(field))

    return RouterTensors(
        weight=named("router", end=".weight"),
        bias=named("router_bias"),
        correction=named("correction") + named("layer_correction", layer),
        input_scale=named("router_input_scale"),
        scale=named("router_scale"),
        expert_scale=named("router_expert_scale"),
        table=named("router_table"),
    )


def shared_expert_tensors(source: str) -> tuple[SharedExpert, ...]:
    """Candidates for the shared expert of the experts under `source`; a layer has one or none.

    Several shared experts are one wider expert in every family known here.
    """
    block, found = _block(source), []
    for parent in dict.fromkeys((block, _layer(source))):  # Step's is in the layer
        for name, spelt, gating in table.FAMILIES.shared_experts:
            if not name and parent != block:
                continue
            where = f"{parent}.{name}" if name else parent
            gate, up, down = (f"{where}.{spelt.of(proj)}.weight" for proj in PROJECTIONS)
            found.append(SharedExpert(gate, up, down, f"{parent}.{gating}.weight"))
    return tuple(found)


def norm_tensors(source: str, family: Family | None = None) -> tuple[str, ...]:
    """Candidates for the norm before the block of these experts, that of `family` first: others'
    names may be of norms elsewhere in its layers."""
    layer, own = _layer(source), () if family is None else (family.norm,)
    names = dict.fromkeys((*own, *table.FAMILIES.names("norm")))
    return tuple(f"{layer}.{name}.weight" for name in names)


def _layer(source: str) -> str:
    path = parse_source(source)
    return path.layer if path else _block(source).rpartition(".")[0]


def post_norm_tensors(source: str) -> tuple[str, ...]:
    """Candidates for the norm of these experts' outputs."""
    return tuple(f"{source}.{name}.weight" for name in table.FAMILIES.names("post_norm"))


def _block(source: str) -> str:
    block = block_of(source.rstrip("."))
    if block is None:
        raise UsageError(
            f"{source!r} is not a prefix of expert tensors",
            f"it must end with .{' or .'.join(table.FAMILIES.containers)}",
        )
    return block
