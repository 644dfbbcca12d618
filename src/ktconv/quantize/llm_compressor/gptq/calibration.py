"""Calibration samples: what text a quantizer sees, as token ids.

    samples = read_samples(Calibration("texts.jsonl"), load_tokenizer("path/to/model"))

A local file needs no network: `.jsonl` with a "text" or "messages" per line, or `.txt`, which is
cut into windows. Any other name goes to the library `datasets`. The same settings choose the same
samples in the same order.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from ktconv.errors import CheckpointError, UsageError
from ktconv.model import load
from ktconv.system.regular_files import refuse_device
from ktconv.targets.encoded.target import Calibration

_FILES = (".jsonl", ".txt")
WITHOUT_MODEL = "--algorithm rtn works on the checkpoint itself"
_COPY = "copy tokenizer.json and tokenizer_config.json of this model next to its weights"
_RECORDS = 'each record needs "text" (a string) or "messages" (a list with role and content)'


class Samples(Struct, frozen=True):
    """Token ids, a list per sample, and where they come from (JSON-ready, for the manifest)."""

    ids: Sequence[Sequence[int]]
    facts: Mapping[str, Any]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))


def load_tokenizer(model: Path) -> Any:
    """The tokenizer next to the weights; CheckpointError if there is none that can be loaded."""
    if not any(model.glob("tokenizer*")) and not any(model.glob("vocab*")):
        raise CheckpointError(f"{model} contains no tokenizer, which calibration needs", _COPY)
    try:
        with load.way_out(WITHOUT_MODEL):
            return load.load_tokenizer(model)
    except load.NeedsOwnCode:
        raise
    except CheckpointError as error:
        raise CheckpointError(
            f"the tokenizer of {model} cannot be loaded: {error}", _COPY
        ) from error


def check_settings(settings: Calibration) -> None:
    """Refuse what can be refused without reading: numbers, and files that are not there."""
    if settings.samples < 1:
        raise UsageError(f"--samples {settings.samples} is not a positive number")
    if settings.max_seq_len < 2:
        raise UsageError(f"--max-seq-len {settings.max_seq_len} is too short", "use 2048")
    hint = "give a .jsonl or .txt file, or the name of a dataset"
    there = Path(settings.dataset).is_file()
    if is_file(settings.dataset) and not there:
        what = "is a directory" if Path(settings.dataset).is_dir() else "does not exist"
        raise UsageError(f"--dataset {settings.dataset} {what}", hint)
    if there and not is_file(settings.dataset):
        raise UsageError(f"--dataset {settings.dataset} is neither .jsonl nor .txt", hint)


def is_file(dataset: str) -> bool:
    """Whether `dataset` means a file of ours, not the name of a dataset."""
    return Path(dataset).suffix.lower() in _FILES


def read_samples(settings: Calibration, tokenizer: Any) -> Samples:
    """Draw `settings.samples` samples of at most `settings.max_seq_len` tokens each.

    Fewer if the text has no more. Samples of less than two tokens are left out, since a model
    learns nothing from them. Raises UsageError for a dataset that is missing, empty, has no text,
    or has messages where the tokenizer has no chat template.
    """
    check_settings(settings)
    if Path(settings.dataset).suffix.lower() == ".txt":
        ids, facts = _from_text(settings, tokenizer)
    else:
        records = _lines(settings.dataset) if is_file(settings.dataset) else _named(settings)
        ids, facts = _from_records(records, settings, tokenizer), records.facts
    if not ids:
        raise UsageError(f"--dataset {settings.dataset} contains no usable text", _RECORDS)
    found = {
        "dataset": settings.dataset,
        "split": None if is_file(settings.dataset) else settings.split,
        "samples": len(ids),
        "samples_wanted": settings.samples,
        "max_seq_len": settings.max_seq_len,
        "tokens": sum(map(len, ids)),
        "seed": settings.seed,
    }
    return Samples(ids, {**found, **facts})


# ---- text files ------------------------------------------------------------------------


def _from_text(settings: Calibration, tokenizer: Any) -> tuple[list[list[int]], Mapping[str, Any]]:
    """Windows of a text file: they neither overlap nor leave a gap. A text that is shorter than
    one window is one sample; else what is left at its end is not used."""
    data = _read(settings.dataset)
    text = _decoded(data, settings.dataset)
    if not text.strip():
        return [], {}
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    length = min(settings.max_seq_len, len(tokens))
    if length < 2:
        return [], {}
    starts = list(range(0, len(tokens) - length + 1, length))
    random.Random(settings.seed).shuffle(starts)
    chosen = [list(tokens[start : start + length]) for start in starts[: settings.samples]]
    return chosen, _file_facts(data)


# ---- records ---------------------------------------------------------------------------


class _Records(Struct, frozen=True):
    """Records that can be drawn in any order."""

    count: int
    get: Callable[[int], Any]
    where: Callable[[int], str]  # how an error names a record
    facts: Mapping[str, Any]


def _lines(dataset: str) -> _Records:
    """The lines of a .jsonl file that are not blank."""
    data = _read(dataset)
    numbered = enumerate(data.splitlines(), start=1)
    lines = [(number, line) for number, line in numbered if line.strip()]
    if not lines:
        raise UsageError(f"--dataset {dataset} is empty", _RECORDS)

    def where(index: int) -> str:
        return f"{dataset} line {lines[index][0]}"

    def get(index: int) -> Any:
        line = _decoded(lines[index][1], where(index))
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where(index)} is not JSON: {error}", _RECORDS) from None

    return _Records(len(lines), get, where, _file_facts(data))


def _named(settings: Calibration) -> _Records:
    """A dataset that the library `datasets` knows or downloads."""
    dataset, split = settings.dataset, settings.split
    name, _, config = dataset.partition(":")
    hint = "give a .jsonl or .txt file, or the name and --split of a dataset on the hub"
    try:
        from datasets import load_dataset

        with _no_warnings():  # each attempt to reach the hub is one
            rows: Any = load_dataset(name, config or None, split=split)
    except ImportError as error:
        raise UsageError(
            f"--dataset {dataset} is not a .jsonl or .txt file, and the "
            "library datasets is not installed",
            "install it with: pip install 'ktconv[gpu]'",
        ) from error
    except Exception as error:  # of many libraries: network, file systems, parsers
        raise UsageError(
            f"--dataset {dataset} (split {split}) cannot be loaded: {load.first_line(error)}", hint
        ) from error
    if not len(rows):
        raise UsageError(f"--dataset {dataset} has no records in {split}", hint)
    facts = {"fingerprint": str(getattr(rows, "_fingerprint", ""))}
    return _Records(
        len(rows), rows.__getitem__, lambda n: f"record {n} of {dataset} ({split})", facts
    )


@contextmanager
def _no_warnings() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _from_records(records: _Records, settings: Calibration, tokenizer: Any) -> list[list[int]]:
    order = list(range(records.count))
    random.Random(settings.seed).shuffle(order)
    chosen: list[list[int]] = []
    for index in order:
        ids = _tokens(records.get(index), records.where(index), tokenizer)[: settings.max_seq_len]
        if len(ids) >= 2:
            chosen.append(ids)
        if len(chosen) == settings.samples:
            break
    return chosen


def _tokens(record: Any, where: str, tokenizer: Any) -> list[int]:
    """Token ids of one record, in full."""
    if isinstance(record, dict) and isinstance(record.get("messages"), list):
        text = _chat(record["messages"], where, tokenizer)
        special = False  # the template writes them itself
    elif isinstance(record, dict) and isinstance(record.get("text"), str):
        text, special = record["text"], True
        if not text.strip():
            return []
    else:
        raise UsageError(f"{where} has neither text nor messages", _RECORDS)
    try:
        return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
    except (TypeError, UnicodeError, ValueError) as error:  # half a surrogate pair, for one
        raise UsageError(
            f"the tokenizer cannot read {where}: {load.first_line(error)}", _RECORDS
        ) from error


def _chat(messages: list[Any], where: str, tokenizer: Any) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(
            f"{where} has messages, but the model's tokenizer has no chat template",
            'use records with "text", or put the chat template into tokenizer_config.json',
        )
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # templates are programs
        raise UsageError(
            f"the chat template cannot render {where}: {load.first_line(error)}", _RECORDS
        ) from error


# ---- reading ---------------------------------------------------------------------------


def _read(path: str) -> bytes:
    refuse_device(Path(path), "--dataset")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"--dataset {path} cannot be read: {error.strerror}") from error


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not UTF-8 text: {error.reason}") from None


def _file_facts(data: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(data).hexdigest()}
