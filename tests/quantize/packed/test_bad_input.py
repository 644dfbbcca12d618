"""Bad input at the command line: one sentence, exit code 2 or 3, and nothing lost.

What each check says in detail is tested with the library in tests/source.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from helpers.cli import (
    check_reader,
    contents,
    done,
    edit_json,
    model_tensors,
    refused,
    refused_in_json,
    run,
    staged,
    write_model,
)
from helpers.families import (
    Raw,
    bf16,
    file_bytes,
    fp8,
    numbered,
    random_weights,
    simple_config,
    write_checkpoint,
    write_safetensors,
)

from ktconv import native
from ktconv.cli.app import app
from ktconv.conversion import tasks
from ktconv.conversion.pipeline import Observer
from ktconv.errors import CheckpointError, UsageError
from ktconv.quantize.packed import packing
from ktconv.quantize.packed.run import Request, quantize_cpu
from ktconv.source import open_checkpoint
from ktconv.source.reading import matrices
from ktconv.source.reading.matrices import CHUNK_BYTES
from ktconv.source.reading.reader import SourceReader
from ktconv.system.files import io_error
from ktconv.targets.packed.matrix_check import MatrixCheck, Packed
from ktconv.targets.packed.target import Options
from ktconv.writer import staging
from ktconv.writer.staging import ShardStaging

pytestmark = pytest.mark.slow

_map_file = native.map_file

SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", layers=2)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "output"


# ---- broken checkpoints ----------------------------------------------------------------


def header(text: str) -> Callable[[Path], object]:
    """A first shard with this header and no data."""
    return lambda model: (model / SHARDS[0]).write_bytes(file_bytes(text.encode()))


def entry(offsets: list[int], name: str = "x") -> str:
    return f'"{name}":{{"dtype":"BF16","shape":[2],"data_offsets":{offsets}}}'


def change_config(**changes: object) -> Callable[[Path], object]:
    return lambda model: edit_json(model / "config.json", lambda c: c.update(changes))


def without(*lost: str) -> Callable[[Path], object]:
    """The model without tensors whose name contains one of `lost`."""

    def rewrite(model: Path) -> None:
        tensors = {k: v for k, v in model_tensors(2).items() if not any(x in k for x in lost)}
        rewrite_with(model, tensors)

    return rewrite


def having(**changed: Any) -> Callable[[Path], object]:
    """The model with other tensors; dots of names are written __."""
    tensors = {name.replace("__", "."): tensor for name, tensor in changed.items()}
    return lambda model: rewrite_with(model, model_tensors(2) | tensors)


def rewrite_with(model: Path, tensors: dict[str, Any]) -> None:
    config = json.loads((model / "config.json").read_text())
    shutil.rmtree(model)
    write_checkpoint(model, tensors, config)


def weight_map(**changes: str) -> Callable[[Path], object]:
    return lambda model: edit_json(model / INDEX, lambda c: c["weight_map"].update(changes))


def point_index_at(name: str) -> Callable[[Path], object]:
    def change(model: Path) -> None:
        tensor = "model.embed_tokens.weight"
        edit_json(model / INDEX, lambda content: content["weight_map"].update({tensor: name}))

    return change


def only_pickles(model: Path) -> None:
    for path in [*model.glob("*.safetensors"), model / INDEX]:
        path.unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps({}))


def remove_all_files(model: Path) -> None:
    for path in model.iterdir():
        path.unlink()


def truncate_shard(model: Path) -> None:
    os.truncate(model / SHARDS[1], 5000)


GATE = "model__layers__1__mlp__experts__2__gate_proj__weight"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (lambda m: (m / SHARDS[1]).unlink(), SHARDS[1]),
    "truncated shard": (truncate_shard, SHARDS[1]),
    "empty shard": (lambda m: (m / SHARDS[1]).write_bytes(b""), SHARDS[1]),
    "header length too big": (lambda m: (m / SHARDS[0]).write_bytes(b"\xff" * 16), SHARDS[0]),
    "header not JSON": (header("{x"), SHARDS[0]),
    "header a list": (header("[]"), SHARDS[0]),
    "offsets out of range": (header("{" + entry([0, 4]) + "}"), SHARDS[0]),
    "offsets overlap": (header("{" + entry([0, 4]) + "," + entry([2, 6], "y") + "}"), SHARDS[0]),
    "duplicate keys": (header("{" + entry([0, 0]) + "," + entry([0, 0]) + "}"), SHARDS[0]),
    "JSON bomb": (header("[" * 100_000), SHARDS[0]),
    "index not JSON": (lambda m: (m / INDEX).write_text("{"), INDEX),
    "index names a lost key": (weight_map(lost=SHARDS[0]), "lost"),
    "absolute path in the index": (point_index_at("/etc/passwd"), "'/etc/passwd'"),
    ".. in the index": (point_index_at("../model/x.safetensors"), "'../model/x.safetensors'"),
    "config.json missing": (lambda m: (m / "config.json").unlink(), "config.json"),
    "config.json not JSON": (lambda m: (m / "config.json").write_text("{"), "config.json"),
    "config: other number of experts": (
        change_config(num_experts=5),
        "num_experts is stale: it is 5",
    ),
    "config: other hidden size": (change_config(hidden_size=256), "256"),
    "config: other intermediate size": (change_config(moe_intermediate_size=256), "256"),
    "missing expert": (without(".experts.3."), "3"),
    "gap in the experts": (without(".1.mlp.experts.1."), "expert"),
    "missing projection": (without("layers.1.mlp.experts.2.up_proj"), "up_proj"),
    "no experts at all": (without(".experts."), "expert"),
    "wrong shape": (having(**{GATE: bf16(np.zeros((128, 256)))}), GATE.replace("__", ".")),
    "unsupported dtype": (having(**{GATE: np.zeros((128, 128), np.int32)}), "I32"),
    "FP8 without scales": (having(**{GATE: fp8(np.zeros((128, 128), np.uint8))}), "scale"),
    "pickles only": (only_pickles, "pickle"),
    "no file at all": (remove_all_files, "is empty"),
    "no directory": (shutil.rmtree, "does not exist"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoint(model: Path, output: Path, name: str) -> None:
    break_it, phrase = BROKEN[name]
    break_it(model)
    refused(run(model, output), 2, phrase)
    refused_in_json(run(model, output, "--dry-run", "--json"), 2, phrase)
    assert not output.exists()


def test_gpt_oss_as_transformers_writes_it(tmp_path: Path, output: Path) -> None:
    transformers = pytest.importorskip("transformers")
    assert transformers
    from helpers.families import write_family

    write_family("gpt_oss", tmp_path / "model")
    refused(run(tmp_path / "model", output), 2, "computes plain SiLU without biases")
    assert not output.exists()


def test_dimensions_that_the_format_cannot_hold(tmp_path: Path, output: Path) -> None:
    weights = random_weights(hidden=128, inner=96)
    write_checkpoint(
        tmp_path / "model",
        numbered("model.layers.0.mlp.experts", weights),
        simple_config(moe_intermediate_size=96),
    )
    refused(run(tmp_path / "model", output), 2, "96")
    assert not output.exists()


# ---- NaN and infinity ------------------------------------------------------------------

FP8_NAN, FP8_ONE = 0x7F, 0x38


def bf16_with(value: float) -> Callable[[np.ndarray], Raw]:
    def encode(matrix: np.ndarray) -> Raw:
        return bf16(np.where(matrix == 777, np.float32(value), matrix))

    return encode


def numpy_with(dtype: str, value: float) -> Callable[[np.ndarray], Any]:
    return lambda matrix: np.where(matrix == 777, value, matrix).astype(dtype)


def fp8_with_nan(matrix: np.ndarray) -> Raw:
    return fp8(np.where(matrix == 777, FP8_NAN, FP8_ONE).astype(np.uint8))


ENCODERS = {
    "bf16 NaN": bf16_with(np.nan),
    "bf16 infinity": bf16_with(np.inf),
    "fp16 NaN": numpy_with("float16", np.nan),
    "fp16 -infinity": numpy_with("float16", -np.inf),
    "fp32 NaN": numpy_with("float32", np.nan),
    "fp32 infinity": numpy_with("float32", np.inf),
    "fp8 NaN": fp8_with_nan,
}


@pytest.mark.parametrize("proj", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("encoder", ENCODERS)
def test_nonfinite_weight_is_named_and_finished_layers_are_kept(
    tmp_path: Path, output: Path, encoder: str, proj: str
) -> None:
    encode = ENCODERS[encoder]
    tensors: dict[str, Any] = {}
    for layer in range(3):
        weights = random_weights(inner=256, experts=2, seed=layer)
        if layer == 2:
            stack = getattr(weights, proj.removesuffix("_proj"))
            stack[1, 127, 77] = 777  # not in the first block of rows or columns
        for name, tensor in numbered(f"model.layers.{layer}.mlp.experts", weights).items():
            matrix = getattr(weights, name.split(".")[-2].removesuffix("_proj"))
            tensors[name] = encode(matrix[int(name.split(".")[-3])])
            if tensors[name].dtype == "F8_E4M3":
                grid = tuple(-(-length // 128) for length in tensor.shape)
                tensors[f"{name}_scale_inv"] = np.ones(grid, np.float32)
    config = simple_config(
        num_hidden_layers=3, num_experts=2, moe_intermediate_size=256,
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}
        if encoder.startswith("fp8") else None,
    )  # fmt: skip
    model = write_checkpoint(tmp_path / "model", tensors, config)
    result = run(model, output, "--threads=1", "--max-shard-size=1MB")
    name = f"model.layers.2.mlp.experts.1.{proj}.weight"
    refused(result, 2, name, "model.safetensors", "a NaN or an infinity at [127, 77]")
    assert staged(output) == []
    shards = sorted(path.name for path in output.glob("*.safetensors"))
    assert shards == ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nonfinite_block_scale(tmp_path: Path, output: Path, value: float) -> None:
    weights = random_weights(experts=1)
    tensors: dict[str, Any] = {}
    for name in numbered("model.layers.0.mlp.experts", weights):
        tensors[name] = fp8(np.full((128, 128), FP8_ONE, np.uint8))
        tensors[f"{name}_scale_inv"] = np.full((1, 1), value, np.float32)
    model = write_checkpoint(
        tmp_path / "model", tensors,
        simple_config(num_experts=1, quantization_config={"weight_block_size": [128, 128]}),
    )  # fmt: skip
    refused(run(model, output, "--threads=1"), 2, "gate_proj.weight_scale_inv", "(0, 0) is")
    assert not output.exists()


# ---- options ---------------------------------------------------------------------------

OPTIONS: dict[tuple[str, ...], str] = {
    ("--layers=2",): "--layers names layer 2, but the last MoE layer is 1",
    ("--layers=0-5",): "--layers names layer 2, but the last MoE layer is 1",
    ("--layers=x",): "--layers 'x' is not a list",
    ("--layers=1-0",): "--layers '1-0' cannot be used: 1 is larger than 0",
    ("--layers=0,,1",): "--layers '0,,1' is not a list",
    ("--layers=-1",): "--layers '-1' cannot be used: -1 is less than 0",
    ("--layers=0-99999999999",): "99999999999 is larger than 999999999",
    ("--layers=0-999999",): "0-999999 are more than 100000 numbers",
    ("--layers=" + "9" * 5000,): " is larger than 999999999",
    ("--layers=",): "--layers is empty",
    ("--numa=3",): "INT4 cannot split layer 0 into --numa 3: ",
    ("--numa=2",): "INT4 cannot split layer 0 into --numa 2: ",
    ("--max-memory=1MB",): "--max-memory 1.0 MB is too small",
    ("--max-memory=0",): "--max-memory '0' is not a positive size",
    ("--max-memory=lots",): "--max-memory 'lots' is not a size",
    ("--max-shard-size=5000",): "--max-shard-size 5.0 kB is too small for tensor",
    ("--max-shard-size=1",): "--max-shard-size 1 B is too small for tensor",
    ("--max-shard-size=-5GB",): "--max-shard-size '-5GB' is not a size",
    ("--max-shard-size=" + "9" * 5000,): "is not a size",
    ("--max-memory=" + "9" * 400 + ".5",): "is not a size",
    ("--max-shard-size=5XB",): "--max-shard-size '5XB' is not a size",
}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options[0][:30])
def test_option_that_cannot_be(model: Path, output: Path, options: tuple[str, ...]) -> None:
    code = 3 if "max-memory=1MB" in options[0] else 2
    refused(run(model, output, *options), code, OPTIONS[options])
    assert not output.exists()


@pytest.mark.parametrize(
    "options", [["--method=int3"], ["--threads=-1"], ["--numa=1000000"], ["--layout=x"], ["--x"]]
)
def test_option_that_the_command_line_knows_to_be_wrong(
    model: Path, output: Path, options: list[str]
) -> None:
    result = run(model, output, *options)
    assert result.exit_code == 2 and result.stdout == ""
    assert "Traceback" not in result.stderr and options[0].split("=")[0] in result.stderr
    assert not output.exists()


def test_numa_says_which_numbers_work(tmp_path: Path, output: Path) -> None:
    model = write_model(tmp_path / "model", layers=1, inner=512)
    result = run(model, output, "--numa=3")
    refused(result, 2, "--numa 3")
    assert "Hint: possible values of --numa for this model: 1, 2, 4." in result.stderr


def test_memory_and_shard_size_that_are_asked_for_suffice(model: Path, output: Path) -> None:
    """The hint names the smallest number that works."""
    too_small = run(model, output, "--max-shard-size=5000")
    size = too_small.stderr.split("--max-shard-size ")[-1].strip(" .\n")
    assert size.isdigit()
    done(model, output, f"--max-shard-size={size}", "--experts-only")
    assert max(path.stat().st_size for path in output.glob("*.safetensors")) <= int(size)


def test_layers_of_a_model_with_dense_ones(tmp_path: Path, output: Path) -> None:
    tensors = model_tensors(4)
    for name in list(tensors):
        if name.startswith(("model.layers.0.", "model.layers.2.")):
            del tensors[name]
    for layer in (0, 2):
        tensors[f"model.layers.{layer}.mlp.gate_proj.weight"] = bf16(np.ones((128, 128)))
    model = write_checkpoint(tmp_path / "model", tensors, simple_config(num_hidden_layers=4))
    refused(run(model, output, "--layers=0"), 2, "--layers names no MoE layer")
    assert not output.exists()
    done(model, output, "--layers=0-1")
    done(model, output)


def test_no_mtp_leaves_nothing(tmp_path: Path, output: Path) -> None:
    tensors = numbered("model.layers.1.mlp.experts", random_weights())
    tensors["model.layers.0.mlp.gate_proj.weight"] = bf16(np.ones((128, 128)))
    config = simple_config(num_hidden_layers=1, num_nextn_predict_layers=1)
    model = write_checkpoint(tmp_path / "model", tensors, config)
    refused(run(model, output, "--no-mtp"), 2, "--no-mtp leaves no MoE layer")
    assert not output.exists()


# ---- where OUTPUT is -------------------------------------------------------------------


@pytest.mark.parametrize("below", [".", "out", "a/b"])
def test_output_in_the_model(model: Path, below: str) -> None:
    before = contents(model)
    for overwrite in ([], ["--overwrite"]):
        refused(run(model, model / below, *overwrite), 2, "inside the model directory")
    assert contents(model) == before


def test_output_in_the_model_through_a_link(model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(model)
    refused(run(model, tmp_path / "link" / "out"), 2, "inside the model directory")
    assert not (model / "out").exists()


def test_output_in_another_output(model: Path, tmp_path: Path) -> None:
    """It would be in the way of the other's `--overwrite`, and of what loads it."""
    outer = tmp_path / "outer"
    assert run(model, outer).exit_code == 0
    before = contents(outer)
    for words in ([], ["--overwrite"], ["--layout", "layers"]):
        refused(run(model, outer / "a" / "b", *words), 2, f"is inside {outer}, an output of ktconv")
    assert contents(outer) == before


def test_model_in_the_output(model: Path, tmp_path: Path) -> None:
    before = contents(tmp_path)
    refused(run(model, tmp_path), 2, "contains model, which this conversion did not write")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("below", ["", "sub"])
def test_output_is_a_file(model: Path, output: Path, below: str) -> None:
    output.write_text("precious")
    assert refused(run(model, output / below), 2, str(output))
    assert output.read_text() == "precious"


def test_output_is_a_broken_link(model: Path, output: Path) -> None:
    output.symlink_to(output.parent / "gone")
    refused(run(model, output), 2, f"{output} is a broken link")
    assert not output.exists()


FOREIGN = ["notes.txt", "model.safetensors", SHARDS[0], "config.json", "_layer_0", "README.md"]


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("options", [(), ("--overwrite",), ("--finalize",)])
def test_output_that_holds_something_else(
    model: Path, output: Path, name: str, options: tuple[str, ...]
) -> None:
    (output / name if name.startswith("_") else output).mkdir(parents=True)
    path = output / name / "x.kt" if name.startswith("_") else output / name
    path.write_text("precious")
    refused(
        run(model, output, *options), 2, f"contains {name}, which this conversion did not write"
    )
    assert list(contents(output).values()) and path.read_text() == "precious"
    assert not (output / ".ktconv").exists()


@pytest.mark.parametrize("stage", [(), ("--layers=0",)])
def test_foreign_file_in_an_output_of_ours(
    model: Path, output: Path, stage: tuple[str, ...]
) -> None:
    done(model, output, *stage)
    write_safetensors(output / "other.safetensors", {"x": np.zeros(3)})
    before = contents(output)
    for options in ((), ("--overwrite",), ("--overwrite", "--method=int8")):
        refused(run(model, output, *options), 2, "contains other.safetensors, which")
    assert contents(output) == before


def test_export_of_the_reference_converter(model: Path, output: Path) -> None:
    output.mkdir()
    name = "blk.0.ffn_gate_exps.0.numa.0.weight"
    write_safetensors(output / SHARDS[0], {name: np.zeros(64, np.int8)})
    (output / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {name: SHARDS[0]}}))
    (output / "config.json").write_text("{}")
    before = contents(output)
    for options in ((), ("--overwrite",)):
        refused(run(model, output, *options), 2, "which this conversion did not write")
    assert contents(output) == before


# ---- names -----------------------------------------------------------------------------


def test_names_that_collide(model: Path, output: Path) -> None:
    name = "embed_tokens__weight"
    having(**{f"model__{name}": bf16(np.ones((2, 2))), name: bf16(np.ones((2, 2)))})(model)
    refused(run(model, output), 2, "would both become embed_tokens.weight in the output")
    assert not output.exists()
    done(model, output, "--experts-only")


def test_shards_that_are_links_as_in_the_hub_cache(tmp_path: Path, output: Path) -> None:
    plain = write_model(tmp_path / "plain", layers=2)
    cache = tmp_path / "models--org--name"
    snapshot, blobs = cache / "snapshots" / "0123abc", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(plain.iterdir())):
        shutil.copy2(path, blobs / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    done(snapshot, output)
    done(plain, tmp_path / "clean")
    shards = {k: v for k, v in contents(tmp_path / "clean").items() if k.endswith("safetensors")}
    assert shards.items() <= contents(output).items()
    assert not any(path.is_symlink() for path in output.iterdir())
    (blobs / "1").rename(blobs / "gone")
    refused(run(snapshot, tmp_path / "again"), 2, str(snapshot))


# ---- a source that changes meanwhile ---------------------------------------------------


class At(Observer):
    """Does something when unit `key` is finished."""

    def __init__(self, key: str, action: Callable[[], object]) -> None:
        self.key, self.action = key, action

    def unit_finished(self, key: str) -> None:
        if key == self.key:
            self.action()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def edit(path: Path) -> None:
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")


CHANGES: dict[str, Callable[[Path], object]] = {
    "truncated": cut, "emptied": lambda path: os.truncate(path, 0), "modified": edit,
    "removed": Path.unlink,
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_source_that_changes_during_the_run(
    tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    model = write_model(tmp_path / "model", layers=8, shards=1)
    done(model, tmp_path / "clean")
    clean = contents(tmp_path / "clean")
    shard = model / "model.safetensors"
    observer = At("layer-00001", lambda: CHANGES[change](shard))
    monkeypatch.setattr("ktconv.cli.options.progress_over", lambda sizes: Shown(observer))
    code, phrase = (3, "No such file") if change == "removed" else (2, "changed while it was read")
    refused(run(model, output, "--threads=1"), code, str(shard), phrase)
    assert staged(output) == []
    assert len(list(output.glob("*.safetensors"))) >= 2
    check_reader(output, clean)


def test_source_that_changes_while_it_is_read(model: Path) -> None:
    checkpoint = open_checkpoint(model)
    reader = SourceReader(checkpoint.files, checkpoint.sources)
    with (
        pytest.raises(CheckpointError, match="changed while it was read"),
        reader.open(checkpoint.files[0]),
    ):
        edit(checkpoint.files[0])


def test_source_that_shrinks_while_it_is_read(model: Path) -> None:
    """The read fails, but the reason is told."""
    checkpoint = open_checkpoint(model)
    reader = SourceReader(checkpoint.files, checkpoint.sources)
    tensor = checkpoint.layers[0].experts[0]["gate"].tensor
    with (
        pytest.raises(CheckpointError, match="changed while it was read"),
        reader.open(tensor.file) as fd,
    ):
        os.truncate(tensor.file, 0)
        reader.read(fd, tensor, memoryview(bytearray(16)), 0)


class Shown(Observer):
    """An observer as the command line uses it."""

    def __init__(self, observer: Observer) -> None:
        self.unit_finished = observer.unit_finished  # type: ignore[method-assign]

    def __enter__(self) -> Shown:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_file_that_is_shorter_than_it_says(
    model: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Truncated between the check and the read: an error, not a crash."""
    own = os.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        return own(fd, buffers, offset) if offset <= 8 else 0  # headers are there

    monkeypatch.setattr("os.preadv", preadv)
    refused(run(model, output, "--threads=1"), 3, "cannot read tensor", "ends too early")
    assert not output.exists()


def test_the_tensor_that_cannot_be_read_is_named_among_neighbours(
    model: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read at once."""
    own = os.preadv
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    tensor = open_checkpoint(model).layers[1].experts[2]["up"].tensor
    assert tensor.name == name
    file = tensor.file.stat().st_ino

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        end = offset + sum(len(one) for one in buffers)
        if os.fstat(fd).st_ino == file and offset <= tensor.offset + 9 < end:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return own(fd, buffers, offset)

    monkeypatch.setattr("os.preadv", preadv)
    refused(run(model, output, "--threads=1"), 3, f"cannot read tensor {name} from")


def test_bytes_that_come_back_wrong_are_a_failed_check(
    model: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_zeros(fd: int, target: memoryview, offset: int) -> None:
        target.cast("B")[:] = bytes(len(target.cast("B")))

    monkeypatch.setattr(staging, "read_exactly", read_zeros)
    refused(run(model, output, "--threads=1"), 1, "read back differs from what was written")
    assert not output.exists()


@pytest.mark.parametrize("kind", ["weight", "scale"])
def test_bytes_that_change_in_memory_after_their_audit_are_a_failed_check(
    model: Path, output: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """What is written and read back is the same then, but not what was compared."""
    own = MatrixCheck.judge

    def judge(self: MatrixCheck, found: Any, source: Any, start: int, packed: Packed) -> None:
        own(self, found, source, start, packed)
        getattr(packed, kind)[-1] ^= 1

    monkeypatch.setattr(MatrixCheck, "judge", judge)
    refused(run(model, output, "--threads=1"), 1, f".{kind} changed in memory between")
    assert not output.exists()


@pytest.mark.parametrize("chunk", [CHUNK_BYTES, 1])
def test_the_one_of_many_matrices_that_changed_in_memory_is_named(
    tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """They are written at once; also where they came in chunks, whose sums go beyond 64 bits."""
    model = write_model(tmp_path / "model", layers=1, inner=1024)
    monkeypatch.setattr(matrices, "CHUNK_BYTES", chunk)
    own, seen = tasks.write_stretches, []

    def change(stretches: list[tasks.Stretch], *others: Any) -> None:
        seen.append(len(stretches))
        name = "blk.0.ffn_up_exps.1.numa.0.weight"
        for one in stretches:
            if one.name == name:
                one.data[5] ^= 1
        own(stretches, *others)

    monkeypatch.setattr(packing, "write_stretches", change)
    refused(
        run(model, output, "--threads=1"), 1, "blk.0.ffn_up_exps.1.numa.0.weight changed in memory"
    )
    assert max(seen) > 6


def test_the_one_of_many_matrices_that_cannot_be_read_back_is_named(
    tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model", layers=1)
    name, own = "blk.0.ffn_up_exps.1.numa.0.weight", ShardStaging.read

    def read(self: ShardStaging, first: str, target: memoryview, offset: int) -> None:
        path, start = self.place(name)
        begin = self.place(first)[1] + offset
        if begin <= start < begin + len(target):
            raise io_error(f"read tensor {first} back from", path, OSError(errno.EIO, "broken"))
        own(self, first, target, offset)

    monkeypatch.setattr(ShardStaging, "read", read)
    monkeypatch.setattr(ShardStaging, "mapped", lambda *_: None)
    refused(run(model, output, "--threads=1"), 3, f"cannot read tensor {name} back from")


def test_few_files_of_the_source_are_open_at_once(tmp_path: Path, output: Path) -> None:
    """Every tensor has a file of its own, more than may be open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    model = write_model(tmp_path / "model", layers=1, experts=40, shards=120)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 60, limits[1]))  # 32 are kept
    try:
        done(model, output, "--threads=1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# ---- mapped files ------------------------------------------------------------------------


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A model whose matrices are large enough to be mapped, and aligned, as safetensors' own
    writer has them."""
    model = write_model(tmp_path / "wide", layers=1, inner=2048)
    for shard in model.glob("*.safetensors"):
        content = shard.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        shard.write_bytes(file_bytes(content[8:end] + b" " * (-end % 8), content[end:]))
    return model


@pytest.mark.parametrize("left", [0, 300_000])
def test_source_that_is_cut_while_it_is_mapped(
    wide: Path, output: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    own, maps = native.quantize_audit, []

    def cut(*arguments: Any) -> list[tuple[native.Audit, native.ByteSums]]:
        for shard in wide.glob("*.safetensors"):
            os.truncate(shard, left)
        return own(*arguments)

    def map_file(*arguments: int) -> native.Mapped | None:
        maps.append(_map_file(*arguments))
        return maps[-1]

    monkeypatch.setattr(native, "quantize_audit", cut)
    monkeypatch.setattr(native, "map_file", map_file)
    refused(run(wide, output, "--threads=1"), 2, "changed while it was read")
    assert any(one is not None and one.lost for one in maps) and not output.exists()


@pytest.mark.parametrize("method", ["fp8", "mxfp4", "bf16"])
@pytest.mark.parametrize("left", [0, 300_000])
def test_source_that_is_cut_while_it_is_encoded(
    wide: Path, output: Path, monkeypatch: pytest.MonkeyPatch, method: str, left: int
) -> None:
    """Behind rounding and comparing: not what is written is wrong."""
    own = native.encode_audit

    def cut(*arguments: Any) -> Any:
        found = own(*arguments)
        for shard in wide.glob("*.safetensors"):
            os.truncate(shard, left)
        return found

    monkeypatch.setattr(native, "encode_audit", cut)
    words = ["quantize-cpu", str(wide), str(output), "--threads=1", f"--method={method}"]
    refused(CliRunner().invoke(app, words), 2, "changed while it was read")
    assert not output.exists()


def test_source_that_cannot_be_read_any_more_where_it_is_mapped(
    wide: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails, say: the file looks as before."""
    monkeypatch.setattr(native.Mapped, "lost", True)
    refused(run(wide, output, "--threads=1", "--no-verify"), 3, "cannot read tensor", "too early")
    assert not output.exists()


def test_mapped_bytes_that_come_back_wrong_are_a_failed_check(
    wide: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flipped(*arguments: int) -> native.Mapped | None:
        found = _map_file(*arguments)
        if found is not None:
            found.data = found.data.copy()
            found.data[len(found.data) // 2] ^= 1
        return found

    monkeypatch.setattr(staging, "map_file", flipped)
    refused(run(wide, output, "--threads=1"), 1, "read back differs from what was written")
    assert not output.exists()


def test_output_that_is_cut_while_it_is_read_back(
    wide: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(descriptor: int, nbytes: int, offset: int) -> native.Mapped | None:
        found = _map_file(descriptor, nbytes, offset)
        if found is not None:
            os.ftruncate(descriptor, offset)
        return found

    monkeypatch.setattr(staging, "map_file", cut)
    refused(run(wide, output, "--threads=1"), 3, "cannot read tensor", "back from", "too early")
    assert not output.exists()


def test_bytes_are_the_same_where_nothing_can_be_mapped(
    wide: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(wide, output).exit_code == 0
    monkeypatch.setattr(native, "map_file", lambda *_: None)
    monkeypatch.setattr(staging, "map_file", lambda *_: None)
    assert run(wide, tmp_path / "read").exit_code == 0
    for path in output.glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "read" / path.name).read_bytes()


def test_library_raises_what_the_command_shows(model: Path, output: Path) -> None:
    with pytest.raises(UsageError, match="--numa 3"):
        quantize_cpu(Request(str(model), output, Options(numa=3)))
