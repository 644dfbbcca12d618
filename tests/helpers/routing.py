"""A router in float64, a token at a time: what kt_choose_experts is compared with."""

from __future__ import annotations

import numpy as np

from ktconv import native
from ktconv.system.arrays import F64, I64, Array


def scores(scoring: str, z: F64) -> F64:
    with np.errstate(over="ignore", invalid="ignore"):
        if scoring == "sigmoid":
            return np.asarray(1 / (1 + np.exp(-z)))
        if scoring == "sqrtsoftplus":
            return np.sqrt(np.logaddexp(0, z))
        powers = np.exp(z - z.max())
        return np.asarray(powers / powers.sum())


def best(values: F64, count: int) -> I64:
    """The lowest of equal ones first."""
    return np.argsort(-values, kind="stable")[:count]


def in_best_groups(router: native.Router, choice: F64) -> F64:
    groups = choice.reshape(router.groups, -1)
    marks = np.sort(groups, axis=1)[:, -router.group_score :].sum(axis=1)
    kept = np.isin(np.arange(router.groups), best(marks, router.keep))
    return np.where(kept[:, None], groups, router.masked).reshape(-1)


def weigh(router: native.Router, ids: I64, z: F64, sinks: F64) -> F64:
    chosen = scores(router.scoring, z[ids]) if router.by_logits else scores(router.scoring, z)[ids]
    if router.renormalise:
        summed = np.concatenate((chosen, scores(router.scoring, sinks) if len(sinks) else sinks))
        norm = np.linalg.norm(summed, ord=router.p_norm) + router.epsilon
        chosen = chosen / max(norm, router.least_sum)
    return np.asarray(chosen * router.factor)


def mixed(router: native.Router, z: F64) -> tuple[I64, F64]:
    left, ids, weights = z.copy(), [], []
    assert router.jitter is not None
    for _ in range(router.top_k):
        at = int(left.argmax())
        far = (z[at] - z) / np.maximum(np.abs(z), z[at]) > 2 * router.jitter
        ids.append(at)
        weights.append(scores("softmax", np.where(far, -np.inf, left))[at])
        left[at] = -np.inf
    return np.array(ids), np.array(weights) * router.factor


def routed(
    router: native.Router,
    logits: Array,
    correction: Array | None = None,
    expert_factor: Array | None = None,
    given: Array | None = None,
) -> tuple[I64, F64]:
    """Ids and weights [M, K], of numbers that are finite."""
    found = []
    for token, row in enumerate(logits.astype(np.float64)):
        z, sinks = np.split(row, [len(row) - router.sinks])
        if router.jitter is not None:
            found.append(mixed(router, z))
            continue
        choice = z if router.by_logits else scores(router.scoring, z)
        choice = choice if correction is None else choice + correction
        choice = in_best_groups(router, choice) if router.groups > 1 else choice
        ids = best(choice, router.top_k) if given is None else given[token]
        found.append((ids, weigh(router, ids, z, sinks)))
    ids, weights = (np.array(one) for one in zip(*found, strict=True))
    return ids, weights if expert_factor is None else weights * expert_factor[ids]
