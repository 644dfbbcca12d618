"""The fields of a row in the table of families. Imports neither torch nor numpy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import asdict, replace

Projection = Literal["gate", "up", "down"]
PROJECTIONS: tuple[Projection, ...] = ("gate", "up", "down")
Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]
SCORINGS: tuple[Scoring, ...] = ("softmax", "sigmoid", "sqrtsoftplus")
UNGATED: tuple[Projection, ...] = ("up", "down")  # of experts without a gate
GroupScore = Literal["max", "top2"]
GROUP_SCORES: tuple[GroupScore, ...] = ("max", "top2")  # of the best one, of the best two


class Matrices(Struct, frozen=True):
    """Spellings of an expert's matrices, of which some families have no gate; `gate_up`: of the
    tensor with gate and up together, of one expert or of all experts of a layer (next to one called
    `down`), if the family has such a layout. `gate` and `up` are empty in a family that has no
    other."""

    gate: str
    up: str
    down: str
    gate_up: str | None = None
    # All experts' rows in three tensors of two axes, [E * I, H] each, that of down turned (DBRX).
    rows_of_all: bool = False

    def of(self, projection: Projection) -> str:
        return {"gate": self.gate, "up": self.up, "down": self.down}[projection]

    @property
    def projections(self) -> Mapping[str, Projection]:
        """Spelling -> what it means."""
        return {name: projection for projection in PROJECTIONS if (name := self.of(projection))}


USUAL = Matrices("gate_proj", "up_proj", "down_proj", "gate_up_proj")
NUMBERED_W = Matrices("w1", "w3", "w2")
INPUT_OUTPUT = Matrices("", "", "output_linear", "input_linear")


class RouterSpec(Struct, frozen=True):
    """Routing of one layer; the order of the fields is the order of the steps.

    Scores choose experts: the best `topk_group` of `n_group` groups first where there are
    several, then the best `top_k` experts in them. `correction` is added to the scores for that
    choice only; the weights are the chosen experts' scores without it.
    """

    scoring: Scoring  # sqrtsoftplus: sqrt(log(1 + exp(z)))
    top_k: int = 0
    # what the gate computes
    input_norm: float | None = None  # x / rms(x) · a stored scale / sqrt(H); this is rms's epsilon
    bias: bool = False  # the gate is a linear layer with a bias
    logit_scale: float = 1.0  # logits are multiplied by it
    softcap: float = 0.0  # logits become c · tanh(z / c); 0: they do not
    # which experts are chosen
    by_token: bool = False  # those of a table with a row for each token of the vocabulary
    by_logits: bool = False  # logits choose, and scores are computed of the chosen logits alone
    correction: bool = False
    n_group: int = 1
    topk_group: int = 1
    group_score: GroupScore = "top2"  # of a group: its best expert's, or the sum of its best two
    masked: float = -math.inf  # what stands for the scores of groups that are not chosen
    jitter: float | None = None  # sparsemixer's: its two experts are chosen one after the other
    identity_experts: int = 0  # the last of the experts that can be chosen return their input
    # what their weights are
    sinks: int = 0  # last rows of the gate that are no experts, whose scores belong to the sum
    renormalise: bool = True  # weights are divided by their sum
    p_norm: float = 1.0  # by their p-norm, more precisely
    epsilon: float = 1e-20  # that is added to the sum
    least_sum: float = 0.0
    routed_scaling_factor: float = 1.0
    stored_scale: bool = False  # a further factor [1] of all weights
    expert_scale: bool = False  # a further factor [E], one for each expert
    weight_on_input: bool = False  # the weight multiplies the expert's input, not its output


class Router(Struct, frozen=True):
    """The fixed or default spec, and which settings of config.json change it."""

    spec: RouterSpec
    reads: frozenset[str] = frozenset()  # keys of routers.SETTINGS; groups, hash layers
    methods: tuple[str, ...] | None = None  # values of topk_method; None: nothing is checked
    never: tuple[str, ...] = ()  # settings that must not be switched on
    by_method: Mapping[str, Router] = field(default_factory=dict)  # for other values of topk_method


# What kernels compute of the gate's outputs, and of up's where there is no gate.
GATED_FUNCTIONS = ("silu", "gelu", "gelu_tanh")
UNGATED_FUNCTIONS = ("relu2", "relu", "gelu", "gelu_tanh")


class ExpertActivation(Struct, frozen=True):
    """Computation of an expert around its products: g are the outputs of gate, u those of up, s is
    the logistic function, f what `function` names, and h meets the down projection.

        silu, gelu, gelu_tanh    h = f(g) * u, f(g) = g * s(alpha * g), or GELU by erf or tanh
        without a gate           h = f(u), also with relu: max(u, 0), and relu2: max(u, 0)^2

    In this order: biases are added to g and u; `limit` bounds g from above and u on both sides
    (`limit_after`: f(g) instead of g); caps replace the factor g by gate_cap * tanh(g / gate_cap),
    u by up_cap * tanh(u / up_cap); with an `alpha` u is u + 1.
    """

    function: str = "silu"  # of those above, or a name of config.json's that nothing computes
    gated: bool = True  # whether experts have a gate projection
    alpha: float | None = None
    limit: float = math.inf
    limit_after: bool = False
    gate_cap: float = math.inf
    up_cap: float = math.inf
    biases: bool = False
    weight_on_input: bool = False  # the router's weight multiplies the input, not the output
    post_norm: bool = False  # each expert's output is normalised (RMS) before its weight

    @property
    def capped(self) -> bool:
        return math.isfinite(self.gate_cap) or math.isfinite(self.up_cap)

    @property
    def limited(self) -> bool:
        return math.isfinite(self.limit)

    @property
    def supported(self) -> bool:
        """Whether ktconv's kernels have it: one of the functions above, and with SiLU at most one
        of alpha, caps and a limit after it."""
        factors = (self.alpha is not None) + self.capped + self.limit_after
        functions = GATED_FUNCTIONS if self.gated else UNGATED_FUNCTIONS
        return self.function in functions and factors <= (self.function == "silu")

    def __str__(self) -> str:
        """Description in words: SiLU, gate and up clamped to 10."""
        return ", ".join([self._function, *self._bounds, *self._around])

    @property
    def _function(self) -> str:
        if self.alpha is not None:
            return f"gate * sigmoid({self.alpha:g} * gate) * (up + 1)"
        words = {
            "silu": "SiLU",
            "gelu": "GELU",
            "gelu_tanh": "GELU (tanh)",
            "relu": "ReLU",
            "relu2": "squared ReLU",
        }
        return words.get(self.function, self.function) + ("" if self.gated else " without a gate")

    @property
    def _bounds(self) -> Iterator[str]:
        if self.limited and self.limit_after:
            yield f"its result and up clamped to {self.limit:g}"
        elif self.limited:
            yield f"{'gate and up' if self.gated else 'up'} clamped to {self.limit:g}"
        for name, cap in (("gate", self.gate_cap), ("up", self.up_cap)):
            if math.isfinite(cap):
                yield f"{name} within {cap:g} by tanh"

    @property
    def _around(self) -> Iterator[str]:
        if self.biases:
            yield "with biases"
        if self.weight_on_input:
            yield "of inputs times the router's weight"
        if self.post_norm:
            yield "RMS norm of each expert's output"

    def as_record(self) -> dict[str, object]:
        """Record for JSON: in words, and every number; what is not there is left out."""
        usual = ExpertActivation()
        own = {name: one for name, one in asdict(self).items() if one != getattr(usual, name)}
        return {"description": str(self), "function": self.function} | own


PLAIN = ExpertActivation()  # SiLU of the gate times up, and nothing else


def activation_of_record(record: object) -> ExpertActivation | None:
    """The inverse of `as_record`; None for anything that is none."""
    if not isinstance(record, dict):
        return None
    usual = ExpertActivation(alpha=0.0)
    values = {name: record[name] for name in usual.__struct_fields__ if name in record}
    if record.get("function") == "relu2":
        values.setdefault("gated", False)  # which older records do not say
    if any(type(value) is not type(getattr(usual, name)) for name, value in values.items()):
        return None
    return ExpertActivation(**values)


class Released(Struct, frozen=True):
    """Released checkpoints of a family, for documentation; no conversion depends on it."""

    type: str  # model_type
    models: str
    layout: str = "N"  # code of a layout in docs/families.md
    encodings: str = "bf16"  # names of ktconv.source.encodings
    prefix: str = "model."  # of the list of layers
    shared: bool = False  # whether there is a shared expert
    activation: ExpertActivation | None = None  # None: the row's
    where: str = ""  # in which layers the activation is that
    mxfp8: bool = (
        False  # whether blocks of fp8-block are 1 x 32, with scales that are powers of two
    )


class Family(Struct, frozen=True):
    """A row of the table; what most families share is the default.

    Names are parts of tensors' names: in PREFIX.layers.3.mlp.experts.5.gate_proj.weight `layers` is
    "layers", `block` "mlp", `experts` "experts", `matrices.gate` "gate_proj". Without a `block` the
    experts are in the layer itself; without `experts` the block contains the tensors of all its
    experts directly; without both the layer does, as in GGUF files. `router`, `correction` and
    `shared` are names within the block, `norm` is one within the layer. `beside` are tensors under
    the experts' name that belong to none of them.

    Tensors are found by the names of all rows, whatever model_type a checkpoint has: one family
    may be stored in several ways, and its fine-tunes under other types.
    """

    types: tuple[str, ...]  # model_type, without the "_text" of a multimodal model's section

    # names of tensors
    layers: str = "layers"
    mtp: str = "mtp"  # what the names of layers for multi-token prediction have in front of them
    mtp_inside: str = ""  # what is between such a layer and its block
    block: str = "mlp"
    experts: str = "experts"
    matrices: Matrices = USUAL
    # whose expert's number comes last: ffn_gate.5.weight, down_projs.5.weight
    before_number: Matrices | None = None
    expert_biases: bool = False
    # Of the outputs of `matrices.gate_up` the even ones are gate, the odd ones up.
    interleaved: bool = False
    beside: tuple[str, ...] = ()
    unfused: Matrices = USUAL  # what engines call the matrices of experts that are stored together
    # Names of transformers' modules where they are not the checkpoint's: patterns that are replaced
    # one after the other in a module's name; "a|b" makes two names of one.
    modules: tuple[tuple[str, str], ...] = ()
    no_gpu: bool = False  # no engine reads quantized experts of it one by one
    fused_only: bool = False  # neither does transformers (5.17), or it does not know the family
    latent: tuple[str, ...] = ()  # projections in the block into and out of the experts' width
    tower: str = ""  # the first word of the language model's layers, where others have experts too
    # of one list of experts the first are the text model's, the others the vision model's
    modalities: bool = False
    other_experts: str = ""  # a block whose experts are no MLPs
    router: str = "gate"
    router_is_transposed: bool = False  # stored as [H, E]
    router_bias: str | None = None
    router_input_scale: str | None = None
    router_scale: str | None = None
    router_expert_scale: str | None = None
    router_table: str | None = None
    correction: str = "gate.e_score_correction_bias"
    layer_correction: str | None = None  # within the layer, not within the block
    correction_rows: int = 1  # of which the first is the language model's
    shared: str = "shared_experts"
    shared_matrices: Matrices = USUAL
    shared_gate: str = "shared_expert_gate"
    norm: str = "post_attention_layernorm"
    norm_less_one: bool = False  # what is stored of a norm is its weight less 1; not in GGUF files

    # what is computed
    activation: ExpertActivation = PLAIN  # where config.json does not say otherwise
    post_norm: str = ""  # beside the experts' tensors: an RMS norm of each expert's output
    shared_limit: bool = True  # the activation's limit is that of shared experts, too
    routing: Router | str | None = None  # a text: why not; None: by config.json's keys alone

    released: tuple[Released, ...] = ()

    # further names of settings in config.json, by the keys of table.KEYS
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def gate_up(self) -> tuple[str, ...]:
        """The family's own names for gate and up together."""
        spelt = (self.matrices, self.before_number)
        return tuple(one.gate_up for one in spelt if one is not None and one.gate_up)

    def activation_of(self, released: Released) -> ExpertActivation:
        """Activation of the experts with the released config.json."""
        on_input = isinstance(self.routing, Router) and self.routing.spec.weight_on_input
        return replace(
            released.activation or self.activation,
            biases=self.expert_biases,
            post_norm=bool(self.post_norm),
            weight_on_input=on_input,
        )
