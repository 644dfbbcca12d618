"""A checkpoint whose weights are W + s B A: the view of a source through adapters.

Every matrix that an adapter changes becomes one of a made file (`ktconv.source.reading.merged`),
in float32 if it is an expert's, else in its own dtype. Whatever reads the checkpoint reads these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from ktconv.errors import CheckpointError, UsageError
from ktconv.families.family import Projection
from ktconv.source.adapter.beside import CONFIG
from ktconv.source.adapter.choices import Choice, choices_of
from ktconv.source.adapter.config import AdapterConfig
from ktconv.source.adapter.files import Adapter, LowRank, checked, headers_of
from ktconv.source.adapter.layers import layer_names, sizes_of_checkpoint
from ktconv.source.adapter.names import (
    EMBEDDING_ENDS,
    ENDS,
    PREFIX,
    WRAPPED,
    module_of,
    renamed_modules,
    usual_module,
)
from ktconv.source.adapter.recorded import files_of, name_of
from ktconv.source.elements import F32
from ktconv.source.encodings.base import Parts
from ktconv.source.encodings.unquantized import UNQUANTIZED
from ktconv.source.others import OtherWeights, primary
from ktconv.source.reading.encoded_sums import EncodedSums, encoded_sums
from ktconv.source.reading.matrices import MatrixReader
from ktconv.source.reading.merged import MergedFiles
from ktconv.source.reading.reader import SourceReader
from ktconv.source.safetensors_file import Header
from ktconv.source.types import Checkpoint, ExpertMatrix, MoELayer, SourceFile, TensorRef
from ktconv.system.arrays import Array
from ktconv.system.units import counted

_PEFT = "merge it into its base with PEFT (merge_and_unload), and convert the result"
_ANOTHER = "give an adapter of this model"
_PIECE = 16 << 20


class ExpertPart(NamedTuple):
    """The part of an adapter that is added to a matrix of an expert."""

    adapter: Adapter
    layer: int
    projection: Projection
    expert: int
    scale: float

    def load(self) -> LowRank:
        return self.adapter.expert(self.layer, self.projection, self.expert, self.scale)


class _Added(NamedTuple):
    """An adapter's part in a projection of a layer, and the experts that it changes."""

    adapter: Adapter
    scale: float
    experts: Set[int]


class OtherPart(NamedTuple):
    """The part of an adapter that is added to another matrix."""

    adapter: Adapter
    a: TensorRef
    b: TensorRef
    scale: float
    embedding: bool

    def load(self) -> LowRank:
        a, b = self.adapter.values(self.a), self.adapter.values(self.b)
        if self.embedding:
            a, b = np.ascontiguousarray(b.T), np.ascontiguousarray(a.T)
        return LowRank(a, b, self.scale)


def with_adapters(checkpoint: Checkpoint, texts: Sequence[str]) -> Checkpoint:
    """The checkpoint through the adapters of `--adapter`.

    All their bytes are read once, for checksums and what is not finite. CheckpointError for an
    adapter of another model or another kind, and for a tensor of it that belongs to no weight;
    UsageError for options that contradict one another.
    """
    view = _View(checkpoint)
    for number, choice in enumerate(choices_of(texts), start=1):
        view.add(number, choice)
    return view.checkpoint()


class _View:
    """Collects what adapters change."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        if checkpoint.tower is not None:
            raise UsageError(
                f"{checkpoint.path} has experts in several towers: no adapter can be added to them",
                _PEFT,
            )
        self._base = checkpoint
        self._layers = {layer.index: layer for layer in checkpoint.layers}
        self._sizes = sizes_of_checkpoint(checkpoint)
        self._experts: dict[tuple[int, Projection], list[_Added]] = {}
        self._others: dict[str, list[OtherPart]] = {}
        self._matrices: dict[str, ExpertMatrix] = {}  # of others, by their tensors' names
        self._encoded: dict[str, EncodedSums] = {}  # of those, where numbers have scales
        self._modules = _Modules(checkpoint)
        self._choices: list[Choice] = []
        self._sources: list[SourceFile] = []
        self._notes: list[str] = []
        self._memory: list[int] = []

    def add(self, number: int, choice: Choice) -> None:
        """One more adapter."""
        directory = choice.directory
        config = AdapterConfig(directory)
        config.check_mergeable()
        headers = headers_of(directory)
        names = layer_names(self._sizes, self._base.config.family, headers)
        adapter = Adapter(directory, names, opened=(config, headers))
        experts = self._add_experts(adapter, choice.weight)
        others = self._add_others(adapter, choice.weight)
        if not experts + others:
            raise CheckpointError(f"{directory} has no matrices", "save the adapter again")
        self._sources += _states(files_of(number, choice.weight), config, headers)
        self._choices.append(choice)
        self._memory.append(adapter.memory)
        words = [f"{counted(experts, 'matrix')} of experts"] if experts else []
        what = " and ".join(words + ([counted(others, "other matrix")] if others else []))
        times = "" if choice.weight == 1 else f", times {choice.weight:g}"
        self._notes.append(f"the adapter {name_of(directory)} is added to {what}{times}")

    def _add_experts(self, adapter: Adapter, weight: float) -> int:
        count = 0
        for index, projections in adapter.projections.items():
            layer = self._layers[index]
            for projection in sorted(projections):
                if projection not in layer.experts[0]:
                    raise CheckpointError(
                        f"{adapter.directory} has LoRA of {projection} in layer {index}, whose "
                        "experts have none",
                        _ANOTHER,
                    )
                matrix = layer.experts[0][projection]
                shape, experts = (matrix.rows, matrix.cols), len(layer.experts)
                scale = adapter.expert_scale(index, projection, experts, shape)
                covered = frozenset(adapter.covered(index, projection, experts))
                found = self._experts.setdefault((index, projection), [])
                found.append(_Added(adapter, weight * scale, covered))
                count += len(covered)
        return count

    def _add_others(self, adapter: Adapter, weight: float) -> int:
        modules: dict[tuple[str, bool], TensorRef] = {}
        for key, tensor in adapter.others.items():
            plain, embedding = module_of(key), module_of(key, EMBEDDING_ENDS)
            found = plain or embedding
            if found is None:
                self._modules.check_copy(adapter, tensor)
                continue
            modules.setdefault((found[0], plain is None), tensor)
        for (module, embedded), tensor in modules.items():
            name, matrix = self._modules.matrix(module, adapter, tensor)
            shape = matrix.rows, matrix.cols
            try:
                (a, b), scale = adapter.other(module, shape, embedded)
            except CheckpointError as error:
                raise self._modules.refusal(module, tensor, name) or error from None
            part = OtherPart(adapter, a, b, weight * scale, embedded)
            parts = self._others.setdefault(name, [])
            if any(one.adapter is adapter for one in parts):
                raise CheckpointError(
                    f"{tensor.name} in {tensor.file} is of {name}, to which another matrix there "
                    "belongs, too",
                    _ANOTHER,
                )
            parts.append(part)
            self._matrices[name] = matrix
            encoded = encoded_sums(matrix, self._base.config.checked.power_scales)
            if name not in self._encoded and encoded is not None:
                self._encoded[name] = encoded
        return len(modules)

    def checkpoint(self) -> Checkpoint:
        """The checkpoint with what was added."""
        base, files = self._base, MergedFiles(self._base, [str(one) for one in self._choices])
        self._scaled = {one.scale.name: name for name, one in self._encoded.items()}
        layers = [self._layer(layer, files) for layer in base.layers]
        others = [self._other(tensor, files) for tensor in base.other_tensors]
        merged = {one.directory for one in self._choices}
        starts = tuple(f"a LoRA adapter lies in {one} and" for one in merged)
        return replace(
            base,
            layers=layers,
            other_tensors=others,
            notes=[
                *(note for note in base.notes if not note.startswith(starts)),
                *self._notes,
            ],
            sources=[*base.sources, *self._sources],
            thread_memory=files.memory,
            shared_memory=sum(self._memory),
            adapters=[f"{one.directory.absolute()}:{one.weight!r}" for one in self._choices],
            encoded_again=sorted(self._encoded),
        )

    def _layer(self, layer: MoELayer, files: MergedFiles) -> MoELayer:
        changed = {what: found for (index, what), found in self._experts.items()
                   if index == layer.index}  # fmt: skip
        if not changed:
            return layer
        experts, whole = [], True
        for number, own in enumerate(layer.experts):
            merged = dict(own)
            for projection, adapters in changed.items():
                parts = [
                    ExpertPart(one.adapter, layer.index, projection, number, one.scale)
                    for one in adapters
                    if number in one.experts
                ]
                if parts:
                    merged[projection] = _merged(own[projection], parts, files)
            whole &= all(merged[name] is not matrix for name, matrix in own.items())
            experts.append(merged)
        left = [] if whole else list(layer.encodings)
        encodings = dict.fromkeys([*left, "fp32"])
        return replace(layer, experts=tuple(experts), encoding="+".join(encodings))

    def _other(self, tensor: TensorRef, files: MergedFiles) -> TensorRef:
        name = self._scaled.get(tensor.name, tensor.name)
        parts, encoded = self._others.get(name), self._encoded.get(name)
        if parts is None:
            return tensor
        matrix = self._matrices[name]
        return files.add(tensor, matrix, parts, tensor.dtype, tensor.shape, encoded)


def _merged(matrix: ExpertMatrix, parts: Sequence[ExpertPart], files: MergedFiles) -> ExpertMatrix:
    """A matrix of an expert with what is added to it, in float32."""
    shape = matrix.rows, matrix.cols
    tensor = files.add(matrix.tensor, matrix, parts, "F32", shape)
    return ExpertMatrix(tensor, *shape, 0, matrix.cols, 1, F32, None, matrix.bias)


# ---- names ---------------------------------------------------------------------------------


class _Modules:
    """Matrices that are no expert's, by what transformers and checkpoints call their modules."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self._weights = checkpoint, OtherWeights(checkpoint)
        family = checkpoint.config.family
        rows = [] if family is None else [family]
        self._by_name: dict[str, list[tuple[str, Parts]]] = {}
        self._alike: dict[str, list[str]] = {}
        self._parts: set[str] = set()  # of the names, those of one part of a matrix
        for module, parts in self._weights.modules():
            for name, is_part in renamed_modules(module, rows).items():
                self._by_name.setdefault(name, []).append((module, parts))
                if is_part:
                    self._parts.add(name)
            alike = usual_module(module) or module.rpartition(".")[2]
            self._alike.setdefault(alike, []).append(module)
        self._tied = bool(checkpoint.config.content.get("tie_word_embeddings"))

    def matrix(self, module: str, adapter: Adapter, tensor: TensorRef) -> tuple[str, ExpertMatrix]:
        """The name of a module's tensor, and its matrix. CheckpointError where the model has none,
        where several could be meant, and where numbers have scales, to which nothing can be
        added."""
        where = f"{tensor.name} in {tensor.file}"
        if self._checkpoint.is_gguf:
            raise CheckpointError(
                f"{where} is of a tensor that is no expert's: its name and order are others in "
                "GGUF files",
                "convert the safetensors checkpoint of the model",
            )
        these = self._those_of(module)
        if len(these) > 1:
            raise CheckpointError(
                f"{where} is of one matrix, which the model has as "
                + " and ".join(name for name, _ in these),
                _PEFT,
            )
        found = these[0][1] if these else {}
        if primary(found) is None:
            raise _unused(adapter, tensor)
        if self._tied and module.rpartition(".")[2] in ("embed_tokens", "lm_head", "wte"):
            raise CheckpointError(
                f"{where} is of embeddings that are the model's head, too, where it is not added",
                "train without it, or untie them (tie_word_embeddings) and merge it with PEFT",
            )
        weight = self._weights.weight(found)
        try:
            one = self._weights.matrix(found)
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}", error.hint) from None
        plain = one.encoding in UNQUANTIZED or encoded_sums(one.matrix, powers=False) is not None
        if not plain or len(weight.shape) != 2:
            raise CheckpointError(
                f"{where} is of {weight.name}, which the model has as {one.encoding}: of "
                "weights that are no expert's only FP8 is encoded again, as other codes were "
                "chosen on data that is not here",
                "give the model in bf16, or an adapter without this module",
            )
        return weight.name, one.matrix

    def refusal(self, module: str, tensor: TensorRef, name: str) -> CheckpointError | None:
        """The error for LoRA of another shape than a matrix; None if it is not of a part of it."""
        if module not in self._parts:
            return None
        return CheckpointError(
            f"{tensor.name} in {tensor.file} is of one of the modules that transformers makes of "
            f"{name}",
            _PEFT,
        )

    def check_copy(self, adapter: Adapter, tensor: TensorRef) -> None:
        """CheckpointError unless this is the model's own weight: PEFT saves embeddings and heads
        next to their LoRA."""
        module, _, part = tensor.name.removeprefix(PREFIX).rpartition(".")
        these = self._those_of(module.removesuffix(f".{WRAPPED}")) if part == "weight" else []
        found = these[0][1] if len(these) == 1 else {}
        if primary(found) is None:
            raise _unused(adapter, tensor)
        own = self._weights.weight(found)
        if own.dtype not in ("BF16", "F16", "F32") or own.shape != tensor.shape:
            same = False
        else:
            matrix = self._weights.matrix(found).matrix
            same = self._is_same(matrix, adapter.values(tensor))
        if not same:
            raise CheckpointError(
                f"{tensor.name} in {tensor.file} is another weight than {own.name} of the model: "
                "it was trained, or has rows for other tokens",
                _PEFT,
            )

    def _is_same(self, matrix: ExpertMatrix, values: Array) -> bool:
        """Whether a matrix has these numbers, in the dtype of either of the two."""
        checkpoint = self._checkpoint
        reader = MatrixReader(SourceReader(checkpoint.files, checkpoint.sources), matrix)
        for chunk, own in reader.decoded():
            given = values[chunk.start : chunk.stop]
            close = np.abs(given - own) <= 2.0**-8 * np.abs(own)  # rounded to bf16, or not
            if not close.all():
                return False
        return True

    def _those_of(self, module: str) -> Sequence[tuple[str, Parts]]:
        """The checkpoint's modules that one of transformers consists of, with their tensors."""
        if module in self._by_name:
            return self._by_name[module]
        alike = self._alike.get(usual_module(module) or module.rpartition(".")[2], [])
        return self._by_name[alike[0]][:1] if len(alike) == 1 else []


def _unused(adapter: Adapter, tensor: TensorRef) -> CheckpointError:
    what = f"{tensor.name} {list(tensor.shape)} in {tensor.file}"
    if tensor.name.endswith(tuple(f".{end}" for end in (*ENDS.values(), *EMBEDDING_ENDS.values()))):
        return CheckpointError(f"{what} is of a module that the model does not have", _ANOTHER)
    return CheckpointError(f"{what} is no matrix of LoRA", _PEFT)


# ---- states --------------------------------------------------------------------------------


def _states(start: str, config: AdapterConfig, headers: Sequence[Header]) -> Iterator[SourceFile]:
    """The files of an adapter with the checksums of all their bytes. CheckpointError for a NaN or
    an infinity in them."""
    if config.data is not None:
        digest = hashlib.sha256(config.data).hexdigest()
        yield SourceFile(f"{start}{CONFIG}", len(config.data), None, digest)
    for header in headers:
        yield SourceFile(f"{start}{header.file.name}", header.file_bytes, None, _digest(header))


def _digest(header: Header) -> str:
    digest, reader = hashlib.sha256(), SourceReader([header.file], [header.state])
    with reader.open(header.file) as fd:
        first = min((one.offset for one in header.tensors), default=header.file_bytes)
        digest.update(fd.take(first, 0))
        for tensor in header.tensors:
            for start in range(0, tensor.nbytes, _PIECE):
                data = np.empty(min(_PIECE, tensor.nbytes - start), np.uint8)
                reader.read(fd, tensor, data.data, start)
                checked(tensor, data)
                digest.update(data.data)
    return digest.hexdigest()
