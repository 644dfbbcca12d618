"""`--calibrate`: codes with GPTQ error compensation on the inputs of a text.

`codes` is the arithmetic, `task` an expert's matrices from source to checked bytes, `inputs` the
second moments of `ktconv stats --hessian`, checked against the model, and `streaming` gathers them
from a text, layer by layer. Only `codes` and `streaming` import torch, when they begin.
"""
