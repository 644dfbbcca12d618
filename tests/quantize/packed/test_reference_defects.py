"""The reference converter's defects, each with a test that ours does not have it.

Letters and numbers are those of the project's list of defects in kt-kernel 0.7.2 and its
converter scripts; the docstrings say what they are. Defects of parts that ktconv does not
have (loaders, AWQ export, merging) are left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import reference
from helpers.cli import ktconv, process
from helpers.convert import (
    all_files,
    assert_output,
    assert_same,
    assert_shards,
    convert,
    matrices_of,
    read_json,
    read_model,
    truths,
)
from helpers.disk_calls import Commands
from helpers.families import (
    Raw,
    Tensor,
    Weights,
    bf16,
    e8m0,
    fp8,
    fp8_values,
    fused,
    numbered,
    random_weights,
    simple_config,
    write_checkpoint,
    write_safetensors,
)

from ktconv.errors import CheckpointError, KtconvError, OutputError, ResourceError, UsageError
from ktconv.formats import FORMATS, scales
from ktconv.formats.decode import round_to_bf16
from ktconv.system.files import write_behind
from ktconv.writer import staging

pytestmark = [pytest.mark.slow, pytest.mark.process]

SOURCE = "model.layers.{}.mlp.experts"
LAYERS = {index: random_weights(128, 128, 3, seed=index) for index in range(3)}
NORM = bf16(np.ones(128))


def sources() -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {"model.norm.weight": NORM}
    for index, weights in LAYERS.items():
        tensors |= numbered(SOURCE.format(index), weights)
    return tensors


def config(**changes: Any) -> dict[str, Any]:
    return simple_config(**{"num_experts": 3, "num_hidden_layers": 3, **changes})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of three experts in four shards; not to be changed."""
    directory = tmp_path_factory.mktemp("defects") / "model"
    return write_checkpoint(directory, sources(), config(), shards=4)


def assert_right(output: Path, method: str = "int4") -> None:
    matrices = matrices_of(LAYERS)
    assert_output(output, matrices, {"norm.weight": NORM}, method=method, numa=1)


# ---- A: silently wrong or missing weights ----------------------------------------------


def test_a1_nothing_is_staged_outside_the_output(model: Path, tmp_path: Path) -> None:
    """A1: .kt files are staged in /dev/shm; if that is small, weights are cut without a word.
    Ours writes below OUTPUT only, so a tiny /dev/shm or /tmp does not matter."""
    hook = (
        "import sys\n"
        "def audit(event, arguments):\n"
        "    if event == 'open' and isinstance(arguments[2], int) and arguments[2] & 0x43:\n"
        "        print(arguments[0], file=sys.stderr)\n"
        "sys.addaudithook(audit)\n"
        "from ktconv.cli.entry import main\n"
        "main()\n"
    )
    words = ["quantize-cpu", str(model), str(tmp_path / "out"), "--numa", "1", "--json"]
    done = subprocess.run(
        [sys.executable, "-B", "-c", hook, *words], capture_output=True, text=True, check=True
    )
    opened = [line for line in done.stderr.splitlines() if line.startswith("/")]
    assert opened
    assert [path for path in opened if not path.startswith(str(tmp_path / "out"))] == []
    assert_right(tmp_path / "out")


def test_a1_full_disk_is_an_error(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A1: the writer returns normally on a full disk. Ours ends with exit code 3, and no
    partial file has a final name."""

    def full(fd: int, data: memoryview, offset: int) -> None:
        write_behind(fd, data[: len(data) // 2], offset)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(staging, "write_behind", full)
    with pytest.raises(ResourceError, match="the disk is full") as caught:
        convert(model, tmp_path / "out")
    assert caught.value.exit_code == 3
    assert not list(tmp_path.glob("out/*"))
    monkeypatch.setattr(staging, "write_behind", write_behind)
    convert(model, tmp_path / "out")
    assert_right(tmp_path / "out")


def test_a2_later_runs_keep_earlier_layers(model: Path, tmp_path: Path) -> None:
    """A2: resuming overwrites the shards of finished layers and the index forgets them.
    Ours plans all names first, so the parts add up to what one run writes."""
    for layer in (2, 0):
        report = convert(model, tmp_path / "parts", layers=[layer])
        assert not report.complete
    assert convert(model, tmp_path / "parts").complete
    convert(model, tmp_path / "whole")
    assert_same(all_files(tmp_path / "parts"), all_files(tmp_path / "whole"))
    assert_right(tmp_path / "parts")


@pytest.mark.parametrize("transposed", [False, True])
def test_a3_fused_experts_in_both_orientations(transposed: bool, tmp_path: Path) -> None:
    """A3: [E, 2I, H] is read as [E, H, 2I] and comes out scrambled, even where H = I makes
    the shapes look right. Ours decides from both tensors' shapes."""
    weights = random_weights(128, 128)
    tensors = fused(SOURCE.format(0), weights, transposed)
    write_checkpoint(tmp_path / "model", tensors, simple_config())
    convert(tmp_path / "model", tmp_path / "out")
    assert_output(tmp_path / "out", matrices_of({0: weights}), {}, method="int4", numa=1)


def refused(tensors: dict[str, Tensor], tmp_path: Path, words: str, **changes: Any) -> None:
    write_checkpoint(tmp_path / "model", tensors, config(**changes))
    with pytest.raises(CheckpointError, match=words) as caught:
        convert(tmp_path / "model", tmp_path / "out")
    assert caught.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_a4_missing_expert(tmp_path: Path) -> None:
    """A4: experts behind a missing one shift, and memory behind the buffer is packed."""
    tensors = {key: value for key, value in sources().items() if ".1.mlp.experts.1." not in key}
    refused(tensors, tmp_path, r"model.layers.1.mlp.experts.1.gate_proj.weight is missing")


def test_a4_missing_projection(tmp_path: Path) -> None:
    tensors = sources()
    del tensors["model.layers.2.mlp.experts.0.up_proj.weight"]
    refused(tensors, tmp_path, r"model.layers.2.mlp.experts.0.up_proj.weight is missing")


def test_a4_gaps_in_numbers(tmp_path: Path) -> None:
    """A4: experts 0, 1, 3 are renumbered without a word."""
    renamed = {key.replace("experts.2.", "experts.3."): value for key, value in sources().items()}
    refused(renamed, tmp_path, "expert 2", num_experts=None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 2}, "is expert 2, but config.json has num_experts 2"),
        ({"num_experts": 4}, "experts.3.gate_proj.weight is missing"),
        ({"moe_intermediate_size": 256}, "moe_intermediate_size 256"),
        ({"hidden_size": 64}, "hidden_size 64"),
    ],
)
def test_a4_config_against_tensors(changes: dict[str, int], words: str, tmp_path: Path) -> None:
    """A4: a config that says otherwise is obeyed, with wrong counts and shapes."""
    write_checkpoint(tmp_path / "model", sources(), {**config(), **changes})
    with pytest.raises(CheckpointError, match=words):
        convert(tmp_path / "model", tmp_path / "out")


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a5_dtype_comes_from_the_tensor(dtype: Any, tmp_path: Path) -> None:
    """A5: fp16 and fp32 bytes are taken for bf16 (cosine 0.62 and 0.0004 to the source)."""
    weights = Weights(*(stack.astype(dtype).astype(np.float32) for stack in LAYERS[0]))
    tensors = numbered(SOURCE.format(0), weights, encode=lambda values: values.astype(dtype))
    write_checkpoint(tmp_path / "model", tensors, simple_config(num_experts=3))
    convert(tmp_path / "model", tmp_path / "out", method="int8")
    assert_output(tmp_path / "out", matrices_of({0: weights}), {}, method="int8", numa=1)


@pytest.mark.parametrize("damage", ["truncated", "deleted", "garbage"])
@pytest.mark.parametrize("indexed", [True, False])
def test_a6_unreadable_shards(damage: str, indexed: bool, model: Path, tmp_path: Path) -> None:
    """A6: unreadable or missing shards are skipped, and their tensors are just not there."""
    write_checkpoint(tmp_path / "model", sources(), config(), shards=4)
    if not indexed:
        (tmp_path / "model" / "model.safetensors.index.json").unlink()
    shard = tmp_path / "model" / "model-00003-of-00004.safetensors"
    data = shard.read_bytes()
    if damage == "deleted":
        shard.unlink()
    else:
        shard.write_bytes(data[:-100] if damage == "truncated" else b"\xff" * 50)
    with pytest.raises(CheckpointError, match=r"model-00003-of-00004\.safetensors"):
        convert(tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("inner", [128, 192])
def test_a7_fp8_block_size(inner: int, tmp_path: Path) -> None:
    """A7: weight_block_size is ignored, and rows that are no multiple of 128 shift the scales
    of all experts but the first."""
    rng = np.random.default_rng(7)
    tensors: dict[str, Tensor] = {}
    stacks: list[list[Any]] = [[], [], []]
    for expert in range(2):
        for stack, name in zip(stacks, ("gate_proj", "up_proj", "down_proj"), strict=True):
            shape = (128, inner) if name == "down_proj" else (inner, 128)
            codes = rng.integers(0, 127, shape, dtype=np.uint8)
            scales = rng.random((shape[0] // 64, shape[1] // 64), np.float32) + np.float32(0.1)
            tensors[f"{SOURCE.format(0)}.{expert}.{name}.weight"] = fp8(codes)
            tensors[f"{SOURCE.format(0)}.{expert}.{name}.weight_scale_inv"] = scales
            stack.append(fp8_values()[codes] * scales.repeat(64, 0).repeat(64, 1))
    sizes = {"num_experts": 2, "moe_intermediate_size": inner}
    quantization = {"quantization_config": {"weight_block_size": [64, 64]}}
    write_checkpoint(tmp_path / "model", tensors, simple_config(**sizes, **quantization))
    weights = Weights(*map(np.stack, stacks))
    convert(tmp_path / "model", tmp_path / "out", method="int8")
    assert_output(tmp_path / "out", matrices_of({0: weights}), {}, method="int8", numa=1)


def test_a8_outputs_do_not_mix(model: Path, tmp_path: Path) -> None:
    """A8: shards of an earlier export stay and win over the new ones. Ours refuses other
    options in the same directory; --overwrite removes everything that was written before."""
    output = tmp_path / "out"
    convert(model, output, max_shard_size=40_000)
    many = set(output.glob("*.safetensors"))
    with pytest.raises(OutputError, match=r"options\.method: int4 there, int8 now"):
        convert(model, output, method="int8", max_shard_size=40_000)
    convert(model, output, method="int8", overwrite=True)
    assert len(set(output.glob("*.safetensors"))) < len(many)
    assert_right(output, "int8")


def test_a8_layer_folders_do_not_mix(model: Path, tmp_path: Path) -> None:
    """A8: .kt files of other sizes stay beside the new ones."""
    output = tmp_path / "out"
    convert(model, output, layout="layers", method="int4")
    convert(model, output, layout="layers", method="int8", overwrite=True)
    files = [path.name for path in output.rglob("*.kt")]
    assert len(files) == 3 * 3 * 3 * 2
    assert all(name.startswith("INT8_") for name in files)


def test_a8_foreign_shards(model: Path, tmp_path: Path) -> None:
    """A8: what another tool left is taken for part of the export."""
    (tmp_path / "out").mkdir()
    write_safetensors(tmp_path / "out" / "model-00001-of-00002.safetensors", {"a": NORM})
    for overwrite in (False, True):
        with pytest.raises(OutputError, match=r"model-00001-of-00002\.safetensors"):
            convert(model, tmp_path / "out", overwrite=overwrite)


@pytest.mark.parametrize("inside", [".", "converted", "a/b"])
def test_a8_output_inside_the_input(inside: str, tmp_path: Path) -> None:
    """A8: the second run swallows the first one's output."""
    model = write_checkpoint(tmp_path / "model", sources(), config())
    before = all_files(model)
    with pytest.raises(UsageError, match="inside the model directory"):
        convert(model, model / inside)
    assert_same(all_files(model), before)


def test_a9_mtp_layers_are_kept(tmp_path: Path) -> None:
    """A9: experts of layers beyond num_hidden_layers vanish without a message."""
    write_checkpoint(
        tmp_path / "model",
        {**sources(), "model.layers.2.eh_proj.weight": NORM},
        {**config(), "num_hidden_layers": 2, "num_nextn_predict_layers": 1},
    )
    done = ktconv("quantize-cpu", tmp_path / "model", tmp_path / "out", "--numa", 1)
    assert "note: layer 2 is an MTP layer" in done.stderr
    others = {"norm.weight": NORM, "blk.2.eh_proj.weight": NORM}
    assert_output(tmp_path / "out", matrices_of(LAYERS), others, method="int4", numa=1)


def test_a10_renaming_keeps_every_tensor(tmp_path: Path) -> None:
    """A10: names are changed by substring, so that other towers' layers become the decoder's."""
    renamed = {
        "model.vision_model.encoder.x": "vision_model.encoder.x",
        "model.vision_tower.model.layers.5.w": "vision_tower.model.layers.5.w",
        "model.norm.weight": "norm.weight",
    }
    tensors: dict[str, Tensor] = {
        name: bf16(np.full(3, number)) for number, name in enumerate(renamed)
    }
    write_checkpoint(tmp_path / "model", {**sources(), **tensors}, config())
    convert(tmp_path / "model", tmp_path / "out")
    others = {renamed[name]: tensor for name, tensor in tensors.items()}
    assert_output(tmp_path / "out", matrices_of(LAYERS), others, method="int4", numa=1)  # type: ignore[arg-type]


def test_a10_collisions_are_refused(tmp_path: Path) -> None:
    """A10: of two tensors that get one name, the last wins."""
    tensors = {**sources(), "model.language_model.norm.weight": NORM}
    refused(tensors, tmp_path, "would both become norm.weight")
    convert(tmp_path / "model", tmp_path / "out", experts_only=True)
    assert_output(tmp_path / "out", matrices_of(LAYERS), {}, method="int4", numa=1)


def test_a10_expert_biases_do_not_vanish(tmp_path: Path) -> None:
    """A10: biases of experts are dropped. Ours refuses what it cannot convert, by name."""
    tensors = {**sources(), "model.layers.0.mlp.experts.0.gate_proj.bias": NORM}
    refused(tensors, tmp_path, r"model.layers.0.mlp.experts.0.gate_proj.bias")


def test_a11_error_of_int4_is_stated(model: Path, tmp_path: Path) -> None:
    """A11: INT4 rounds twice. `--scale amax` reproduces it, as the golden bytes ask; the
    manifest states the error that it has, and no weight is off by more than the bound."""
    convert(model, tmp_path / "out", scale="amax")
    fmt = FORMATS["int4"]
    manifest = read_json(tmp_path / "out" / "ktconv.json")
    steps = [
        about["max_error_steps"]
        for unit in manifest["units"].values()
        for about in unit["tensors"].values()
        if "max_error_steps" in about
    ]
    assert len(steps) == 3 * 3 * 3
    assert 0.5 < max(steps) <= fmt.max_error_steps + 1e-4
    for truth in truths(matrices_of(LAYERS), "int4", 1, scale="amax").values():
        off = np.abs(reference.dequantize(fmt, truth.codes, truth.scale) - truth.source)
        assert (off.max(axis=1) <= scales.error_bound(fmt, truth.scale)).all()


def test_a12_fp16_keeps_its_mantissa(tmp_path: Path) -> None:
    """A12: fp16 is cut to bf16 before it is quantized, which changes 5 % of the INT8 codes."""
    rng = np.random.default_rng(12)
    stacks = [rng.standard_normal((3, 128, 128)).astype(np.float16) for _ in range(3)]
    weights = Weights(*(stack.astype(np.float32) for stack in stacks))
    tensors = numbered(SOURCE.format(0), weights, encode=lambda values: values.astype(np.float16))
    write_checkpoint(tmp_path / "model", tensors, simple_config(num_experts=3))
    better = convert(tmp_path / "model", tmp_path / "out", method="int8").mean_error
    assert_output(tmp_path / "out", matrices_of({0: weights}), {}, method="int8", numa=1)
    fine = truths(matrices_of({0: weights}), "int8", 1)
    coarse = truths(matrices_of({0: Weights(*map(round_to_bf16, weights))}), "int8", 1)
    assert any((fine[key].codes != coarse[key].codes).mean() > 0.02 for key in fine)
    fmt, worse = FORMATS["int8"], []
    for key, truth in coarse.items():
        off = reference.dequantize(fmt, truth.codes, truth.scale) - fine[key].source
        worse.append(np.sqrt((off**2).sum() / (fine[key].source ** 2).sum()))
    assert better is not None
    assert better < np.mean(worse)


@pytest.mark.parametrize("part", ["weight_packed", "qweight", "weight_scale", "qzeros"])
def test_a13_packed_sources_are_refused(part: str, tmp_path: Path) -> None:
    """A13: packed INT4 of any group size is accepted and computed wrongly. Ours says that it
    does not read such weights yet, and names the tensor."""
    tensors = sources()
    name = f"{SOURCE.format(1)}.2.up_proj"
    if part != "weight_scale":
        del tensors[f"{name}.weight"]
    tensors[f"{name}.{part}"] = np.zeros((128, 16), np.int32)
    refused(tensors, tmp_path, rf"experts.2.up_proj.{part}")


def test_a15_directory_names_mean_nothing(tmp_path: Path) -> None:
    """A15: "scale" anywhere in the path makes weights F32."""
    model = write_checkpoint(tmp_path / "upscale" / "rescale_quant", sources(), config())
    convert(model, tmp_path / "scale.bwd" / "weight_scale")
    assert_right(tmp_path / "scale.bwd" / "weight_scale")


# ---- B: does nothing, crashes, or cannot be used ---------------------------------------


def test_b1_b2_no_gpu_packages(model: Path, tmp_path: Path) -> None:
    """B1, B2: quantizing on the CPU needs triton, a CUDA build of torch and the kernel package.
    Ours works where importing any of them fails."""
    script = (
        "import sys\n"
        "for name in ('torch', 'triton', 'transformers', 'kt_kernel', 'huggingface_hub'):\n"
        "    sys.modules[name] = None\n"
        "from ktconv.cli.entry import main\n"
        "main()\n"
    )
    words = ["quantize-cpu", str(model), str(tmp_path / "out"), "--numa", "1"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(
        [sys.executable, "-c", script, *words], env=environment, check=True, capture_output=True
    )
    assert_right(tmp_path / "out")


def test_b4_memory_does_not_grow_with_layers(tmp_path: Path) -> None:
    """B4: each packed layer stays in memory. Ours needs the same for 2 layers and for 14."""
    weights = random_weights(256, 512, 8)
    peaks = []
    for count in (2, 14):
        tensors: dict[str, Tensor] = {}
        for index in range(count):
            tensors |= numbered(SOURCE.format(index), weights)
        sizes = {"hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 8}
        path = tmp_path / str(count)
        write_checkpoint(path, tensors, simple_config(**sizes, num_hidden_layers=count), count)
        words = ["--method", "int8", "--numa", "1", "--threads", "2", "--json"]
        done = process("quantize-cpu", path, tmp_path / f"{count}-out", *words)
        facts = json.loads(done.stdout)
        peaks.append(facts["peak_rss_bytes"])
    per_layer = facts["output_bytes"] / 14
    assert peaks[1] - peaks[0] < 2 * per_layer, "12 more layers"


@pytest.mark.parametrize(
    "source", ["model.layers.0.block_sparse_moe.experts", "layers.0.ffn.experts"]
)
def test_b5_other_names(source: str, tmp_path: Path) -> None:
    """B5: w1/w3/w2, other blocks and no "model." prefix end in an empty output and success;
    num_local_experts in the config is not known."""
    weights = random_weights()
    tensors = numbered(source, weights, ("w1", "w3", "w2"))
    changes = {"num_experts": None, "num_local_experts": 4, "model_type": "mixtral"}
    write_checkpoint(tmp_path / "model", tensors, simple_config(**changes))
    convert(tmp_path / "model", tmp_path / "out")
    assert_output(tmp_path / "out", matrices_of({0: weights}), {}, method="int4", numa=1)


def test_b5_nothing_to_convert_is_an_error(tmp_path: Path) -> None:
    """B5: a model without experts that are recognised "succeeds"."""
    tensors = {"model.layers.0.odd.experts.0.weird.weight": NORM, "model.norm.weight": NORM}
    refused(tensors, tmp_path, "no MoE layer was found.*nearest keys are .*weird")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["0.gate_up_proj.weight", "gate.weight", "shared.up_proj.weight", "gate_up_proj_bias"]
)
def test_b6_odd_names_are_sentences(name: str, tmp_path: Path) -> None:
    """B6: unexpected names below experts end in KeyError or ValueError tracebacks."""
    tensors = {**sources(), f"{SOURCE.format(0)}.{name}": NORM}
    write_checkpoint(tmp_path / "model", tensors, config())
    done = ktconv("quantize-cpu", tmp_path / "model", tmp_path / "out")
    assert done.exit_code == 2
    assert name in done.stderr
    assert done.stderr.startswith("Error: ")
    assert "Traceback" not in done.stderr


def test_b7_errors_leave_nothing_behind(commands: Commands, tmp_path: Path) -> None:
    """B7: /dev/shm/kt_convert_<pid> stays after an error. Ours removes what was not finished
    and keeps what was."""
    tensors = sources()
    bad = np.full((128, 128), np.nan, np.float32)
    tensors[f"{SOURCE.format(2)}.1.down_proj.weight"] = bf16(bad)
    write_checkpoint(tmp_path / "model", tensors, config())
    (tmp_path / "tmp").mkdir()
    words = ["quantize-cpu", tmp_path / "model", tmp_path / "out", "--numa", 1, "--threads", 1]
    done = commands.run(words, variables={"TMPDIR": str(tmp_path / "tmp")})
    assert done.returncode == 2
    assert "model.layers.2.mlp.experts.1.down_proj.weight" in done.stderr
    assert list((tmp_path / "tmp").iterdir()) == []
    assert not list(tmp_path.rglob("*.part"))


def test_b11_conversions_do_not_share_settings(model: Path, tmp_path: Path) -> None:
    """B11: the first wrapper's thread pool and part count serve all later ones, silently."""
    sizes = simple_config(num_experts=2, moe_intermediate_size=256)
    weights = random_weights(128, 256, 2)
    write_checkpoint(tmp_path / "other", numbered(SOURCE.format(0), weights), sizes)
    for numa in (1, 2):
        output = tmp_path / f"numa-{numa}"
        convert(tmp_path / "other", output, numa=numa)
        assert_output(output, matrices_of({0: weights}), {}, method="int4", numa=numa)
    jobs: list[Callable[[], Any]] = [
        lambda: convert(model, tmp_path / "a", method="int8"),
        lambda: convert(tmp_path / "other", tmp_path / "b", method="int4", numa=2, threads=2),
    ]
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_right(tmp_path / "a", "int8")
    assert_output(tmp_path / "b", matrices_of({0: weights}), {}, method="int4", numa=2)


FLUSHING = """
import ctypes, sys
import numpy as np
libm = ctypes.CDLL("libm.so.6")
environment = ctypes.create_string_buffer(64)
libm.fegetenv(environment)
mxcsr = ctypes.c_uint32.from_buffer(environment, 28)  # of glibc's fenv_t on x86-64
usual, words = mxcsr.value, sys.argv[1:]
for mode, bits in {"flush": 0x8040, "up": 0x4000, "down": 0x2000, "cut": 0x6000}.items():
    mxcsr.value = usual | bits  # flush-to-zero with denormals-are-zero; directions of rounding
    libm.fesetenv(environment)
    denormal = np.array([1e-40], np.float32) * np.float32(1)
    assert (denormal[0] == 0) == (mode == "flush"), "the mode is not set"
    sys.argv[1:] = [one.replace("MODE", mode) for one in words]
    from ktconv.cli.entry import main
    try:
        main()
    except SystemExit as done:
        if done.code:
            raise
"""


def denormal_sources() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """fp32 around the smallest normal numbers, and FP8 under denormal scales."""
    rng = np.random.default_rng(12)

    def draw(rows: int, cols: int) -> Any:
        powers = np.exp2(rng.integers(-149, -110, (3, rows, 1)).astype(np.float64))
        return (rng.standard_normal((3, rows, cols)) * powers).astype(np.float32)

    weights = Weights(draw(128, 128), draw(128, 128), draw(128, 128))
    tensors = numbered(SOURCE.format(0), weights, encode=np.ascontiguousarray)
    for expert in range(3):
        for name in ("gate_proj", "up_proj", "down_proj"):
            base = f"{SOURCE.format(1)}.{expert}.{name}.weight"
            codes = rng.integers(0, 127, (128, 128), dtype=np.uint8)
            tensors[base] = fp8(codes)
            tensors[f"{base}_scale_inv"] = e8m0(rng.integers(0, 9, (2, 2), dtype=np.uint8))
    sizes = simple_config(
        num_experts=3, num_hidden_layers=2, quantization_config={"weight_block_size": [64, 64]}
    )
    return tensors, sizes


@pytest.mark.skipif(
    os.uname().machine != "x86_64" or not sys.platform.startswith("linux"),
    reason="sets MXCSR through glibc's fenv_t of x86-64",
)
@pytest.mark.parametrize("level", ["", "scalar"])
def test_b12_floating_point_mode_of_the_caller(level: str, tmp_path: Path) -> None:
    """B12: importing kt_kernel sets flush-to-zero for the whole process. Ours gives the same
    bytes under flush-to-zero and other rounding modes of the process, and sets none."""
    tensors, sizes = denormal_sources()
    write_checkpoint(tmp_path / "model", tensors, sizes)
    convert(tmp_path / "model", tmp_path / "plain", numa=1, method="int8")
    words = ["quantize-cpu", str(tmp_path / "model"), str(tmp_path / "MODE"), "--method", "int8"]
    environment = {**os.environ, "KTCONV_ISA": level} if level else dict(os.environ)
    done = subprocess.run(
        [sys.executable, "-c", FLUSHING, *words, "--numa", "1"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = all_files(tmp_path / "plain")
    assert_same(all_files(tmp_path / "flush"), expected)
    del expected["ktconv.json"]  # where Python itself prints other last digits
    for mode in ("up", "down", "cut"):
        found = all_files(tmp_path / mode)
        assert found.pop("ktconv.json")
        assert_same(found, expected)
    assert float(np.float32(1e-40) * np.float32(1)) != 0, "our own process is as it was"


# ---- C: metadata and packaging ---------------------------------------------------------


def test_c_index_and_metadata(model: Path, tmp_path: Path) -> None:
    """C: total_size is 0, no __metadata__, nothing records method or part count."""
    convert(model, tmp_path / "out")
    assert_shards(tmp_path / "out", "int4", 1)
    index = read_json(tmp_path / "out" / "model.safetensors.index.json")
    data = sum(len(tensor.data) for tensor in read_model(tmp_path / "out").values())
    assert index["metadata"]["total_size"] == data > 0


def test_c_side_files(tmp_path: Path) -> None:
    """C: only four files are copied; chat templates, vocabularies and code are not."""
    model = write_checkpoint(tmp_path / "model", sources(), config())
    names = ["generation_config.json", "vocab.json", "merges.txt", "tokenizer.model"]
    names += ["chat_template.jinja", "preprocessor_config.json", "modeling_x.py"]
    for name in names:
        (model / name).write_bytes(os.urandom(100))
    convert(model, tmp_path / "out")
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()


def test_c_sub_directories_are_other_copies(tmp_path: Path) -> None:
    """C: original/model-00002-of-00002.safetensors is read in place of the checkpoint's own."""
    model = write_checkpoint(tmp_path / "model", sources(), config(), shards=2)
    (model / "original").mkdir()
    zeros = {
        name: Raw(tensor.dtype, tensor.shape, bytes(len(tensor.data)))
        for name, tensor in sources().items()
        if isinstance(tensor, Raw)
    }
    for shard in model.glob("*.safetensors"):
        write_safetensors(model / "original" / shard.name, zeros)
    convert(model, tmp_path / "out")
    assert_right(tmp_path / "out")


def test_c_problems_go_to_stderr(tmp_path: Path) -> None:
    """C: problems are printed on stdout, and only uncaught exceptions give an exit code."""
    done = ktconv("quantize-cpu", tmp_path / "missing", tmp_path / "out")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "missing" in done.stderr


def test_every_error_is_ours() -> None:
    """Exit codes of the error classes, as documented."""
    codes = {UsageError: 2, CheckpointError: 2, OutputError: 2, ResourceError: 3}
    for kind, code in codes.items():
        assert issubclass(kind, KtconvError)
        assert kind("words").exit_code == code
