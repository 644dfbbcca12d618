"""Every command writes the bytes, exit codes, JSON keys and option names that were recorded.

The guard of a rebuilding, to be dropped after it. It knows the command line alone.
`python tests/test_same_bytes.py --record` writes `data/same_bytes.json` anew.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).parent / "data/same_bytes.json"
EXAMPLE, SHARED = "tiny-moe", ("tiny-deepseekv3", "tiny-qwen3moe", "wide-qwen3moe")
MODELS = {name: ROOT.parent / "shared/models" / name for name in SHARED}
MODELS[EXAMPLE] = ROOT / "docs/example" / EXAMPLE
OF_THE_MACHINE = ("caches", "environment", "kernel_error")  # keys differ between machines
TIMES = ("mtime_ns", "listing_sha256")
PACKAGES = ("torch", "transformers", "llmcompressor", "compressed-tensors")
# Command lines, M for the model. A name without a slash is an output of the first that names it.
EVERY_MODEL = """
merge M-int4-2-layers M-merged --source models/M --json
merge M-int8-2-layers-partial M-merged-alone --max-shard-size 400kB
reshard M-int4-1-safetensors M-halved --numa 2 --json
reshard M-halved M-whole-again --numa 1
reshard M-int8-2-layers M-joined --numa 1 --source models/M
reshard M-int4-2-safetensors M-not-joined --numa 1 --json
verify M-merged M-int4-2-safetensors --json
verify M-halved M-int4-2-safetensors --json
verify M-int4-2-safetensors --source models/M --level weights --json
inspect models/M --json
inspect M-int4-2-safetensors --json
quantize-cpu models/M M-none --method int8 --numa 4 --dry-run --json
"""
EXAMPLE_ALONE = """
inspect M-int8-1-layers --json
verify M-int8-1-layers --json
verify M-int4-1-safetensors-partial --json
verify M-int4-2-safetensors M-int8-2-safetensors --json
verify M-int4-2-safetensors --source models/M --level structure --report report.html --json
merge M-int4-2-safetensors M-none --json
merge M-int4-2-layers M-none --dry-run --json
quantize-cpu models/M M-small --numa 2 --max-shard-size 200kB --compat --no-verify --json
quantize-cpu models/M M-experts --method int8 --numa 1 --experts-only --no-mtp
quantize-cpu models/M M-pieces --numa 1 --layers 1
quantize-cpu models/M M-pieces --numa 1 --finalize --json
quantize-cpu models/M M-pieces --numa 2
quantize-cpu models/M M-pieces --numa 1 --json
quantize-cpu models/M M-none --exclude-experts chosen.json --json
quantize-cpu models/M M-none --method int3 --json
inspect nowhere --json
doctor --json
bench --isa scalar --threads 1 --iters 1 --format json --shape 128,128,2,1 --tokens 1 --method all
bench --isa scalar --iters 1 --format json --method int8 --stage pack
"""
WITH_TORCH = """
quantize-cpu models/M M-whole --numa 2
quantize-cpu models/M M-rest --numa 1 --allow-partial --exclude-experts chosen.json
quantize-gpu models/M gpu-w4 --scheme W4A16 --group-size 32 --json
quantize-gpu models/M gpu-w8 --scheme W8A16 --max-shard-size 300kB
quantize-gpu models/M gpu-chosen --scheme W4A16 --experts chosen.json
quantize-gpu models/M gpu-none --dry-run --json
quantize-gpu models/M gpu-none --group-size 100 --json
inspect gpu-w4 --json
verify gpu-w4 --tp 1,2 --ep 1,2 --json
verify gpu-w4 --source models/M --level layers --json
verify M-rest --with gpu-chosen --source models/M --level weights --json
verify M-rest --with gpu-w4 --json
verify M-whole --source models/M --level model --windows 1 --json
stats models/M --max-tokens 512 --hot 3 --write hot.json --trace trace.safetensors --placement p.pt
stats trace.safetensors --hot-total 5 --write hot-total.json --json
"""
# Runs each as `python -m ktconv` would, in one process: starting one takes longer than most.
DRIVER = """
import json, os, runpy, sys
codes, answer = [], os.dup(1)
for number, words in enumerate(json.load(sys.stdin)):
    path, code, sys.argv = list(sys.path), 0, ["ktconv", *words]
    os.dup2(os.open(f"stdout-{number}", os.O_CREAT | os.O_WRONLY, 0o644), 1)
    try:
        runpy.run_module("ktconv", run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    sys.path[:] = path
    codes.append(code)
os.write(answer, json.dumps(codes).encode())
"""


def commands_for(batch: str) -> list[str]:
    conversions = [
        f"quantize-cpu models/M M-{method}-{numa}-{layout}{options} --method {method} "
        f"--numa {numa} --layout {layout} --threads 2"
        for method in ("int4", "int8")
        for numa in (1, 2)
        for layout in ("safetensors", "layers")
        for options in ("", "-partial --allow-partial --exclude-experts chosen.json")
        if batch == EXAMPLE or numa == 2 or not options
    ]
    lines = [] if batch == "torch" else [*conversions, *EVERY_MODEL.splitlines()[1:]]
    lines += {"torch": WITH_TORCH, EXAMPLE: EXAMPLE_ALONE}.get(batch, "").splitlines()[1:]
    if batch == EXAMPLE:
        texts = (EVERY_MODEL + EXAMPLE_ALONE + WITH_TORCH).split("\n")
        lines += sorted({f"{line.split(' ')[0]} --help".strip() for line in texts})
    return [line.replace("M", EXAMPLE if batch == "torch" else batch) for line in lines]


def run(commands: list[str], work: Path) -> dict[str, Any]:
    """What each command line did, in the form that is recorded."""
    (work / "models").mkdir()
    for model, directory in MODELS.items():
        (work / "models" / model).symlink_to(directory)
    (work / "chosen.json").write_text('{"schema": 1, "experts": {"1": [0, 5]}}')
    driver, words = [sys.executable, "-c", DRIVER], json.dumps([line.split() for line in commands])
    done = subprocess.run(driver, cwd=work, input=words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen, found = {"chosen.json"}, {}
    for number, (command, code) in enumerate(zip(commands, json.loads(done.stdout), strict=True)):
        made = {word for word in command.split() if "/" not in word and (work / word).exists()}
        files = {name: value for word in sorted(made - seen) for name, value in hashes(work / word)}
        seen |= made
        found[command] = {"exit": code} | ({"files": files} if files else {})
        stdout = (work / f"stdout-{number}").read_text()
        if command.endswith("--help"):
            column = re.findall(r"^  (-.*?)(?:  |$)", stdout.split("\nOptions:")[1], re.MULTILINE)
            found[command]["options"] = re.findall(r"(?<!\S)--?[a-z][a-z-]*", " ".join(column))
        elif {"json", "--json"} & {*command.split()}:
            shape = json.dumps(keys([json.loads(stdout)]), sort_keys=True)
            found[command]["keys"] = shape.replace(": {}", "").replace('"', "")
    return found


def hashes(path: Path) -> Iterator[tuple[str, str]]:
    """Name and hash of a file, or of each in a directory; of a layer folder that of a listing."""
    if path.is_file():
        yield path.name, hashlib.sha256(content(path)).hexdigest()
    for inner in sorted(path.iterdir()) if path.is_dir() else ():
        listed = [(str(kt.relative_to(path)), *hashes(kt)) for kt in sorted(inner.rglob("*.kt"))]
        data = repr(listed).encode() if inner.is_dir() else content(inner)
        yield f"{path.name}/{inner.name}", hashlib.sha256(data).hexdigest()


def content(path: Path) -> bytes:
    """Without what differs from run to run; a report in HTML only has to be there."""
    data = b"" if path.suffix == ".html" else path.read_bytes()
    if path.name == "ktconv.json":
        parsed = json.loads(data, object_hook=lambda found: {**found, **dict.fromkeys(TIMES)})
        return json.dumps(parsed, sort_keys=True).encode()
    if path.name == "trace.safetensors":
        end = 8 + int.from_bytes(data[:8], "little")
        return json.dumps(json.loads(data[8:end]), sort_keys=True).encode() + data[end:]
    return data


def keys(values: list[Any]) -> dict[str, Any]:
    """The keys of JSON values as nested mappings, all values together; `[]`: of a list's items."""
    below: dict[str, list[Any]] = {}
    for value in values:
        items = value.items() if isinstance(value, dict) else ()
        for key, inner in (("[]", item) for item in value) if isinstance(value, list) else items:
            below.setdefault(key, []).append(None if key in OF_THE_MACHINE else inner)
    return {key: keys(inner) for key, inner in below.items()}


def environment() -> list[str]:
    found = {package.name: package.version for package in distributions()}
    cpus = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return [found.get(name, "none") for name in PACKAGES] + cpus


@pytest.mark.parametrize("batch", [*MODELS, "torch"])
def test_outputs_are_as_recorded(batch: str, tmp_path: Path) -> None:
    recorded = json.loads(RECORD.read_text())
    if batch == "torch" and environment() != recorded["environment"]:
        pytest.skip("recorded with other packages or on another CPU")
    if batch != "torch" and not MODELS[batch].exists():
        pytest.skip(f"{batch} is not beside this checkout")
    for command, found in run(commands_for(batch), tmp_path).items():
        assert found == recorded["commands"][command], command


if __name__ == "__main__" and sys.argv[1:] == ["--record"]:
    everything: dict[str, Any] = {}
    for batch in (*MODELS, "torch"):
        with tempfile.TemporaryDirectory() as directory:
            everything |= run(commands_for(batch), Path(directory))
    document = {"environment": environment(), "commands": everything}
    RECORD.write_text(json.dumps(document, indent=1) + "\n")
