"""docs/adding.md against additions of the past: all files that they touched are named there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cli import ktconv, ktconv_done, refused, write_model
from helpers.paths import ROOT

from ktconv.errors import UsageError
from ktconv.quantize.packed import Request, prepare
from ktconv.targets.packed.target import Options

pytestmark = [pytest.mark.slow, pytest.mark.process]

PAGE = (ROOT / "docs/adding.md").read_text(encoding="utf-8")
# Heading, what an addition is called in code, and where that is looked for.
OWN = (
    "src/ktconv/inspect/doctor.py",
    "src/ktconv/cli/doctor.py",
)  # what was added
TOO_WIDE = ("native/src/", "src/ktconv/", "tests/")
WALKS = {
    "an input encoding": (r"(?<!A)MXINT4|of_mxint4", ["src/ktconv", "native", "tests/helpers"]),
    "a weight format": (r"gint8|GINT8", ["src/ktconv", "native"]),
    "an ISA level": (r"neon|NEON", ["native/src", "native/include"]),
    "a subcommand": (r"[\":]doctor\"|^def doctor", ["src/ktconv", "docs"]),
    "a model family": (r"kolibri1|Kolibri1", ["src/ktconv", "tests"]),
}


def section(heading: str) -> str:
    return PAGE.split(f"\n## Adding {heading}\n")[1].split("\n## ")[0]


def named(heading: str) -> list[str]:
    """Files and folders of a section; a file that is named alone is beside the one before it."""
    found: list[str] = []
    for path in re.findall(r"`([\w./*-]+(?:\.\w+|/))`", section(heading)):
        folder = found[-1].rpartition("/")[0] if found else ""
        found += [path, f"{folder}/{path}"] if "/" not in path else [path]
    return found


def touched(pattern: str, places: list[str]) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--", *places], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.splitlines()
    this = "tests/test_adding.py"
    files = [path for path in listed if path.endswith((".py", ".c", ".h")) and path != this]
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in files}
    return [path for path, text in texts.items() if re.search(pattern, text, re.MULTILINE)]


@pytest.mark.parametrize("heading", WALKS)
def test_every_file_of_an_earlier_addition_is_named(heading: str) -> None:
    files = touched(*WALKS[heading])
    if not files:
        pytest.skip("needs the repository")
    places = [*OWN, *(one for one in named(heading) if one not in TOO_WIDE)]
    assert len(files) >= 2
    for file in files:
        covered = any(file == one or (one.endswith("/") and file.startswith(one)) for one in places)
        assert covered, f"Adding {heading} does not name {file}"


# ---- a way to choose codes ----------------------------------------------------------------

# Its file, which converts the matrices of an expert in another order; that changes no byte.
WAY_FILE = """
from ktconv.quantize.packed.ways import Way

class Turned(Way):
    def __init__(self, by):
        self.facts = by

    @staticmethod
    def open(asked):
        by = asked.request.ways.get("turn")
        return None if by is None else Turned(by)

    @staticmethod
    def unproven(options, codes, known):
        return [f"matrices were turned by {options.ways['turn']}"] if options.ways else []

    def notes(self, plan):
        return [f"matrices are turned by {self.facts}"]

    def tasks(self, expert, tasks):
        return [*tasks[self.facts:], *tasks[:self.facts]]
"""
# The row in the table, and the command.
WITH_ROW = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
from ktconv.quantize import ways

folder, *words = sys.argv[1:]
ways.WAYS += (ways.WayRow("turned:Turned", "turn", int | None, "Turn matrices.", metavar="N",
                          others="they are not packed"),)
import ktconv.quantize.packed
spec = spec_from_file_location("ktconv.quantize.packed.turned", folder + "/turned.py")
sys.modules[spec.name] = module = module_from_spec(spec)
spec.loader.exec_module(module)
from ktconv.cli.app import app
app(words)
"""


def test_a_way_to_choose_codes_is_a_file_and_a_row(tmp_path: Path) -> None:
    """A way to choose codes that exists only here: its option, record, notes, tasks and proof."""
    (tmp_path / "turned.py").write_text(WAY_FILE)
    model, plain, turned = write_model(tmp_path / "model"), tmp_path / "plain", tmp_path / "turned"

    def run(*words: object, code: int = 0) -> str:
        command = [sys.executable, "-c", WITH_ROW, str(tmp_path), *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    assert "--turn N" in run("quantize-cpu", "--help")
    ktconv_done("quantize-cpu", model, plain, "--numa=1")
    said = run("quantize-cpu", model, turned, "--numa=1", "--turn=2")
    assert "matrices are turned by 2" in said
    options = json.loads((turned / "ktconv.json").read_text())["options"]
    assert options["ways"] == {"turn": 2}
    assert "ways" not in json.loads((plain / "ktconv.json").read_text())["options"]
    names = [path.name for path in plain.glob("*.safetensors")]
    assert names
    assert all((turned / one).read_bytes() == (plain / one).read_bytes() for one in names)
    assert "matrices were turned by 2" in run(
        "verify", turned, f"--source={model}", "--level=weights"
    )
    run("quantize-cpu", model, turned, "--numa=1", code=2)  # other options than the output's
    again = Request(str(model), tmp_path / "x", Options(ways={"turn": 2}))
    with pytest.raises(UsageError, match="were converted with --turn, without which other codes"):
        prepare(again)
    for level in ("structure", "weights"):  # a version without the way does not know its proof
        unknown = ktconv("verify", turned, f"--source={model}", f"--level={level}")
        assert "ktconv.json names --turn, which this version does not support" in refused(
            unknown, 2
        )
    why = run("quantize-cpu", model, tmp_path / "x", "--method=bf16", "--turn=2", code=2)
    assert "--turn does not apply to --method bf16: they are not packed" in why


# ---- a checkpoint output ------------------------------------------------------------------

# Its row, and the command: INT8 in groups of 64, named as KTransformers finds experts.
WITH_SPEC = """
import sys
from ktconv.formats import specs

specs.SPECS += (specs.FormatSpec(
    "int8", 8, 64, cpu="odd8", words="INT8 in odd groups",
    cpu_stored=specs.Stored("packed:PACK_QUANTIZED", naming="MLP", half=False)),)
from ktconv.cli.app import app
app(sys.argv[1:])
"""


def test_a_checkpoint_output_is_a_row(tmp_path: Path) -> None:
    """A format that exists only here: its help, plan, bytes, config.json, and what verify says."""
    model, odd = write_model(tmp_path / "model"), tmp_path / "odd"

    def run(*words: object, code: int = 0) -> str:
        command = [sys.executable, "-c", WITH_SPEC, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    assert "odd8" in run("quantize-cpu", "--help-all")
    run("quantize-cpu", model, odd, "--method=odd8")
    found = json.loads((odd / "config.json").read_text())["quantization_config"]
    [group] = found["config_groups"].values()
    assert (group["weights"]["num_bits"], group["weights"]["group_size"]) == (8, 64)
    run("verify", odd, f"--source={model}", "--level=weights")
    shard = next(odd.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 64
    shard.write_bytes(data)
    run("verify", odd, f"--source={model}", "--level=weights", code=1)


# ---- an option about the source -----------------------------------------------------------


# A field of `ModelSource`, whose code asks it, and one of `Reading`; then the command.
WITH_FIELDS = """
import sys
from typing import Annotated

import ktconv.source
from ktconv.source import model_source

class Source(model_source.ModelSource, frozen=True):
    accent: str | None = None

    def place(self):
        print(f"read with {self.accent}", file=sys.stderr)
        return super().place()

model_source.ModelSource = ktconv.source.ModelSource = Source
from ktconv.cli import sources
from ktconv.cli.parameters import option

class Reading(sources.Reading, frozen=True):
    accent: Annotated[str | None, option("Accent of the model.", "NAME")] = None

sources.Reading, sources.USUAL = Reading, Reading()
from ktconv.cli.app import app
app(sys.argv[1:])
"""


def test_an_option_about_the_source_is_two_fields(tmp_path: Path) -> None:
    """Every command has it then, and requests carry it to where the source is opened."""
    model, packed = write_model(tmp_path / "model"), tmp_path / "packed"
    ktconv_done("quantize-cpu", model, packed, "--numa=1")
    for words in (
        ["inspect", model],
        ["quantize-cpu", model, tmp_path / "x", "--dry-run"],
        ["quantize-cpu", model, tmp_path / "x", "--dry-run", "--method=rawint4"],
        ["quantize-gpu", model, tmp_path / "x", "--dry-run"],
        ["verify", packed, f"--source={model}", "--level=weights"],
        ["plan", model],
    ):
        command = [sys.executable, "-c", WITH_FIELDS, *map(str, words), "--accent=soft"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "read with soft" in done.stderr, (words, done.stderr)


def test_a_file_that_is_not_named_is_found() -> None:
    assert "src/ktconv/formats/table.py" in named("a weight format")
    assert "src/ktconv/source/elements.py" not in named("a weight format")
