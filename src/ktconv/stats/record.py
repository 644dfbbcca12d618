"""Reads a text with a model, layer by layer, and records what its experts get."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ktconv.errors import DiskSpaceError, UsageError
from ktconv.model import require_packages
from ktconv.model.load import context_length, load_tokenizer
from ktconv.source import open_checkpoint
from ktconv.source.model_source import ModelSource
from ktconv.stats import hessian, importance
from ktconv.stats.counting import CountTap
from ktconv.stats.counts import NUM_LAYERS, Statistics, check_layers
from ktconv.stats.hessian import HessianTap
from ktconv.stats.importance import ImportanceTap
from ktconv.stats.origin import Origin, Sizes, source_sha256
from ktconv.stats.router_sample import router_sample
from ktconv.stats.scores import ScoreTap, write_scores
from ktconv.system import machine
from ktconv.system.arrays import I32
from ktconv.system.text import Notify, path_text, silent
from ktconv.system.units import counted, format_size

if TYPE_CHECKING:
    from torch import Tensor

    from ktconv.model.streamed.calls import Tap
    from ktconv.model.streamed.parts import PartedModel
    from ktconv.model.streamed.stream import Progression

HessianTaps = Callable[[Mapping[int, Sizes], Origin, Path], HessianTap]
WINDOW = 512  # tokens that the model reads at a time; each window starts anew


class Wanted(Struct, frozen=True):
    """Records to make besides counts: all chosen ids, and files. Of `layers` (None: of all); the
    model is read up to the last of them."""

    ids: bool = False
    importance: Path | None = None
    hessian: Path | None = None
    scores: Path | None = None
    layers: Sequence[int] | None = None
    hessian_tap: HessianTaps = HessianTap  # what makes the tap of `hessian`


class Recorder:
    """A model whose weights are read layer by layer while a text goes through it.

    `model` is a directory, or one GGUF file, whose config.json and tokenizer are those of `config`.
    `adapters` and `prune` are those of `ModelSource`. With `precise` it computes in float32: in
    bf16, some tokens choose other experts, which changes scores by up to 1 %.
    Only headers are read at first. Raises CheckpointError where transformers does not have the
    family or finds no experts in it, UsageError without a tokenizer, PyTorch
    or transformers.
    """

    def __init__(
        self,
        model: Path,
        config: Path | None = None,
        adapters: Sequence[str] = (),
        *,
        prune: Path | Mapping[str, Any] | None = None,
        precise: bool = False,
    ) -> None:
        require_packages()
        import torch

        from ktconv.model.streamed.parts import PartedModel

        if model.is_file() and config is None:
            raise UsageError(
                f"{model} has no config.json and tokenizer that transformers can load",
                "give a directory with those of the model: --config DIR",
            )
        source = ModelSource(model, config, adapter=tuple(adapters), prune=prune)
        checkpoint = open_checkpoint(source)
        self._tokenizer = load_tokenizer(checkpoint.side_directory or model, model)
        self._parted = PartedModel(checkpoint, torch.float32 if precise else "auto")
        settings = self._parted.model.config
        self.about = {
            "model": path_text(model),
            "model_type": getattr(settings, "model_type", None),
            NUM_LAYERS: getattr(settings.get_text_config(), NUM_LAYERS, None),
        }

    @property
    def experts(self) -> dict[int, int]:
        """Number of experts by layer."""
        return {index: layer.own.count for index, layer in self._parted.experts.items()}

    def prepare(
        self,
        pieces: Iterable[str],
        max_tokens: int,
        wanted: Wanted | None = None,
        *,
        text: str = "",
        max_memory: int | None = None,
        work: Path | None = None,
    ) -> Recording:
        """A recording of the first `max_tokens` tokens of a text that comes in pieces, planned.

        `text`: its name. `max_memory`: bytes that the process may have; None: what is free. `work`:
        where the state of the pass is kept; None: in the user's cache. Raises UsageError for a text
        without tokens and layers without experts, OutputError for a directory of other Hessians,
        ResourceError where memory or a disk is too small.
        """
        import torch

        digest = hashlib.sha256()
        length = context_length(self._parted.model.config, WINDOW)
        windows = [
            torch.tensor([window])
            for window in token_windows(self._tokenizer, _seen(pieces, digest), length, max_tokens)
        ]
        if not windows:
            raise UsageError("the text contains no tokens", "use a longer text")
        about = {**self.about, "text": text, "tokens": sum(ids.shape[1] for ids in windows)}
        return Recording(
            self._parted, windows, about, digest.hexdigest(), wanted or Wanted(), max_memory, work
        )


class Recording:
    """A planned pass over a text. As a context it has the folder of the pass, which is kept at the
    end unless `complete` was called, so that the same recording goes on there."""

    def __init__(
        self,
        parted: PartedModel,
        windows: Sequence[Tensor],
        about: Mapping[str, Any],
        text_sha256: str,
        wanted: Wanted,
        max_memory: int | None,
        work: Path | None,
    ) -> None:
        from ktconv.model.streamed.stream import PlannedPass
        from ktconv.model.streamed.work import pass_identity

        self._parted, self._about, self._wanted = parted, about, wanted
        ids = (one.numpy().tobytes() for one in windows)
        run = pass_identity("stats", parted.checkpoint, ids, dtype=str(parted.dtype))
        self._origin = Origin(
            model=about["model"],
            source_sha256=source_sha256(parted.checkpoint),
            text=about["text"],
            text_sha256=text_sha256,
            tokens=about["tokens"],
            run=hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest(),
            router=router_sample(parted.checkpoint),
        )
        self._layers = _chosen_layers(parted, wanted.layers)
        self._hessian = (
            None
            if wanted.hessian is None
            else wanted.hessian_tap(self._layers, self._origin, wanted.hessian)
        )
        self._pass = PlannedPass(
            "stats",
            parted,
            windows,
            head=False,
            layers=None if wanted.layers is None else max(self._layers) + 1,
            taps_memory=self._memory_of_taps,
            max_memory=max_memory,
            work_dir=work,
            more={
                "ids": wanted.ids,
                "importance": wanted.importance is not None,
                "hessian": None if wanted.hessian is None else path_text(wanted.hessian.absolute()),
                "of": list(self._layers),
                **({} if wanted.scores is None else {"scores": True}),
            },
        )
        self.plan, self.origin = self._pass.plan, self._origin
        self._check_disks()

    # ---- what it takes ----

    @property
    def _memory_of_taps(self) -> int:
        """Bytes: all tokens of an expert, at most those of the text, and what taps make of them."""
        if self._wanted.importance is None and self._wanted.hessian is None:
            return 0
        widths = [one.hidden + one.intermediate for one in self._layers.values()]
        tokens: int = 2 * self._about["tokens"] * max(widths) * self._parted.dtype.itemsize
        return tokens + max(importance.memory(self._layers), hessian.memory(self._layers))

    @property
    def _importance_bytes(self) -> int:
        return 0 if self._wanted.importance is None else importance.nbytes(self._layers)

    @property
    def _hessian_bytes(self) -> int:
        """Bytes of Hessians that are still to be written."""
        return self._hessian.missing_bytes if self._hessian else 0

    @property
    def lines(self) -> list[str]:
        """The plan, for people."""
        found = self.plan.lines()
        if self._wanted.importance is not None:
            found.append(
                f"{self._wanted.importance} will have {format_size(self._importance_bytes)}"
            )
        if self._hessian:
            kept = (
                f"; {counted(len(self._hessian.kept), 'layer', 'are')} there"
                if self._hessian.kept
                else ""
            )
            found.append(
                f"up to {format_size(self._hessian_bytes)} will be written to "
                f"{self._wanted.hessian}{kept}"
            )
        return found

    @property
    def facts(self) -> dict[str, Any]:
        """The plan, for JSON."""
        found = self.plan.facts()
        if self._wanted.importance is not None:
            found["importance_bytes"] = self._importance_bytes
        if self._hessian:
            found["hessian_bytes"] = self._hessian_bytes
        return found

    def _check_disks(self) -> None:
        """DiskSpaceError where what is written does not fit, each disk taken together."""
        folder = self.plan.folder or Path()
        needs = [(folder, self.plan.disk + self._importance_bytes, "the work folder")]
        if self._wanted.importance is not None:
            needs.append((self._wanted.importance, self._importance_bytes, "--importance"))
        if self._wanted.hessian is not None:
            needs.append((self._wanted.hessian, self._hessian_bytes, "--hessian"))
        for path, nbytes, what in needs:
            there = [n for other, n, _ in needs if _device(other) == _device(path)]
            free = machine.disk_free(path)
            if sum(there) > free and nbytes == max(there):
                raise DiskSpaceError(
                    f"{what} {path} needs {format_size(nbytes)}, but only {format_size(free)} are "
                    "free on that disk",
                    "use a larger disk, or record fewer layers at a time with --layers",
                )

    # ---- the pass ----

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self._pass.close()

    def run(
        self,
        progression: Progression = lambda sizes: nullcontext(),
        notify: Notify = silent,
    ) -> tuple[Statistics, dict[int, I32]]:
        """Counts, and the chosen ids [tokens, top-k] of each layer in the order of the text if they
        are wanted; wanted files are written. `progression` makes an observer from bytes of source.

        Raises NotCut for a model that cannot be run layer by layer, InUseError where another
        process makes the same recording, and other KtconvErrors.
        """
        folder = self._pass.open(notify)
        counts = CountTap(
            {layer: sizes.experts for layer, sizes in self._layers.items()},
            apart=[n for n, one in self._parted.experts.items() if one.own.call == "sorted"],
            keep=self._wanted.ids,
        )
        taps: list[Tap] = [counts]
        with ExitStack() as opened:
            if self._wanted.importance is not None:
                means = ImportanceTap(self._layers, self._origin, folder)
                taps.append(means)
            if self._hessian is not None:
                opened.callback(self._hessian.close)
                taps.append(self._hessian)
            scores = ScoreTap(self._layers, self._weighted_inputs)
            if self._wanted.scores is not None:
                taps.append(scores)
            self._pass.run(taps=taps, progression=progression, notify=notify)
            if self._wanted.importance is not None:
                means.write(self._wanted.importance)
            if self._wanted.scores is not None:
                found = scores.scores(self._about["tokens"])
                write_scores(self._wanted.scores, found, self._origin)
        return Statistics(counts.layers, self._about), counts.ids

    @property
    def _weighted_inputs(self) -> list[int]:
        """Layers whose router weights multiply the inputs of experts."""
        experts = self._parted.experts.items()
        return [n for n, one in experts if one.source.activation.weight_on_input]

    def complete(self) -> None:
        """Everything is written: what the pass has kept is not needed any more."""
        self._pass.complete()


def _chosen_layers(parted: PartedModel, wanted: Sequence[int] | None) -> dict[int, Sizes]:
    """The layers that files are written of. UsageError for one without experts."""
    sizes = {index: Sizes.of(layer.source) for index, layer in parted.experts.items()}
    if wanted is None:
        return sizes
    check_layers(wanted, sizes)
    return {index: sizes[index] for index in wanted}


def _device(path: Path) -> int:
    """The file system that `path` is or would be on."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    return existing.stat().st_dev


# ---- text ------------------------------------------------------------------------------


def _seen(pieces: Iterable[str], digest: Any) -> Iterator[str]:
    """Pieces of a text, each after it was added to a digest."""
    for piece in pieces:
        digest.update(piece.encode())
        yield piece


def token_windows(
    tokenizer: Any, pieces: Iterable[str], length: int, limit: int
) -> Iterator[list[int]]:
    """Runs of `length` tokens without gap or overlap, `limit` in all; the last is shorter."""
    kept: list[int] = []
    for piece in pieces:
        kept += tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        kept = kept[:limit]
        whole = len(kept) // length * length
        for start in range(0, whole, length):
            yield kept[start : start + length]
        kept, limit = kept[whole:], limit - whole
        if len(kept) == limit:
            break
    if kept:
        yield kept
