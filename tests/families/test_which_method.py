"""docs/which-method.md says what the tables say, what is known of engines, and what the program
itself decides."""

from __future__ import annotations

import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from click.testing import CliRunner
from helpers.families import Tensor, bf16, write_checkpoint
from helpers.family_list import MADE
from helpers.family_models import of_bf16, write
from helpers.layouts import LAYOUTS, Stacked, draw
from helpers.paths import ROOT

from ktconv.cli.app import app, application
from ktconv.cli.quantize_cpu import Method
from ktconv.errors import CheckpointError
from ktconv.families.family import Released
from ktconv.families.sizes import SIZES
from ktconv.families.table import FAMILIES
from ktconv.formats import output_formats
from ktconv.source import Checkpoint, open_checkpoint
from ktconv.source.encodings import ENCODINGS
from ktconv.targets.consumers import METHODS, SGLANG, SGLANG_KT, VLLM
from ktconv.targets.encoded.kept import is_kept
from ktconv.targets.encoded.scheme import SCHEMES, Scheme
from ktconv.targets.encoded.target import EncodedTarget
from ktconv.targets.encoded.target import Options as EncodedOptions
from ktconv.targets.packed.target import Options, make_plan

SCRIPT = runpy.run_path(str(ROOT / "docs" / "write_which_method.py"))
LINES = list(SCRIPT["lines"]())
NAMES = [line.models for line in LINES]
LINE = {line.models: line for line in LINES}
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text()
HIDDEN, INNER, EXPERTS = 128, 256, 2


@pytest.fixture(scope="module")
def page() -> str:
    return SCRIPT["PAGE"].read_text(encoding="utf-8")


def cells(row: tuple[str, ...]) -> str:
    return f"| {' | '.join(row)} |\n"


# ---- the tables --------------------------------------------------------------------------


def test_the_page_is_up_to_date(page: str) -> None:
    assert page == SCRIPT["page"](), "run python docs/write_which_method.py"


def test_rows_are_found_by_their_models() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert all(name and not name.startswith("the same") for name in NAMES)


def test_methods_are_those_of_the_command() -> None:
    known = set(get_args(Method))
    loaded = {row.name for row in SCHEMES.values() if row.kt_method} | output_formats().keys()
    assert set(SCRIPT["COMMANDS"].values()) == loaded <= known
    assert set(SCRIPT["KEPT"].values()) | {*SCRIPT["SMALL"], *SCRIPT["LARGE"]} <= loaded
    assert SCRIPT["COMMANDS"].keys() | {"LLAMAFILE"} == {one.name for one in METHODS}


def test_encodings_are_known() -> None:
    names = {one.name for one in ENCODINGS}
    assert SCRIPT["KEPT"].keys() - {"mxfp8"} | SCRIPT["AS_LARGE"].keys() <= names
    assert all(line.encodings for line in LINES)


@pytest.mark.parametrize(
    ("models", "kept", "small", "large"),
    [
        ("Qwen3-MoE", ["bf16"], "int4", "int8"),
        ("Kimi-K2-Thinking", ["rawint4"], "rawint4", "int8"),
        ("DeepSeek-V4, V4-Flash, V4-Pro, V4.1-Flash", ["mxfp4"], "mxfp4", "mxfp8"),
        ("MiniMax-M3", ["mxfp8"], "", "mxfp8"),  # MXFP4 would drop alpha
        ("GLM-5.3-Flash", ["fp8"], "", "fp8"),  # its server refuses all else
        ("gpt-oss-20b, 120b", [], "", ""),  # biases
        ("Step-3.5-Flash, Step-3.7-Flash", [], "", ""),  # a clamp after SiLU
    ],
)
def test_what_is_known(models: str, kept: list[str], small: str, large: str) -> None:
    line = LINE[models]
    assert (line.kept, line.small(), line.large()) == (kept, small, large)


@pytest.mark.parametrize(
    "trap",
    [
        "`KT_MXFP4_BACKEND=avx2` where there is AMX",
        "| `FP8_PERCHANNEL` | `fp8-channel` | 8.02 | – | AVX-512 |",
        "GLM-5.3-Flash: its server refuses all but `FP8`",
        "an intermediate size that 256 divides",
        "`MXFP4` clamps, but drops alpha",
        "No method adds biases of experts (gpt-oss)",
        "none clamps after SiLU (Step",
        "`RAWINT4` loads groups of 64 and 128 as well",
        "AVX-512 or AVX-VNNI: its AVX2 kernel crashes",
        "| `NVFP4A16` | reads it | reads it | refuses it | computes wrong results",
        "reads all folders below `--kt-weight-path`",
    ],
)
def test_traps(trap: str, page: str) -> None:
    assert trap in " ".join(page.split())


# ---- engines -------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [SGLANG_KT, SGLANG, VLLM], ids=lambda one: one.name)
def test_types_of_engines_are_known(engine: Any) -> None:
    known = {kind for row in FAMILIES.rows for kind in row.types}
    assert engine.has | engine.lacks | engine.own_config <= known
    assert not engine.has & engine.lacks
    groups = (engine.computes, engine.stops, engine.unread)
    assert sum(map(len, groups)) == len(frozenset().union(*groups))


def test_every_row_has_a_verdict_for_each_engine(page: str) -> None:
    rows = list(SCRIPT["engine_rows"]())
    assert [row[0] for row in rows] == NAMES
    for row in rows:
        assert all(row) and cells(row) in page
    for _, *columns in rows:
        assert columns[2].startswith(("release; `W4A16`", "no class", "not known"))
        general = "its general class"
        assert columns[3].startswith(("release; `W4A16`", "no class", "not known", general))


@pytest.mark.parametrize(
    ("models", "kt", "sglang", "vllm"),
    [
        ("Qwen3-MoE", "all", "release; `W4A16`", "release; `W4A16`"),
        (
            "MiniMax-M3",
            "`mxfp8`; others **wrong** without a word",
            "release; `W4A16`: **wrong**, plain SiLU",
            "release; `W4A16`",
        ),
        (
            "GLM-5.3-Flash",
            "`fp8`; others refused at start",
            "release; `W4A16`",
            "release; `W4A16`",
        ),
        (
            "gpt-oss-20b, 120b",
            "none: **wrong** without a word",
            "release; `W4A16`: refused by `quantize-gpu`",
            "release; `W4A16`: refused by `quantize-gpu`",
        ),
        ("Solar-Open-100B", "all; no class in sglang-kt", "no class", "no class"),
        ("MiniMax-Text-01", "all; no class in sglang-kt", "no class", "no class"),
        ("dots.llm1", "all; no class in sglang-kt", "no class", "no class"),
        (
            "DeepSeek-OCR-2",
            "all; not taken over by sglang-kt",
            "release; `W4A16`: not loaded",
            "release; `W4A16`",
        ),
        ("FlexOlmo", "all; no class in sglang-kt", "no class", "its general class"),
        ("Mellum", "all; no class in sglang-kt", "release; `W4A16`", "its general class"),
        ("Beam-1.0", "all; no class in sglang-kt", "release; `W4A16`", "release; `W4A16`"),
        ("Ling-3.0-Flash", "all; class in sglang-kt: not known", "not known", "not known"),
    ],
)
def test_verdicts(models: str, kt: str, sglang: str, vllm: str) -> None:
    line = LINE[models]
    assert SCRIPT["kt_verdict"](line) == kt
    assert SCRIPT["gpu_verdict"](SGLANG, line) == sglang
    assert SCRIPT["gpu_verdict"](VLLM, line) == vllm


# ---- sizes and times -------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES, ids=lambda one: one.model)
def test_sizes_agree_with_the_names_of_models(size: Any) -> None:
    """Qwen3-235B-A22B has 235 billion weights, most of them in experts."""
    family = FAMILIES.of(size.type)
    assert family is not None
    products = 2 + family.activation.gated
    weights = products * size.layers * size.experts * size.hidden * size.intermediate
    found = re.search(r"(?<![A\d.])(?:(\d+)x)?(\d+)B(?!-7B)", size.model, re.IGNORECASE)
    if found:
        named = int(found[1] or 1) * int(found[2]) * 1e9
        assert 0.75 * named < weights < named
    assert size.top_k <= size.experts


# Models whose dimensions are the defaults of transformers' classes, and the names of these.
DEFAULTS = {
    "Qwen1.5-MoE-A2.7B": "qwen2_moe",
    "Qwen3-Next-80B-A3B": "qwen3_next",
    "Qwen3.5-35B-A3B": "qwen3_5_moe_text",
    "Mixtral-8x7B": "mixtral",
    "MiniMax-M2": "minimax_m2",
    "Phi-3.5-MoE": "phimoe",
    "Kimi-Linear-48B-A3B": "kimi_linear",
    "DeepSeek-V3": "deepseek_v3",
    "DeepSeek-V3.2": "deepseek_v32",
    "DeepSeek-V4-Flash": "deepseek_v4",
    "GLM-4.5-Air": "glm4_moe",
    "GLM-4.5V": "glm4v_moe_text",
    "GLM-4.7-Flash": "glm4_moe_lite",
    "GLM-5": "glm_moe_dsa",
    "GLM-5.3-Flash": "glm5_next_text",
    "Solar-Open-100B": "solar_open",
    "gpt-oss-120b": "gpt_oss",
    "Step-3.5-Flash": "step3p5",
    "MiMo-V2-Flash": "mimo_v2_flash",
}


@pytest.mark.parametrize("model", DEFAULTS)
def test_sizes_are_the_defaults_of_transformers(model: str) -> None:
    """Its classes have the released dimensions as defaults."""
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    if DEFAULTS[model] not in auto.CONFIG_MAPPING:
        pytest.skip(f"transformers has no {DEFAULTS[model]} yet")
    values = auto.CONFIG_MAPPING[DEFAULTS[model]]().to_dict()

    def value(*keys: str) -> Any:
        return next((values[key] for key in keys if values.get(key) is not None), None)

    size = SCRIPT["size_named"](model)
    kinds = value("mlp_layer_types")
    dense = value("first_k_dense_replace") or 0
    layers = len([kind for kind in kinds if kind != "dense"]) if kinds else None
    assert size.layers == (layers or value("num_hidden_layers") - dense)
    assert size.experts == value("n_routed_experts", "num_experts", "num_local_experts")
    assert size.hidden == value("hidden_size")
    assert size.intermediate == value("moe_intermediate_size", "intermediate_size")
    assert value("num_experts_per_tok", "num_experts_per_token") in (None, size.top_k)


def test_a_model_has_one_row() -> None:
    assert len({size.model for size in SIZES}) == len(SIZES)
    hubs = [size.hub for size in SIZES if size.hub]
    assert len(set(hubs)) == len(hubs) and all(one.count("/") == 1 for one in hubs)


def test_the_first_models_have_sizes(page: str) -> None:
    first = list(SCRIPT["model_rows"](map(SCRIPT["size_named"], SCRIPT["FIRST"])))
    assert [row[0] for row in first] == list(SCRIPT["FIRST"])
    assert page.index("| Qwen3-30B-A3B |") < 1000  # it is found without scrolling
    for row in first:
        assert cells(row) in page and all(row)


def test_a_size_by_hand() -> None:
    """94 layers of 128 experts, 3 matrices of 4096 x 1536: bytes of codes, and a scale a row."""
    size = SCRIPT["size_named"]("Qwen3-235B-A22B")
    weights, rows = 94 * 128 * 3 * 4096 * 1536, 94 * 128 * (2 * 1536 + 4096)
    assert SCRIPT["all_bytes"]("int8", size) == weights + 4 * rows
    assert SCRIPT["all_bytes"]("bf16", size) == 2 * weights


def test_a_time_by_hand() -> None:
    size = SCRIPT["size_named"]("Qwen3-30B-A3B")
    weights = 48 * 128 * 3 * 2048 * 768
    moved = SCRIPT["all_bytes"]("int4", size) + 2 * weights
    slow = SCRIPT["seconds"]("int4", "bf16", size, True, 1e8, 8)
    few = SCRIPT["seconds"]("int4", "bf16", size, True, 1e12, 1)
    assert slow == pytest.approx(moved / 1e8)
    assert few == pytest.approx(1.55 / 1.21 * 2 * weights / 1e9)


@pytest.mark.parametrize("name", [*SCRIPT["TIMES"], "kept"])
def test_measurements_are_in_the_results(name: str) -> None:
    one = SCRIPT["KEPT_INT4"] if name == "kept" else SCRIPT["TIMES"][name]
    found = section(one.section)
    assert one.words in found
    numbers = {float(number) for number in re.findall(r"\d+\.\d+", found)}
    assert one.cpu_seconds in numbers


def test_the_memory_is_in_the_results() -> None:
    title, words = SCRIPT["MEMORY"]
    assert words in section(title)


def section(title: str) -> str:
    """Of benchmarks/RESULTS.md, up to the next title."""
    parts = re.split(r"^#+ ", RESULTS, flags=re.MULTILINE)
    return next(part for part in parts if part.split("\n", 1)[0] == title)


# ---- what the program decides ------------------------------------------------------------


def source_of(line: Any) -> str:
    """Where a layer's experts are."""
    words = (f"{line.family.layers}.0", line.family.block, line.family.experts)
    return str(line.released.prefix) + ".".join(filter(None, words))


def tensors_of(line: Any) -> dict[str, Tensor]:
    """The experts of a layer as the family stores them, in bf16."""
    released: Released = line.released
    layout = "F3" if released.layout == "F4" else released.layout  # the same in FP4
    known = LAYOUTS["N" if layout == "V" else layout]
    source, rng = source_of(line), np.random.default_rng(0)
    tensors, _ = draw(
        "N" if layout == "V" else layout, source, (EXPERTS, INNER, HIDDEN), rng, of_bf16
    )
    if layout == "V":
        words = {"gate_proj": "fc1", "up_proj": "fc3", "down_proj": "fc2"}
        tensors = {re.sub("|".join(words), lambda m: words[m[0]], k): v for k, v in tensors.items()}
    if line.activation.biases:
        assert isinstance(known, Stacked)
        for name, rows in (("gate_up_proj", 2 * INNER), ("down_proj", HIDDEN)):
            tensors[f"{source}.{name}_bias"] = bf16(np.zeros((EXPERTS, rows), np.float32))
    if line.family.post_norm:
        tensors[f"{source}.{line.family.post_norm}.weight"] = bf16(np.ones(HIDDEN, np.float32))
    return tensors


def write_line(line: Any, directory: Path) -> Path:
    """A checkpoint of one layer with the experts of a row, and the least config.json."""
    config: dict[str, Any] = {
        "model_type": line.released.type, "num_hidden_layers": 1, "hidden_size": HIDDEN,
        "vocab_size": 64, "num_experts": EXPERTS,
    }  # fmt: skip
    if line.activation.limit_after:
        config["swiglu_limits"] = [line.activation.limit]
    return write_checkpoint(directory, tensors_of(line), config)


def decided(checkpoint: Checkpoint, method: str) -> bool:
    """Whether quantize-cpu says that KTransformers computes the experts right."""
    if method in output_formats():
        make: Any = lambda: make_plan(checkpoint, Options(method=method)).target  # noqa: E731
    else:
        group = SCHEMES[method].groups[0]
        options = EncodedOptions(scheme=method, group_size=group)
        make = lambda: checked(EncodedTarget(options, checkpoint), checkpoint)  # noqa: E731
    try:
        return make().mismatch is None
    except CheckpointError as error:
        assert "KTransformers" in str(error)
        return False


def checked(target: EncodedTarget, checkpoint: Checkpoint) -> EncodedTarget:
    target.check(checkpoint.layers)
    return target


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each row."""
    directory = tmp_path_factory.mktemp("rows")
    return {line.models: write_line(line, directory / str(i)) for i, line in enumerate(LINES)}


def test_the_page_agrees_with_the_checks_of_the_program(sources: dict[str, Path]) -> None:
    for line in LINES:
        checkpoint = open_checkpoint(str(sources[line.models]))
        (layer,) = checkpoint.layers
        assert layer.activation == line.activation, line.models
        for method in SCRIPT["COMMANDS"].values():
            right = method in line.right
            assert decided(checkpoint, method) is right, f"{line.models}, {method}"


def test_every_command_plans_a_model_of_its_row(sources: dict[str, Path], tmp_path: Path) -> None:
    """What is printed for a family is accepted with --dry-run, and refused without the option that
    allows what no method of KTransformers computes."""
    runner = CliRunner()
    for line in LINES:
        words = shlex.split(line.command())[1:]
        words[1:3] = str(sources[line.models]), str(tmp_path / "out")
        result = runner.invoke(app, [*words, "--dry-run"])
        assert result.exit_code == 0, f"{line.models}: {result.output}"
        if SCRIPT["ALLOW"] in words:
            words.remove(SCRIPT["ALLOW"])
            assert runner.invoke(app, [*words, "--dry-run"]).exit_code == 2, line.models


def test_sizes_are_those_of_plans(sources: dict[str, Path]) -> None:
    """Bytes of a plan's tensors, by method."""
    size = SCRIPT["Size"]("qwen3_moe", "", 1, EXPERTS, HIDDEN, INNER, 1)
    checkpoint = open_checkpoint(str(sources["Qwen3-MoE"]))
    (layer,) = checkpoint.layers
    for method in (*SCRIPT["COMMANDS"].values(), "W4A16"):
        if method in output_formats():
            target: Any = make_plan(checkpoint, Options(method=method)).target
        else:
            group = SCHEMES[method].groups[0]
            target = EncodedTarget(EncodedOptions(scheme=method, group_size=group), checkpoint)
        tensors = (one for part in target.sections(layer, range(EXPERTS)) for one in part)
        assert SCRIPT["all_bytes"](method, size) == sum(one.nbytes for one in tensors), method


@pytest.mark.parametrize(
    ("name", "models"),
    [
        ("Kimi-K2-Thinking", "Kimi-K2-Thinking"),
        ("MiniMax-M2 FP8", "MiniMax-M2, M2.5, M2.7"),
        ("MiniMax-M3 MXFP8", "MiniMax-M3"),
        ("Hy4 MXFP8", "Hy4-preview: the same in MXFP8, MXFP4"),
    ],
)
def test_what_is_kept_is_kept_by_the_program(name: str, models: str, tmp_path: Path) -> None:
    write(MADE[name], tmp_path)
    (layer, *_) = open_checkpoint(str(tmp_path)).layers
    matrix = layer.experts[0]["up"]
    keeps = {
        method
        for method in LINE[models].kept
        if is_kept(Scheme(method, SCHEMES[method].groups[0]), matrix, half=False)
    }
    assert len(keeps) == 1


# ---- commands -------------------------------------------------------------------------------


def commands(page: str) -> Iterator[list[str]]:
    for text in re.findall(r"`(ktconv [^`]+)`", page):
        yield shlex.split(text)


def test_every_command_parses(page: str) -> None:
    known: dict[str, Any] = dict(application().commands)
    found = [words for words in commands(page) if "--scheme" in words or "--method" in words]
    assert len(found) > len(LINES)
    for _, name, *words in found:
        known[name].make_context(name, list(words))


def test_commands_name_the_model_of_their_row(page: str) -> None:
    for size, row in zip(SIZES, SCRIPT["model_rows"](SIZES), strict=True):
        assert cells(row) in page
        assert f"quantize-cpu {size.hub or 'MODEL'} {size.model.lower()}-" in row[1]
