"""A checkpoint with fewer experts: the view of a source through a `Pruning`.

Experts that stay have new numbers, in the order of their old ones; rows of routers and what stands
next to them are cut in *made files* (`ktconv.source.reading.sliced`), and config.json has the new
counts. Whatever reads the checkpoint reads these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase

from msgspec.structs import replace

from ktconv.errors import CheckpointError, UsageError
from ktconv.families.config import Config
from ktconv.families.names import mtp_prefix
from ktconv.source.config import CONFIG_NAME
from ktconv.source.pruning.config import pruned_content, renamed
from ktconv.source.pruning.kept import WRITE, Kept, Pruning
from ktconv.source.pruning.routers import Routers
from ktconv.source.reading.sliced import SlicedFiles
from ktconv.source.settings import ModelSettings
from ktconv.source.side_files import find_side_files
from ktconv.source.types import Checkpoint, MoELayer, SourceFile, TensorRef
from ktconv.system.regular_files import read_small
from ktconv.system.units import counted, format_ranges

SOURCE = "kept experts"  # the name of the pruning among the files of a source
_ABOUT_QUANTIZATION = "*quant*"
# What follows "experts" in a pattern of module names. Numbers of any length are of all experts
# alike; other digits, and classes of them, choose some.
_AFTER_EXPERTS = re.compile(r"(?<!shared_)(?<!shared)experts?([^/\w].*)")
_ANY_NUMBER = re.compile(r"(?:\\d|\[0-9\]|\.)[+*]")
_SOME_NUMBERS = re.compile(r"(?<![\w\[-])[0-9]|\\d|(?<!\w)\[[^\]]*[0-9]|^\\?\.\?")
_AGAIN = f"make a file for this model: {WRITE}"


class PrunedView:
    """A checkpoint and what stays of it."""

    def __init__(self, checkpoint: Checkpoint, pruning: Pruning) -> None:
        """UsageError for a pruning that does not fit the checkpoint."""
        if checkpoint.tower is not None:
            raise UsageError(
                f"{checkpoint.path} has experts in several towers: none of them are dropped",
                "convert it without --prune",
            )
        self.base, self.pruning = checkpoint, pruning
        self._layers = {layer.index: layer for layer in checkpoint.layers}
        self._routers = Routers(checkpoint)
        self.files = SlicedFiles(checkpoint)
        self._check()
        self.groups = self._groups()

    def kept(self, layer: MoELayer) -> Kept:
        """The experts of a layer that stay."""
        everything = Kept(len(layer.experts), tuple(range(len(layer.experts))))
        return self.pruning.layers.get(layer.index, everything)

    @property
    def mtp_left_out(self) -> bool:
        return bool(self.pruning.left_out)

    def checkpoint(self) -> Checkpoint:
        """The checkpoint with what stays. CheckpointError where what belongs to experts cannot be
        cut."""
        base, pruning = self.base, self.pruning
        layers = [
            replace(layer, experts=tuple(layer.experts[one] for one in self.kept(layer).ids))
            for layer in self.layers
        ]
        content = self._content()
        made = {**base.made_files, **self._renamed_files(), CONFIG_NAME: _written(content)}
        data = pruning.data
        return replace(
            base,
            config=ModelSettings(Config(content)),
            layers=layers,
            other_tensors=self.others(),
            notes=[*base.notes, *self._notes()],
            sources=[*base.sources, SourceFile(SOURCE, len(data), None, pruning.sha256)],
            made_files=made,
            pruning=pruning,
            unpruned=base,
        )

    @property
    def layers(self) -> Sequence[MoELayer]:
        """The layers of the source that stay."""
        return [one for one in self.base.layers if one.index not in self.pruning.left_out]

    def others(self) -> list[TensorRef]:
        """The tensors that are no experts, with what stays of routers."""
        cuts: dict[str, TensorRef] = {}
        shifted: dict[str, tuple[int, int]] = {}  # by experts' name: old and new number
        for layer in self.layers:
            kept = self.kept(layer)
            if len(kept.ids) == kept.experts:
                continue
            for cut in self._routers.cuts(layer, kept):
                tensor = self.files.add(cut.tensor, cut.axis, cut.size, cut.kept)
                cuts[cut.tensor.name] = tensor
            shifted[layer.source] = kept.experts, len(kept.ids)
        gone = tuple(
            mtp_prefix(layer.source)
            for layer in self.base.layers
            if layer.index in self.pruning.left_out
        )
        stay = (one for one in self.base.other_tensors if not (gone and one.name.startswith(gone)))
        found = [cuts.get(one.name) or _renumbered(one, shifted) for one in stay]
        # Experts without weights come last, by layer: so they lie in a checkpoint that is written.
        order = {layer.source: number for number, layer in enumerate(self.layers, 1)}
        return sorted(found, key=lambda one: _experts_order(one, order))

    def rename(self, name: str) -> str | None:
        """The new name of a tensor or module; None for those of experts that are dropped."""
        for layer in self.base.layers:
            if not name.startswith(f"{layer.source}."):
                continue
            if layer.index in self.pruning.left_out:
                return None
            words = name.removeprefix(f"{layer.source}.").split(".")
            if any(word.isdecimal() for word in words[:2]):
                return self.renumbered(name, layer)
        self._refuse_some(name)
        return name

    def _refuse_some(self, pattern: str) -> None:
        """CheckpointError for a pattern of names that is of some experts: their numbers change. It
        is read and not run, since a pattern of a checkpoint can run without end."""
        found = _AFTER_EXPERTS.search(pattern)
        if found is None or not _SOME_NUMBERS.search(_ANY_NUMBER.sub("", found[1])):
            return
        if any(one.dropped for one in self.pruning.layers.values()):
            raise CheckpointError(
                f"the settings of quantization in {self.base.path} name some experts by "
                f"{pattern!r:.200}, and their numbers change where others are dropped",
                "write the whole names of their tensors or modules in its place",
            )

    def renumbered(self, name: str, layer: MoELayer) -> str | None:
        """The new name of a tensor or module of a layer's experts; None for those that are
        dropped."""
        kept, words = self.kept(layer), name.removeprefix(f"{layer.source}.").split(".")
        place = next((at for at, word in enumerate(words[:2]) if word.isdecimal()), None)
        if place is None:
            return name
        number = int(words[place])
        if number < kept.experts:
            if number not in kept.ids:
                return None
            number = kept.ids.index(number)
        else:
            number += len(kept.ids) - kept.experts
        words[place] = str(number)
        return f"{layer.source}.{'.'.join(words)}"

    # ---- checks ----

    def _check(self) -> None:
        path, pruning = self.base.path, self.pruning
        for index, kept in pruning.layers.items():
            layer = self._layers.get(index)
            if layer is None:
                raise UsageError(
                    f"the kept experts are of layer {index}, which has no experts in {path}", _AGAIN
                )
            if len(layer.experts) != kept.experts:
                raise UsageError(
                    f"the kept experts are of a layer {index} with "
                    f"{counted(kept.experts, 'expert')}, but "
                    f"{path} has {len(layer.experts)} there",
                    _AGAIN,
                )
            top_k = self.base.config.top_k(index)
            if top_k and len(kept.ids) < top_k:
                raise UsageError(
                    f"{counted(len(kept.ids), 'expert')} of layer {index} are kept, but each token "
                    f"takes {top_k}",
                    f"keep at least {top_k}",
                )
        mtp = {layer.index for layer in self.base.layers if layer.is_mtp}
        if pruning.left_out and set(pruning.left_out) != mtp:
            raise UsageError(
                f"layers {format_ranges(list(pruning.left_out))} are left out, but the MTP layers "
                f"of {path} are {format_ranges(sorted(mtp)) or 'none'}",
                _AGAIN,
            )

    def _groups(self) -> tuple[int, int] | None:
        """The number of groups that the router chooses from, before and after; None: of one.

        UsageError unless in each layer the same number of experts stays in all groups that stay.
        """
        found: dict[tuple[int, int], int] = {}
        for layer in self.layers:
            index, kept, spec = layer.index, self.kept(layer), self._routers.spec(layer)
            if spec is None or spec.n_group < 2:
                continue
            size = (kept.experts + spec.identity_experts) // spec.n_group
            numbers = [0] * spec.n_group
            for one in kept.ids:
                numbers[one // size] += 1
            stay = [number for number in numbers if number]
            if len(set(stay)) > 1 or len(stay) < spec.topk_group:
                raise UsageError(
                    f"layer {index} has experts in {spec.n_group} groups of {size}, of which each "
                    f"token takes {spec.topk_group}: kept are {numbers}",
                    "keep whole groups, or the same number in each",
                )
            found.setdefault((spec.n_group, len(stay)), index)
        if len(found) > 1:
            raise UsageError(
                f"different numbers of groups are kept in layers "
                f"{format_ranges([*found.values()])}",
                "keep the same number in all layers",
            )
        return next(iter(found), None)

    def _content(self) -> dict[str, object]:
        experts = {one.index: len(self.kept(one).ids) for one in self.layers}
        config = self.base.config
        return pruned_content(
            config.content, config.checked, experts, self.groups, self.mtp_left_out, self.rename
        )

    def _renamed_files(self) -> dict[str, bytes]:
        """JSON about quantization next to the weights, where it names experts of new numbers:
        hf_quant_config.json, quantize_config.json, quant_model_description.json.
        """
        directory, made = self.base.side_directory, {}
        if directory is None:
            return {}
        for path in find_side_files(directory):
            if not fnmatchcase(path.name, _ABOUT_QUANTIZATION) or path.suffix != ".json":
                continue
            # What is no JSON is copied as it is: no loader reads it.
            with suppress(ValueError, RecursionError):
                content = json.loads(read_small(directory, path))
                new = renamed(content, self.rename)
                if new != content:
                    made[str(path)] = _written(new)
        return made

    def _notes(self) -> list[str]:
        drops = any(layer.dropped for layer in self.pruning.layers.values())
        words = "experts are dropped" if drops else "no expert is dropped"
        notes = [f"{words}: kept are {self.pruning.in_words}"]
        if left := self.pruning.left_out:
            notes.append(f"MTP layers {format_ranges(list(left))} are left out with their tensors")
        return notes


def with_pruning(checkpoint: Checkpoint, pruning: Pruning) -> Checkpoint:
    """The checkpoint with fewer experts. Raises as `PrunedView`."""
    return PrunedView(checkpoint, pruning).checkpoint()


def _written(content: object) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


_NUMBER = re.compile(r"(?:0|[1-9][0-9]*)")


def _experts_order(tensor: TensorRef, order: Mapping[str, int]) -> int:
    """The place of the layer of an expert's tensor; 0 for other tensors."""
    source, _, _ = tensor.name.rpartition(".experts.")
    return order.get(f"{source}.experts", 0)


def _renumbered(tensor: TensorRef, shifted: Mapping[str, tuple[int, int]]) -> TensorRef:
    """A tensor of an expert that returns its input, which follows the numbered ones (LongCat)."""
    source, _, rest = tensor.name.rpartition(".experts.")
    source = f"{source}.experts" if source else ""
    if source not in shifted:
        return tensor
    number, dot, tail = rest.partition(".")
    old, new = shifted[source]
    if not dot or not _NUMBER.fullmatch(number) or int(number) < old:
        return tensor
    return replace(tensor, name=f"{source}.{int(number) - old + new}.{tail}")
