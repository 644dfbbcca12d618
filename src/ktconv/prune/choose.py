"""Chooses the experts that stay: from scores, a number and the rules of routers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, field

from ktconv.errors import UsageError
from ktconv.families.family import RouterSpec
from ktconv.source import Checkpoint, MoELayer
from ktconv.source.pruning.kept import Kept, Pruning
from ktconv.source.pruning.routers import Routers
from ktconv.source.reading.matrices import experts_bytes
from ktconv.stats.router_sample import notes_on_origin
from ktconv.stats.scores import LayerScores, Scores, read_scores
from ktconv.system.arrays import F64
from ktconv.system.text import path_text, table_lines
from ktconv.system.units import counted, format_ranges, format_size, listed
from ktconv.targets.consumers import UNEVEN

LEAST_TOKENS = 100  # of an expert, on average in each layer: below, scores are mostly chance
_ENTRY_BYTES, _PARTS = 192, 3  # of a tensor in a header; tensors of a matrix: more than most have
ENGINES = ("ktconv",)  # which take a number of experts for each layer
_RECORD = "record scores on a longer text: ktconv stats MODEL --text FILE --max-tokens N --scores"


class Choice(Struct, frozen=True):
    """Number of experts that stay, and what they are chosen by. One of `keep`, `ratio` and
    `target_size` says how many."""

    scores: Path | None = None
    measure: str = "saliency"  # of stats.scores.MEASURES
    keep: int | None = None  # in each layer
    ratio: float | None = None  # of the experts of each layer that go, rounded down
    target_size: int | None = None  # bytes of the output
    per_layer: str | None = None  # an engine of ENGINES: one threshold for all layers
    allow_few_tokens: bool = False


class LayerChoice(Struct, frozen=True):
    """The experts of a layer that stay, and the scores of all."""

    layer: int
    kept: Kept
    scores: LayerScores | None  # None: all experts stay
    measure: str

    def facts(self) -> dict[str, Any]:
        """JSON of the layer: the share of the score, and of the tokens, that the dropped have."""
        found: dict[str, Any] = {
            "layer": self.layer,
            "experts": self.kept.experts,
            "kept": list(self.kept.ids),
            "dropped": self.kept.dropped,
        }
        if self.scores is None:
            return found
        dropped, tokens = self.kept.dropped, self.scores.tokens
        if tokens is not None:
            weight = self.scores.measures["saliency"] * tokens
            found["dropped_tokens"] = _share(tokens.astype(np.float64), dropped)
            found["dropped_saliency"] = _share(weight, dropped)
            found["fewest_tokens"] = int(tokens.min())
            found["median_tokens"] = float(np.median(tokens))
            found["experts_without_tokens"] = int((tokens == 0).sum())
        return found


def _share(values: F64, ids: Sequence[int]) -> float:
    total = float(values.sum())
    return float(f"{values[list(ids)].sum() / total:.6g}") if total else 0.0


class Selection(Struct, frozen=True):
    """The experts that stay, and what is to be said of them."""

    pruning: Pruning
    layers: Sequence[LayerChoice]
    notes: Sequence[str] = field(default_factory=tuple)

    def facts(self) -> dict[str, Any]:
        return {
            "layers_pruned": [one.facts() for one in self.layers],
            "left_out_layers": list(self.pruning.left_out),
        }

    def lines(self) -> Iterator[str]:
        """A row for each layer: numbers, which experts go, what share of tokens they had, and how
        many tokens the scores are of."""
        rows: list[tuple[str, ...]] = [
            ("layer", "experts", "kept", "of tokens", "of saliency", "fewest tokens", "dropped")
        ]
        for one in self.layers:
            facts = one.facts()
            shares = (facts.get(name) for name in ("dropped_tokens", "dropped_saliency"))
            rows.append(
                (
                    str(one.layer),
                    str(one.kept.experts),
                    str(len(one.kept.ids)),
                    *("-" if share is None else f"{100 * share:.2f} %" for share in shares),
                    str(facts.get("fewest_tokens", "-")),
                    format_ranges(one.kept.dropped) or "none",
                )
            )
        return table_lines(rows, left={len(rows[0]) - 1})


def choose(checkpoint: Checkpoint, choice: Choice) -> Selection:
    """The experts of a whole checkpoint that stay. UsageError where scores, numbers and model do
    not fit one another."""
    _check(choice)
    assert choice.scores is not None
    return _Chooser(checkpoint, choice, read_scores(choice.scores)).selection()


def _check(choice: Choice) -> None:
    given = (choice.keep, choice.ratio, choice.target_size)
    if (numbers := sum(one is not None for one in given)) != 1:
        raise UsageError(
            "nothing says how many experts stay"
            if not numbers
            else f"{numbers} options say how many experts stay",
            "give one of --keep N, --ratio R and --target-size SIZE",
        )
    if choice.scores is None:
        raise UsageError(
            "no scores say which experts matter least",
            "give --scores FILE of: ktconv stats MODEL --text FILE --scores FILE.json",
        )
    if choice.ratio is not None and not 0 < choice.ratio < 1:
        raise UsageError(f"--ratio {choice.ratio:g} is not between 0 and 1", "for example 0.25")
    if choice.per_layer is not None and choice.per_layer not in ENGINES:
        raise UsageError(f"--per-layer {choice.per_layer}: {UNEVEN}", "omit --per-layer")


class _Chooser:
    def __init__(self, checkpoint: Checkpoint, choice: Choice, scores: Scores) -> None:
        self._checkpoint, self._choice, self._scores = checkpoint, choice, scores
        routers = Routers(checkpoint)
        self._specs: Mapping[int, RouterSpec | None] = {
            layer.index: routers.spec(layer) for layer in checkpoint.layers
        }
        self._notes = list(notes_on_origin(scores.path, scores.origin, checkpoint))
        self._measure = "scores" if scores.foreign else choice.measure
        hashed = [n for n, spec in self._specs.items() if spec is not None and spec.by_token]
        self._whole = frozenset(hashed)
        self._left_out = tuple(
            layer.index
            for layer in checkpoint.layers
            if layer.is_mtp and layer.index not in scores.layers
        )
        self._check_layers()
        self._check_tokens()

    @property
    def _pruned(self) -> list[MoELayer]:
        """The layers of which experts go."""
        apart = self._whole | set(self._left_out)
        return [layer for layer in self._checkpoint.layers if layer.index not in apart]

    def _check_layers(self) -> None:
        path, scores = path_text(self._scores.path), self._scores.layers
        there = {layer.index: layer for layer in self._checkpoint.layers}
        if beyond := sorted(scores.keys() - there.keys()):
            raise UsageError(
                f"{path} has scores of layer {beyond[0]}, which has no experts in "
                f"{self._checkpoint.path}",
                "give scores of this model",
            )
        if missing := [one.index for one in self._pruned if one.index not in scores]:
            raise UsageError(
                f"{path} has no scores of {listed('layer', missing)}",
                "record all layers: ktconv stats MODEL --scores FILE, without --layers",
            )
        mtp = [layer.index for layer in self._checkpoint.layers if layer.is_mtp]
        if self._left_out and len(self._left_out) < len(mtp):
            raise UsageError(
                f"{path} has scores of some MTP layers only", "give those of all, or of none"
            )
        for layer in self._pruned:
            found, experts = scores[layer.index], len(layer.experts)
            if found.listed is None and found.experts != experts:
                raise UsageError(
                    f"{path} has scores of {counted(found.experts, 'expert')} in layer "
                    f"{layer.index}, but the model has {experts}",
                    "give scores of this model",
                )
            if found.experts > experts:
                raise UsageError(
                    f"{path} lists expert {found.experts - 1} of layer {layer.index}, but the "
                    f"model has {experts}",
                    "give a ranking of this model",
                )

    def _check_tokens(self) -> None:
        few: list[int] = []
        fewest = math.inf
        for layer in self._pruned:
            tokens = self._scores.layers[layer.index].tokens
            if tokens is not None and tokens.mean() < LEAST_TOKENS:
                few.append(layer.index)
                fewest = min(fewest, float(tokens.mean()))
        if not few:
            return
        words = (
            f"{path_text(self._scores.path)} has scores of few tokens: {fewest:.0f} for each "
            f"expert on average in {listed('layer', few)}, and {LEAST_TOKENS} are the least"
        )
        if not self._choice.allow_few_tokens:
            raise UsageError(words, f"{_RECORD}; --allow-few-tokens uses them all the same")
        self._notes.append(words)

    # ---- how many ----

    def selection(self) -> Selection:
        if self._choice.per_layer is not None:
            chosen = self._by_threshold()
        else:
            self._refuse_uneven()
            counts = self._counts()
            chosen = {one.index: self._best(one, counts[one.index]) for one in self._pruned}
        layers = []
        for layer in self._checkpoint.layers:
            if layer.index in self._left_out:
                continue
            count = len(layer.experts)
            kept = Kept(count, tuple(chosen.get(layer.index, range(count))))
            scores = None if layer.index in self._whole else self._of(layer)
            layers.append(LayerChoice(layer.index, kept, scores, self._measure))
        pruning = Pruning({one.layer: one.kept for one in layers}, self._left_out)
        return Selection(pruning, layers, [*self._notes, *self._rules()])

    def _rules(self) -> Iterator[str]:
        """Notes about layers and experts that are not treated by scores."""
        if self._whole:
            indices = format_ranges(sorted(self._whole))
            yield f"layers {indices} choose experts by a table of tokens: all of theirs stay"
        if self._left_out:
            yield (
                f"MTP layers {format_ranges(list(self._left_out))} have no scores, since a text "
                "does not pass them: they are left out with all their tensors"
            )
        identity = max((spec.identity_experts for spec in self._known), default=0)
        if identity:
            yield f"{counted(identity, 'expert')} without weights stay in each layer"
        grouped = next((spec for spec in self._known if spec.n_group > 1), None)
        if grouped is not None:
            yield (
                f"the router chooses {grouped.topk_group} of {grouped.n_group} groups: whole "
                "groups are dropped"
            )

    @property
    def _known(self) -> list[RouterSpec]:
        return [spec for spec in self._specs.values() if spec is not None]

    def _refuse_uneven(self) -> None:
        if self._whole:
            raise UsageError(
                f"{listed('layer', sorted(self._whole))} choose experts by a table of tokens, so "
                f"that all of theirs stay; then {UNEVEN}",
                "add --per-layer ktconv if ktconv's runtime is to run it",
            )

    def _counts(self) -> dict[int, int]:
        """Number of experts that stay, by layer: the same, as far as layers have it."""
        choice = self._choice
        if choice.target_size is not None:
            return self._fitting(choice.target_size)
        if choice.keep is not None:
            return {layer.index: self._checked(layer, choice.keep) for layer in self._pruned}
        assert choice.ratio is not None
        return {
            layer.index: self._at_least(layer, len(layer.experts) - self._going(layer))
            for layer in self._pruned
        }

    def _going(self, layer: MoELayer) -> int:
        assert self._choice.ratio is not None
        return int(len(layer.experts) * self._choice.ratio)

    def _checked(self, layer: MoELayer, keep: int) -> int:
        """The number of --keep. UsageError for one that the layer cannot have."""
        count, step, least = len(layer.experts), self._step(layer), self._least(layer)
        if keep > count:
            raise UsageError(
                f"--keep {keep} is more than the {counted(count, 'expert')} of layer {layer.index}",
                f"use at most {count}",
            )
        if keep % step:
            below = keep // step * step
            numbers = {max(least, below), min(count, max(least, below + step))}
            raise UsageError(
                f"--keep {keep} would cut a group: the router of layer {layer.index} chooses "
                f"groups of {counted(step, 'expert')}",
                f"use --keep {' or '.join(map(str, sorted(numbers)))}",
            )
        if keep < least:
            raise UsageError(f"--keep {keep}: {self._why(layer)}", f"use at least {least}")
        return keep

    def _at_least(self, layer: MoELayer, keep: int) -> int:
        """A number rounded up to whole groups. UsageError where it is too small."""
        step, least = self._step(layer), self._least(layer)
        rounded = -(-keep // step) * step
        if rounded < least:
            raise UsageError(
                f"--ratio {self._choice.ratio:g} would keep {keep}: {self._why(layer)}",
                f"keep at least {least} of {len(layer.experts)}",
            )
        return rounded

    def _why(self, layer: MoELayer) -> str:
        top_k = self._checkpoint.config.top_k(layer.index)
        if self._least(layer) > (top_k or 1):
            spec = self._specs[layer.index]
            assert spec is not None
            return f"each token takes experts of {spec.topk_group} groups of {self._step(layer)}"
        return f"each token takes {counted(top_k or 1, 'expert')} of layer {layer.index}"

    def _step(self, layer: MoELayer) -> int:
        """Experts of a group where a router chooses groups, else 1."""
        spec = self._specs[layer.index]
        if spec is None or spec.n_group < 2:
            return 1
        return (len(layer.experts) + spec.identity_experts) // spec.n_group

    def _least(self, layer: MoELayer) -> int:
        """The fewest experts that the router works with."""
        spec, top_k = self._specs[layer.index], self._checkpoint.config.top_k(layer.index) or 1
        step = self._step(layer)
        groups = spec.topk_group if spec is not None and step > 1 else 1
        return max(groups * step, -(-top_k // step) * step)

    def _fitting(self, size: int) -> dict[int, int]:
        """The most experts with which the weights have at most `size` bytes."""
        most = max(len(layer.experts) for layer in self._pruned)
        least = max(self._least(layer) for layer in self._pruned)
        step = max(self._step(layer) for layer in self._pruned)
        for keep in range(most // step * step, least - 1, -step):
            counts = {one.index: min(keep, len(one.experts)) for one in self._pruned}
            if self._bytes(counts) <= size:
                return counts
        smallest = self._bytes({one.index: min(least, len(one.experts)) for one in self._pruned})
        raise UsageError(
            f"--target-size {format_size(size)} is too small: with {counted(least, 'expert')} in "
            f"each layer, the fewest that routers work with, there are {format_size(smallest)}",
            "give a larger size, or quantize the experts that stay",
        )

    def _bytes(self, counts: Mapping[int, int]) -> int:
        """Bytes of all shards with these numbers of experts, at most."""
        others = self._checkpoint.other_tensors
        total = sum(one.nbytes + _ENTRY_BYTES for one in others)
        for layer in self._checkpoint.layers:
            whole, count = experts_bytes(layer), len(layer.experts)
            stay = 0 if layer.index in self._left_out else counts.get(layer.index, count)
            entries = len(layer.projections) * _PARTS * _ENTRY_BYTES
            total += stay * (-(-whole // count) + entries)
        return total

    # ---- which ----

    def _of(self, layer: MoELayer) -> LayerScores:
        return self._scores.layers[layer.index]

    def _values(self, layer: MoELayer) -> F64:
        """The score of each expert; of one that a ranking does not list, less than all others."""
        found = self._of(layer).measures[self._measure]
        rest = np.full(len(layer.experts) - len(found), -np.inf)
        return np.concatenate([found, rest])

    def _best(self, layer: MoELayer, count: int) -> list[int]:
        """Ids of the `count` best experts; of equally good ones the lower stay. Whole groups where
        the router chooses groups: those with the largest sums."""
        values, step = self._values(layer), self._step(layer)
        if (known := self._of(layer).listed) is not None and count > known:
            raise UsageError(
                f"{path_text(self._scores.path)} lists {counted(known, 'expert')} of layer "
                f"{layer.index}, fewer than the {count} that are kept",
                "list more, or keep fewer",
            )
        if step > 1:
            values = np.where(np.isfinite(values), values, 0).reshape(-1, step).sum(axis=1)
        best = sorted(range(len(values)), key=lambda one: (-values[one], one))[: count // step]
        return sorted(one * step + place for one in best for place in range(step))

    def _by_threshold(self) -> dict[int, list[int]]:
        """The best experts of all layers together, and in each as many as its tokens take."""
        layers = self._pruned
        if any(self._step(layer) > 1 for layer in layers):
            raise UsageError(
                "--per-layer does not go with a router that chooses groups of experts",
                "omit --per-layer",
            )
        if self._scores.foreign and any(self._of(layer).listed is not None for layer in layers):
            raise UsageError(
                f"--per-layer needs scores, and {path_text(self._scores.path)} ranks the experts "
                "of each layer by themselves",
                "give scores, or omit --per-layer",
            )
        chosen = {layer.index: self._best(layer, self._least(layer)) for layer in layers}
        certain = {(index, one) for index, ids in chosen.items() for one in ids}
        rest = [
            (-float(value), layer.index, expert)
            for layer in layers
            for expert, value in enumerate(self._values(layer))
            if (layer.index, expert) not in certain
        ]
        for _, index, expert in sorted(rest)[: max(0, self._total() - len(certain))]:
            chosen[index].append(expert)
        return {index: sorted(ids) for index, ids in chosen.items()}

    def _total(self) -> int:
        """Number of experts of all layers that stay."""
        choice, layers = self._choice, self._pruned
        if choice.target_size is not None:
            return sum(self._fitting(choice.target_size).values())
        if choice.keep is not None:
            return sum(self._checked(layer, choice.keep) for layer in layers)
        return sum(len(layer.experts) - self._going(layer) for layer in layers)
