"""`ktconv bench`: MoE kernels measured against the machine's own limits."""

from ktconv import callable_module

callable_module(__name__)
