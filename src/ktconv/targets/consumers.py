"""What the known consumers of converted experts compute, and models that need something else.

The methods of KTransformers 0.7.2 read parameters that they do not have as zero, without a word.
A step of an `ExpertActivation` that a method leaves out makes its results wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from ktconv.checkpoint import Checkpoint, MoELayer
from ktconv.checkpoint.activations import in_words
from ktconv.families.config import sections_of, value_of
from ktconv.families.family import PLAIN, ExpertActivation
from ktconv.system.units import format_ranges

ALLOW = "--allow-activation-mismatch converts it for ktconv's own runtime"


@dataclass(frozen=True, slots=True)
class Method:
    """A method of KTransformers. All compute SiLU of experts with a gate, of every weight on the
    output; `computes`: fields of ExpertActivation that they follow beside that."""

    name: str
    computes: frozenset[str] = frozenset()
    families: Mapping[str, frozenset[str]] = field(default_factory=dict)  # model_type -> instead
    encoding: str = ""  # of checkpoints whose experts it reads as they are


_LIMIT = frozenset({"limit"})
_ONLY_FP8: Mapping[str, frozenset[str]] = {"glm5_next": frozenset()}  # which its server enforces

METHODS = (
    Method("AMXINT4"),
    Method("AMXINT8"),
    Method("RAWINT4"),
    Method("BF16"),
    Method("FP8", families={"glm5_next": _LIMIT}, encoding="fp8-block"),
    Method("FP8_PERCHANNEL"),
    Method("GPTQ_INT4"),
    Method("NVFP4"),
    Method("MXFP4", _LIMIT, _ONLY_FP8, "mxfp4"),
    Method("MXFP8", _LIMIT | {"alpha"}, _ONLY_FP8, "fp8-group"),
    Method("LLAMAFILE"),
)
_BY_NAME = {method.name: method for method in METHODS}

# What a method does in place of a field that it does not follow, beside plain SiLU.
_INSTEAD = {
    "biases": " without biases",
    "post_norm": " without a norm",
    "weight_on_input": " of inputs without weights",
}


def model_types(checkpoint: Checkpoint) -> list[str]:
    """Of the text section and of the whole config.json."""
    sections = sections_of(checkpoint.config)
    found = (value_of(section, "model type") for section in sections)
    return [kind for kind in found if isinstance(kind, str)]


def left_out(
    activation: ExpertActivation, method: str, model_types: Iterable[str] = ()
) -> frozenset[str]:
    """The fields of `activation` that the method of KTransformers does not follow. One that is not
    in the table, as of a new format, counts as one that computes SiLU alone."""
    one = _BY_NAME.get(method, Method(method))
    types = (kind.removesuffix("_text") for kind in model_types)
    computed = next((one.families[kind] for kind in types if kind in one.families), one.computes)
    names = (field.name for field in fields(activation))
    changed = (name for name in names if getattr(activation, name) != getattr(PLAIN, name))
    return frozenset(changed) - computed


def right_methods(
    activations: Iterable[ExpertActivation], model_types: Iterable[str] = ()
) -> list[str]:
    """The methods of KTransformers that compute all of them."""
    wanted, types = set(activations), tuple(model_types)
    return [
        method.name
        for method in METHODS
        if not any(left_out(one, method.name, types) for one in wanted)
    ]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Layers of a model whose experts compute something else than a method of KTransformers."""

    layers: Sequence[MoELayer]
    method: str
    left_out: frozenset[str]  # fields of ExpertActivation that the method does not follow
    right: Sequence[str]  # the methods that compute what these layers do

    @property
    def sentence(self) -> str:
        where = format_ranges([layer.index for layer in self.layers])
        activations = {layer.index: layer.activation for layer in self.layers}
        return (
            f"the experts of layer(s) {where} compute {in_words(activations)}{self._bias}; "
            f"{self.instead}, and its results would be wrong"
        )

    @property
    def instead(self) -> str:
        """What the consumer computes."""
        ends = (end for name, end in _INSTEAD.items() if name in self.left_out)
        return f"KTransformers' {self.method} computes plain SiLU" + "".join(ends)

    @property
    def hint(self) -> str:
        if self.right:
            own = f"{self._own}, as this model's are" if self._own else " and ".join(self.right)
            return f"KTransformers computes it with weights in {own}; {ALLOW}."
        if self.supported:
            return f"No method of KTransformers computes it; {ALLOW}."
        return (
            "Neither KTransformers nor ktconv's kernels compute it. Check hidden_act in "
            "config.json; --allow-activation-mismatch converts it for something else."
        )

    @property
    def consequence(self) -> str:
        """For an output that was converted all the same."""
        if self.supported:
            return "this output is for ktconv's own runtime"
        return "ktconv's kernels do not compute it either"

    @property
    def supported(self) -> bool:
        """Whether ktconv's kernels compute it."""
        return all(layer.activation.supported for layer in self.layers)

    @property
    def _own(self) -> str | None:
        """The right method whose format the layers are in already, if there is one."""
        encodings = {layer.encoding for layer in self.layers}
        names = (name for name in self.right if encodings == {_BY_NAME[name].encoding})
        return next(names, None)

    @property
    def _bias(self) -> str:
        biased = (layer for layer in self.layers if layer.biased)  # of packed ones nothing is known
        matrices = (
            matrix for one in biased for expert in one.experts for matrix in expert.values()
        )
        name = next((matrix.bias.tensor.name for matrix in matrices if matrix.bias), None)
        return f" ({name})" if name else ""


def mismatch_of(
    layers: Iterable[MoELayer], method: str, model_types: Iterable[str]
) -> Mismatch | None:
    """The layers that the method would compute wrongly, if there are any."""
    types = tuple(model_types)
    wrong = [one for one in layers if left_out(one.activation, method, types)]
    if not wrong:
        return None
    activations = {one.activation for one in wrong}
    missing = frozenset().union(*(left_out(one, method, types) for one in activations))
    return Mismatch(wrong, method, missing, right_methods(activations, types))
