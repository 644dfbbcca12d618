"""The commands: what they print and where, exit codes, help, examples, imports."""

from __future__ import annotations

import inspect
import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import CliRunner
from helpers.cli import ktconv, process
from helpers.convert import all_files, assert_same, convert, read_folders, read_json
from helpers.docs_modules import module
from helpers.paths import ROOT

import ktconv as package
from ktconv import native
from ktconv.cli.app import app
from ktconv.cli.encode import ENCODED_METHODS, GGUF_METHODS
from ktconv.cli.quantize_cpu import Layout, Method, ScaleRule
from ktconv.conversion.run import DISK_MARGIN
from ktconv.formats import output_formats
from ktconv.targets.packed.target import ScaleRule as OfLibrary

pytestmark = [pytest.mark.slow, pytest.mark.process]

EXAMPLE = ROOT / "docs" / "example" / "tiny-moe"
SITE = module("site_commands")  # makes the page of a command
COMMANDS: dict[str, Any] = dict(app.commands)


def run(*words: object) -> Any:
    """The command in this process."""
    return CliRunner().invoke(app, [str(word) for word in words])


def quantize(*words: object) -> Any:
    return run("quantize-cpu", EXAMPLE, *words)


# ---- dry run ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--method", "int8", "--numa", "4"),
        ("--max-shard-size", "200kB"),
        ("--experts-only",),
        ("--layout", "layers", "--numa", "2"),
        ("--layers", "1"),
    ],
    ids=" ".join,
)
def test_dry_run_is_exact(words: tuple[str, ...], tmp_path: Path) -> None:
    """What it says is what a run writes and reads, to the byte."""
    output = tmp_path / "out"
    words = words if "--numa" in words else (*words, "--numa", "1")
    result = quantize(output, *words, "--dry-run", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert not output.exists()
    plan = json.loads(result.stdout)
    done = json.loads(quantize(output, *words, "--json").stdout)
    shards = list(output.glob("*.safetensors"))
    files = [path.stat().st_size for path in shards] or map(len, read_folders(output).values())
    assert plan["output_bytes"] == sum(files)
    assert plan["files"] == len(shards)
    assert plan["disk_needed_bytes"] == plan["output_bytes"] + DISK_MARGIN
    assert done["disk_needed_bytes"] == plan["disk_needed_bytes"]
    assert plan["source_bytes"] == done["source_bytes_read"]
    for key in ("schema", "layers", "experts", "source_bytes", "output_bytes", "layer_indices"):
        assert plan[key] == done[key]
    assert plan["schema"] == 1
    assert plan["layers"] == (1 if "--layers" in words else 2)
    assert plan["experts"] == 8
    assert plan["peak_memory_bytes"] > 0
    assert plan["seconds"] == 0
    assert done["seconds"] > 0


def test_source_bytes_are_the_tensors(tmp_path: Path) -> None:
    """Where nothing is left out, source_bytes is all tensor data of the checkpoint."""
    total = read_json(EXAMPLE / "model.safetensors.index.json")["metadata"]["total_size"]
    plan = json.loads(quantize(tmp_path / "out", "--dry-run", "--json").stdout)
    assert plan["source_bytes"] == total
    assert plan["copied_bytes"] < total


def test_dry_run_text(tmp_path: Path) -> None:
    """Layers, experts, encodings, sizes, memory, disk, what is copied and what is skipped."""
    result = quantize(tmp_path / "out", "--experts-only", "--dry-run", "--numa", 2)
    lines = dict(re.split("  +", line, maxsplit=1) for line in result.stdout.splitlines())
    assert lines["MoE layers"] == "2 (0-1)"
    assert lines["experts"] == "8 of hidden 128, intermediate 256, bf16"
    assert lines["write"] == "INT4, 2 NUMA parts, 2 shards"
    assert re.match(r"[0-9]+ bytes \(", lines["output"])
    assert "config.json" in lines["files copied"]
    assert "21 non-expert tensors (595.5 kB): --experts-only" in lines["skipped"]
    assert "free" in lines["disk"]
    assert "peak with" in lines["memory"]
    assert list(tmp_path.iterdir()) == []


def test_dry_run_touches_nothing(tmp_path: Path) -> None:
    """Not even an output that is there."""
    convert(EXAMPLE, tmp_path / "out")
    before = all_files(tmp_path)
    for words in ((), ("--overwrite",), ("--method", "int8")):
        quantize(tmp_path / "out", "--numa", 1, "--dry-run", *words)
        assert_same(all_files(tmp_path), before)


# ---- streams and exit codes ------------------------------------------------------------


def test_json_is_alone_on_stdout(tmp_path: Path) -> None:
    done = ktconv("quantize-cpu", EXAMPLE, tmp_path / "out", "--numa", 1, "--json")
    assert done.exit_code == 0
    facts = json.loads(done.stdout)
    assert facts["complete"] is True
    assert facts["converted_units"] == ["layer-00000", "layer-00001", "other-00001"]
    assert facts["missing_units"] == []
    assert 0 < facts["mean_relative_rms_error"] <= facts["worst_relative_rms_error"] < 0.2
    lines = done.stderr.splitlines()
    assert sorted(line.split(" ")[0] for line in lines) == facts["converted_units"]


def test_lines_on_a_pipe(tmp_path: Path) -> None:
    """One per unit, with bytes, share, speed and ETA; the result is on stdout."""
    done = ktconv("quantize-cpu", EXAMPLE, tmp_path / "out", "--numa", 1)
    pattern = r"\S+ done, [0-9.]+ MB of 3\.7 MB \([0-9]+ %\), [0-9.]+ [kMG]?B/s, ETA [0-9:?]+"
    assert all(re.fullmatch(pattern, line) for line in done.stderr.splitlines())
    assert "(100 %)" in done.stderr.splitlines()[-1]
    assert "Converted layers 0-1 and non-expert tensors" in done.stdout
    assert "Relative RMS error: mean 0.1" in done.stdout
    assert f"{tmp_path / 'out'} is complete." in done.stdout
    again = ktconv("quantize-cpu", EXAMPLE, tmp_path / "out", "--numa", 1)
    assert (again.exit_code, again.stderr) == (0, "")
    assert "nothing to do" in again.stdout


def read_terminal(words: list[str], **changes: str) -> tuple[int, str]:
    """Exit code and what a command writes to a terminal on stderr."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", **changes}
    process = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=follower, env=environment, close_fds=True
    )
    os.close(follower)
    text = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # how Linux tells that nobody writes any more
            break
        if not piece:
            break
        text += piece
    os.close(leader)
    return process.wait(), text.decode()


def test_bar_on_a_terminal(tmp_path: Path) -> None:
    words = ["quantize-cpu", str(EXAMPLE), str(tmp_path / "out"), "--numa", "1"]
    code, text = read_terminal([sys.executable, "-m", "ktconv", *words])
    assert code == 0
    assert "━" in text
    assert "B/s" in text
    assert "ETA" in text
    assert "layer-00000 done" not in text


def test_bar_without_colours(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "ktconv", "quantize-cpu", str(EXAMPLE)]
    colour = re.compile(r"\x1b\[[0-9;]*([39][0-7]|38;5;[0-9]+)m")
    for wanted in ("", "1"):
        new = str(tmp_path / f"out{wanted}")
        code, text = read_terminal([*words, new, "--numa=1"], NO_COLOR=wanted)
        assert code == 0 and "B/s" in text
        assert bool(colour.search(text)) != bool(wanted)


def test_a_part_says_what_is_missing(tmp_path: Path) -> None:
    result = quantize(tmp_path / "out", "--numa", 1, "--layers", "1")
    assert result.exit_code == 0
    assert "is incomplete: missing layer 0" in result.stdout
    result = quantize(tmp_path / "out", "--numa", 1, "--finalize")
    assert result.exit_code == 2
    assert "layer 0 missing" in result.stderr


@pytest.mark.parametrize(
    "tensor",
    [
        "blk.1.ffn_up_exps.3.numa.0.weight",
        "blk.1.ffn_up_exps.3.numa.0.scale",
        "embed_tokens.weight",
    ],
)
def test_exit_code_1_when_a_check_fails(
    tensor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte that changes between writing and reading back."""
    from ktconv.writer.staging import ShardStaging

    real = ShardStaging.write

    def flipped(self: ShardStaging, name: str, data: memoryview, offset: int) -> None:
        other = bytearray(data)
        (here, start), (there, wanted) = self.place(name), self._places.get(tensor, (None, 0))
        at = wanted + 7 - (start + offset)
        if here == there and 0 <= at < len(other):  # tensors that follow are written with it
            other[at] ^= 0x70
        real(self, name, memoryview(other), offset)

    monkeypatch.setattr(ShardStaging, "write", flipped)
    result = quantize(tmp_path / "out", "--numa", 1, "--threads", 1)
    assert result.exit_code == 1
    assert f"{tensor} read back differs from what was written" in result.stderr
    assert not (tmp_path / "out" / "ktconv.json").exists()
    monkeypatch.undo()
    assert quantize(tmp_path / "out", "--numa", 1).exit_code == 0
    convert(EXAMPLE, tmp_path / "clean")
    assert_same(all_files(tmp_path / "out"), all_files(tmp_path / "clean"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--numa", "3"), "possible values of --numa for this model: 1, 2"),
        (("--numa", "-1"), "--numa"),
        (("--method", "int5"), "int5"),
        (("--layers", "5"), "--layers names layer 5"),
        (("--layers", "1-"), "write it like 0-3,7"),
        (("--max-shard-size", "big"), "write it like 5GB"),
        (("--max-memory", "0"), "write it like"),
        (("--no-such-option",), "--no-such-option"),
    ],
)
def test_exit_code_2_for_bad_options(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    result = quantize(tmp_path / "out", *words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "out").exists()


def test_exit_code_3_for_resources(tmp_path: Path) -> None:
    result = quantize(tmp_path / "out", "--numa", 1, "--max-memory", "1MB")
    assert result.exit_code == 3
    assert "--max-memory 1.0 MB is too small" in result.stderr
    needed = re.search(r"--max-memory ([0-9]+MiB)", result.stderr)
    assert needed is not None
    enough = f"{int(needed[1][:-3]) + 64}MiB"  # this process may have grown meanwhile
    result = quantize(tmp_path / "out", "--numa", 1, "--threads", 1, "--max-memory", enough)
    assert result.exit_code == 0


def test_unusable_isa_is_a_sentence(tmp_path: Path) -> None:
    done = process("quantize-cpu", EXAMPLE, tmp_path / "out", "--numa", 1, KTCONV_ISA="mmx")
    assert done.returncode == 2
    assert re.match("Error: KTCONV_ISA.* cannot be used", done.stderr)
    assert not (tmp_path / "out").exists()


# ---- help, names, entry points ---------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_whole(name: str) -> None:
    """Every option with its words, and an example."""
    result = run(name, "--help-all")
    assert result.exit_code == 0
    for parameter in COMMANDS[name].params:
        for option in [*parameter.opts[:1], *parameter.secondary_opts]:
            if option.startswith("-"):
                assert re.search(rf"(^|[\s/,]){re.escape(option)}\b", result.stdout), option
        assert parameter.help, parameter.name
    assert "Example: ktconv" in result.stdout


def parses(line: str) -> None:
    """`line` is a command that the options allow; nothing is run."""
    words = shlex.split(line)
    assert words[0] == "ktconv"
    if words[1].startswith("-"):
        assert run(*words[1:]).exit_code == 0
        return
    COMMANDS[words[1]].make_context(words[1], words[2:])


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_parse(name: str) -> None:
    text = inspect.getdoc(COMMANDS[name].callback) or ""
    examples = re.findall(r"^Example: (.+)$", text, re.MULTILINE)
    assert examples
    for example in examples:
        parses(example)


def documented_commands() -> list[str]:
    """Lines of the README's and docs' code blocks that call ktconv."""
    lines = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for block in re.findall(
            r"```\w*\n(.*?)```|((?:^    .*\n)+)", path.read_text(), re.M | re.S
        ):
            text = "".join(block).replace("\\\n", " ")
            commands = (re.split("#| > ", line)[0] for line in text.splitlines())
            lines += [line.strip() for line in commands if "ktconv " in line]
    return [line for line in lines if line.startswith("ktconv ")]


def test_documented_commands_parse() -> None:
    lines = documented_commands()
    assert lines
    assert any(" quantize-cpu " in line for line in lines)
    for line in lines:
        parses(line)


# Options of other programs that the documentation names.
ELSEWHERE = {
    "ktconv itself": "--help --help-all --version",
    "sglang-kt": "--kt-method --kt-weight-path --kt-threadpool-count --kt-num-gpu-experts "
    "--kt-gpu-experts-ratio --kt-expert-placement-strategy --init-expert-location "
    "--disable-cuda-graph --kt-numa-nodes --kt-max-deferred-experts-per-token "
    "--attention-backend",
    "ray start": "--address --dashboard-host --head --object-store-memory --port",
    "pip": "--index-url --no-binary --no-deps --target",
    "numactl": "--cpunodebind --interleave --membind",
    "docker": "--cap-add --cpuset-cpus --cpuset-mems",
    "docs/example/train.py": "--output --hidden --expert-size",
}
PAGES = ["README.md", "CONTRIBUTING.md", "benchmarks/README.md"]
PAGES += [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))]
OF_THEIRS = "docs/from-ktransformers.md"
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")


def options_of_benchmarks() -> set[str]:
    texts = [path.read_text("utf-8") for path in (ROOT / "benchmarks").rglob("*.py")]
    return {option for text in texts for option in re.findall(r'"(--[a-z][a-z-]+)"', text)}


@pytest.mark.parametrize("page", PAGES)
def test_documented_options_exist(page: str) -> None:
    """Of a command that is named beside them in one piece of code, of that command; otherwise of
    any, or of another program that the page is about."""
    text = (ROOT / page).read_text(encoding="utf-8")
    known = {name: set[str]().union(*options_of(name)) for name in COMMANDS}
    elsewhere = {option for options in ELSEWHERE.values() for option in options.split()}
    if page in ("benchmarks/README.md", "docs/accuracy.md", "docs/adding.md"):
        elsewhere |= options_of_benchmarks()
    if page == OF_THEIRS:
        elsewhere |= set(OPTION.findall(" ".join(THEIRS.values())))
    assert set(OPTION.findall(text)) <= elsewhere.union(*known.values())
    for code in re.findall(r"`([^`\n]+)`", text):
        words = code.removeprefix("ktconv ").split()
        if words[0] in COMMANDS:
            assert set(OPTION.findall(code)) <= known[words[0]] | {"--help", "--help-all"}, code


def options_of(name: str) -> list[set[str]]:
    """The names of each option of a command."""
    names = [{*one.opts[:1], *one.secondary_opts} for one in COMMANDS[name].params]
    return [one for one in names if any(word.startswith("--") for word in one)]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_documented(name: str) -> None:
    """On the site's page of the command, which is made from the program, with what it means."""
    rows = re.findall(r"^\| (`-.*?`) \| (\S.*) \|$", SITE.page(name, COMMANDS[name]), re.MULTILINE)
    told = {word for cell, _ in rows for word in OPTION.findall(cell)}
    assert told == {"--help", "--help-all"}.union(*options_of(name))
    assert all(len(text.split()) > 1 for _, text in rows)


@pytest.mark.parametrize("guide", sorted(set(SITE.GUIDES.values())))
def test_guides_have_no_table_of_options(guide: str) -> None:
    """It is on the page that is made from the program."""
    text = (ROOT / "docs" / f"{guide}.md").read_text("utf-8")
    assert not re.findall(r"^\| option \|", text, re.MULTILINE)
    assert not re.findall(r"^- `--[^`]*`(?:, `[^`]*`)*: ", text, re.MULTILINE)


# Options of KTransformers' scripts of 0.7.2.
THEIRS = {
    "convert_cpu_weights.py": "--input-path -i --input-type --output -o --quant-method "
    "--cpuinfer-threads --threadpool-count --gpu --no-merge-safetensor --resume-layer "
    "--save-backward-weights --profile",
    "merge_cpu_weights.py": "--input-path -i --output -o --original-path -r --max-tensors",
    "convert_gpu_weights.py": "--model_id --output_dir --quant_method --quant_type "
    "--num_calibration_samples --max_sequence_length --dampening_frac --dataset --dataset_split "
    "--force_cpu --ignore_patterns --torch_dtype --trust_remote_code --random_seed "
    "--max_gpu_memory --max_cpu_memory",
    "compare_weights.py": "--tolerance",
}


def test_the_page_for_users_of_ktransformers_has_each_of_their_options() -> None:
    """In the first column; the second has ours, of the command that the heading names."""
    text = (ROOT / OF_THEIRS).read_text("utf-8").replace("\\|", "/")
    _, *parts = re.split(r"^## (.*): `ktconv ([a-z-]+).*`$", text, flags=re.MULTILINE)
    scripts = list(zip(parts[::3], parts[1::3], parts[2::3], strict=True))
    assert [script for script, _, _ in scripts] == list(THEIRS)
    for script, command, section in scripts:
        rows = re.findall(r"^\| (.*?) \| (.*?) \| .*\|$", section, re.MULTILINE)[2:]
        named = re.findall(r"(?<![\w-])--?[a-z][a-z0-9_-]*", " ".join(cell for cell, _ in rows))
        assert set(named) == set(THEIRS[script].split())
        known = set[str]().union(*options_of(command))
        for _, cell in rows:
            assert set(OPTION.findall(cell)) <= known, cell


def test_choices_of_quantize_cpu_are_those_of_the_library() -> None:
    assert get_args(Method) == (*output_formats(), *ENCODED_METHODS, *GGUF_METHODS)
    assert set(output_formats()) <= set(native.FORMATS)
    assert get_args(Layout) == ("safetensors", "layers")
    assert get_args(ScaleRule) == get_args(OfLibrary)


def test_defaults_are_those_of_the_library(tmp_path: Path) -> None:
    """MODEL and OUTPUT alone."""
    from ktconv.quantize.packed.run import Request, prepare
    from ktconv.targets.packed.target import Options

    facts = json.loads(quantize(tmp_path / "out", "--dry-run", "--json").stdout)
    request = Request(str(EXAMPLE), tmp_path / "out", Options(numa=0))
    preflight = prepare(request)
    assert facts["method"] == preflight.plan.target.options.method
    assert facts["numa"] == preflight.plan.target.options.numa
    assert facts["output_bytes"] == preflight.plan.output_bytes
    assert facts["threads"] == preflight.threads


@pytest.mark.parametrize("entry", ["module", "script"])
def test_entry_points(entry: str) -> None:
    script = shutil.which("ktconv", path=str(Path(sys.executable).parent))
    if entry == "script" and script is None:
        pytest.skip("the console script is not installed beside this interpreter")
    words = [sys.executable, "-m", "ktconv"] if entry == "module" else [str(script)]
    done = subprocess.run([*words, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"ktconv {package.__version__}\n"
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "quantize-cpu" in done.stdout + done.stderr


def test_the_version_as_json() -> None:
    facts = json.loads(run("--version", "--json").stdout)
    assert facts["ktconv"] == package.__version__
    assert facts["levels"] == native.isa_available()
    assert run("--json", "--version").exit_code == 0


def test_json_needs_version_or_a_command() -> None:
    result = run("--json")
    assert result.exit_code == 2
    assert "--version" in result.stderr


# ---- what is imported ------------------------------------------------------------------

WATCH = """
import sys
sys.argv[0] = "ktconv"
from ktconv.cli.entry import main
try:
    main()
finally:
    print(*sorted(sys.modules), file=sys.stderr)
"""


def imported_by(*words: object) -> set[str]:
    command = [sys.executable, "-c", WATCH, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize(
    "words", [("--help",), ("quantize-cpu", "--help"), ("--version",), ("completion", "bash")]
)
def test_help_imports_little(words: tuple[str, ...]) -> None:
    heavy = {"numpy", "torch", "transformers", "safetensors", "huggingface_hub", "cffi", "jinja2"}
    assert not imported_by(*words) & heavy


@pytest.mark.parametrize("command", ["quantize-cpu", "inspect", "doctor"])
def test_no_command_needs_torch(command: str, tmp_path: Path) -> None:
    words: dict[str, list[object]] = {
        "quantize-cpu": [EXAMPLE, tmp_path / "out", "--numa", 1],
        "inspect": [EXAMPLE],
        "doctor": [],
    }
    heavy = {"torch", "transformers", "huggingface_hub", "triton", "pandas", "scipy", "jinja2"}
    assert not imported_by(command, *words[command]) & heavy


def test_a_conversion_imports_the_ways_that_are_asked_for(tmp_path: Path) -> None:
    """Other modules would be a third of the time in which it starts."""
    loaded = imported_by("quantize-cpu", EXAMPLE, tmp_path / "out", "--numa", 1)
    others = {
        "ktconv.cli.bar", "ktconv.cli.estimate", "ktconv.quantize.packed.folding",
        "ktconv.quantize.packed.gptq", "ktconv.quantize.packed.importance", "ktconv.stats",
        "ktconv.source.remote.mirror", "ktconv.targets.encoded", "gguf", "pydantic", "rich",
        "typer",
    }  # fmt: skip
    assert "ktconv.quantize.packed.rules" in loaded and not loaded & others


def test_dry_run_tells_what_a_run_would_refuse(tmp_path: Path) -> None:
    """An OUTPUT that is a file or holds something else shows before the real run."""
    (tmp_path / "file").write_text("x")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "model.safetensors").write_text("x")
    for output, said in ((tmp_path / "file", "is a file"), (foreign, "contains model.safetensors")):
        result = quantize(output, "--dry-run", "--numa", "1")
        assert result.exit_code == 2
        assert said in result.stderr


# ---- readers that leave ----------------------------------------------------------------


@pytest.mark.parametrize("redirection", ["2>&-", "2>&1 | true", "| true"])
def test_a_reader_that_leaves_does_not_end_the_work(redirection: str, tmp_path: Path) -> None:
    """Closed stderr, a log reader that died, `| head`: the conversion completes, exit code 0."""
    output = tmp_path / "out"
    command = shlex.join(
        [sys.executable, "-m", "ktconv", "quantize-cpu", str(EXAMPLE), str(output)]
    )
    script = f"set -o pipefail; {command} --numa 1 {redirection}"
    assert subprocess.run(["bash", "-c", script], check=False).returncode == 0
    assert (output / "ktconv.json").exists()
    assert not (output / ".ktconv").exists()


def test_a_terminal_without_room_gets_lines() -> None:
    """No bar for TERM=dumb: cursor movements would fill the log."""
    code = "from ktconv.cli.bar import BarObserver; print(BarObserver.fits())"
    leader, follower = pty.openpty()
    answers = []
    for term, columns in (("xterm", "100"), ("dumb", "100"), ("xterm", "30")):
        environment = os.environ | {"TERM": term, "COLUMNS": columns}
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=follower,
            env=environment,
            check=True,
        )
        answers.append(done.stdout.split()[-1])
    os.close(leader)
    os.close(follower)
    assert answers == [b"True", b"False", b"False"]


def test_names_of_absurd_length_are_cut(tmp_path: Path) -> None:
    """The sentence stays one that a person reads."""
    result = quantize(tmp_path / "out", "--layers", "x" * 5000)
    assert result.exit_code == 2
    assert "xxx...xxx" in result.stderr
    assert len(result.stderr) < 500


def test_a_word_behind_ray_that_is_no_address(tmp_path: Path) -> None:
    for words in (("head-node",), ("10.0.0.1",)):
        result = CliRunner().invoke(
            app, ["quantize-cpu", "m", str(tmp_path / "o"), "--ray", *words]
        )
        assert result.exit_code == 2
        assert "what follows --ray is HOST:PORT, auto or local" in " ".join(result.stderr.split())
    result = CliRunner().invoke(app, ["quantize-cpu", "m", str(tmp_path / "o"), "more"])
    assert result.exit_code == 2 and "--ray" not in result.stderr
