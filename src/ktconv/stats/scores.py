"""Scores of experts, from which pruning chooses: gathered in a pass, written, read again.

FILE is JSON, with a line for each layer:

    {"layer": 3, "tokens": [...], "saliency": [...], "frequency": [...], "router_weight": [...],
     "output_norm": [...]}

with a number for each expert: the tokens that chose it; the mean over these of its router weight
times the 2-norm of its output (REAP's saliency, arXiv 2510.13999), of the router weight and of the
norm; and the share of all tokens that chose it. Experts without tokens have zeros. Where the router
weight multiplies the input of an expert, the output is that of the weighted input, and saliency its
norm. Rankings of other tools are read too, see `read_scores`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from ktconv import __version__
from ktconv.errors import CheckpointError, UsageError
from ktconv.source.strict_json import parse_object
from ktconv.stats.importance import not_finite
from ktconv.stats.origin import Origin, Sizes
from ktconv.system.arrays import F64, I64, Array
from ktconv.system.regular_files import MAX_SMALL_BYTES, read_given
from ktconv.writer.option_files import WrittenFile

if TYPE_CHECKING:
    from torch import Tensor

KIND, SCHEMA = "expert scores", 1
MEASURES = ("saliency", "frequency", "router_weight", "output_norm")
AGAIN = "record scores with: ktconv stats MODEL --text FILE --scores FILE.json"
_FORM = (
    "give a file of ktconv stats --scores, or a line of JSON for each layer: "
    '{"layer": 3, "scores": [0.5, 1.25, ...]} or {"layer": 3, "ids": [17, 4, ...]}, best first'
)
_MOST = 1 << 20  # layers, and experts of one, that a file may number
_ORIGIN = ("model", "source_sha256", "text", "text_sha256", "run", "router")


class LayerScores(Struct, frozen=True):
    """One layer. `measures` [E] by name; `tokens` [E], None where a ranking does not tell."""

    measures: Mapping[str, F64]
    tokens: I64 | None = None
    listed: int | None = None  # how many experts a ranking lists; None: scores are of all

    @property
    def experts(self) -> int:
        return len(next(iter(self.measures.values())))


class Scores(Struct, frozen=True):
    """The layers of a file. `foreign`: another tool's ranking, with one measure, "scores"."""

    path: Path
    layers: Mapping[int, LayerScores]
    origin: Origin | None = None  # None: the file does not tell

    @property
    def foreign(self) -> bool:
        return self.origin is None


# ---- gathering -------------------------------------------------------------------------


class ScoreTap:
    """Gathers the scores of `layers`. `on_input`: layers whose router weights multiply inputs."""

    wants_inputs = False

    def __init__(self, layers: Mapping[int, Sizes], on_input: Sequence[int] = ()) -> None:
        self._on_input = on_input
        # Per layer and expert: tokens, and sums of saliency, router weight and output norm.
        self._sums = {n: np.zeros((4, sizes.experts)) for n, sizes in layers.items()}

    def chosen(self, layer: int, window: int, ids: Tensor, weights: Tensor) -> None:
        pass

    def inputs(self, layer: int, expert: int, rows: Tensor, inner: Tensor, weights: Tensor) -> None:
        pass

    def norms(self, layer: int, expert: int, norms: Tensor, weights: Tensor) -> None:
        """Add an expert's tokens: norms [n] of its weighted outputs, and the weights [n]. A token
        with weight 0 chose another expert. CheckpointError where they are not finite."""
        if layer not in self._sums:
            return
        weight: Array = weights.detach().cpu().double().abs().numpy()
        used = weight != 0
        weight, norm = weight[used], norms.detach().cpu().double().numpy()[used]
        if not (np.isfinite(norm).all() and np.isfinite(weight).all()):
            raise not_finite(layer, expert, "outputs")
        plain = norm if layer in self._on_input else norm / weight
        sums = len(norm), norm.sum(), weight.sum(), plain.sum()
        self._sums[layer][:, expert] += sums

    def layer_done(self, layer: int) -> None:
        pass

    def state(self) -> Mapping[str, Array]:
        """The sums by layer."""
        return {str(layer): sums.copy() for layer, sums in self._sums.items()}

    def restore(self, state: Mapping[str, Array]) -> None:
        for layer, sums in state.items():
            self._sums[int(layer)] = sums.copy()

    def scores(self, tokens: int) -> dict[int, LayerScores]:
        """The scores of all layers, of a text of `tokens` tokens."""
        found = {}
        for layer, sums in self._sums.items():
            counts, times = sums[0].astype(np.int64), np.maximum(sums[0], 1)
            saliency, weight, norm = sums[1:] / times
            values = saliency, sums[0] / tokens, weight, norm
            found[layer] = LayerScores(dict(zip(MEASURES, values, strict=True)), counts)
        return found


# ---- files -----------------------------------------------------------------------------


def scores_file(path: Path) -> WrittenFile:
    """FILE of --scores of `ktconv stats`."""
    return WrittenFile(path, "--scores", "scores that ktconv wrote", _is_recorded)


def _is_recorded(path: Path) -> bool:
    return not read_scores(path).foreign


def write_scores(path: Path, layers: Mapping[int, LayerScores], origin: Origin) -> None:
    """Replace `path` in one step. UsageError where there is another file, or a model around it."""
    about = {key: getattr(origin, key) for key in _ORIGIN}
    head = {
        "kind": KIND, "schema": SCHEMA, "ktconv": __version__, **about, "tokens": origin.tokens
    }  # fmt: skip
    lines = [json.dumps(_content(layer, one)) for layer, one in sorted(layers.items())]
    text = f'{json.dumps(head, indent=1)[:-2]},\n "layers": [\n  ' + ",\n  ".join(lines)
    scores_file(path).write(f"{text}\n ]\n}}\n".encode())


def _content(layer: int, one: LayerScores) -> dict[str, Any]:
    assert one.tokens is not None
    values = {
        name: [float(f"{value:.9g}") for value in measure] for name, measure in one.measures.items()
    }
    return {"layer": layer, "tokens": one.tokens.tolist(), **values}


def read_scores(path: str | Path) -> Scores:
    """A file of `ktconv stats --scores`, or another tool's ranking: a line of JSON for each layer,
    a list of such objects, or an object with this list as `layers`. Each has the number of its
    `layer`, and either `scores`, a number for each expert, higher is better, or `ids`, best first,
    in which experts that are not listed come last. Raises UsageError that names the layer for
    anything else, and for a layer or an id that is there twice."""
    path = Path(path)
    data = read_given(path, "--scores", _FORM, MAX_SMALL_BYTES)
    head, entries = _parsed(data, path)
    own = head.get("kind") == KIND
    if own and head.get("schema") != SCHEMA:
        raise UsageError(
            f"{path} has schema {head.get('schema')!r:.20}, which this ktconv does not read", AGAIN
        )
    layers: dict[int, LayerScores] = {}
    for entry in entries:
        number = entry.get("layer") if isinstance(entry, dict) else None
        if type(number) is not int or not 0 <= number < _MOST:
            raise UsageError(f"{path}: {entry!r:.60} has no number of a layer", _FORM)
        if number in layers:
            raise UsageError(f"{path} has layer {number} twice", "leave one of them out")
        assert isinstance(entry, dict)
        read = _recorded if own else _ranked
        layers[number] = read(path, number, entry)
    if not layers:
        raise UsageError(f"{path} has no layer", _FORM)
    return Scores(path, dict(sorted(layers.items())), _origin(path, head) if own else None)


def _parsed(data: bytes, path: Path) -> tuple[Mapping[str, Any], Sequence[Any]]:
    """The head of a file, and its layers."""
    lines = [(n, line) for n, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    try:
        if lines and _is_line(lines[0][1]):
            return {}, [parse_object(line, f"line {n} of {path}", _FORM) for n, line in lines]
        if data.lstrip()[:1] == b"[":
            data = b'{"layers": %s}' % data
        content = parse_object(data, str(path), _FORM)
    except CheckpointError as error:
        raise UsageError(str(error), _FORM) from None
    found = content.get("layers")
    if not isinstance(found, list):
        raise UsageError(f"{path} has no list of layers", _FORM)
    return content, found


def _is_line(line: bytes) -> bool:
    """Whether a line is an object of its own, about one layer."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "layers" not in found


def _recorded(path: Path, layer: int, entry: Mapping[str, Any]) -> LayerScores:
    tokens = entry.get("tokens")
    if not isinstance(tokens, list) or any(type(n) is not int or n < 0 for n in tokens):
        tokens = []
    values = {name: _numbers(entry.get(name)) for name in MEASURES}
    if not tokens or any(found is None or len(found) != len(tokens) for found in values.values()):
        raise UsageError(f"the scores of layer {layer} in {path} are damaged", AGAIN)
    measures = {name: found for name, found in values.items() if found is not None}
    if any((found < 0).any() for found in measures.values()):
        raise UsageError(f"the scores of layer {layer} in {path} are negative", AGAIN)
    return LayerScores(measures, np.array(tokens, np.int64))


def _ranked(path: Path, layer: int, entry: Mapping[str, Any]) -> LayerScores:
    scores, ids = entry.get("scores"), entry.get("ids")
    if (scores is None) == (ids is None):
        raise UsageError(f"layer {layer} in {path} has neither or both of scores and ids", _FORM)
    if ids is None:
        found = _numbers(scores)
        if found is None or not len(found):
            raise UsageError(f"the scores of layer {layer} in {path} are not finite numbers", _FORM)
        return LayerScores({"scores": found})
    if not isinstance(ids, list) or not ids or any(type(n) is not int or n < 0 for n in ids):
        raise UsageError(f"the ids of layer {layer} in {path} are not numbers of experts", _FORM)
    seen: set[int] = set()
    for number in ids:
        if number in seen:
            raise UsageError(
                f"layer {layer} in {path} lists expert {number} twice", "list each expert once"
            )
        seen.add(number)
    if max(ids) >= _MOST:
        raise UsageError(f"layer {layer} in {path} lists expert {max(ids)!r:.20}", _FORM)
    values = np.zeros(max(ids) + 1)
    values[ids] = np.arange(len(ids), 0, -1)
    return LayerScores({"scores": values}, listed=len(ids))


def _numbers(values: object) -> F64 | None:
    """float64 [E]; None for anything but finite numbers."""
    if not isinstance(values, list):
        return None
    if not all(type(one) in (int, float) for one in values):
        return None
    try:
        found = np.array([float(one) for one in values])
    except OverflowError:  # an integer beyond float64
        return None
    return found if np.isfinite(found).all() else None


def _origin(path: Path, head: Mapping[str, Any]) -> Origin:
    texts = {key: head.get(key) for key in _ORIGIN}
    tokens = head.get("tokens")
    if type(tokens) is not int or tokens < 1 or not all(isinstance(t, str) for t in texts.values()):
        raise UsageError(f"{path} does not say which model and text its scores are of", AGAIN)
    return Origin(tokens=tokens, **{key: str(text) for key, text in texts.items()})
