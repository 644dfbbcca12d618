"""Tables in Markdown, put between the marks of a document."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.accuracy.results import Ratio, Row, kl_ratio, select, spread
from benchmarks.accuracy.variants import BASE, VARIANTS

WHOLE = "split"  # calibrated on all that the split leaves
_OUTLIERS = re.compile(r"(.+)-outliers-(\d+)")
ABOUT = ("cpu", "date", "commit")
Cells = Sequence[str]


def write_tables(document: Path, rows: Sequence[Row]) -> None:
    """Replace what is between `<!-- NAME -->` and `<!-- end -->` by the table of this name.

    ValueError where the document has no such marks.
    """
    content = document.read_text(encoding="utf-8")
    tables = {f"model {name}": model_table(rows, name) for name in models(rows)}
    tables |= {
        "outliers": outlier_table(rows),
        "parts": parts_table(rows),
        "calibration": calibration_table(rows),
        "time": time_table(rows),
        "provenance": provenance(rows),
    }
    for name, lines in tables.items():
        marks = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not marks.search(content):
            raise ValueError(f"{document} has no place for the table <!-- {name} -->")
        content = marks.sub(partial(_between_marks, lines), content)
    document.write_text(content, encoding="utf-8")


def _between_marks(lines: Sequence[str], found: re.Match[str]) -> str:
    return found[1] + "".join(f"{line}\n" for line in lines) + found[2]


# ---- which rows ------------------------------------------------------------------------


def models(rows: Iterable[Row]) -> list[str]:
    """Names of models without outliers, in the order in which they were measured."""
    return list(dict.fromkeys(r["model"] for r in rows if not _OUTLIERS.fullmatch(r["model"])))


def with_outliers(rows: Iterable[Row]) -> dict[str, list[str]]:
    """Name of a model -> names of its versions with outliers, one of each seed."""
    rows = list(rows)
    found: dict[str, list[str]] = {name: [] for name in models(rows)}
    for name in sorted({row["model"] for row in rows}):
        if match := _OUTLIERS.fullmatch(name):
            found.setdefault(match[1], []).append(name)
    return {name: versions for name, versions in found.items() if versions}


def usual(rows: Iterable[Row], model: str, numa: int = 1) -> dict[str, Row]:
    """By variant, calibrated on the first half of the text and evaluated on the second."""
    chosen = select(rows, model=model, numa=numa, split="halves")
    found = {row["variant"]: row for row in chosen if row["kind"] in (None, WHOLE)}
    return {key: found[key] for key in VARIANTS if key in found}


def ratio_of(row: Row, rows: Iterable[Row], by: str = "values") -> Ratio | None:
    """KL as a multiple of that of `amax` of the same format with the same parts and text."""
    base = BASE[VARIANTS[row["variant"]].format.key]
    same = {name: row[name] for name in ("model", "numa", "evaluation")}
    found = next(select(rows, variant=base, **same), None)
    if found is None or by not in row:
        return None
    return kl_ratio(row[by]["kl_windows"], found[by]["kl_windows"])


# ---- tables ----------------------------------------------------------------------------


def model_table(rows: Sequence[Row], model: str) -> list[str]:
    """All variants in one part."""
    found = usual(rows, model)
    head = (
        "codes", "weight error", "layer error", "perplexity loss", "mean KL", "× amax", "p99 KL",
        "top-1", "kernels: mean KL", "× amax",
    )  # fmt: skip
    return table(head, [_of_model(row, rows) for row in found.values()])


def _of_model(row: Row, rows: Sequence[Row]) -> Cells:
    values, kernels = row["values"], row.get("kernels")
    errors = values["layer_errors"]
    return (
        VARIANTS[row["variant"]].label,
        f"{row['weights']['all']:.4f}",
        f"{sum(errors) / len(errors):.4f}",
        f"{values['perplexity_converted'] - values['perplexity_source']:+.3f}",
        f"{values['kl_mean']:.5f}",
        multiple(ratio_of(row, rows)),
        f"{values['kl_p99']:.5f}",
        f"{100 * values['top1_agreement']:.2f} %",
        f"{kernels['kl_mean']:.5f}" if kernels else "",
        multiple(ratio_of(row, rows, "kernels")),
    )


def outlier_table(rows: Sequence[Row]) -> list[str]:
    """Mean KL of `amax`, and the multiples of the others: mean over seeds, smallest to largest."""
    groups = with_outliers(rows)
    there = {
        row["variant"] for names in groups.values() for n in names for row in select(rows, model=n)
    }
    body = [
        (VARIANTS[key].label, *(_of_seeds(rows, names, key) for names in groups.values()))
        for key in VARIANTS
        if key in there
    ]
    heads = (f"{name}, {len(names)} seeds" for name, names in groups.items())
    return table(("codes", *heads), body)


def _of_seeds(rows: Sequence[Row], names: Sequence[str], key: str) -> str:
    found = [row for name in names if (row := usual(rows, name).get(key)) is not None]
    if not found:
        return ""
    if key in BASE.values():
        low, mean, high = spread(row["values"]["kl_mean"] for row in found)
        return f"KL {mean:.4f} ({low:.4f} to {high:.4f})"
    return between([r.value for row in found if (r := ratio_of(row, rows)) is not None])


def parts_table(rows: Sequence[Row]) -> list[str]:
    """Mean KL by number of NUMA parts."""
    counts = sorted({row["numa"] for row in rows})
    body = [
        (model, VARIANTS[key].label, *(_kl(usual(rows, model, count).get(key)) for count in counts))
        for model in models(rows)
        for key in VARIANTS
        if sum(key in usual(rows, model, count) for count in counts) > 1
    ]
    return table(
        ("model", "codes", *(f"{count} part{'s' * (count > 1)}" for count in counts)), body
    )


def _kl(row: Row | None) -> str:
    return "" if row is None else f"{row['values']['kl_mean']:.5f}"


def calibration_table(rows: Sequence[Row]) -> list[str]:
    """Multiples of `amax` by calibration text, in one part."""
    body = []
    for model in models(rows):
        for key, variant in VARIANTS.items():
            if variant.needs:
                cells = _of_texts(rows, model, key)
                body.append((model, variant.label, *cells))
    head = "model", "codes", "other half", "swapped", "blocks", "subsets", "another text"
    return table(head, [cells for cells in body if any(cells[2:])])


def _of_texts(rows: Sequence[Row], model: str, key: str) -> Cells:
    chosen = list(select(rows, model=model, variant=key, numa=1))

    def cell(split: str, wanted: Callable[[str], bool]) -> str:
        ratios = [ratio_of(r, rows) for r in chosen if r["split"] == split and wanted(r["kind"])]
        return between([ratio.value for ratio in ratios if ratio is not None])

    return (
        *(cell(split, lambda kind: kind == WHOLE) for split in ("halves", "swapped", "blocks")),
        cell("halves", lambda kind: kind.startswith("subset")),
        cell("halves", lambda kind: kind != WHOLE and not kind.startswith("subset")),
    )


def time_table(rows: Sequence[Row]) -> list[str]:
    """Seconds per GB of source, of the conversion and of recording statistics before it."""
    body = []
    for model in models(rows):
        for key, row in usual(rows, model).items():
            if "seconds" in row:
                size = row["source_bytes"] / 1e9
                recorded = f"{row['statistics_seconds'] / size:.0f}" if VARIANTS[key].needs else ""
                label = VARIANTS[key].label
                body.append((model, label, f"{row['seconds'] / size:.1f}", recorded))
    return table(("model", "codes", "conversion, s/GB", "ktconv stats, s/GB"), body)


def provenance(rows: Sequence[Row]) -> list[str]:
    """Where and when the rows were measured, and on which texts."""
    cpus, dates, commits = (sorted({row[name] for row in rows}) for name in ABOUT)
    evaluated: dict[str, list[str]] = {}
    for model in models(rows):
        for text in sorted({r["evaluation"] for r in select(rows, model=model, split="halves")}):
            evaluated.setdefault(text, []).append(model)
    texts = "; ".join(f"{text} of {', '.join(names)}" for text, names in evaluated.items())
    return [
        f"Measured {' and '.join(dates)} on two cores of an {' and '.join(cpus)}, at commits "
        f"{', '.join(commits)}. Evaluation texts, by range of bytes: {texts}."
    ]


# ---- cells -----------------------------------------------------------------------------


def table(head: Cells, body: Iterable[Cells]) -> list[str]:
    """Lines of a table in Markdown."""
    rule = ("---",) + ("---:",) * (len(head) - 1)
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *body)]


def multiple(ratio: Ratio | None) -> str:
    """The ratio and its standard error."""
    return "" if ratio is None else f"{ratio.value:.2f} ± {ratio.error:.2f}"


def between(values: Sequence[float]) -> str:
    """One value, or the mean of several with the smallest and the largest."""
    if not values:
        return ""
    low, mean, high = spread(values)
    return f"{mean:.2f}" if len(values) == 1 else f"{mean:.2f} ({low:.2f} to {high:.2f})"
