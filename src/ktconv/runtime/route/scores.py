"""Routers by the kind of their scores, and by a spec."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from msgspec import Struct

from ktconv.errors import CheckpointError, UsageError
from ktconv.families.family import GroupScore, RouterSpec, Scoring
from ktconv.families.routing import Stored, choose
from ktconv.native import Pool
from ktconv.runtime.arrays import INTEGERS, kind_of, operand
from ktconv.runtime.compiled import uncompiled
from ktconv.system.arrays import F32, I64
from ktconv.system.numbers import real, whole


@uncompiled
def by_spec(
    spec: RouterSpec,
    logits: Any,
    *,
    bias: Any = None,
    scale: Any = None,
    expert_scale: Any = None,
    table: Any = None,
    tokens: Any = None,
    pool: Pool | None = None,
) -> tuple[Any, Any]:
    """Weights float32 and ids int64, both [M, K], as the router of a family has them.

    `spec`: `ktconv.families.routers.router_of(config, layer)`. `logits` [M, E + sinks]: what the
    router's matrix gives, with its own bias, scale and softcap. What `spec` has, and nothing else:
    `bias` [E], the correction bias; `scale` [1]; `expert_scale` [E]; `table` [V, K] of integers,
    the experts of each token of the vocabulary, and `tokens` [M]. `pool`: its threads work, else
    the calling one. Raises UsageError for arguments that do not fit one another.
    """
    count, columns = rows_of("logits", logits, "tokens, experts")
    experts = columns - spec.sinks
    stored = Stored(
        correction=None if bias is None else floats("bias", bias, (experts,)),
        scale=None if scale is None else floats("scale", scale, (1,)),
        expert_scale=None
        if expert_scale is None
        else floats("expert_scale", expert_scale, (experts,)),
        table=None
        if table is None
        else integers("table", table, (rows_of("table", table, "vocabulary, k")[0], spec.top_k)),
    )
    given = None if tokens is None else integers("tokens", tokens, (count,))
    values = floats("logits", logits, (count, columns))
    try:
        ids, weights = choose(spec, values, stored, given, pool)
    except CheckpointError as error:  # here it is the arguments that do not fit
        raise UsageError(str(error), error.hint) from error
    kind = kind_of("logits", logits)
    return kind.of_numpy(weights), kind.of_numpy(ids)


class ScoredRouter(Struct, frozen=True):
    """A router with scores of one kind: `softmax`, `sigmoid` and `sqrtsoftplus` here."""

    scoring: Scoring

    @uncompiled
    def __call__(
        self,
        logits: Any,
        k: int,
        *,
        bias: Any = None,
        groups: int = 1,
        keep: int = 1,
        group_score: GroupScore | None = None,
        by_logits: bool = False,
        renormalise: bool = True,
        epsilon: float = 1e-20,
        scale: float = 1.0,
        table: Any = None,
        tokens: Any = None,
        pool: Pool | None = None,
    ) -> tuple[Any, Any]:
        """Weights float32 and ids int64, both [M, k], of logits [M, E].

        bias         [E], added to the scores for the choice alone, not to the weights
        groups, keep experts are chosen in the best `keep` of `groups` groups of neighbours, and
                     nowhere else
        group_score  of a group: "max", its best expert's, or "top2", the sum of its best two;
                     default: "top2" with a bias, "max" without
        by_logits    logits choose, and scores are computed of the chosen ones alone
        renormalise  weights are divided by their sum plus `epsilon`; weights 0 for a divisor of 0
        scale        multiplies the weights at last, once
        table        [V, k] integers instead of a choice: the experts of each token of the
                     vocabulary, for `tokens` [M]
        pool         its threads work, else the calling one

        Raises UsageError for arguments that do not fit one another.
        """
        spec = _spec(
            self.scoring,
            whole("k", k, 1),
            by_token=table is not None,
            by_logits=bool(by_logits),
            correction=bias is not None,
            n_group=whole("groups", groups, 1),
            topk_group=whole("keep", keep, 1),
            group_score=group_score or ("max" if bias is None else "top2"),
            renormalise=bool(renormalise),
            epsilon=real("epsilon", epsilon),
            routed_scaling_factor=real("scale", scale),
        )
        if table is None and tokens is not None:
            raise UsageError("tokens are for a table of tokens, which is not given")
        return by_spec(spec, logits, bias=bias, table=table, tokens=tokens, pool=pool)


softmax = ScoredRouter("softmax")
sigmoid = ScoredRouter("sigmoid")
sqrtsoftplus = ScoredRouter("sqrtsoftplus")


def grouped(
    logits: Any,
    k: int,
    groups: int,
    keep: int,
    *,
    scoring: Scoring = "sigmoid",
    bias: Any = None,
    group_score: GroupScore | None = None,
    renormalise: bool = True,
    scale: float = 1.0,
    pool: Pool | None = None,
) -> tuple[Any, Any]:
    """The router of DeepSeek-V2 (softmax) and V3 (sigmoid and bias): see `ScoredRouter`.

    Groups that do not divide the experts are refused: no other router takes over.
    """
    return ScoredRouter(scoring)(
        logits,
        k,
        bias=bias,
        groups=groups,
        keep=keep,
        group_score=group_score,
        renormalise=renormalise,
        scale=scale,
        pool=pool,
    )


_spec = lru_cache(maxsize=64)(RouterSpec)  # making one takes longer than routing a token


def floats(name: str, array: Any, shape: tuple[int, ...]) -> F32:
    """Floats in place if they are float32 and contiguous; bf16 and fp16 are widened."""
    owner = operand(name, array, shape, ("fp32",), ("bf16", "fp16")).owner
    values: F32 = kind_of(name, owner).numpy(owner)
    return values


def integers(name: str, array: Any, shape: tuple[int, ...]) -> I64:
    owner = operand(name, array, shape, INTEGERS[-1:], INTEGERS[:-1]).owner
    values: I64 = kind_of(name, owner).numpy(owner)
    return values


def rows_of(name: str, array: Any, what: str) -> tuple[int, int]:
    """The shape of a matrix; UsageError for anything else."""
    kind_of(name, array)
    if array.ndim != 2:
        raise UsageError(f"{name} must be [{what}], got {list(array.shape)}")
    rows, cols = array.shape
    return int(rows), int(cols)
