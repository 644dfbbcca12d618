"""Models' own names of expert modules: those of the unfused model."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ktconv.checkpoint import MoELayer, Projection
from ktconv.families import table
from ktconv.families.family import USUAL

USUAL_CONTAINER = "experts"
LINEAR = "Linear"  # the class of modules that targets and ignore lists can name


def module_name(layer: MoELayer, expert: int, proj: Projection) -> str:
    """model.layers.3.mlp.experts.5.gate_proj: the source's own name where it has one per
    expert (Mixtral: w1, w3, w2), else the usual one; for GGUF that of the safetensors model."""
    if layer.hub_names is not None:
        return f"{layer.hub_names.prefix}.{expert}.{layer.hub_names.matrices.of(proj)}"
    return f"{_container(layer.source)}.{expert}.{_spelling(layer, proj)}"


def _container(source: str) -> str:
    """The family's own name for it; the usual one where a tool chose another, or there is none."""
    block, _, last = source.rpartition(".")
    if last in table.FAMILIES.own_containers:
        return source
    where = block if last in table.FAMILIES.containers else source
    return f"{where}.{USUAL_CONTAINER}"


def _spelling(layer: MoELayer, proj: Projection) -> str:
    name = layer.experts[0][proj].tensor.name
    match = re.fullmatch(re.escape(layer.source) + r"\.[0-9]+\.(\w+)\.\w+", name)
    if match:
        return match[1]
    down = layer.experts[0]["down"].tensor.name.removesuffix(".weight").rpartition(".")[2]
    return table.FAMILIES.unfused.get(down, USUAL).of(proj)


def target_pattern(modules: Iterable[str]) -> str:
    """The pattern by which engines find the encoded modules, of which these are some; it never
    fits a shared expert.

    The usual names are always in it: vLLM asks for them whatever the model calls its own.
    """
    parts = {tuple(module.split(".")[-3::2]) for module in modules}  # (experts, gate_proj)
    containers = "|".join(sorted({where for where, _ in parts})) or "experts"
    spelled = "|".join(sorted({word for _, word in parts} | USUAL.projections.keys()))
    where = f"({containers})" if "|" in containers else containers
    return rf"re:.*\.{where}\.[0-9]+\.({spelled})$"


def fits(pattern: str, module: str) -> bool:
    """Whether compressed-tensors would find `module` by `pattern`."""
    return re.match(pattern.removeprefix("re:"), module) is not None
