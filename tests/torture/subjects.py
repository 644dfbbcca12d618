"""The commands that are put to torture: every converting one, and the variants of what it writes.

Models are as small as a run with several units can be: each is converted thousands of times.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from helpers import gguf_files
from helpers.cli import ktconv_done, write_model
from helpers.paths import EXAMPLE
from helpers.web_server import serving

# What the server of commands has imported, as far as it is installed: a run takes a fraction of a
# second then.
MODULES = (
    "torch", "transformers.models.qwen3_moe.modeling_qwen3_moe", "ktconv.model.load",
    "transformers.models.auto.modeling_auto",
    "ktconv.quantize.encoded.run", "ktconv.quantize.llm_compressor.run", "ktconv.repack.merge",
    "ktconv.repack.reshard",
    "ktconv.verify.run", "ktconv.quantize.recipes.run", "gguf", "fsspec", "aiohttp",
    "ktconv.cli.progress", "ktconv.quantize.encoded.mix", "ktconv.source.remote.ahead",
)  # fmt: skip


def installed(modules: Sequence[str]) -> list[str]:
    """Those of `modules` whose packages are there."""
    return [name for name in modules if find_spec(name.split(".")[0])]


QUICK = ("--threads=2",)
RECIPE = """
method = "int4-g128"
engine = "compressed-tensors"

[[rule]]
layers = "1"
method = "FP8_DYNAMIC"

[[rule]]
projections = "down"
method = "bf16"
"""


@dataclass
class Sources:
    """What is converted; made when it is asked for, and never changed."""

    room: Path
    url: str = ""

    @cached_property
    def model(self) -> Path:
        return write_model(self.room / "model", layers=3, experts=2, inner=256)

    @cached_property
    def gguf(self) -> Path:
        return gguf_files.model(self.room / "gguf", layers=2)

    @cached_property
    def folders(self) -> Path:
        return self._converted("folders", "--layout=layers")

    @cached_property
    def shards(self) -> Path:
        return self._converted("shards")

    @cached_property
    def text(self) -> Path:
        path = self.room / "text.txt"
        path.write_text((EXAMPLE.parent / "corpus.txt").read_text()[:3000])
        return path

    @cached_property
    def recipe(self) -> Path:
        path = self.room / "recipe.toml"
        path.write_text(RECIPE)
        return path

    def _converted(self, name: str, *more: str) -> Path:
        output = self.room / name
        ktconv_done("quantize-cpu", self.model, output, "--numa=1", *QUICK, *more)
        return output


@contextmanager
def served_sources(room: Path) -> Iterator[Sources]:
    """Sources in `room`, which are on a web server of this machine, too."""
    with serving(room) as web:
        yield Sources(room, web.url)


Words = Callable[[Sources, Path], list[object]]  # of the command, for the directory of a trial


def _nothing(sources: Sources, trial: Path) -> None:
    pass


@dataclass(frozen=True)
class Subject:
    """A command, its outputs in the directory of a trial, and what is made there before."""

    words: Words
    outputs: tuple[str, ...] = ("output",)
    prepare: Callable[[Sources, Path], None] = _nothing
    verified: bool = False  # whether `verify` has the source that its outputs were made from
    fleet: bool = False  # runs others, which have the disk calls
    layers: bool = False  # whether it can be shared by --layers
    keeps: bool = True  # whether units that are finished are kept
    slow: bool = False  # only where it is asked for


def _quantize(command: str, *more: str) -> Words:
    return lambda sources, trial: [command, sources.model, trial / "output", *QUICK, *more]


def _cpu(*more: str) -> Subject:
    return Subject(_quantize("quantize-cpu", *more), verified=True, layers=True)


def _gpu(*more: str) -> Subject:
    return Subject(_quantize("quantize-gpu", *more), verified=True, layers=True)


def _gptq(sources: Sources, trial: Path) -> list[object]:
    text = EXAMPLE.parent / "corpus.txt"
    words = ["quantize-gpu", EXAMPLE, trial / "output", "--method=gptq", f"--dataset={text}"]
    return [*words, "--samples=2", "--max-seq-len=32", "--device=cpu", *QUICK]


def _calibrated(sources: Sources, trial: Path) -> list[object]:
    words = ["quantize-cpu", EXAMPLE, trial / "output", "--numa=1"]
    return [*words, f"--calibrate={sources.text}", *QUICK]


def _gguf(sources: Sources, trial: Path) -> list[object]:
    return ["quantize-cpu", sources.gguf, trial / "output", "--method=int8", "--numa=1", *QUICK]


def _recipe(sources: Sources, trial: Path) -> list[object]:
    return [*_quantize("quantize-cpu")(sources, trial), f"--recipe={sources.recipe}"]


def _remote(sources: Sources, trial: Path) -> list[object]:
    url = f"{sources.url}/{sources.model.name}/"
    return ["quantize-cpu", url, trial / "output", "--numa=1", *QUICK]


def _merge(sources: Sources, trial: Path) -> list[object]:
    return ["merge", sources.folders, trial / "output", f"--source={sources.model}", *QUICK]


def _reshard(sources: Sources, trial: Path) -> list[object]:
    return ["reshard", sources.shards, trial / "output", "--numa=2", *QUICK]


def _reshard_source(sources: Sources, trial: Path) -> list[object]:
    return [*_reshard(sources, trial), f"--source={sources.model}"]


def _list(sources: Sources, trial: Path) -> list[object]:
    return ["quantize-cpu", "--from-list", trial / "models.txt", "--at-once=2", *QUICK]


def _write_list(sources: Sources, trial: Path) -> None:
    lines = [
        f"{shlex.quote(str(sources.model))} {shlex.quote(str(trial / name))} {more}\n"
        for name, more in (("first", "--numa=1"), ("second", "--method=nvfp4"))
    ]
    (trial / "models.txt").write_text("".join(lines))


def _finished(sources: Sources, trial: Path) -> None:
    """An output of other options, of which every file has the name of a new one."""
    options = ("--numa=1", "--method=int8", *QUICK)
    ktconv_done("quantize-cpu", sources.model, trial / "output", *options)


SUBJECTS: dict[str, Subject] = {
    "int4": _cpu("--numa=1"),
    "int4-small-shards": _cpu("--numa=1", "--max-shard-size=30kB"),
    "int4-layers": _cpu("--numa=2", "--layout=layers"),
    "int4-fold": _cpu("--numa=1", "--fold=up-down"),
    "int4-backward": _cpu("--numa=1", "--save-backward", "--layout=layers"),
    "int4-calibrate": Subject(_calibrated),
    "gguf": Subject(_gguf),
    "int8": _cpu("--numa=2", "--method=int8"),
    "rawint4": _cpu("--method=rawint4"),
    "int4-g128": _cpu("--method=int4-g128"),
    "int8-g128": _cpu("--method=int8-g128"),
    "fp8": _cpu("--method=fp8"),
    "fp8-channel": _cpu("--method=fp8-channel"),
    "mxfp4": _cpu("--method=mxfp4"),
    "mxfp8": _cpu("--method=mxfp8"),
    "nvfp4": _cpu("--method=nvfp4"),
    "gptq-int4": _cpu("--method=gptq-int4"),
    "awq": _cpu("--method=awq"),
    "bf16": _cpu("--method=bf16"),
    "recipe": Subject(_recipe, verified=True, layers=True),
    "target-size": _cpu("--target-bits=6"),
    "overwrite": Subject(
        _quantize("quantize-cpu", "--numa=1", "--overwrite"),
        prepare=_finished,
        verified=True,
        keeps=False,
    ),
    "gpu-w4a16": _gpu("--scheme=W4A16"),
    "gpu-w8a16": _gpu("--scheme=W8A16"),
    "gpu-fp8-block": _gpu("--scheme=FP8_BLOCK"),
    "gpu-fp8-dynamic": _gpu("--scheme=FP8_DYNAMIC"),
    "gpu-mxfp8": _gpu("--scheme=MXFP8"),
    "gpu-mxfp4": _gpu("--scheme=MXFP4A16"),
    "gpu-nvfp4": _gpu("--scheme=NVFP4A16"),
    "gpu-gptq": Subject(_gptq, slow=True),
    "merge": Subject(_merge, verified=True),
    "reshard": Subject(_reshard, verified=True),
    "reshard-source": Subject(_reshard_source, verified=True),
    "from-list": Subject(_list, ("first", "second"), _write_list, fleet=True),
    "remote": Subject(_remote),
}
