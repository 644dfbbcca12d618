"""Text from a model whose experts run on the kernels, and how fast it comes.

    report = ktconv.generate("OUTPUT", source="MODEL", prompt="Once upon a time")

`loading` puts the parts together, `prompt` makes tokens of a text and text of tokens, `decoding`
runs the model token by token, `run` is the command; `measure` and `figures` are `ktconv bench
--generate`.
"""

from ktconv import callable_module
from ktconv.generate.request import GenerateRequest, Sampling

__all__ = ["GenerateRequest", "Sampling"]

callable_module(__name__)
