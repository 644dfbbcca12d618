"""`--estimate`: progress while rows are sampled, then tables of predicted errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ktconv.cli.exits import NOTHING_WRITTEN, interruptible
from ktconv.system.text import table_lines
from ktconv.system.units import counted, format_ranges, format_size

if TYPE_CHECKING:
    from ktconv.quantize.packed.run import Preflight

Facts = Mapping[str, Any]

FEW_LAYERS = 16  # have a line each
ALIKE = 0.03  # of an error: neighbouring layers of a deep model that differ by less share a line,
MOST_LINES = 24  # or by more, if there would be more lines than these
_COLUMNS = range(12)  # at most; all are aligned to the left
BETTER = 0.98  # times an error: what is worth naming


def estimated(preflight: Preflight) -> dict[str, Any]:
    """The JSON of an estimate, with progress on stderr."""
    from ktconv.cli.options import progress_over
    from ktconv.quantize.estimate.run import Estimation

    with interruptible(lambda: NOTHING_WRITTEN):
        estimation = Estimation(preflight)
        with progress_over(estimation.stages) as observer:
            facts = estimation.run(observer).facts()
    return facts | {"advice": advice(facts)}


def estimate_lines(facts: Facts) -> Iterator[str]:
    """The lines of an estimate: the sample, errors by candidate and by layer, and the advice."""
    chosen = chosen_of(facts)
    yield ""
    yield f"Estimated from {_sampled(facts)}."
    if missing := facts["layers_not_sampled"]:
        yield f"Not sampled for lack of time: layers {format_ranges(missing)}."
    for method, why in facts["left_out"].items():
        yield f"--method {method} cannot represent this model: {why}."
    for sentence in facts["not_estimated"]:
        yield f"Not estimated: {sentence}."
    yield "Relative RMS error of the weights, mean over the layers (> as this command says):"
    yield from table_lines(_candidate_rows(facts), left=_COLUMNS)
    yield f"{_name(chosen)}, by layer:"
    yield from table_lines(_layer_rows(chosen), left=_COLUMNS)
    yield facts["advice"]


def _sampled(facts: Facts) -> str:
    """8 of 256 experts of each layer, 64-96 rows of each matrix (0.9 GB in 12.1 s)."""
    left = facts["matrices_planned"] - facts["matrices_sampled"]
    every = (
        f"; no time for {left} of {counted(facts['matrices_planned'], 'matrix')}" if left else ""
    )
    return (
        f"{_between(facts['experts_sampled'])} of {_between(facts['experts'], 'expert')} of each "
        f"layer, {_between(facts['rows_sampled'], 'row')} of each matrix "
        f"({format_size(facts['bytes_read'])} in {facts['seconds']:.1f} s{every})"
    )


def _between(ends: Sequence[int], word: str = "") -> str:
    least, most = ends
    count = counted(most, word) if word else f"{most}"
    return count if least == most else f"{least}-{count}"


# ---- tables ----------------------------------------------------------------------------


def _candidate_rows(facts: Facts) -> list[list[str]]:
    projections = list(facts["candidates"][0]["by_projection"])
    weighted = ["weighted"] if facts["weighted"] else []
    rows = [["", "method", "scale", *projections, "all", *weighted, "worst", "experts"]]
    for one in facts["candidates"]:
        means = [_error(one["by_projection"][proj]) for proj in projections]
        worst = one["worst"]
        place = f"{_error(worst)} (layer {worst['layer']} {worst['projection']})"
        by_importance = [f"{one['weighted_relative_rms_error']:.4f}"] if weighted else []
        mark = ">" if one["chosen"] else ""
        size = format_size(one["expert_bytes"])
        columns = [one["method"], _rule(one), *means, _all(one), *by_importance, place, size]
        rows.append([mark, *columns])
    return rows


def _all(one: Facts) -> str:
    interval = f"{2 * (one['standard_error'] or 0):.4f}"
    return _error(one) if not float(interval) else f"{_error(one)} +-{interval}"


def _error(numbers: Facts) -> str:
    return f"{numbers['relative_rms_error']:.4f}"


def _layer_rows(candidate: Facts) -> list[list[str]]:
    projections = list(candidate["by_projection"])
    rows = [["layer", *projections]]
    for group in _groups(candidate["layers"], projections):
        means = []
        for proj in projections:
            errors = [one[proj]["relative_rms_error"] for one in group if proj in one]
            means.append(f"{sum(errors) / len(errors):.4f}" if errors else "-")
        rows.append([format_ranges([one["layer"] for one in group]), *means])
    return rows


def _groups(layers: Sequence[Facts], projections: Sequence[str]) -> list[list[Facts]]:
    """Neighbours with about the same errors; in shallow models every layer alone."""
    groups = [[one] for one in layers]
    share = ALIKE
    while len(groups) > (MOST_LINES if share > ALIKE else FEW_LAYERS):
        groups = _joined(layers, projections, share)
        share *= 2
    return groups


def _joined(layers: Sequence[Facts], projections: Sequence[str], share: float) -> list[list[Facts]]:
    """Neighbours whose errors differ from those of the first by no more than a share of them."""
    groups: list[list[Facts]] = []
    for one in layers:
        if groups and _differ(groups[-1][0], one, projections) <= share:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _differ(first: Facts, other: Facts, projections: Sequence[str]) -> float:
    """The largest difference, by the errors of `first`; projections without a sample are left
    out."""
    pairs = [
        (first[proj]["relative_rms_error"], other[proj]["relative_rms_error"])
        for proj in projections
        if proj in first and proj in other
    ]
    return max((abs(a - b) / a if a else float(b > 0) for a, b in pairs), default=0.0)


# ---- advice ----------------------------------------------------------------------------


def chosen_of(facts: Facts) -> Facts:
    """The candidate that the options of the command say."""
    found: Facts = next(one for one in facts["candidates"] if one["chosen"])
    return found


def _rule(one: Facts) -> str:
    return f"{one['scale']}, weighted" if one["weighted"] else str(one["scale"])


def _name(one: Facts) -> str:
    return f"{one['method']} {_rule(one)}"


def _weight_of(one: Facts) -> float:
    """The error by which candidates are compared: weighted by inputs, where these are known."""
    error: float = one.get("weighted_relative_rms_error", one["relative_rms_error"])
    return error


def advice(facts: Facts) -> str:
    """Sentences about the rule that the errors favour, and what other methods cost."""
    chosen = chosen_of(facts)
    if not _weight_of(chosen):
        return "The sampled weights are kept without any error."
    same: list[Facts] = []
    others: dict[str, Facts] = {}
    for one in facts["candidates"]:
        if one["method"] == chosen["method"]:
            same.append(one)
        elif one["method"] not in others or _weight_of(one) < _weight_of(others[one["method"]]):
            others[one["method"]] = one
    best = min(same, key=_weight_of)
    if _weight_of(best) >= BETTER * _weight_of(chosen):
        best = chosen
    sentences = [f"Advice: {_of_rules(best, same[0])}{'' if best is chosen else _change(chosen)}."]
    sentences += [_of_method(other, best) for other in others.values()]
    return " ".join(sentences)


def _of_rules(best: Facts, amax: Facts) -> str:
    ratio = _weight_of(best) / _weight_of(amax) if _weight_of(amax) else 1.0
    if best is amax or ratio >= BETTER:
        return f"no rule has a smaller error than {_name(best)}"
    return f"{_name(best)} has {ratio:.2f} times the error of amax, in the same bytes"


def _change(chosen: Facts) -> str:
    """The change of options with which a command gets the search, not `chosen`."""
    return ": omit --compat" if chosen["compat"] else ": use --scale search"


def _of_method(other: Facts, best: Facts) -> str:
    ratio = _weight_of(other) / _weight_of(best)
    size = other["expert_bytes"] / best["expert_bytes"]
    return (
        f"--method {other['method']} has {ratio:.2f} times that error in {size:.2f} times the "
        f"bytes ({format_size(other['expert_bytes'])}, not {format_size(best['expert_bytes'])})."
    )
