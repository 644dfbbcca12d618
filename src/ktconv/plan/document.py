"""The JSON document of `ktconv plan`: figures, and the arrays that a loader applies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from ktconv.plan.cuts import slices
from ktconv.plan.placement.balance import evenness, replicas_of
from ktconv.plan.placement.parallel import local_places
from ktconv.plan.planned import Planned
from ktconv.plan.ranks import LayerPlacement
from ktconv.plan.sizes import distinct
from ktconv.plan.split import hot_share
from ktconv.system.units import format_ranges

SCHEMA = 1
KIND = "placement plan"


def document(planned: Planned) -> dict[str, Any]:
    """Everything in `planned`; docs/plan.md describes it."""
    model, request, load = planned.model, planned.request, planned.load
    before, after = planned.evenness
    return {
        "schema": SCHEMA,
        "kind": KIND,
        "path": model.path,
        "family": model.config.model_types[0],
        "moe_layers": format_ranges([layer.index for layer in model.layers]),
        "experts": model.count,
        "other_bytes": model.other_bytes,
        "ep": request.ep,
        "tp": request.tp,
        "placement": request.placed,
        "redundant": request.redundant,
        "nodes": request.nodes,
        "load": {
            "file": None if load.path is None else str(load.path),
            "tokens": load.tokens,
            "uniform": load.path is None,
        },
        "ranks": list(_ranks(planned)),
        "evenness": {"before": before, "after": after},
        "gpu": _gpu(planned),
        "cpu": None if planned.cpu is None else planned.cpu.as_dict(),
        "warnings": list(planned.warnings),
        "layers": [_layer(one, planned) for one in planned.layers],
        "tp_slices": list(_tp_slices(planned)) if request.tp > 1 else [],
    }


def _ranks(planned: Planned) -> Iterator[dict[str, Any]]:
    tp, other = planned.request.tp, planned.model.other_bytes
    figures = zip(planned.rank_places, planned.rank_bytes, planned.rank_loads, strict=True)
    for rank, (places, nbytes, share) in enumerate(figures):
        yield {
            "ep_rank": rank,
            "gpus": list(range(rank * tp, (rank + 1) * tp)),
            "experts": places,
            "expert_bytes": nbytes,
            "other_bytes": other,
            "bytes": nbytes + other,
            "load_share": share,
        }


def _gpu(planned: Planned) -> dict[str, Any]:
    request = planned.request
    return {
        "memory_bytes": request.gpu_memory,
        "hot": request.hot,
        "per_layer": request.per_layer,
        "experts": planned.gpu_experts,
        "load_share": hot_share(planned.layers),
    }


def _layer(one: LayerPlacement, planned: Planned) -> dict[str, Any]:
    layer = one.layer
    return {
        "layer": layer.index,
        "experts": layer.experts,
        "hidden_size": layer.hidden,
        "intermediate_size": layer.intermediate,
        "mtp": layer.is_mtp,
        "load": one.load.tolist(),
        "rank_loads": one.loads.tolist(),
        "evenness": {
            "before": float(evenness(one.loads_before)),
            "after": float(evenness(one.loads)),
        },
        "gpu_mask": (one.copies > 0).tolist(),
        "places": [list(rank) for rank in one.places],
        **_maps(one, planned),
    }


def _maps(one: LayerPlacement, planned: Planned) -> dict[str, Any]:
    """Maps of each rank: without copies as `expert_map`, with copies the tables of `balance`."""
    experts = one.layer.experts
    if planned.request.placed != "balanced":
        return {"expert_maps": [local_places(rank, experts).tolist() for rank in one.places]}
    ids = np.array(one.layer.ids)
    tables = replicas_of(np.searchsorted(ids, np.concatenate(one.places)), len(ids))
    physical = np.full((experts, tables.logical_to_physical.shape[1]), -1)
    physical[ids] = tables.logical_to_physical
    return {
        "physical_to_logical": np.concatenate(one.places).tolist(),
        "logical_to_physical": physical.tolist(),
        "copies": one.copies.tolist(),
    }


def _tp_slices(planned: Planned) -> Iterator[dict[str, Any]]:
    """Slices that are equal, once, with the experts that they are for."""
    found: dict[str, tuple[dict[str, Any], dict[str, str]]] = {}
    for layer in planned.model.layers:
        if layer.source is None:
            continue
        of_experts: dict[str, list[int]] = {}
        whole = distinct(layer.source)
        for expert in whole:
            cut = slices(layer.source.experts[expert], planned.request.tp)
            key = json.dumps(cut, sort_keys=True)
            found.setdefault(key, (cut, {}))
            of_experts.setdefault(key, []).append(expert)
        for key, ids in of_experts.items():
            ids = list(layer.ids) if len(whole) == 1 else ids
            found[key][1][str(layer.index)] = format_ranges(ids)
    for cut, experts in found.values():
        yield {"experts": experts, **cut}
