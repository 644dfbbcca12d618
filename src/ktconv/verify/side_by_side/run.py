"""Verifies and measures each output; see `compare`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from ktconv import __version__
from ktconv.errors import UsageError
from ktconv.source import Checkpoint, open_checkpoint
from ktconv.source.model_source import ModelSource
from ktconv.source.pruning.kept import Pruning
from ktconv.source.reading.matrices import experts_bytes
from ktconv.system.stores import is_remote
from ktconv.system.text import Notify, silent
from ktconv.verify.findings import Progression
from ktconv.verify.pruned.output import is_pruned_output
from ktconv.verify.report.outputs import ERRORS
from ktconv.verify.request import VerifyRequest
from ktconv.verify.run import Result, prepare, unwatched, verify
from ktconv.verify.side_by_side.request import CompareRequest
from ktconv.verify.side_by_side.speed import Speed, kinds_of_output, measure
from ktconv.writer.manifest import read_begun

MEASURES = (
    "relative_rms_error",
    "output_error",
    "kl_mean",
    "perplexity_increase",
    "top1_agreement",
)


class Row(Struct, frozen=True):
    """One conversion, or the model itself."""

    name: str
    path: str
    method: str
    nbytes: int  # of all its weights files
    bits: float  # per weight of the experts
    measures: Mapping[str, float | None]
    speed: Speed
    failures: Sequence[str] = ()
    is_source: bool = False

    def facts(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "path": self.path,
            "method": self.method,
            "bytes": self.nbytes,
            "bits": round(self.bits, 4),
            **{name: self.measures.get(name) for name in MEASURES},
            **self.speed.facts(),
            "failures": list(self.failures),
            "is_source": self.is_source,
        }


class Comparison(Struct, frozen=True):
    """The model first, then its conversions as they were given."""

    level: str
    rows: Sequence[Row]

    @property
    def passed(self) -> bool:
        return not any(row.failures for row in self.rows)

    def facts(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "kind": "outputs",
            "ktconv_version": __version__,
            "level": self.level,
            "passed": self.passed,
            "rows": [row.facts() for row in self.rows],
            "dominated": dominated(self.rows),
        }


def compare(
    request: CompareRequest, progression: Progression = unwatched, notify: Notify = silent
) -> Comparison:
    """Verify each output to the level, then measure its experts. Raises KtconvError where something
    cannot be run; checks that fail are in the rows."""
    request.check()
    first = read_begun(request.outputs[0])
    _expect_same_adapters(request.outputs)
    source = ModelSource.of(request.source)
    source = source.recorded(first.naming, first.tower, first.located_adapters(source))
    checkpoint = open_checkpoint(source)
    wishes = [_verification(request, output) for output in request.outputs]
    prepared = [prepare(wish) for wish in wishes]  # refuses all that is wrong before an hour's work
    rows = [_source_row(request, checkpoint, notify)]
    for wish, ready in zip(wishes, prepared, strict=True):
        notify(f"{wish.output}: verifying to level {request.depth}")
        result = verify(wish, progression, ready, notify)
        rows.append(_row(request, checkpoint, wish.output, result, notify))
    return Comparison(request.depth, rows)


def _expect_same_adapters(outputs: Sequence[Path]) -> None:
    """UsageError for outputs whose models differ by adapters, by what they are called."""
    first, *others = [read_begun(one).adapters or () for one in outputs]
    for output, adapters in zip(outputs[1:], others, strict=True):
        if adapters != first:
            names = [", ".join(one) or "no adapter" for one in (first, adapters)]
            raise UsageError(
                f"{outputs[0]} was converted with {names[0]}, and {output} with {names[1]}: they "
                "are of different models",
                "compare outputs that were converted with the same --adapter",
            )


def _verification(request: CompareRequest, output: Path) -> VerifyRequest:
    return VerifyRequest(
        output,
        request.source,
        level=request.depth,
        sample=request.sample,
        seed=request.seed,
        threads=request.threads,
        max_memory=request.max_memory,
        text=request.text,
        windows=request.windows,
    )


def _kinds(checkpoint: Checkpoint) -> dict[int, object]:
    """Dimensions and encoding of each layer, equal for layers that are alike."""
    return {
        layer.index: (
            layer.hidden_size,
            layer.intermediate_size,
            len(layer.experts),
            layer.encoding,
        )
        for layer in checkpoint.layers
    }


def _source_row(request: CompareRequest, checkpoint: Checkpoint, notify: Notify) -> Row:
    kinds = _kinds(checkpoint)
    if is_remote(checkpoint.path):
        speed = Speed({}, (), "the model is not on this machine")
    else:
        speed = _speed(request, Path(checkpoint.path), kinds, notify)
    measures = dict.fromkeys(MEASURES, 0.0)
    experts = sum(experts_bytes(one, range(len(one.experts))) for one in checkpoint.layers)
    return Row(
        "source",
        str(checkpoint.path),
        " and ".join(sorted({one for layer in checkpoint.layers for one in layer.encodings})),
        checkpoint.nbytes,
        8 * experts / _weights(checkpoint),
        measures | {"top1_agreement": 1.0},
        speed,
        is_source=True,
    )


def _row(
    request: CompareRequest, checkpoint: Checkpoint, output: Path, result: Result, notify: Notify
) -> Row:
    facts = result.facts
    layers = [layer.index for layer in checkpoint.layers]
    pruned = open_checkpoint(output) if is_pruned_output(output) else None
    kinds = kinds_of_output(output, layers) if pruned is None else _kinds(pruned)
    speed = _speed(request, output, kinds, notify)
    experts = _expert_bytes(output) if pruned is None else sum(map(experts_bytes, pruned.layers))
    return Row(
        output.name or str(output),
        str(output),
        _method(facts),
        sum(file.stat().st_size for file in _files(output)),
        8 * experts / _weights(checkpoint, read_begun(output).pruning),
        _measures(facts),
        speed,
        [failure.message for failure in result.failures],
    )


def _speed(
    request: CompareRequest, model: Path, kinds: Mapping[int, object], notify: Notify
) -> Speed:
    if not request.tokens:
        return Speed({}, (), "not asked for")
    notify(f"{model}: measuring its experts")
    return measure(model, kinds, request.tokens, request.seconds, request.threads, notify)


def _method(facts: Mapping[str, Any]) -> str:
    scheme = facts.get("scheme")
    return str(scheme if scheme not in (None, "mixed") else facts.get("method"))


def _measures(facts: Mapping[str, Any]) -> dict[str, float | None]:
    """Measures in the document of verify; None for what was not reached."""
    weights, layers, model = (facts.get(level) or {} for level in ("weights", "layers", "model"))
    model = model.get("unpruned") or model  # against the whole model
    errors = [one.get("quantization_error") for one in layers.get("layers", ())]
    known = [float(error) for error in errors if isinstance(error, (int, float))]
    found: dict[str, Any] = {
        "relative_rms_error": weights.get("relative_rms_error"),
        "output_error": max(known, default=None),
        **{name: model.get(name) for name in ("kl_mean", "perplexity_increase", "top1_agreement")},
    }
    return {
        name: float(value) if isinstance(value, (int, float)) else None
        for name, value in found.items()
    }


def _weights(checkpoint: Checkpoint, pruning: Pruning | None = None) -> int:
    """Number of the experts' weights, of those that stay."""
    kept = {} if pruning is None else {n: len(one.ids) for n, one in pruning.layers.items()}
    left_out = () if pruning is None else pruning.left_out
    return sum(
        kept.get(layer.index, len(layer.experts)) * matrix.rows * matrix.cols
        for layer in checkpoint.layers
        if layer.index not in left_out
        for matrix in layer.experts[0].values()
    )


def _files(output: Path) -> Iterator[Path]:
    yield from output.glob("*.safetensors")
    yield from output.glob("*.gguf")
    yield from output.glob("_layer_*/**/*.kt")


def _expert_bytes(output: Path) -> int:
    from ktconv.inspect.inspection import inspect_path

    return int(inspect_path(str(output)).get("expert_bytes") or 0)


def dominated(rows: Sequence[Row]) -> dict[str, str]:
    """Conversions that another one beats or equals in size and in the deepest measure that both
    have, by name: the other's."""
    found = {}
    converted = [row for row in rows if not row.is_source]
    for row in converted:
        for other in converted:
            measure = next(
                (
                    name
                    for name in ERRORS
                    if None not in (row.measures.get(name), other.measures.get(name))
                ),
                None,
            )
            if other is row or measure is None:
                continue
            mine, theirs = row.measures[measure], other.measures[measure]
            assert mine is not None and theirs is not None
            better = (other.nbytes, theirs) != (row.nbytes, mine)
            if better and other.nbytes <= row.nbytes and theirs <= mine:
                found[row.path] = other.path
                break
    return found
