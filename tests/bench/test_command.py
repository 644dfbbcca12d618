"""`ktconv bench` at the command line: stdout is data, bad input is one sentence and exit 2."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import helpers
import numpy as np
import pytest
from bench.reports import PACK_SCHEMA, SCHEMA, problems
from click.testing import CliRunner
from helpers import amx
from helpers.convert import Converted, convert
from helpers.family_list import MADE
from helpers.family_models import write

from ktconv import native
from ktconv.bench import command, pack_stage, run
from ktconv.bench.measure import Effort
from ktconv.bench.presets import parse_shape
from ktconv.bench.render import FORMATS
from ktconv.cli.app import app
from ktconv.cli.bench import CONFLICTS, BenchFormat
from ktconv.cli.process import OutputStream
from ktconv.errors import ResourceError, UsageError
from ktconv.formats import FORMATS as WEIGHT_FORMATS
from ktconv.runtime.layers import Experts
from ktconv.system.units import parse_size

pytestmark = [pytest.mark.slow, pytest.mark.process]

SMALL = ("--shape", "128,128,3,2", "--tokens", "1,5", "--iters", "1", "--threads", "1")


def bench(*words: object) -> Any:
    return CliRunner().invoke(app, ["bench", *map(str, words)])


@pytest.fixture(autouse=True)
def _quick(quick: None) -> None:
    pass


def test_formats_are_those_of_the_library() -> None:
    assert get_args(BenchFormat) == FORMATS


@pytest.mark.parametrize("form", FORMATS)
def test_stdout_is_data_and_progress_goes_to_stderr(form: str) -> None:
    result = bench(*SMALL, "--method", "int8,mxfp4", "--format", form)
    assert result.exit_code == 0, result.stderr
    assert "packing 3 experts" in result.stderr and "packing" not in result.stdout
    lines = result.stdout.splitlines()
    if form == "json":
        assert problems(json.loads(result.stdout), SCHEMA) == []
    elif form == "jsonl":
        assert len([json.loads(line) for line in lines]) == 4
    elif form == "csv":
        assert len(list(csv.DictReader(lines))) == 4
    else:
        assert sum("mxfp4" in line for line in lines) == 2


def test_all_methods_and_all_levels() -> None:
    layouts = [method.layout for method in WEIGHT_FORMATS.values()]
    levels = [level for level in native.kernel_levels(*layouts) if level != "amx"]
    result = bench(*SMALL, "--method", "all", "--isa", ",".join(levels), "--format", "json")
    rows = json.loads(result.stdout)["rows"]
    found = {(row["method"], row["isa"]) for row in rows}
    assert found == {(method, level) for method in WEIGHT_FORMATS for level in levels}


def test_the_command_is_in_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/ktconv", "bench", "--seed", "3"])
    machine = json.loads(bench(*SMALL, "--format", "json").stdout)["machine"]
    assert machine["command"] == ["ktconv", "bench", "--seed", "3"]


def test_bench_fails_on_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Experts.forward
    monkeypatch.setattr(Experts, "forward", lambda *given: right(*given) ^ 0x8000)
    result = bench(*SMALL, "--method", "int4")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "Error: the int4 kernel is wrong: relative error 2 against float32" in result.stderr


def test_comparing_with_an_old_report(tmp_path: Path) -> None:
    old = json.loads(bench(*SMALL, "--format", "json").stdout)
    path = tmp_path / "old.json"
    for factor, code in ((1e6, 0), (1e-6, 1)):
        for row in old["rows"]:
            row["median_us"] *= factor
        path.write_text(json.dumps(old))
        result = bench(*SMALL, "--compare", path, "--format", "json")
        assert result.exit_code == code, result.stderr
        rows = json.loads(result.stdout)["rows"]
        assert [row["regressed"] for row in rows] == [bool(code)] * len(rows)
        assert f"{len(rows) * code} of {len(rows)} rows are more than 10% slower" in result.stderr
        for row in old["rows"]:
            row["median_us"] /= factor


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pictures = [tmp_path / "roofline.png", tmp_path / "sweep.svg"]
    words = [word for picture in pictures for word in ("--plot", picture)]
    assert bench(*SMALL, *words).exit_code == 0
    assert pictures[0].read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in pictures[1].read_bytes()


@pytest.fixture
def broken_pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stdout whose reader has left."""
    read, write = os.pipe()
    os.close(read)
    stream = io.BufferedWriter(OutputStream(write, BrokenPipeError))  # as the command has it
    with io.TextIOWrapper(stream) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        yield
    os.close(write)


@pytest.mark.parametrize(("factor", "code"), [(1e6, 0), (1e-6, 1)])
def test_a_reader_that_leaves_hides_no_regression(
    factor: float, code: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    old = json.loads(bench(*SMALL, "--format", "json").stdout)
    for row in old["rows"]:
        row["median_us"] *= factor
    (tmp_path / "old.json").write_text(json.dumps(old))
    request.getfixturevalue("broken_pipe")
    with pytest.raises(SystemExit) as ended:
        app(["bench", *SMALL, "--compare", str(tmp_path / "old.json")])
    assert ended.value.code == code


def quick_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    small = partial(pack_stage.bench_packing, working_set=1 << 16)
    monkeypatch.setattr(command, "bench_packing", small)


@pytest.mark.usefixtures("broken_pipe")
def test_a_reader_of_packing_that_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_packing(monkeypatch)
    with pytest.raises(SystemExit) as ended:
        app(["bench", *PACK, "--format", "json"])
    assert not ended.value.code


def test_reports_with_nothing_in_common_are_told_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old.json").write_text(bench(*SMALL, "--format", "json").stdout)
    monkeypatch.setattr(run, "Meter", lambda: pytest.fail("measured"))
    result = bench(*SMALL, "--tokens", "2", "--compare", tmp_path / "old.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "measured what this run would measure" in " ".join(result.stderr.split())


def test_a_picture_that_fails_costs_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")

    def full(*_: Any) -> None:
        raise ResourceError("a.png cannot be written: No space left on device")

    monkeypatch.setattr(command, "plot", full)
    result = bench(*SMALL, "--plot", tmp_path / "a.png", "--format", "jsonl")
    assert result.exit_code == 3 and "No space left" in result.stderr
    assert len(list(map(json.loads, result.stdout.splitlines()))) == 6


def test_a_trace_of_nothing(tmp_path: Path) -> None:
    for shape in ((4, 0), (0, 0), (3, 2)):
        np.savez(tmp_path / "trace.npz", ids=np.full(shape, -1))
        result = bench(*SMALL, "--routing", f"trace:{tmp_path / 'trace.npz'}")
        assert (result.exit_code, result.stdout) == (2, "")
        assert "Error: " in result.stderr and "Traceback" not in result.stderr


def test_a_trace_that_starts_with_nothing(tmp_path: Path, model: Path) -> None:
    """What is replayed is what counts: two tokens to warm up and one to time."""
    ids = np.full((9, 2), -1)
    ids[3] = 0, 1
    np.savez(tmp_path / "trace.npz", ids=ids)
    words = ("--routing", f"trace:{tmp_path / 'trace.npz'}", "--iters", "1", "--tokens")
    own = ("--model", model, "--numa", "0", "--top-k", "2", "--threads", "1")  # as left out
    for layer in (SMALL, own):
        result = bench(*layer, *words, "1")
        assert (result.exit_code, result.stdout) == (2, "")
        assert "the first 3 tokens of the trace go to no expert" in result.stderr
        assert bench(*layer, *words, "2").exit_code == 0


# ---- levels ------------------------------------------------------------------------------


def test_levels_are_only_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """By KTCONV_ISA, which the library has read when it is asked for its level."""
    monkeypatch.setattr(native, "isa_available", lambda: ["scalar", "avx512", "amx"])
    for level, allowed in (("scalar", ("scalar",)), ("avx512", ("scalar", "avx512"))):
        monkeypatch.setattr(native, "isa", lambda level=level: level)
        assert command.parse_isas("auto") == (level,)
        assert command.parse_isas("all") == allowed
        assert command.parse_isas("scalar") == ("scalar",)
        with pytest.raises(UsageError, match=f"--isa amx is above KTCONV_ISA={level}"):
            command.parse_isas("scalar,amx")


def test_all_levels_are_those_with_kernels() -> None:
    """Packing has code for neon, products have none."""
    assert "neon" not in command.parse_isas("all", tuple(WEIGHT_FORMATS.values()))
    if native.isa() == "avx512":
        levels = ("scalar", "avx2", "avx512")
        assert command.parse_isas("all", (WEIGHT_FORMATS["int4"],)) == levels
        assert command.parse_isas("all") == levels


def test_the_variable_is_what_lowers() -> None:
    code = "from ktconv.bench import command; print(command.parse_isas('all'))"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"KTCONV_ISA": "scalar"},
        check=False,
    )
    assert result.stdout == "('scalar',)\n", result.stderr


# ---- --stage pack ------------------------------------------------------------------------

PACK = ("--stage", "pack", "--shape", "128,128,3,2", "--isa", "scalar", "--iters", "1")


def test_bench_stage_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_packing(monkeypatch)
    sources = ("BF16", "F16", "F32", "F8_E4M3", "BF16 [in, out]")
    for words in (PACK, (*PACK, "--method", "all")):
        report = json.loads(bench(*words, "--format", "json").stdout)
        assert problems(report, PACK_SCHEMA) == []
        rows = report["rows"]
        assert [(row["method"], row["source"], row["scale"]) for row in rows] == [
            (method, source, rule)
            for method in ("int4", "int8")
            for source in sources
            for rule in ("amax", "search")
        ]
        assert all(row["pack_gb_s"] > 0 and row["memcpy_gb_s"] > 0 for row in rows)
        row_schema = PACK_SCHEMA["properties"]["rows"]["items"]
        assert set(rows[0]) == set(row_schema["properties"]) == set(row_schema["required"])
    for form in FORMATS:
        result = bench(*PACK, "--format", form, "--method", "int8")
        assert result.exit_code == 0 and "F8_E4M3" in result.stdout


def test_packing_honours_seconds_iterations_and_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(command, "bench_packing", lambda *_, **given: asked.append(given) or [])
    words = ("--seconds", "0.25", "--iters", "3", "--seed", "5")
    assert bench("--stage", "pack", "--method", "int4", *words, "--format", "json").exit_code == 0
    assert asked == [{"effort": Effort(0.25, 3), "seed": 5}]
    first, same, other = (
        pack_stage.stored_weights("F32", 4, 8, seed).tolist() for seed in (5, 5, 6)
    )
    assert first == same != other


MEANINGLESS = [
    ("--model", "anywhere"),
    ("--memory", "copy"),
    ("--layer", "0"),
    ("--top-k", "2"),
    ("--experts", "99"),
    ("--routing", "foo"),
    ("--routing", "balanced"),
    ("--tokens", "0"),
    ("--threads", "0"),
    ("--numa", "77"),
    ("--plot", "a.png"),
    ("--compare", "nowhere.json"),
    ("--tolerance", "0.1"),
    ("--peers",),
]


@pytest.mark.parametrize("words", MEANINGLESS, ids=" ".join)
def test_options_without_meaning_for_packing_are_refused(words: tuple[str, ...]) -> None:
    """Whatever their value, their default too."""
    result = bench(*PACK, *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{words[0]} does not belong to --stage pack" in result.stderr


@pytest.mark.parametrize("seconds", ["inf", "nan", "-1", "1e30"])
def test_a_time_that_does_not_end_is_refused(seconds: str) -> None:
    result = bench("--shape", "128,128,4,2", "--seconds", seconds)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--seconds" in result.stderr


def test_every_option_has_a_meaning_for_packing_or_none() -> None:
    options = {p.opts[0] for p in app.commands["bench"].params}
    packing = {
        "--stage", "--method", "--shape", "--isa", "--iters", "--seconds", "--seed", "--format",
    }  # fmt: skip
    of_fine_tuning = {"--mode", "--rank"}  # which --mode infer, the default, refuses
    of_models = {"--generate", "--source"}  # which belong to --model
    none = {words[0] for words in MEANINGLESS}
    assert options - {"--help"} == packing | none | of_fine_tuning | of_models
    refused = {one.when.split()[0] for one in CONFLICTS if one.when.endswith(" --stage=pack")}
    assert refused == none | {"--mode", "--generate"}


def test_packing_checks_everything_before_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "quantize_pack", lambda *_: pytest.fail("measured"))
    for words, error in (
        (("--method", "int4,bf16"), "--stage pack cannot measure bf16"),
        (("--shape", "128,128,3,2", "--shape", "96,128,3,2"), "int4 does not allow a matrix of"),
        (("--shape", "1048576,1048576,8,2"), "more than this machine has free"),
    ):
        result = bench("--stage", "pack", *words)
        assert (result.exit_code, result.stdout) == (2, "")
        told = " ".join(result.stderr.split())
        assert error in told and ("--shape" in words) == ("--shape" in told)


def test_memory_of_packing_is_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = partial(
        pack_stage.bench_packing,
        *(["int8"], [parse_shape("2048,1024,1,1")], [native.isa()], lambda _: None),
        effort=Effort(iterations=1),
        working_set=8 << 20,
    )
    asked: list[int] = []
    monkeypatch.setattr("ktconv.system.machine.available_memory", lambda: asked.append(1) or 1)
    with pytest.raises(UsageError, match="takes") as caught:
        measure()
    foreseen = parse_size(str(caught.value).split(" takes ")[1].split(",")[0], "size")
    monkeypatch.undo()
    tracemalloc.start()
    assert len(measure()) == 2 * len(pack_stage.SOURCES)  # by both rules
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= foreseen


# ---- bad input ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--method", "int3"), "unknown method 'int3'"),
        (("--method", ""), "--method is empty"),
        (("--method=",), "--method is empty"),
        (("--threads", ""), "--threads is empty"),
        (("--shape", "qwen"), "is neither a preset nor H,I,E,K"),
        (("--shape", "32,32,1048576,1048576"), "has a top-k of 1048576"),
        (("--shape", "128,128,4,5"), "more experts per token (5) than experts (4)"),
        (("--shape", "96,128,4,2", "--method", "int4"), "int4 does not support hidden size 96"),
        (("--shape", "gpt-oss-120b", "--method", "int4"), "int4 does not support hidden size 2880"),
        (("--experts", "1"), "--experts 1 is less than"),
        (("--routing", "even"), "--routing 'even' is not known"),
        (("--routing", "trace:nowhere.npz"), "there is no trace file"),
        (("--tokens", "0"), "must be numbers from 1"),
        (("--tokens", "many"), "is not a list of numbers"),
        (("--tokens", ""), "--tokens is empty"),
        (("--threads", "0"), "must be numbers from 1"),
        (("--threads", "5000"), "must be numbers from 1"),
        (("--isa", "sse"), "--isa 'sse' is not known"),
        (("--iters", "0"), "Invalid value for '--iters'"),
        (("--seconds", "-1"), "Invalid value for '--seconds'"),
        (("--numa", "3"), "cannot be split into 3 parts"),
        (("--format", "xml"), "'xml' is not one of"),
        (("--plot", "plot.txt"), "is not a picture file"),
        (("--plot", "nowhere/plot.png"), "there is no directory nowhere"),
        (("--compare", "nowhere.json"), "nowhere.json does not exist"),
        (("--compare", "/dev/zero"), "--compare /dev/zero is a device"),
        (("--layer", "0"), "--layer, --top-k and --memory belong to --model"),
        (("--model", "nowhere"), "--model nowhere is not a directory"),
        (("--model", ""), "--model is empty"),
        (("--plot", "."), "is not a picture file"),
        (("--model", ".", "--method", "int4"), "--model uses the converted model's own weights"),
        (("--model", ".", "--numa", "1"), "--model uses the converted model's own weights"),
        (("--stage", "pack", "--method", "bf16"), "--stage pack cannot measure bf16"),
        (
            ("--shape", "32,32,4096,4096", "--tokens", "1048576"),
            "1,048,576 tokens of 32,32,4096,4096 take",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input(
    words: tuple[str, ...], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--plot" in words:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    base = () if {"--model", "--stage"} & set(words) else SMALL
    result = bench(*base, *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert error in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr and not list(tmp_path.iterdir())


@pytest.fixture(scope="session")
def model(converted_example: Converted) -> Path:
    return converted_example(method="int4")


# Models by what their experts compute.
ACTIVATIONS = {
    "Ling-2.0": "SiLU",
    "Hy4 MXFP8": "SiLU, gate and up clamped to 10",
    "Step-3.5 BF16": "SiLU, its result and up clamped to 7",
    "gpt-oss MXFP4": "gate * sigmoid(1.702 * gate) * (up + 1), gate and up clamped to 7",
    "Nemotron-3, stacked": "squared ReLU without a gate",
    "Inkling-2 MXFP8": "SiLU, gate within 4 by tanh, up within 25 by tanh",
    "DiffusionGemma": "GELU (tanh)",
    "Muse-Spark": "SiLU",  # and a norm after it, which is not measured
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_model_of_each_activation(name: str, tmp_path: Path) -> None:
    write(MADE[name], tmp_path / "model")
    output = tmp_path / "out"
    convert(tmp_path / "model", output, method="int8", allow_activation_mismatch=True)
    layer = max(MADE[name].layers)
    words = ("--layer", layer, "--tokens", "1,6", "--iters", "1", "--threads", "1")
    result = bench("--model", output, *words, "--format", "json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert problems(report, SCHEMA) == [] and len(report["rows"]) == 2
    for row in report["rows"]:
        assert row["layer"] == layer and row["shape"]["activation"] == ACTIVATIONS[name]
        assert 0 < row["kernel_error"] < 0.005
    assert f"4 experts, 1 part, {ACTIVATIONS[name]}" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"hidden_act": ["silu"]}', "config.json: hidden_act is ['silu'], not a name"),
        ('{"swiglu_limit": "abc"}', "config.json: swiglu_limit is 'abc'"),
        ('{"swiglu_limit": NaN}', "config.json: swiglu_limit is nan"),
        ('{"swiglu_alpha": {}}', "config.json: swiglu_alpha is {}"),
        ('{"text_config": [1]}', "config.json: text_config is [1]"),
        ('{"num_experts_per_tok": "2"}', "config.json: num_experts_per_tok is '2'"),
        ('{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_a_model_with_an_odd_config(config: str, words: str, model: Path) -> None:
    before = (model / "config.json").read_bytes()
    try:
        (model / "config.json").write_text(config)
        result = bench("--model", model, "--iters", "1", "--tokens", "1")
    finally:
        (model / "config.json").write_bytes(before)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in " ".join(result.stderr.split()) and "Traceback" not in result.stderr


def test_a_trace_with_ids_out_of_range(tmp_path: Path) -> None:
    np.savez(tmp_path / "trace.npz", ids=np.array([[0, 1], [3, 2]]))
    result = bench(*SMALL, "--routing", f"trace:{tmp_path / 'trace.npz'}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "sends token 1 to expert 3, but there are 3" in result.stderr


def test_a_level_that_the_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "isa_available", lambda: ["scalar"])
    result = bench(*SMALL, "--isa", "amx")
    assert result.exit_code == 2 and "this machine does not support amx" in result.stderr


# Its limits by tiles would be measured for seconds.
QUICK_KTCONV = "import quick_limits; from ktconv.cli.entry import main; main()"


def test_amx_under_the_emulator(emulator: amx.Emulator, tmp_path: Path) -> None:
    """The command itself, in a process of its own, on tiles."""
    words = ["bench", "--isa", "amx", "--tokens", "33", "--iters", "1", "--shape", "256,256,4,2"]
    places = [str(Path(helpers.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    path = {"PYTHONPATH": os.pathsep.join(places)}
    result = subprocess.run(
        [sys.executable, "-c", QUICK_KTCONV, *words, "--method=int8,bf16", "--format=json"],
        capture_output=True,
        text=True,
        env=os.environ | emulator.environment(tmp_path / "counts") | path,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert [(row["method"], row["isa"]) for row in rows] == [
        (method, "amx") for method in ("int8", "bf16")
    ]
    counts = amx.read_report(tmp_path / "counts")
    assert counts.int8_products and counts.bf16_products
