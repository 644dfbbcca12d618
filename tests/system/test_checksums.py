"""Checksums of manifests: BLAKE3, and SHA-256 of earlier versions."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from helpers.convert import convert, read_json, read_model
from helpers.corrupt import check
from helpers.gpu_corrupt import change, flip
from helpers.paths import DOCS
from numpy.typing import NDArray

from ktconv.repack.reshard import Request, reshard
from ktconv.system.checksums import Checksum, algorithm_of, checksum_for, is_sound, of_record

U8 = NDArray[np.uint8]
MODEL = DOCS / "example/tiny-moe"
DATA = b"of weights"
BLAKE = {"blake3": blake3(DATA).hexdigest()}
SHA = {"sha256": hashlib.sha256(DATA).hexdigest()}


@pytest.mark.parametrize("record", [BLAKE, SHA])
def test_each_is_compared_by_its_own_algorithm(record: dict[str, str]) -> None:
    about = {"zero_share": 0.5, **record}
    assert [algorithm_of(about)] == list(record) == list(of_record(about))
    checksum = checksum_for(about)
    for piece in (DATA[:4], DATA[4:]):
        checksum.update(piece)
    assert checksum.record() == record and checksum.agrees(about)
    checksum.update(b"!")
    assert not checksum.agrees(about)


def test_records_without_one() -> None:
    assert algorithm_of(None) is algorithm_of({"md5": "x"}) is None
    assert of_record({"md5": "x"}) == of_record(None) == {}
    assert checksum_for(None).record().keys() == Checksum().record().keys() == {"blake3"}


@pytest.mark.parametrize(
    ("record", "sound"),
    [
        (BLAKE, True), (SHA, True), ({**BLAKE, **SHA}, False), ({}, False), ({"md5": "0"}, False),
        ({"blake3": "0" * 63}, False), ({"blake3": 3}, False), ({"sha256": "G" * 64}, False),
    ],
)  # fmt: skip
def test_sound_records(record: dict[str, Any], sound: bool) -> None:
    assert is_sound(record) is sound


# ---- outputs of earlier versions -----------------------------------------------------------


def as_before(output: Path) -> None:
    """The manifest that an earlier version wrote."""
    data = {name: tensor.data for name, tensor in read_model(output).items()}

    manifest = read_json(output / "ktconv.json")
    for unit in manifest["units"].values():
        for name, about in unit["tensors"].items():
            assert about.pop("blake3") == blake3(data[name]).hexdigest()
            about["sha256"] = hashlib.sha256(data[name]).hexdigest()
    (output / "ktconv.json").write_text(json.dumps(manifest))


def test_an_earlier_output_verifies(tmp_path: Path) -> None:
    convert(MODEL, tmp_path / "out", numa=2)
    as_before(tmp_path / "out")
    assert check(tmp_path / "out").passed and check(tmp_path / "out", MODEL).passed
    name = next(name for name in read_model(tmp_path / "out") if name.endswith("numa.1.weight"))
    change(tmp_path / "out", name, flip)
    found = check(tmp_path / "out").failures
    assert [(one.check, one.tensor) for one in found] == [("checksum", name)]


def test_an_earlier_output_is_cut_anew(tmp_path: Path) -> None:
    convert(MODEL, tmp_path / "out", numa=1)
    as_before(tmp_path / "out")
    reshard(Request(tmp_path / "out", tmp_path / "two", 2))
    assert check(tmp_path / "two", MODEL).passed
    manifest = read_json(tmp_path / "two" / "ktconv.json")
    cut = manifest["units"]["layer-00000"]["tensors"]["blk.0.ffn_up_exps.0.numa.0.weight"]
    assert algorithm_of(cut) == "blake3"


def test_nothing_of_an_earlier_output_is_done_again(tmp_path: Path) -> None:
    convert(MODEL, tmp_path / "out", numa=2)
    as_before(tmp_path / "out")
    report = convert(MODEL, tmp_path / "out", numa=2)
    assert report.complete and not report.converted
