"""MoE layers to call: packed experts on the kernels, with torch tensors or NumPy arrays.

    from ktconv.runtime import MoELayer

    layer = MoELayer.load("OUTPUT", 3)
    y = layer(x, ids, weights)                  # the kind and dtype of x
    handle = layer.submit(x, ids, weights)      # in the background
    y = handle.wait()

A layer has weights and nothing else: no state of a call, and no memory that calls share. The
workspace of a call belongs to the pool of threads it runs on, and nothing in it outlives the call.
"""

from ktconv.runtime.deferred import DeferredExperts, split_deferred
from ktconv.runtime.handle import Handle
from ktconv.runtime.layer import MoELayer
from ktconv.runtime.workspace import free_workspaces
from ktconv.system.pool import Pool

__all__ = [
    "DeferredExperts",
    "Handle",
    "MoELayer",
    "Pool",
    "free_workspaces",
    "split_deferred",
]
