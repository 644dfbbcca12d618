"""Dropping the experts of a model that matter least.

    report = ktconv.prune("MODEL", "OUTPUT", scores="scores.json", keep=96)

`choose` says which experts stay, from scores of `ktconv stats`; `run` copies a checkpoint of them
in the encoding of the source, byte by byte.
"""

from ktconv import callable_module
from ktconv.prune.choose import Choice, Selection, choose
from ktconv.prune.run import Request, prepare, prune

__all__ = ["Choice", "Request", "Selection", "choose", "prepare", "prune"]

callable_module(__name__)
