"""Tensors of n-grams, which are far larger than all experts of a layer, and are no experts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.convert import read_header, read_json
from helpers.families import file_bytes, numbered, random_weights, raw, simple_config

from ktconv.source import open_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.process]

GIANT = 128 << 20
LIMIT = 160 << 20  # of a process, which takes about 65 MiB for the smallest model
# As Qwen3.8-Flash-Next has them, in a layer and in parts; and with an axis as experts have it.
TABLES = {
    "model.layers.0.ple.ple_embedding.ngram_embedding.shard_0.weight": (GIANT // 128, 64),
    "model.layers.0.mlp.engram.tables": (16, GIANT // 4096, 128),
}


def sparse_model(directory: Path) -> Path:
    """A checkpoint whose tables are holes, but for their first, a middle and their last number."""
    directory.mkdir()
    experts = numbered("model.layers.0.mlp.experts", random_weights())
    header, data = {}, b""
    for name, tensor in experts.items():
        dtype, shape, content = raw(tensor)
        place = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": place}
        data += content
    for number, (table, shape) in enumerate(TABLES.items()):
        place = [len(data) + number * GIANT, len(data) + (number + 1) * GIANT]
        header[table] = {"dtype": "BF16", "shape": list(shape), "data_offsets": place}
    start = file_bytes(json.dumps(header).encode(), data)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(start)
        for number in range(len(TABLES)):
            for at in (0, GIANT // 2 + 2, GIANT - 2):
                file.seek(len(start) + number * GIANT + at)
                file.write(b"\x40\x3f")
    (directory / "config.json").write_text(json.dumps(simple_config()))
    return directory


# The peak of a process that was started by a larger one is in nothing but its own status.
PROGRAM = """
import sys
from pathlib import Path
from ktconv.cli.entry import main
try:
    main()
finally:
    (line,) = (one for one in Path("/proc/self/status").open() if one.startswith("VmHWM:"))
    print(line.split()[1], file=sys.stderr)
"""


def peak_of(*words: object) -> int:
    """The largest amount of memory that a command of ktconv has had; it must succeed."""
    command = [sys.executable, "-c", PROGRAM, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return int(done.stderr.splitlines()[-1]) << 10


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is needed")
def test_tables_are_copied_in_little_memory(tmp_path: Path) -> None:
    model = sparse_model(tmp_path / "model")
    checkpoint = open_checkpoint(model)
    (layer,) = checkpoint.layers
    assert len(layer.experts) == 4
    assert {one.name: one.nbytes for one in checkpoint.other_tensors} == dict.fromkeys(
        TABLES, GIANT
    )

    output = tmp_path / "out"
    peak = peak_of("quantize-cpu", model, output, "--method", "int8", "--numa", 1, "--threads", 2)
    assert peak < LIMIT
    index = read_json(output / "model.safetensors.index.json")
    for table, shape in TABLES.items():
        name = table.replace("model.layers.0", "blk.0")
        shard = output / index["weight_map"][name]
        start, header = read_header(shard)
        assert header[name]["shape"] == list(shape)
        first, last = (start + at for at in header[name]["data_offsets"])
        copied = np.memmap(shard, np.uint16, "r")[first // 2 : last // 2]
        assert np.flatnonzero(copied).tolist() == [0, GIANT // 4 + 1, GIANT // 2 - 1]
        assert set(copied[[0, -1]]) == {0x3F40}

    peak = peak_of("verify", output, "--source", model, "--level", "weights", "--threads", 2)
    assert peak < LIMIT
