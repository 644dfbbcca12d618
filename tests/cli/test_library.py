"""The commands as functions of `import ktconv`: arguments, documents, errors, what they leave."""

from __future__ import annotations

import inspect
import json
import logging
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.conftest import QuickMeter
from helpers.cli import ktconv as command
from helpers.convert import all_files
from helpers.paths import EXAMPLE

import ktconv
from ktconv.bench import run
from ktconv.cli import library
from ktconv.cli.app import app
from ktconv.errors import CheckpointError, UsageError

pytestmark = [pytest.mark.slow, pytest.mark.process]

COMMANDS: dict[str, Any] = dict(app.commands)
# Options that are no arguments, and why.
WITHOUT = {
    "--json": "a function returns that document",
    "--format": "of bench: a function returns the document of --format json",
    "--progress": "the program's own log and display are not ktconv's to write to",
    "--ray": "a cluster runs jobs for a command line that ends with them",
    "--ray-scratch": "it belongs to --ray",
    "--from-list": "a program loops over its models; the command starts a process for each",
    "--at-once": "it belongs to --from-list",
}
# Commands that are no functions, and why.
COMMANDS_WITHOUT = {"completion": "it is a script for a shell"}
MODULES = (
    "bench",
    "generate",
    "inspect",
    "merge",
    "plan",
    "prune",
    "push",
    "quantize_cpu",
    "reshard",
    "stats",
    "verify",
)


def python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, *words, "-c", code]
    return subprocess.run(line, capture_output=True, text=True, check=False)


# ---- import ------------------------------------------------------------------------------


def test_importing_is_light() -> None:
    done = python("import ktconv", "-X", "importtime")
    names = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    assert {one for one in names if one.startswith("ktconv")} == {"ktconv", "ktconv.errors"}
    assert not {"numpy", "click", "torch", "inspect", "json"} & set(names)


def test_a_function_is_a_module_too_whatever_is_imported_first() -> None:
    """`from ktconv.merge import Request`, `ktconv.merge("LAYERS", "OUTPUT")`."""
    checks = """
for name in {names!r}:
    {first}
    {second}
    found = getattr(ktconv, name)
    assert sys.modules["ktconv." + name] is found and callable(found), name
    assert inspect.signature(found) == inspect.signature(getattr(library, name)), name
from ktconv import merge
assert merge is ktconv.merge and merge.Request is importlib.import_module("ktconv.merge").Request
from ktconv.quantize_cpu import Request, quantize_cpu
from ktconv.quantize_cpu.run import Request as Same
from ktconv.targets.ktransformers import Options
assert Same is Request is ktconv.quantize_cpu.Request
for call in (ktconv.quantize_cpu, ktconv.merge):
    try:
        call("/nowhere/model", "/nowhere/output")
    except ktconv.KtconvError as error:
        assert "/nowhere/model" in str(error)
    else:
        raise AssertionError(call)
"""
    orders = ["getattr(ktconv, name)", "importlib.import_module('ktconv.' + name)"]
    for first, second in (orders, reversed(orders)):
        head = "import importlib, inspect, sys\n"
        head += "import ktconv\n" if first == orders[0] else ""
        body = checks.format(names=MODULES, first=first, second=second)
        tail = "import ktconv\nfrom ktconv.cli import library\n"
        early = "" if head.endswith("ktconv\n") else "importlib.import_module('ktconv.merge')\n"
        done = python(head + early + tail + body)
        assert done.returncode == 0, done.stderr


def test_names_of_ktconv() -> None:
    assert set(ktconv.__all__) == {*library.__all__, "KtconvError"} <= set(dir(ktconv))
    assert set(MODULES) < set(ktconv.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        ktconv.nonsense  # type: ignore[attr-defined]  # noqa: B018


# ---- arguments ---------------------------------------------------------------------------


def test_every_command_is_a_function() -> None:
    named = {name.replace("_", "-") for name in library.__all__} - {"load-layer"}
    assert named == COMMANDS.keys() - COMMANDS_WITHOUT.keys()


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - COMMANDS_WITHOUT.keys()))
def test_arguments_are_the_options(name: str) -> None:
    """Each option is an argument, with its default, or is listed with a reason."""
    function = getattr(library, name.replace("-", "_"))
    mine = dict(inspect.signature(function).parameters)
    for old, new in library.OLD_NAMES.get(name, {}).items():
        assert mine.pop(old).default is None and new in mine
    options = [one for one in COMMANDS[name].params if one.opts[0] not in WITHOUT]
    assert list(mine) == [library.argument_of(one) for one in options]
    for option, argument in zip(options, mine.values(), strict=True):
        if argument.kind is inspect.Parameter.VAR_POSITIONAL:
            assert option.nargs == -1
            continue
        needed = argument.default is inspect.Parameter.empty
        of_list = name == "quantize-cpu" and option.param_type_name == "argument"
        assert needed == (option.required or of_list), argument
        assert needed or argument.default == option.default, argument
        assert (argument.kind is inspect.Parameter.KEYWORD_ONLY) == (
            option.param_type_name == "option"
        )
    lines = (inspect.getdoc(function) or "").splitlines()
    assert any(line.startswith("    ") and f"ktconv.{function.__name__}(" in line for line in lines)


def test_options_without_an_argument_exist() -> None:
    known = {one.opts[0] for each in COMMANDS.values() for one in each.params}
    assert WITHOUT.keys() <= known
    assert COMMANDS_WITHOUT.keys() <= COMMANDS.keys()


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("quantize-cpu", {"model": "-m", "output": Path("o")}, ["--json", "--", "-m", "o"]),
        (
            "quantize-cpu",
            {"model": "m", "output": "o", "layers": range(3), "mtp": False, "numa": 0, "map": None},
            ["--layers=0,1,2", "--no-mtp", "--json", "--", "m", "o"],
        ),
        ("quantize-cpu", {"max_memory": 1 << 30, "layers": 3}, None),
        ("verify", {"output": "o", "with_": Path("b")}, ["--with=b", "--json", "--", "o"]),
        ("compare", {"outputs": ("a", "b"), "source": "m"}, None),
        ("bench", {"shape": ["a", "b"], "tokens": [1, 64], "plot": "x.png"}, None),
    ],
)
def test_words_of_arguments(name: str, arguments: dict[str, Any], words: list[str] | None) -> None:
    rest = {
        "quantize-cpu": ["--layers=3", f"--max-memory={1 << 30}", "--json", "--"],
        "compare": ["--source=m", "--json", "--", "a", "b"],
        "bench": ["--shape=a", "--shape=b", "--tokens=1,64", "--format=json", "--plot=x.png", "--"],
    }
    assert library._words(COMMANDS[name], arguments) == (words or rest[name])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"overwrite": "no"}, "overwrite must be True or False, not 'no'"),
        ({"verify": "False"}, "verify must be True or False, not 'False'"),
        ({"dry_run": []}, "dry_run must be True or False, not []"),
        ({"output": True}, "output must be a name, a number or a sequence of them, not True"),
        ({"map": {1: 2}}, "map must be a name, a number or a sequence of them, not {1: 2}"),
        ({"layers": [True]}, "layers must be a name, a number or a sequence of them, not True"),
        ({"model": []}, "an argument is empty"),
    ],
)  # fmt: skip
def test_values_of_other_types_are_refused(
    arguments: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """ "no" is true to Python, and would remove an output."""
    output = tmp_path / "output"
    output.mkdir()
    (output / "kept").touch()
    with pytest.raises(UsageError) as caught:
        ktconv.quantize_cpu(**{"model": EXAMPLE, "output": output, **arguments})
    assert str(caught.value) == said
    assert [path.name for path in output.iterdir()] == ["kept"]


def test_values_that_equal_right_ones() -> None:
    arguments = {"model": b"m", "output": b"o\xff", "overwrite": 1, "verify": np.False_}
    words = ["--no-verify", "--overwrite", "--json", "--", "m", "o\udcff"]
    assert sorted(library._words(COMMANDS["quantize-cpu"], arguments)) == sorted(words)


@pytest.mark.parametrize("name", ktconv.__all__)
def test_pools_of_processes_get_functions(name: str) -> None:
    found = getattr(ktconv, name)
    assert pickle.loads(pickle.dumps(found)) is found


# ---- documents ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversions of the example: `one`, `other`, and `layers` in folders."""
    root = tmp_path_factory.mktemp("made")
    ids = {str(layer): {"experts": 8, "kept": [1, 2, 5]} for layer in range(2)}
    kept = {"kind": "kept experts", "schema": 1, "layers": ids}
    (root / "kept.json").write_text(json.dumps(kept))
    ktconv.quantize_cpu(EXAMPLE, root / "one", numa=1)
    ktconv.quantize_cpu(EXAMPLE, root / "other", method="rawint4")
    ktconv.quantize_cpu(EXAMPLE, root / "layers", layout="layers", numa=1)
    return root


def kinds(document: Any) -> Any:
    """Keys at every depth."""
    if isinstance(document, dict):
        return {name: kinds(value) for name, value in document.items()}
    return [kinds(one) for one in document] if isinstance(document, list) else None


SOURCE = ("--source", EXAMPLE)
CASES: dict[str, tuple[Callable[[Path, Path], Any], Callable[[Path, Path], list[object]]]] = {
    "quantize-cpu": (
        lambda _, out: ktconv.quantize_cpu(EXAMPLE, out, method="int4", numa=2),
        lambda _, out: [EXAMPLE, out, "--method", "int4", "--numa", 2],
    ),
    "quantize-gpu": (
        lambda _, out: ktconv.quantize_gpu(EXAMPLE, out, group_size=32),
        lambda _, out: [EXAMPLE, out, "--group-size", 32],
    ),
    "prune": (
        lambda made, out: ktconv.prune(EXAMPLE, out, prune=made / "kept.json"),
        lambda made, out: [EXAMPLE, out, "--prune", made / "kept.json"],
    ),
    "merge": (
        lambda made, out: ktconv.merge(made / "layers", out, source=EXAMPLE),
        lambda made, out: [made / "layers", out, *SOURCE],
    ),
    "reshard": (
        lambda made, out: ktconv.reshard(made / "one", out, numa=2),
        lambda made, out: [made / "one", out, "--numa", 2],
    ),
    "verify": (
        lambda made, _: ktconv.verify(made / "one", source=EXAMPLE),
        lambda made, _: [made / "one", *SOURCE],
    ),
    "compare": (
        lambda made, _: ktconv.compare(
            made / "one", made / "other", source=EXAMPLE, level="weights", speed=False
        ),
        lambda made, _: [
            made / "one", made / "other", *SOURCE, "--level", "weights", "--no-speed"
        ],
    ),
    "inspect": (
        lambda made, _: ktconv.inspect(made / "one", explain=False),
        lambda made, _: [made / "one"],
    ),
    "plan": (
        lambda *_: ktconv.plan(EXAMPLE, ep=2),
        lambda *_: [EXAMPLE, "--ep", 2],
    ),
    "stats": (
        lambda *_: ktconv.stats(EXAMPLE, max_tokens=64, hot=2),
        lambda *_: [EXAMPLE, "--max-tokens", 64, "--hot", 2],
    ),
    "bench": (
        lambda *_: ktconv.bench(
            method="int4", shape=["128,128,4,2"], tokens=[1, 2], iters=1, seconds=0
        ),
        lambda *_: [
            "--method", "int4", "--shape", "128,128,4,2", "--tokens", "1,2", "--iters", 1,
            "--seconds", 0, "--format", "json",
        ],
    ),
    "generate": (
        lambda made, _: ktconv.generate(made / "one", prompt="a", source=EXAMPLE, max_tokens=2),
        lambda made, _: [made / "one", *SOURCE, "--prompt", "a", "--max-tokens", 2],
    ),
    "push": (
        lambda made, _: ktconv.push(made / "one", "org/name", dry_run=True),
        lambda made, _: [made / "one", "org/name", "--dry-run"],
    ),
    "doctor": (lambda *_: ktconv.doctor(), lambda *_: []),
}  # fmt: skip


def test_every_function_has_a_case() -> None:
    assert CASES.keys() == COMMANDS.keys() - COMMANDS_WITHOUT.keys()


@pytest.mark.parametrize("name", CASES)
def test_a_function_returns_what_json_prints(
    name: str,
    made: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name in ("stats", "generate"):
        pytest.importorskip("transformers")
    monkeypatch.setattr(run, "Meter", QuickMeter)  # no figure is judged
    function, words = CASES[name]
    capfd.readouterr()
    found = function(made, tmp_path / "function")
    assert capfd.readouterr() == ("", "")
    more = [] if name == "bench" else ["--json"]
    done = command(name, *words(made, tmp_path / "command"), *more)
    assert done.exit_code == 0, done.stderr
    printed = json.loads(done.stdout)
    assert kinds(found) == kinds(printed)
    same = {"schema", "kind", "numa", "passed", "output_bytes", "verdict", "outputs", "experts"}
    for key in same & found.keys():
        assert found[key] == printed[key] or name == "compare", key
    if (tmp_path / "command").exists():
        mine, theirs = all_files(tmp_path / "function"), all_files(tmp_path / "command")
        own = {"ktconv.json", "README.md"}  # of which some have times and the name of the output
        assert {k: v for k, v in mine.items() if k not in own} == {
            k: v for k, v in theirs.items() if k not in own
        }


def test_a_plan_is_returned_and_nothing_written(tmp_path: Path) -> None:
    planned = ktconv.quantize_cpu(EXAMPLE, tmp_path / "out", numa=2, layers=[1], dry_run=True)
    assert planned["numa"] == 2 and planned["layer_indices"] == [1]
    assert not (tmp_path / "out").exists()


def test_a_check_that_fails_is_in_the_document(made: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    ktconv.quantize_cpu(EXAMPLE, output, numa=1)
    with next(output.glob("*.safetensors")).open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    found = ktconv.verify(output)
    assert found["passed"] is False and found["failure_count"] == 1
    assert ktconv.verify(made / "one", output)["verdict"] == "different"


def test_load_layer(made: Path) -> None:
    import numpy as np

    layer = ktconv.load_layer(str(made / "one"), 1)
    x = np.zeros((3, layer.hidden), np.float32)
    ids = np.zeros((3, 2), np.int64)
    assert layer(x, ids, np.ones((3, 2), np.float32)).shape == x.shape


# ---- errors, threads, signals --------------------------------------------------------------


def test_errors_are_raised_as_they_are(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty") as wrong:
        ktconv.quantize_cpu(tmp_path / "empty", tmp_path / "out")
    assert wrong.value.exit_code == 2 and wrong.value.hint
    with pytest.raises(UsageError, match="Invalid value for numa: "):
        ktconv.quantize_cpu(EXAMPLE, tmp_path / "out", numa=100_000)
    with pytest.raises(UsageError, match="int5"):
        ktconv.quantize_cpu(EXAMPLE, tmp_path / "out", method="int5")
    with pytest.raises(UsageError, match=r"^layers is empty"):
        ktconv.quantize_cpu(EXAMPLE, tmp_path / "out", layers=[])
    with pytest.raises(UsageError, match=r"^dampening belongs to algorithm gptq"):
        ktconv.quantize_gpu(EXAMPLE, tmp_path / "out", dampening=0.2)
    with pytest.raises(UsageError, match=r"^overwrite=True and finalize=True cannot"):
        ktconv.quantize_cpu(EXAMPLE, tmp_path / "out", overwrite=True, finalize=True)
    with pytest.raises(UsageError, match=r"^revision belongs to source") as other:
        ktconv.generate(EXAMPLE, prompt="a", revision="b")
    assert other.value.hint == "give source MODEL too"
    with pytest.raises(UsageError, match="method and algorithm are two names of one argument"):
        ktconv.quantize_gpu(EXAMPLE, tmp_path / "out", algorithm="gptq", method="rtn")
    with pytest.raises(UsageError, match="layer 7"):
        ktconv.quantize_cpu(EXAMPLE, tmp_path / "out", layers=np.arange(7, 9))
    with pytest.raises(TypeError, match="nonsense"):
        ktconv.merge(made / "layers", tmp_path / "out", nonsense=1)  # type: ignore[call-arg]
    assert capfd.readouterr() == ("", "")
    assert not (tmp_path / "out").exists()


def test_other_errors_are_of_the_family(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error", "there")

    monkeypatch.setattr("ktconv.inspect.inspection.inspect_path", fails)
    with pytest.raises(ktconv.KtconvError, match="error there: Input/output error") as wrong:
        ktconv.inspect(EXAMPLE)
    assert wrong.value.exit_code == 3


def test_an_interrupt_stays_one(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ktconv.inspect.inspection.inspect_path", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ktconv.inspect(EXAMPLE)
    assert capfd.readouterr() == ("", "")


def test_any_thread_may_call(
    tmp_path: Path, logged: list[logging.LogRecord], request: pytest.FixtureRequest
) -> None:
    """Signals are handled in the main thread alone, and stay the program's; notes are logged."""
    logger = logging.getLogger("ktconv")
    request.addfinalizer(partial(logger.setLevel, logger.level))
    logger.setLevel(logging.INFO)
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    found: dict[int, Any] = {}

    def convert(number: int) -> None:
        found[number] = ktconv.quantize_cpu(EXAMPLE, tmp_path / str(number), numa=number)

    threads = [threading.Thread(target=convert, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {number: one["numa"] for number, one in found.items()} == {1: 1, 2: 2}
    assert all(one["complete"] for one in found.values())
    assert before == [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    ktconv.quantize_gpu(EXAMPLE, tmp_path / "gpu", group_size=32)
    assert any(word in record.getMessage() for record in logged for word in ("module", "class"))


def test_the_command_line_speaks_again_afterwards(made: Path) -> None:
    ktconv.inspect(made / "one")
    assert "converted weights" in command("inspect", made / "one").stdout
    assert command("inspect", made / "nowhere").stderr.startswith("Error: ")
