"""The rooms of the package and of C: which there are, and which import or include which."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import msgspec
from helpers.parsed import nodes
from helpers.paths import NATIVE

import ktconv

PACKAGE = Path(ktconv.__file__).parent
# Modules that users import by these names, and what Python wants at the top.
LOOSE = {"__init__", "__main__", "errors", "merge", "reshard"}


def modules() -> dict[str, Path]:
    """Dotted names below `ktconv` -> files."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(module: str, path: Path) -> tuple[str, ...]:
    """What a module imports of the package, in functions too."""
    return tuple(_imports(module, path))


def _imports(module: str, path: Path) -> Iterator[str]:
    parent = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ["ktconv", *parent[: len(parent) - node.level + 1]] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{source}.{name.name}" for name in node.names]
        else:
            continue
        yield from (name.removeprefix("ktconv.") for name in names if name.startswith("ktconv."))


def rooms() -> dict[str, set[str]]:
    """Room -> rooms that it imports. A room is a package, or a loose module."""
    known = {name.split(".")[0] for name in modules() if name}
    found: dict[str, set[str]] = {room: set() for room in known}
    for module, path in modules().items():
        room = module.split(".")[0]
        if room:
            found[room] |= {name.split(".")[0] for name in imports(module, path)} & known - {room}
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Rooms that import one another, in order; empty if there are none."""
    left = {room: set(wanted) for room, wanted in graph.items()}
    while free := [room for room, wanted in left.items() if not wanted & left.keys()]:
        for room in free:
            del left[room]
    path: list[str] = []
    room = min(left, default="")
    while left and room not in path:
        path.append(room)
        room = min(left[room] & left.keys())
    return path[path.index(room) :] if path else []


def test_no_circle_joins_rooms() -> None:
    assert circle(rooms()) == []


def test_a_circle_would_be_seen() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]


def test_no_module_lies_loose() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} == LOOSE


def test_records_are_structs() -> None:
    """A dataclass takes as long to define as fifty of them."""
    dataclasses = re.compile(r"^\s*(from|import) dataclasses\b", re.MULTILINE)
    assert not [name for name, path in modules().items() if dataclasses.search(path.read_text())]


def test_named_tuples_have_no_second_base() -> None:
    """Python 3.10 refuses to import a module with such a class."""
    second = re.compile(r"^\s*class .*\bNamedTuple,|^\s*class .*, NamedTuple\b", re.MULTILINE)
    assert not [name for name, path in modules().items() if second.search(path.read_text())]


def test_targets_need_neither_torch_nor_llm_compressor() -> None:
    """Who only wants to know what an output consists of installs neither."""
    code = """
import sys
for name in ("torch", "llmcompressor", "compressed_tensors", "transformers"):
    sys.modules[name] = None  # importing it raises ImportError
from pathlib import Path
from ktconv.source import open_checkpoint
from ktconv.conversion.plan import plan_checkpoint
from ktconv.targets.encoded import config
from ktconv.targets.encoded.target import Options, EncodedTarget
checkpoint = open_checkpoint(sys.argv[1])
plan = plan_checkpoint(checkpoint, EncodedTarget(Options(group_size=32), checkpoint))
assert plan.output_bytes and b"pack-quantized" in config.config_json(plan)
assert not [name for name in sys.modules if name.startswith("ktconv.quantize.llm_compressor")]
"""
    from helpers.paths import EXAMPLE

    command = [sys.executable, "-c", code, str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# What the second reader of `verify` may use: positions of tensors, raw bytes, families' names.
# What takes config.json as a dictionary, or gives it.
OF_RAW_CONFIG = {
    *(f"families.config.{name}" for name in ("Config", "text_section", "top_k_of")),
    *(f"families.activations.{name}" for name in (
        "expert_activation", "assumed_activation", "shared_activation", "post_norm_epsilon",
        "experts_have_gate",
    )),
    *(f"families.routers.{name}" for name in ("router_of", "find_router", "rows_beside_experts")),
    "families.layer_kinds.dense_layers", "source.config.read_config",
    "source.config.interpret_config", "source.towers.tower_config",
}  # fmt: skip
# What looks at the file itself: transformers would run what it names, and checks of outputs.
READS_RAW_CONFIG = {
    "model.load", "verify.encoded.output", "verify.encoded.quantization",
    "verify.encoded.structure", "verify.second_reader.names",
}  # fmt: skip


OF_SETTINGS = re.compile(r"(config|settings)\.content$")


def takes_raw_config(path: Path) -> Iterator[str]:
    """Functions with a dictionary of config.json among their parameters, or that ask for one."""
    for node in nodes(path):
        if isinstance(node, ast.arg) and node.annotation is not None and "config" in node.arg:
            if "Mapping" in (text := ast.unparse(node.annotation)) or "dict" in text:
                yield f"{node.arg}: {text}"
        elif isinstance(node, ast.Attribute) and node.attr == "content":
            yield from (one for one in [ast.unparse(node)] if OF_SETTINGS.search(one))


def test_raw_config_stays_in_source_and_families() -> None:
    """Everything else asks `ModelSettings`, which has read it once."""
    found = {}
    for module, path in modules().items():
        if module.split(".")[0] not in ("source", "families"):
            raw = {*takes_raw_config(path), *(set(imports(module, path)) & OF_RAW_CONFIG)}
            if raw:
                found[module] = raw
    adapters = {name for name in found if name.startswith("train.parameters")}  # of PEFT's file
    assert found.keys() - adapters == READS_RAW_CONFIG, found


OF_SECOND_READER = {
    *(f"source.{name}" for name in ("PROJECTIONS", "Checkpoint", "MoELayer", "Projection")),
    "source.TensorRef", "source.shards.read_shards", "source.shards.select_shards",
    "families.table", "source.reading.reader.SourceReader", "system.collector.collector_paused",
    "source.safetensors_file.read_header", "system.patterns.Patterns",
    *(f"system.arrays.{name}" for name in ("Array", "F32", "I64", "U8")),
}  # fmt: skip


def test_the_second_reader_shares_nothing_with_the_converter() -> None:
    here, users = "verify.second_reader", set()
    for module, path in modules().items():
        names = set(imports(module, path))
        if module.startswith(here):
            assert {one for one in names if not one.startswith(here)} <= OF_SECOND_READER, module
        elif any(one.startswith(here) for one in names):
            users.add(module.split(".")[0])
    assert users == {"verify"}


_NO_NUMBERS = {"fmt.name", "', '.join(names)"}

_COUNTED = re.compile(
    r" (?:other )?(?:experts|layers|tensors|files|shards|threads|tokens|copies|windows|samples|"
    r"models|units|matrices|checksums)\b"
)


def test_numbers_and_nouns_are_joined_by_one_function() -> None:
    """ "1 experts" cannot be written: `counted` joins them."""
    found = []
    for module, path in modules().items():
        if module.startswith("native"):  # whose errors are for programmers
            continue
        for node in nodes(path):
            if not isinstance(node, ast.JoinedStr):
                continue
            for one, after in zip(node.values, node.values[1:], strict=False):
                if (
                    not isinstance(one, ast.FormattedValue)
                    or one.format_spec
                    or not isinstance(after, ast.Constant)
                ):
                    continue
                text = after.value if isinstance(after.value, str) else ""
                if _COUNTED.match(text) and _may_be_one(one.value):
                    found.append(f"{module}:{one.lineno} {{{ast.unparse(one.value)}}}{text}")
    assert not found, "\n".join(found)


def _may_be_one(value: ast.expr) -> bool:
    """Whether an expression can be a number."""
    return not isinstance(value, ast.Constant) and ast.unparse(value) not in _NO_NUMBERS


def included(folder: Path) -> set[str]:
    """What the C files of a room include of others, as paths below native/src."""
    return {
        found
        for path in folder.iterdir()
        for found in re.findall(r'^#include "\.\./(.+)"', path.read_text("utf-8"), re.MULTILINE)
    }


def test_families_of_weight_formats_do_not_include_one_another() -> None:
    rooms = [path for path in (NATIVE / "src").iterdir() if path.is_dir()]
    row = re.compile(r"^const kt_weight_format kt_\w+_format = {$", re.MULTILINE)
    families = [
        room
        for room in rooms
        if any(row.search(path.read_text("utf-8")) for path in room.iterdir())
    ]
    assert {room.name for room in families} >= {"int", "group", "fp4", "fp8", "bf16"}
    names = {f"{room.name}/" for room in families}
    for room in [*families, NATIVE / "src/gemm"]:
        assert [path for path in included(room) if path.startswith(tuple(names))] == [], room


def test_the_audit_of_c_shares_nothing_with_what_it_audits() -> None:
    shared = {path for path in included(NATIVE / "src/audit") if not path.startswith("simd/")}
    assert shared == {"cpu.h", "source/matrix.h"}


def test_help_shows_every_record() -> None:
    """`help()` evaluates annotations of a Struct, those too that only a type checker imports."""
    shown = 0
    for name, path in modules().items():
        if "Struct" in path.read_text():
            for record in vars(import_module(f"ktconv.{name}")).values():
                if isinstance(record, type) and issubclass(record, msgspec.Struct):
                    inspect.signature(record)
                    shown += 1
    assert shown > 300
