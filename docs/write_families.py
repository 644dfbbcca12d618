"""Writes docs/families.md from the table of families: python docs/write_families.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ktconv.families.family import Family, Released, Router
from ktconv.families.table import FAMILIES
from ktconv.targets.consumers import METHODS, right_methods

PAGE = Path(__file__).with_name("families.md")

# By code: the names after those of the experts, and what the tensors are.
LAYOUTS = {
    "N": (".E.{gate_proj,up_proj,down_proj}.weight", "a tensor for each matrix of each expert"),
    "W": (".E.{w1,w3,w2}.weight", "the same; w1 is gate, w3 up, w2 down"),
    "V": (".E.{fc1,fc3,fc2}.weight", "the same; fc1 is gate, fc3 up, fc2 down"),
    "U": (".E.{up_proj,down_proj}.weight", "as N, without a gate"),
    "F1": (".{gate_up_proj,down_proj}", "`[E, 2I, H]` with gate's rows first, and `[E, H, I]`"),
    "F2": (".{gate_up_proj,down_proj}", "`[E, H, 2I]` with gate's columns first, and `[E, I, H]`"),
    "F3": (".{gate_up_proj,down_proj}", "as F2, but even columns are gate and odd ones up"),
    "F4": (".{gate_up_proj,down_proj}_{blocks,scales}",
           "`[E, 2I, H/32, 16]` and `[E, H, I/32, 16]`; even rows are gate and odd ones up"),
    "F5": (".{w13_weight,w2_weight}", "as F1, but even rows are gate and odd ones up"),
    "F6": (".{gate_proj,up_proj,down_proj}.weight", "`[E, I, H]` twice and `[E, H, I]`"),
    "F7": (".{input_linear,output_linear}.weight", "as F1"),
    "F8": (".{fc1,fc2}.weight", "as F2"),
    "F9": (".mlp.{w1,v1,w2}", "gate, up and the transposed down, `[E * I, H]` each"),
    "F11": (".{up_proj,down_proj}", "`[E, I, H]` and `[E, H, I]`, without a gate"),
    "F12": (".{w13_weight,w2_weight}", "as F1, under other names"),
    "F13": (".mlp.{w1,w2}", "up and the transposed down, `[E * I, H]` each, without a gate"),
    "F14": (".{fc,proj}", "as F1"),
}  # fmt: skip

HEAD = """\
# Model families

Written by `python docs/write_families.py` from the table of families in
`src/ktconv/families/rows.py`; a test compares them. Fine-tunes have the names of their family.
Experts are found by the names of their tensors, so that other releases and encodings of a family
are read as well. A family that is not listed can be [described in a map](maps.md).

- *Tensors*: `L` is a layer, `E` an expert. Other prefixes than the one shown are read too.
- *Layout*, *router*: see [below](#layouts).
- *Encodings*: those of released checkpoints, by the names that `ktconv inspect` has for them.
- *INT4, INT8*: whether KTransformers computes experts in the formats of `ktconv quantize-cpu` as
  the model does. Where it does not, `quantize-cpu` refuses without `--allow-activation-mismatch`.
  ktconv's own runtime computes the experts of all these families.
- *KTransformers*: other methods of KTransformers 0.7.2 that compute the model's activation.
  [which-method.md](which-method.md) has commands for them, sizes, and other engines.
"""

ROUTERS = """\
## Routers

What `verify --level layers` and `stats` compute. *z* are the router's outputs, the logits; "if
config.json says so" and factors are settings such as `norm_topk_prob` and `routed_scaling_factor`.
"""

LAYOUT_HEAD = """\
## Layouts

`[E, I, H]` are the numbers of experts, of the inner values and of the inputs of one. Files saved by
mlx-lm without quantization have F6 in `switch_mlp`. GGUF files have names of their own for all
models: `blk.L.ffn_{gate,up,down}_exps.weight`.
"""

TAIL = """\
## Not settled

For these no released file could be looked at, or what is known contradicts itself.

- msModelSlim W4A8: the order of the two rows in a byte. Refused.
- Grok-2: its files are parts for eight GPUs, in which tensors have the same names. Refused.
- Qwen3-VL FP8: whether experts are numbered, or stacked as in the BF16 release. Both are read.
- Llama-4 FP8: numbered or stacked experts, and the names of scales. The BF16 release is read.
- Kolibri-1: what contains its experts. `mlp` is read, as transformers writes it.
- Hy4 MXFP8: names are known from one excerpt.
- Inkling: whether scales are stored as U8 or F8_E8M0. Both are read.
- Inkling-2-Mini in NVFP4: the dtypes of `…_amax` and `…_outer_scale_denominator`, whose
  quotient is the second scale. Refused.
- Mistral-Small-4: what its static activation scales are for. They are left out.
- KTransformers' MXFP4: how scales that are no power of two are rounded, with and without AMX.
"""


def page() -> str:
    """The contents of docs/families.md."""
    routers: dict[str, str] = {}  # words -> code
    families = _table(_rows(routers), _COLUMNS)
    codes = ((code, words) for words, code in routers.items())
    parts = (
        HEAD, families, LAYOUT_HEAD, _table(_layouts(), _LAYOUT),
        ROUTERS, _table(codes, ("router", "rule")), TAIL,
    )  # fmt: skip
    return "\n".join(parts)


_COLUMNS = (
    "models", "`model_type`", "tensors", "layout", "encodings", "router", "activation",
    "shared expert", "INT4, INT8", "KTransformers",
)  # fmt: skip
_LAYOUT = ("layout", "names", "tensors")


def _table(rows: Iterable[tuple[str, ...]], columns: tuple[str, ...]) -> str:
    lines = (columns, ("---",) * len(columns), *rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _layouts() -> Iterator[tuple[str, ...]]:
    for code, (names, meaning) in LAYOUTS.items():
        yield code, f"`{names}`", meaning


def _rows(routers: dict[str, str]) -> Iterator[tuple[str, ...]]:
    for row in FAMILIES.rows:
        for released in row.released:
            activation = row.activation_of(released)
            right = right_methods([activation], [released.type])
            router = routers.setdefault(router_in_words(row.routing), f"R{len(routers) + 1}")
            others = [name for name in right if name not in ("AMXINT4", "AMXINT8")]
            yield (
                released.models,
                f"`{released.type}`",
                f"`{tensors_of(row, released)}`",
                released.layout,
                ", ".join(released.encodings.split()),
                router,
                str(activation) + (f" ({released.where})" if released.where else ""),
                f"`{row.shared}`" if released.shared else "",
                "yes" if "AMXINT4" in right else "no",
                "all" if len(right) == len(METHODS) else ", ".join(others) or "none",
            )


def tensors_of(row: Family, released: Released) -> str:
    """Names of the experts' tensors."""
    words = [f"{row.layers}.L", row.block, row.experts]
    return released.prefix + ".".join(filter(None, words)) + LAYOUTS[released.layout][0]


_SCORES = {"softmax": "softmax", "sigmoid": "sigmoid", "sqrtsoftplus": "sqrt(softplus)"}


def router_in_words(router: Router | str | None) -> str:
    """Describe how a layer chooses experts and their weights."""
    if not isinstance(router, Router):
        return f"not computed: it {router}" if router else "by config.json"
    return "; ".join((*_choice(router), *_weights(router)))


def _choice(router: Router) -> Iterator[str]:
    spec, reads = router.spec, router.reads
    score = f"{_SCORES[spec.scoring]} of z"
    if spec.input_norm is not None:
        yield "the input is normalised (RMS) and scaled"
    if "logit softcap" in reads:
        yield "z is capped where config.json says so"
    if "hash layers" in reads:
        yield "first layers: experts by token"
    if spec.jitter is not None:
        yield "top 2 one after the other (sparsemixer)"
        return
    if "groups" in reads:
        best = "best expert" if spec.group_score == "max" else "two best experts"
        yield f"if there are groups, the best by their {best}"
    by = "z" if spec.by_logits else score
    yield f"top-k of {by}{' + correction bias' if spec.correction else ''}"
    if spec.identity_experts:
        yield "some experts return their input"


def _weights(router: Router) -> Iterator[str]:
    spec, reads = router.spec, router.reads
    if spec.by_logits:
        yield f"weights are {_SCORES[spec.scoring]} of the chosen z"
    if spec.sinks:
        yield "weights divided by their sum with those of shared experts"
    elif "p-norm" in reads:
        yield "weights divided by their p-norm"
    elif "renormalise" in reads:
        yield "weights divided by their sum if config.json says so"
    elif spec.renormalise:
        yield "weights divided by their sum"
    if "scale" in reads or spec.routed_scaling_factor != 1:
        yield "times a factor"
    if spec.expert_scale:
        yield "times a factor of each expert"
    if spec.weight_on_input:
        yield "they multiply the input"


if __name__ == "__main__":
    PAGE.write_text(page())
