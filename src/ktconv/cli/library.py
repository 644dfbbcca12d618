"""The functions of `import ktconv`: the commands, called from a program.

    import ktconv

    report = ktconv.quantize_cpu("MODEL", "OUTPUT", method="int4", numa=2)
    report["mean_relative_rms_error"]

Arguments are those of the command line: `--max-shard-size 5GB` is `max_shard_size="5GB"`,
`--no-mtp` is `mtp=False`, and `--with` is `with_`, as Python reserves the word. A list of numbers
or names may be a sequence, `layers=range(4)`, and a size a number of bytes. What is left out, or is
None, is the command's default.

Functions return the document that the command prints with `--json`, also where a check failed: then
`passed` is False. They raise `ktconv.KtconvError`, with a sentence, a hint and an exit code. They
print nothing and install no handler of signals: notes go to the log `ktconv`, at level INFO.
"""

from __future__ import annotations

import keyword
import os
import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ktconv.cli.bench import BenchMemory, BenchMode, BenchStage
    from ktconv.cli.compare import CompareLevel
    from ktconv.cli.generate import GenerateMemory, Outside
    from ktconv.cli.mix import MixEngine
    from ktconv.cli.plan import PlacementName
    from ktconv.cli.prune import Measure, PruneEngine
    from ktconv.cli.quantize_cpu import Layout, ScaleRule
    from ktconv.cli.quantize_gpu import ExpertLayout, GpuMethod, Scheme
    from ktconv.cli.verify import Level
    from ktconv.runtime import MoELayer

Name = str | os.PathLike[str]  # of a file or a directory
Size = str | int  # "5GB", "8GiB", or bytes
Listed = str | int | Iterable[str | int]  # "0-3,7", 3, or numbers one by one
Report = dict[str, Any]  # a document of --json

__all__ = [
    "bench",
    "compare",
    "doctor",
    "generate",
    "inspect",
    "load_layer",
    "merge",
    "plan",
    "prune",
    "push",
    "quantize_cpu",
    "quantize_gpu",
    "reshard",
    "stats",
    "verify",
]

# Old names of arguments, which are taken too, by function.
OLD_NAMES = {"quantize-gpu": {"method": "algorithm"}}


def quantize_cpu(
    model: Name,
    output: Name,
    *,
    method: str = "int4",
    recipe: Name | None = None,
    target_size: Size | None = None,
    target_bits: float | None = None,
    engine: MixEngine | None = None,
    methods: Listed | None = None,
    write_recipe: Name | None = None,
    numa: int = 0,
    with_: Name | None = None,
    threads: int = 0,
    layers: Listed = "",
    revision: str | None = None,
    download: bool = False,
    cache_dir: Name | None = None,
    config: Name | None = None,
    map: Name | None = None,
    tower: str | None = None,
    adapter: Name | Iterable[Name] | None = None,
    prune: Name | None = None,
    layout: Layout = "safetensors",
    scale: ScaleRule | None = None,
    fold: str | None = None,
    save_backward: bool = False,
    importance: Name | None = None,
    calibrate: Name | None = None,
    max_shard_size: Size = "5GB",
    max_memory: Size = "8GiB",
    experts_only: bool = False,
    mtp: bool = True,
    compat: bool = False,
    requantize: bool = False,
    verify: bool = True,
    overwrite: bool = False,
    finalize: bool = False,
    experts: Name | None = None,
    exclude_experts: Name | None = None,
    allow_partial: bool = False,
    allow_activation_mismatch: bool = False,
    dry_run: bool = False,
    estimate: bool = False,
) -> Report:
    """Convert the routed experts of a checkpoint into weights for CPUs.

    The same call again continues an interrupted run. With `dry_run` the plan is returned, and
    nothing is written.

        report = ktconv.quantize_cpu("Qwen/Qwen3-30B-A3B", "qwen3-int4", method="int4", numa=2)
        report["complete"], report["mean_relative_rms_error"]
    """
    return _run("quantize-cpu", locals())


def quantize_gpu(
    model: Name,
    output: Name,
    *,
    algorithm: GpuMethod = "rtn",
    scheme: Scheme | str = "W4A16",
    group_size: int | None = None,
    scale: ScaleRule = "amax",
    expert_layout: ExpertLayout = "numbered",
    experts: Name | None = None,
    dataset: Name = "",
    split: str = "train",
    samples: int = 512,
    max_seq_len: int = 2048,
    dampening: float = 0.1,
    seed: int = 0,
    self_test: bool = True,
    device: str = "auto",
    layers: Listed = "",
    revision: str | None = None,
    download: bool = False,
    cache_dir: Name | None = None,
    config: Name | None = None,
    map: Name | None = None,
    adapter: Name | Iterable[Name] | None = None,
    prune: Name | None = None,
    mtp: bool = True,
    max_shard_size: Size = "5GB",
    threads: int = 0,
    max_memory: Size = "8GiB",
    max_gpu_memory: Size = "",
    max_cpu_memory: Size = "",
    verify: bool = True,
    requantize: bool = False,
    overwrite: bool = False,
    finalize: bool = False,
    dry_run: bool = False,
    method: GpuMethod | None = None,
) -> Report:
    """Quantize the routed experts of a checkpoint for GPUs, as compressed-tensors does.

    The same call again continues an interrupted run. `method` is the old name of `algorithm`.

        report = ktconv.quantize_gpu("Qwen/Qwen3-30B-A3B", "qwen3-w4a16", scheme="W4A16")
        report["classes"]
    """
    return _run("quantize-gpu", locals())


def prune(
    model: Name,
    output: Name | None = None,
    *,
    revision: str | None = None,
    download: bool = False,
    cache_dir: Name | None = None,
    config: Name | None = None,
    prune: Name | None = None,
    scores: Name | None = None,
    by: Measure = "saliency",
    keep: int | None = None,
    ratio: float | None = None,
    target_size: Size | None = None,
    per_layer: PruneEngine | None = None,
    allow_few_tokens: bool = False,
    write: Name | None = None,
    max_shard_size: Size = "5GB",
    threads: int = 0,
    verify: bool = True,
    overwrite: bool = False,
    finalize: bool = False,
    dry_run: bool = False,
) -> Report:
    """Drop the experts that matter least, in the encoding of the source.

    The same call again continues an interrupted run.

        ktconv.prune("Qwen/Qwen3-30B-A3B", "qwen3-96", scores="scores.json", keep=96)
    """
    return _run("prune", locals())


def merge(
    layers_dir: Name,
    output: Name,
    *,
    source: Name | None = None,
    config: Name | None = None,
    map: Name | None = None,
    tower: str | None = None,
    adapter: Name | Iterable[Name] | None = None,
    prune: Name | None = None,
    experts_only: bool = False,
    mtp: bool | None = None,
    max_shard_size: Size = "5GB",
    threads: int = 0,
    verify: bool = True,
    overwrite: bool = False,
    dry_run: bool = False,
) -> Report:
    """Merge layer folders into safetensors shards, byte for byte what quantize-cpu writes.

    `ktconv.merge` is also the module with the request and the function of the same name.

        ktconv.merge("qwen3-layers", "qwen3-int4", source="Qwen/Qwen3-30B-A3B")["complete"]
    """
    return _run("merge", locals())


def reshard(
    packed: Name,
    output: Name,
    *,
    numa: int,
    source: Name | None = None,
    config: Name | None = None,
    map: Name | None = None,
    tower: str | None = None,
    adapter: Name | Iterable[Name] | None = None,
    prune: Name | None = None,
    importance: Name | None = None,
    max_shard_size: Size = "5GB",
    threads: int = 0,
    verify: bool = True,
    overwrite: bool = False,
    dry_run: bool = False,
) -> Report:
    """Change the number of NUMA parts of a conversion without changing any weight.

    `ktconv.reshard` is also the module with the request and the function of the same name.

        ktconv.reshard("qwen3-int4", "qwen3-int4-numa2", numa=2)["complete"]
    """
    return _run("reshard", locals())


def verify(
    output: Name,
    other: Name | None = None,
    *,
    source: Name | None = None,
    revision: str | None = None,
    download: bool = False,
    cache_dir: Name | None = None,
    config: Name | None = None,
    map: Name | None = None,
    tower: str | None = None,
    adapter: Name | Iterable[Name] | None = None,
    prune: Name | None = None,
    importance: Name | None = None,
    calibrate: Name | None = None,
    level: Level | None = None,
    sample: float = 1.0,
    seed: int = 0,
    threads: int = 0,
    max_memory: Size | None = None,
    tokens: int = 16,
    gradients: bool = False,
    text: Name | None = None,
    windows: int = 40,
    work_dir: Name | None = None,
    max_ppl_increase: float | None = None,
    max_kl: float | None = None,
    with_: Name | None = None,
    tp: Listed = "",
    ep: Listed = "",
    report: Name | None = None,
    card: bool = False,
) -> Report:
    """Check that a conversion is complete, uncorrupted and as accurate as its format allows.

    With `other`, two conversions are compared. A check that fails is in the document, not raised.

        found = ktconv.verify("qwen3-int4", source="Qwen/Qwen3-30B-A3B", level="weights")
        found["passed"], found["failures"]
    """
    return _run("verify", locals())


def compare(
    *outputs: Name,
    source: Name,
    revision: str | None = None,
    download: bool = False,
    cache_dir: Name | None = None,
    config: Name | None = None,
    map: Name | None = None,
    tower: str | None = None,
    adapter: Name | Iterable[Name] | None = None,
    prune: Name | None = None,
    level: CompareLevel | None = None,
    sample: float = 1.0,
    seed: int = 0,
    threads: int = 0,
    max_memory: Size | None = None,
    text: Name | None = None,
    windows: int = 40,
    tokens: Listed = "1,64",
    seconds: float = 0.5,
    speed: bool = True,
    report: Name | None = None,
    plot: Name | None = None,
) -> Report:
    """Compare conversions of one model: size, errors, KL divergence and tokens per second.

    A check that fails is in the document, not raised.

        ktconv.compare("qwen3-rawint4", "qwen3-fp8", source="Qwen/Qwen3-30B-A3B", speed=False)
    """
    return _run("compare", locals())


def inspect(
    path: Name,
    *,
    revision: str | None = None,
    config: Name | None = None,
    map: Name | None = None,
    tower: str | None = None,
    adapter: Name | Iterable[Name] | None = None,
    prune: Name | None = None,
    explain: bool = False,
) -> Report:
    """Tell what a checkpoint or a converted output contains; only headers are read.

    With `explain` the document says how experts were found, and of unknown names has a map to edit.

        ktconv.inspect("qwen3-int4")["kind"]
    """
    return _run("inspect", locals())


def plan(
    model: Name,
    *,
    ep: int = 1,
    tp: int = 1,
    placement: PlacementName | None = None,
    redundant: int = 0,
    nodes: int = 1,
    load: Name | None = None,
    gpu_memory: Size = "",
    hot: int | str | None = None,
    per_layer: bool = False,
    method: str | None = None,
    numa: int = 0,
    revision: str | None = None,
    config: Name | None = None,
    map: Name | None = None,
    tower: str | None = None,
    adapter: Name | Iterable[Name] | None = None,
    prune: Name | None = None,
    write: Name | None = None,
    plot: Name | None = None,
) -> Report:
    """Plan which GPUs and NUMA nodes hold which experts; only headers are read.

    `ktconv.plan` is also the module with the functions that make maps, masks and slices.

        ktconv.plan("Qwen/Qwen3-30B-A3B", ep=8, redundant=8, load="counts.json")
    """
    return _run("plan", locals())


def stats(
    model: Name,
    *,
    revision: str | None = None,
    download: bool = False,
    cache_dir: Name | None = None,
    adapter: Name | Iterable[Name] | None = None,
    prune: Name | None = None,
    config: Name | None = None,
    text: Name | None = None,
    max_tokens: int | None = None,
    max_memory: Size = "",
    work_dir: Name | None = None,
    layers: Listed = "",
    hot: int | None = None,
    hot_share: float | None = None,
    hot_total: int | None = None,
    write: Name | None = None,
    trace: Name | None = None,
    placement: Name | None = None,
    importance: Name | None = None,
    hessian: Name | None = None,
    scores: Name | None = None,
    dry_run: bool = False,
) -> Report:
    """Count how often a model's own router chooses each expert on a text.

    Needs transformers. The model is read once, layer by layer, and need not fit into memory.

        ktconv.stats("Qwen/Qwen3-30B-A3B", text="prose.txt", hot=32, write="hot.json")["layers"]
    """
    return _run("stats", locals())


def bench(
    *,
    mode: BenchMode = "infer",
    method: Listed = "",
    shape: Iterable[str] | None = None,
    model: Name | None = None,
    generate: Listed = "",
    source: Name | None = None,
    memory: BenchMemory = "auto",
    layer: int | None = None,
    top_k: int | None = None,
    experts: int | None = None,
    routing: str = "balanced",
    tokens: Listed = "",
    rank: Listed = "16",
    threads: Listed = "",
    isa: Listed = "auto",
    numa: int = 0,
    iters: int | None = None,
    seconds: float = 0.5,
    seed: int = 0,
    stage: BenchStage = "forward",
    plot: Iterable[Name] | None = None,
    compare: Name | None = None,
    tolerance: float = 0.1,
    peers: bool = False,
) -> Report:
    """Measure the MoE kernels against this machine's own limits.

    A kernel that was wrong, or slower than in `compare`, is in the document, not raised.

        report = ktconv.bench(method=["int4", "int8"], shape=["128,128,4,2"], tokens=[1, 64])
        report["rows"]
    """
    return _run("bench", locals())


def generate(
    output: Name,
    *,
    prompt: str | None = None,
    prompt_file: Name | None = None,
    source: Name | None = None,
    revision: str | None = None,
    download: bool = False,
    cache_dir: Name | None = None,
    config: Name | None = None,
    adapter: Name | Iterable[Name] | None = None,
    chat: bool | None = None,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    threads: int = 0,
    memory: GenerateMemory = "auto",
    outside: Outside = "kernels",
) -> Report:
    """Write text with a converted model: experts on the kernels, the rest by transformers.

    The document has the text, its tokens, and how fast they came.

        report = ktconv.generate("OUTPUT", source="MODEL", prompt="Once upon a time")
        report["text"], report["decode_tokens_s"]
    """
    return _run("generate", locals())


def push(
    output: Name,
    repository: str,
    *,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    message: str | None = None,
    dry_run: bool = False,
) -> Report:
    """Send a finished output to the Hugging Face hub, with the token of `hf auth login`.

    With `dry_run` the output is read and checked, and nothing is sent.

        ktconv.push("qwen3-int4", "org/Qwen3-30B-A3B-int4", private=True, dry_run=True)
    """
    return _run("push", locals())


def doctor() -> Report:
    """Tell what this machine supports: CPU, AMX, NUMA, memory, disk, optional packages.

    The disk is that of the current directory.

        ktconv.doctor()["cpu"]
    """
    return _run("doctor", locals())


def load_layer(
    path: Name,
    layer: int | None = None,
    *,
    method: str | None = None,
    parts: int | None = None,
    memory: str = "auto",
) -> MoELayer:
    """Load an MoE layer of a conversion or a checkpoint, to call with torch or NumPy arrays.

    The layer is `ktconv.runtime.MoELayer.load(path, layer)`, whose other arguments are there.

        y = ktconv.load_layer("qwen3-int4", 3)(x, ids, weights)
    """
    from pathlib import Path

    from ktconv.runtime import MoELayer

    return MoELayer.load(Path(path), layer, method=method, parts=parts, memory=memory)


# ---- how a command is called -------------------------------------------------------------


def _run(name: str, arguments: Mapping[str, Any]) -> Report:
    """The document of a command. The command parses the words that a shell would give it, so that
    values, defaults, limits and refusals are the same."""
    import click

    from ktconv.cli.app import application
    from ktconv.cli.calls import called
    from ktconv.errors import KtconvError, UsageError

    command = application([name]).commands[name]
    given = dict(arguments)
    defaults = {argument_of(one): one.default for one in command.params}
    for old, new in OLD_NAMES.get(name, {}).items():
        if (value := given.pop(old, None)) is not None:
            if given[new] not in (defaults[new], value):
                raise UsageError(f"{old} and {new} are two names of one argument", f"omit {old}")
            given[new] = value
    words = _words(command, given)
    with called() as documents:
        try:
            with command.make_context(name, words) as context:
                command.invoke(context)
        except click.exceptions.Exit:  # a check failed, as the document says
            pass
        except KtconvError as error:
            error.args = (_in_python(command, given, str(error)),)
            error.hint = error.hint and _in_python(command, given, error.hint)
            raise
        except click.ClickException as error:
            message = _in_python(command, given, error.format_message())
            raise UsageError(message, "see the arguments of the function") from None
    document: Report = documents[-1]
    return document


def _in_python(command: Any, arguments: Collection[str], text: str) -> str:
    """A message with the function's arguments in place of options; lines for a shell stay."""
    names = dict[str, str]()
    for one in command.params:
        if (argument := argument_of(one)) in arguments:
            flag = getattr(one, "is_flag", False)
            names |= dict.fromkeys(one.opts, f"{argument}=True" if flag else argument)
            names |= dict.fromkeys(one.secondary_opts, f"{argument}=False")
    words, line, rest = text.partition("ktconv ")

    def named(found: re.Match[str]) -> str:
        return names.get(found[1] or found[2], found[0])

    return (
        re.sub(r"'(--[a-z][a-z0-9-]*)'|(?<![\w-])(--[a-z][a-z0-9-]*)", named, words) + line + rest
    )


def _words(command: Any, arguments: Mapping[str, Any]) -> list[str]:
    """Convert arguments to the command's words: options that differ from the default, and the
    positional arguments."""
    options: list[str] = []
    positional: list[str] = []
    for parameter in command.params:
        name = argument_of(parameter)
        value = arguments.get(name)
        if parameter.opts[0] == "--json":
            options.append("--json")
        elif parameter.opts[0] == "--format":
            options.append("--format=json")
        elif parameter.param_type_name == "argument":
            values = value if isinstance(value, tuple) else (value,)
            positional += [_text(name, one) for one in values if one is not None]
        elif value is None or (not _is_several(value) and value == parameter.default):
            continue
        elif parameter.is_flag:
            if value not in (True, False):  # "no" is true to Python
                raise _refused(name, value, "True or False")
            options.append((parameter.opts if value else parameter.secondary_opts)[0])
        else:
            several = parameter.multiple and not isinstance(value, _NAME)
            given = value if several else [value]
            options += [f"{parameter.opts[0]}={_text(name, one)}" for one in given]
    return [*options, "--", *positional]


def argument_of(parameter: Any) -> str:
    """The argument that an option, or an argument of the command line, is here."""
    if parameter.param_type_name == "argument":
        return str(parameter.name)
    name = str(parameter.opts[0]).lstrip("-").replace("-", "_")
    return f"{name}_" if keyword.iskeyword(name) else name


_NAME = (str, bytes, os.PathLike)


def _is_several(value: Any) -> bool:
    """Whether it has parts, which arrays of NumPy compare one by one."""
    return isinstance(value, Iterable) and not isinstance(value, _NAME)


def _text(name: str, value: Any) -> str:
    """The word of a value. UsageError for what is no name, number or sequence of them."""
    if isinstance(value, _NAME):
        return os.fsdecode(value)
    if isinstance(value, bool | Mapping):
        raise _refused(name, value, "a name, a number or a sequence of them")
    if isinstance(value, Iterable):
        return ",".join(_text(name, one) for one in value)
    return str(value)


def _refused(name: str, value: Any, right: str) -> Exception:
    from ktconv.errors import UsageError

    return UsageError(f"{name} must be {right}, not {value!r}", "see the arguments of the function")
