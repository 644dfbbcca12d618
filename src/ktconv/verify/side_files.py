"""Level 1, what lies beside the tensors: configuration, tokenizer, leftovers of other runs."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Iterator
from pathlib import Path

from ktconv.checkpoint import read_header
from ktconv.checkpoint.config import CONFIG_NAME, ModelConfig, interpret_config, read_config
from ktconv.errors import CheckpointError, KtconvError
from ktconv.formats import FORMATS, parse_kt_path, parse_tensor_name
from ktconv.plan import find_sidecars
from ktconv.verify.findings import Findings
from ktconv.verify.subject import Subject
from ktconv.writer.files import translated

LEVEL = "structure"


def check_side_files(subject: Subject, findings: Findings) -> None:
    """They are there, can be read, are the source's, and fit the tensors."""
    _sidecars(subject, findings)
    _config(subject, findings)
    _leftovers(subject, findings)
    _names_of_files(subject, findings)


def absent(subject: Subject, findings: Findings, name: str, what: str) -> None:
    """A failure for our own outputs; other tools leave some files out."""
    if subject.ours:
        findings.fail(LEVEL, "missing file", f"{subject.directory} has no {name}.", file=name)
    else:
        findings.note(f"{subject.directory} has no {what}")


def _sidecars(subject: Subject, findings: Findings) -> None:
    source = subject.checkpoint.path if subject.checkpoint else None
    planned = subject.plan.sidecars if subject.plan else [Path(CONFIG_NAME)]
    for name in planned:
        if not (subject.directory / name).is_file():
            absent(subject, findings, str(name), f"{name}, which models need")
        elif source is not None and not _same(subject.directory / name, source / name):
            message = f"{name} is not the source's"
            if subject.ours:
                findings.fail(LEVEL, "changed file", f"{message}, byte for byte.", file=str(name))
            else:
                findings.note(message)
    for name in find_sidecars(subject.directory):
        if name.suffix != ".json" or name.name == CONFIG_NAME:  # which _config() reads
            continue
        if why := _why_no_json(subject.directory / name):
            findings.fail(LEVEL, "damaged file", f"{name} {why}.", file=str(name))


def _same(one: Path, other: Path) -> bool:
    with translated("read", other):
        return filecmp.cmp(one, other, shallow=False)


def _why_no_json(path: Path) -> str | None:
    with translated("read", path):
        data = path.read_bytes()
    try:
        json.loads(data)
    except (ValueError, RecursionError) as error:
        return f"is no JSON: {error}"
    return None


# ---- config.json against the tensors ----


def _config(subject: Subject, findings: Findings) -> None:
    """The layers, experts and sizes that config.json tells are those of the tensors."""
    if not (subject.directory / CONFIG_NAME).is_file():
        return
    try:
        config = interpret_config(read_config(subject.directory).content)
    except KtconvError as error:
        findings.fail(LEVEL, "damaged file", f"{str(error).rstrip('.')}.", file=CONFIG_NAME)
        return
    for message, layer in _unlike(subject, config):
        findings.fail(LEVEL, "dimensions", message, file=CONFIG_NAME, layer=layer)


def _unlike(subject: Subject, config: ModelConfig) -> Iterator[tuple[str, int]]:
    told = (config.num_experts, config.hidden_size, config.intermediate_size)
    for index, here in subject.packed.layers.items():
        sizes = (here.experts, here.hidden, here.intermediate)
        for words, size, setting in zip(_SIZES, sizes, told, strict=True):
            if here.format is not None and setting is not None and setting.value != size:
                yield (
                    f"layer {index} has {words} {size}, but {CONFIG_NAME} says "
                    f"{setting.key} {setting.value}.",
                    index,
                )
    for index in _absent_layers(subject, config):
        yield f"layer {index} is one of experts by {CONFIG_NAME}, but none are there.", index


_SIZES = ("a number of experts of", "a hidden size of", "an intermediate size of")


def _absent_layers(subject: Subject, config: ModelConfig) -> list[int]:
    """Where neither source nor manifest tell: MoE layers by config.json without any tensor."""
    if subject.plan or subject.manifest or not config.num_layers or not config.dense_layers:
        return []
    every = range(config.num_layers.value)
    return [
        n for n in every if n not in subject.packed.layers and not config.dense_layers.key_of(n)
    ]


# ---- other files ----


def _leftovers(subject: Subject, findings: Findings) -> None:
    """KTransformers reads every shard below the directory, whatever the index says."""
    for shard in sorted(subject.directory.rglob("*.safetensors")):
        if shard.parent == subject.directory:
            continue
        try:
            names = [ref.name for ref in read_header(shard).tensors]
        except CheckpointError:
            continue  # nobody can read it
        if any(parse_tensor_name(name) for name in names):
            inside = shard.relative_to(subject.directory).as_posix()
            findings.fail(
                LEVEL,
                "double tensor",
                f"{inside} holds packed experts too, and KTransformers reads every shard below "
                f"{subject.directory}.",
                file=inside,
            )
    if subject.packed.layout == "safetensors":
        folders = sorted(path.name for path in subject.directory.glob("_layer_*"))
        if folders:
            findings.note(f"{', '.join(folders)} beside the shards: not looked at")


def _names_of_files(subject: Subject, findings: Findings) -> None:
    """`.kt` files are found by names that begin with the method."""
    if subject.packed.layout != "layers":
        return
    method = FORMATS[subject.options.method].name
    for place in subject.packed.tensors.values():
        name = place.file.relative_to(subject.directory).as_posix()
        file = parse_kt_path(name)
        if file is not None and file.method != method:
            findings.fail(
                LEVEL, "damaged file", f"{name} is named {file.method}, not {method}.", file=name
            )
