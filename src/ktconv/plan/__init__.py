"""Placement of experts as arrays for loaders: who holds what, and which part of each tensor.

    expert_map(128, ep=8, rank=3)                     # int32 [128]: local places, -1 elsewhere
    balance(load, physical=288, groups=8, nodes=4, gpus=32).physical_to_logical
    tp_slice((768, 2048), "w1", tp=2, rank=1)         # source and destination slices
    hot_experts(frequency, 640)                       # bool [layers, experts]

NumPy only; results are the same on every machine, of equal candidates the first. `ktconv plan`
(`ktconv.plan.command`) plans a whole model with them.
"""

from ktconv import callable_module
from ktconv.plan.placement.balance import (
    Replicas,
    balance,
    evenness,
    initial_map,
    pack,
    replica_slots,
    replicas_of,
    replicate,
)
from ktconv.plan.placement.names import ExpertParam, ExpertParams, expert_params_mapping
from ktconv.plan.placement.parallel import RoundRobinTables, expert_map, round_robin_tables
from ktconv.plan.placement.slices import TensorSlice, tp_slice
from ktconv.targets.hot import hot_experts

__all__ = [
    "ExpertParam",
    "ExpertParams",
    "Replicas",
    "RoundRobinTables",
    "TensorSlice",
    "balance",
    "evenness",
    "expert_map",
    "expert_params_mapping",
    "hot_experts",
    "initial_map",
    "pack",
    "replica_slots",
    "replicas_of",
    "replicate",
    "round_robin_tables",
    "tp_slice",
]

callable_module(__name__)
