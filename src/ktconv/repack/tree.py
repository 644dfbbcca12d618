"""Layer folders on a disk: what they contain, and why they cannot be used.

    tree = read_tree(Path("layers"))
    tree.layers[3].parts, tree.layers[3].hidden

What a file is follows from its own name, `{METHOD}_{proj}_{expert}_{nbytes}Byte_{quant|scale}_.kt`,
and from no other part of its path. No file but the manifest is opened.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from ktconv.errors import CheckpointError
from ktconv.formats import (
    Format,
    Matrix,
    TensorId,
    is_backward,
    kt_path,
    output_formats,
    output_named,
    parse_kt_path,
)
from ktconv.source.remote.urls import no_directory
from ktconv.system.files import io_error
from ktconv.system.pointers import refuse_pointer_at
from ktconv.system.units import counted, listed
from ktconv.targets.packed.weights import Geometry, Recorded, recorded_of
from ktconv.writer.journal import Journal
from ktconv.writer.manifest import MANIFEST

_NUMBER = "(0|[1-9][0-9]{0,4})"
_LAYER_FOLDER = re.compile(rf"_layer_{_NUMBER}")
_NUMA_FOLDER = re.compile(rf"_numa_{_NUMBER}")
_LEFT_OVER = "remove files of other conversions, or convert again into an empty directory"
_INCOMPLETE = "convert again into an empty directory: the layer folders are incomplete"


class KtEntry(Struct, frozen=True):
    """One `.kt` file."""

    name: str  # below the root, with /
    method: str
    tensor: TensorId
    nbytes: int
    mtime_ns: int


class TreeLayer(Geometry, frozen=True, kw_only=True):
    """One layer folder that is complete and consistent in itself."""

    format: Format
    index: int
    backward: bool  # whether it has the matrices of the backward pass too
    files: int
    total_bytes: int
    sha256: str  # of names, sizes and times, to notice changes

    def tensor_nbytes(self, tensor: TensorId) -> int:
        """The size that a tensor of this layer has."""
        return self.format.stored(tensor.kind, *self.shape(tensor.proj))[2]

    def all_tensors(self) -> Iterator[TensorId]:
        return self.tensors(self.index, self.matrices(self.backward))

    @property
    def record(self) -> dict[str, object]:
        """Record of the folder in a journal."""
        return {"files": self.files, "bytes": self.total_bytes, "listing_sha256": self.sha256}


class Tree(Struct, frozen=True):
    """All layer folders of a directory. They are of one format and one number of parts."""

    root: Path
    layers: Mapping[int, TreeLayer]  # ascending

    @property
    def format(self) -> Format:
        return next(iter(self.layers.values())).format

    @property
    def parts(self) -> int:
        return next(iter(self.layers.values())).parts

    @property
    def backward(self) -> bool:
        return any(layer.backward for layer in self.layers.values())


def read_tree(root: Path) -> Tree:
    """Read all layer folders. CheckpointError names the first thing that is wrong."""
    refuse_unfinished(root, "the directory of _layer_* folders")
    recorded = recorded_of(root)
    layers = {
        index: _judge(root, index, scan_layer(root, index), recorded)
        for index in _layer_indices(root)
    }
    tree = Tree(root, layers)
    refuse_mixtures(tree)
    return tree


def refuse_unfinished(directory: Path, wanted: str) -> None:
    """Refuse what is no directory, and one that an interrupted run left."""
    if not directory.is_dir():
        raise CheckpointError(no_directory(directory), f"give {wanted}")
    if Journal(directory).has_run():
        raise CheckpointError(
            f"{directory} is not finished: a conversion into it was interrupted",
            "run the command that began it again to complete it",
        )


def scan_layer(root: Path, index: int) -> list[KtEntry]:
    """The files of a layer, by name; each is as large as its name says."""
    entries = []
    for part in _part_folders(root, index):
        items = _listing(root / part)
        if not items:
            raise CheckpointError(f"{root / part} contains no file", f"remove it, or {_INCOMPLETE}")
        entries += [_entry(root, f"{part}/{item.name}", item) for item in items]
    return entries


def listing_sha256(entries: Iterable[KtEntry]) -> str:
    """Names, sizes and times in one number."""
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(
            f"{entry.name} {entry.nbytes} {entry.mtime_ns}\n".encode(errors="surrogateescape")
        )
    return digest.hexdigest()


# ---- folders and names -----------------------------------------------------------------


def _layer_indices(root: Path) -> list[int]:
    indices = []
    for item in _listing(root):
        if not item.name.startswith("_layer_"):
            continue
        match = _LAYER_FOLDER.fullmatch(item.name)
        if match is None or not item.is_dir():
            raise CheckpointError(f"{root / item.name} is not a layer folder", _LEFT_OVER)
        indices.append(int(match[1]))
    if not indices:
        if any(root.glob("*.gguf")):
            raise CheckpointError(
                f"{root} has GGUF files, which have no NUMA parts and no _layer_* folders",
                "use them as they are; llama-gguf-split of llama.cpp merges the parts of a model",
            )
        shards = any(root.glob("*.safetensors"))
        raise CheckpointError(
            f"{root} contains no _layer_* folder" + (", but shards" if shards else ""),
            "shards need no merging" if shards else "give the directory of _layer_* folders",
        )
    return sorted(indices)


def _part_folders(root: Path, index: int) -> list[str]:
    """`_layer_L/_numa_p` for p = 0, 1, ...; a gap or anything else is refused."""
    folder, parts = f"_layer_{index}", []
    for item in _listing(root / folder):
        match = _NUMA_FOLDER.fullmatch(item.name)
        if match is None or not item.is_dir():
            raise CheckpointError(
                f"{root / folder / item.name} is neither a NUMA folder nor a file of this "
                "conversion",
                _LEFT_OVER,
            )
        parts.append(int(match[1]))
    if not parts:
        raise CheckpointError(f"{root / folder} contains no _numa_* folder", _INCOMPLETE)
    if missing := set(range(max(parts))) - set(parts):
        raise CheckpointError(
            f"{root / folder} has _numa_{max(parts)} but no _numa_{min(missing)}", _LEFT_OVER
        )
    return [f"{folder}/_numa_{part}" for part in range(len(parts))]


def _listing(folder: Path) -> list[os.DirEntry[str]]:
    """The entries of a folder by name, without hidden files, which are the system's."""
    try:
        with os.scandir(folder) as items:
            return sorted(
                (item for item in items if not item.name.startswith(".")), key=lambda i: i.name
            )
    except OSError as error:
        raise io_error("read", folder, error) from error


def _entry(root: Path, name: str, item: os.DirEntry[str]) -> KtEntry:
    file = parse_kt_path(name)
    if file is None:
        raise CheckpointError(f"{root / name} is not named like a packed tensor", _LEFT_OVER)
    if not item.is_file():
        raise CheckpointError(
            f"{root / name} is not a regular file, or a broken link", "restore it, or convert again"
        )
    try:
        status = item.stat()
    except OSError as error:
        raise io_error("read", root / name, error) from error
    if status.st_size != file.nbytes:
        refuse_pointer_at(root / name)
        raise CheckpointError(
            f"{root / name} has {status.st_size} bytes, but its name says {file.nbytes}",
            "convert again: a full disk (or /dev/shm) cuts files short",
        )
    return KtEntry(name, file.method, file.tensor, file.nbytes, status.st_mtime_ns)


# ---- one layer -------------------------------------------------------------------------


def _judge(root: Path, index: int, entries: Sequence[KtEntry], recorded: Recorded) -> TreeLayer:
    """The layer that these files are, without the experts that were left out on request."""
    fmt, left_out = _format(root, entries), recorded.left_out.of(index)
    by_tensor = _by_tensor(root, entries)
    parts = 1 + max(tensor.part for tensor in by_tensor)
    gated = recorded.gated(index, by_tensor)
    if fmt.group:
        hidden, width = _recorded_sizes(root, index, fmt, recorded, parts)
    else:
        width = _width(root, index, fmt, by_tensor, "gate" if gated else "up")
        hidden = _usual(by_tensor.values(), "down", 0) // fmt.traits.scale_size
    if reason := fmt.check(hidden, width * parts, parts):
        raise CheckpointError(
            f"{root / f'_layer_{index}'} has sizes of no {fmt.name} layer: {reason}", _LEFT_OVER
        )
    layer = TreeLayer(
        experts=1 + max([*left_out, *(tensor.expert for tensor in by_tensor)]),
        parts=parts,
        hidden=hidden,
        intermediate=width * parts,
        format=fmt,
        elsewhere=frozenset(left_out),
        gated=gated,
        index=index,
        backward=any(is_backward(tensor.proj) for tensor in by_tensor),
        files=len(entries),
        total_bytes=sum(entry.nbytes for entry in entries),
        sha256=listing_sha256(entries),
    )
    _refuse_odd_sizes(root, layer, entries)
    _refuse_missing(root, layer, by_tensor.keys())
    return layer


def _format(root: Path, entries: Sequence[KtEntry]) -> Format:
    first = entries[0]
    for entry in entries:
        if entry.method != first.method:
            raise CheckpointError(
                f"{root} mixes methods: {first.name} and {entry.name}", _LEFT_OVER
            )
    found = output_named(first.method)
    if found is None:
        raise CheckpointError(
            f"{root / first.name} is of method {first.method}, whose layout is "
            "specific to the program that wrote it",
            f"ktconv knows {', '.join(row.name for row in output_formats().values())}; "
            "convert from the original model",
        )
    return found


def _by_tensor(root: Path, entries: Sequence[KtEntry]) -> dict[TensorId, KtEntry]:
    found: dict[TensorId, KtEntry] = {}
    for entry in entries:
        earlier = found.setdefault(entry.tensor, entry)
        if earlier is not entry:
            raise CheckpointError(
                f"{root} contains one tensor twice: {earlier.name} and {entry.name}; one "
                "of them is left over from another conversion",
                _LEFT_OVER,
            )
    return found


def _recorded_sizes(
    root: Path, index: int, fmt: Format, recorded: Recorded, parts: int
) -> tuple[int, int]:
    """Hidden size and width of a part. Sizes of files give the product of the two only where
    scales are of groups, so they are the manifest's."""
    hidden, intermediate = recorded.sizes(index)
    if not hidden:
        raise CheckpointError(
            f"{root / f'_layer_{index}'} contains {fmt.name}, whose file sizes do not give the "
            f"dimensions of a layer, and no {MANIFEST} next to it does",
            f"restore {MANIFEST}, or convert again",
        )
    return hidden, intermediate // parts


def _width(
    root: Path, index: int, fmt: Format, by_tensor: Mapping[TensorId, KtEntry], proj: Matrix
) -> int:
    """Rows of one part's `proj`. All parts have as many; otherwise some are left over."""
    parts = 1 + max(tensor.part for tensor in by_tensor)
    size = fmt.traits.scale_size
    widths = [_usual(by_tensor.values(), proj, part) // size for part in range(parts)]
    for part, width in enumerate(widths):
        folder = root / f"_layer_{index}" / f"_numa_{part}"
        if not width:
            raise CheckpointError(
                f"{folder} contains no {proj} scales", f"remove it, or {_INCOMPLETE}"
            )
        if width != widths[0]:
            raise CheckpointError(
                f"{folder} is inconsistent: its parts have {width} rows, those of _numa_0 "
                f"have {widths[0]}; it is left over from a conversion with another number "
                "of NUMA parts",
                _LEFT_OVER,
            )
    return widths[0]


def _usual(entries: Iterable[KtEntry], proj: Matrix, part: int) -> int:
    """Size of most scale files of a projection in one part; 0 if there is none."""
    sizes = Counter(
        entry.nbytes
        for entry in entries
        if (entry.tensor.proj, entry.tensor.part, entry.tensor.kind) == (proj, part, "scale")
    )
    return sizes.most_common(1)[0][0] if sizes else 0


def _refuse_odd_sizes(root: Path, layer: TreeLayer, entries: Sequence[KtEntry]) -> None:
    for entry in entries:
        expected = layer.tensor_nbytes(entry.tensor)
        if entry.nbytes != expected:
            raise CheckpointError(
                f"{root / entry.name} has the size of another model or number of parts: "
                f"{layer.format.name} of hidden size {layer.hidden}, intermediate size "
                f"{layer.intermediate} in {counted(layer.parts, 'part')} takes {expected} bytes",
                _LEFT_OVER,
            )


def _refuse_missing(root: Path, layer: TreeLayer, found: Iterable[TensorId]) -> None:
    present = set(found)
    missing = [tensor for tensor in layer.all_tensors() if tensor not in present]
    if not missing:
        return
    first = missing[0]
    nbytes = layer.tensor_nbytes(first)
    name = kt_path(
        layer.format.name, layer.index, first.proj, first.expert, first.part, first.kind, nbytes
    )
    more = f" and {counted(len(missing) - 1, 'more file')}" if missing[1:] else ""
    experts = listed("expert", (tensor.expert for tensor in missing))
    raise CheckpointError(f"{root} does not contain {name}{more}, of {experts}", _INCOMPLETE)


# ---- all layers ------------------------------------------------------------------------


def refuse_mixtures(tree: Tree) -> None:
    """One method, one number of parts, and backward matrices everywhere or nowhere."""
    first, *others = tree.layers.values()
    for layer in others:
        here, there = f"_layer_{layer.index}", f"_layer_{first.index}"
        if layer.format is not first.format:
            raise CheckpointError(
                f"{tree.root} mixes methods: {there} is {first.format.name}, {here} is "
                f"{layer.format.name}",
                _LEFT_OVER,
            )
        if layer.parts != first.parts:
            raise CheckpointError(
                f"{tree.root} mixes numbers of NUMA parts: {there} has {first.parts}, {here} has "
                f"{layer.parts}",
                _LEFT_OVER,
            )
        if layer.backward != first.backward:
            without = here if first.backward else there
            raise CheckpointError(
                f"{tree.root / without} has no backward matrices, although other layers do",
                _INCOMPLETE,
            )
