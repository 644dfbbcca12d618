"""`ktconv quantize-gpu`: experts as W4A16 or W8A16 through llm-compressor, in bounded memory.

    report = quantize_gpu(Request(model="path/to/model", output=Path("out")))

The steps are those of every conversion (`ktconv.conversion`): plan from headers; check output,
memory and disk; convert layer by layer; write config, index and manifest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from ktconv import conversion
from ktconv.checkpoint import PROJECTIONS, Checkpoint, TensorRef, open_checkpoint
from ktconv.conversion import (
    MEMORY_MARGIN,
    BufferedTask,
    Conversion,
    OutputState,
    Plan,
    Report,
    Selection,
    SilentObserver,
    Unit,
    fit_threads,
    manifest_memory,
    plan_checkpoint,
    refuse_nested,
)
from ktconv.conversion.pipeline import Observer
from ktconv.errors import UsageError
from ktconv.placement.expert_sets import check_expert_set, read_expert_set
from ktconv.quantize_gpu.decoded_copy import DecodedCopy
from ktconv.quantize_gpu.rtn import BYTES_PER_ELEMENT, Rounder, RtnTask
from ktconv.quantize_gpu.transformers_compat import loading_notes
from ktconv.reading.buffers import BufferSizes
from ktconv.reading.decoded import source_buffer
from ktconv.reading.reader import SourceReader
from ktconv.system import machine
from ktconv.system.text import Notify, silent
from ktconv.targets.pack_quantized import config
from ktconv.targets.pack_quantized.module_classes import ClassCount, count_classes
from ktconv.targets.pack_quantized.names import target_pattern
from ktconv.targets.pack_quantized.target import CONFIG, RECIPE, GpuTarget, Options
from ktconv.writer.journal import Journal, Record

LIBRARIES_MEMORY = 700 << 20  # torch, transformers and llm-compressor once imported
INSTALL = "pip install 'ktconv[gpu]'"
METHODS = ("rtn", "gptq")
QUANTIZERS = ("llmcompressor", "compressed-tensors")


@dataclass(frozen=True, slots=True)
class Request:
    """What to quantize and how."""

    model: str
    output: Path
    options: Options = field(default_factory=Options)
    layers: Sequence[int] | None = None  # None: all
    experts: Path | None = None  # a file of expert_sets: only these experts
    device: str = "auto"  # as torch names it; auto: a GPU if there is one
    threads: int | None = None  # None: one per CPU that this process may use
    max_memory: int = 8 << 30
    max_gpu_memory: int | None = None  # gptq
    max_cpu_memory: int | None = None  # gptq
    self_test: bool = True  # gptq: one layer is tried before hours of work
    verify: bool = True
    overwrite: bool = False
    finalize: bool = False


@dataclass(frozen=True)
class Preflight(conversion.Preflight[Options]):
    """A planned quantization; what `--dry-run` prints."""

    classes: Sequence[ClassCount]


def prepare(request: Request) -> Preflight:
    """Open the checkpoint and plan. Reads headers only, writes nothing, needs no torch."""
    if request.options.method not in METHODS:
        raise UsageError(
            f"--method {request.options.method} is unknown", f"there is {', '.join(METHODS)}"
        )
    _require_libraries()
    checkpoint = open_checkpoint(request.model)
    refuse_nested(checkpoint.path, request.output)
    options, selection = _choose_experts(request, checkpoint)
    plan = plan_checkpoint(checkpoint, GpuTarget(options, checkpoint), selection)
    plan = replace(
        plan,
        notes=[*plan.notes, *loading_notes(checkpoint)],
        skipped=[*plan.skipped, *_left_out(plan)],
    )
    classes = count_classes(plan.layers, [tensor for u in plan.others for tensor, _ in u.copies])
    OutputState(plan, Journal(request.output)).refuse_foreign_files()
    units = plan.layer_units(request.layers)
    threads, peak = _fit_memory(request, plan)
    if options.method == "gptq":
        from ktconv.quantize_gpu import calibrated  # which builds on this module

        peak = max(peak, calibrated.check(request, plan).cpu(gpu=False))
    free = machine.disk_free(request.output)
    return Preflight(request, plan, units, threads, peak, free, classes)


def quantize_gpu(
    request: Request,
    observer: Observer | None = None,
    preflight: Preflight | None = None,
    notify: Notify = silent,
) -> Report:
    """Quantize; see `Request`. `notify` gets what happens around the layers. Raises KtconvError,
    or KeyboardInterrupt with all state kept."""
    preflight = preflight or prepare(request)
    if request.options.method == "gptq":
        from ktconv.quantize_gpu.calibrated import Gptq

        return Gptq(preflight, observer or SilentObserver(), notify).run()
    return Rtn(preflight, observer or SilentObserver()).run()


def _require_libraries() -> None:
    for package in ("torch", "transformers", "compressed_tensors", "llmcompressor"):
        if find_spec(package) is None:
            raise UsageError(f"quantize-gpu needs {package}, which is not installed", INSTALL)


def _choose_experts(request: Request, checkpoint: Checkpoint) -> tuple[Options, Selection | None]:
    if request.experts is None:
        return request.options, None
    chosen = read_expert_set(request.experts)
    counts = {layer.index: len(layer.experts) for layer in checkpoint.layers}
    check_expert_set(chosen, counts, request.experts)
    selection = {index: chosen.of(index) for index in counts}
    return replace(request.options, experts=chosen.as_record()), selection


def _left_out(plan: Plan[Options]) -> list[str]:
    """Experts that --experts does not name."""
    counts = [len(unit.layer.experts) - len(unit.experts) for unit in plan.layers if unit.layer]
    left = [count for count in counts if count]
    return [f"{sum(left)} experts of {len(left)} layers: not in --experts"] if left else []


def _fit_memory(request: Request, plan: Plan[Options]) -> tuple[int, int]:
    """Threads that the memory allows, and the peak to expect."""
    largest = max(
        matrix.rows * matrix.cols
        for unit in plan.layers
        if unit.layer
        for matrix in unit.layer.experts[0].values()
    )
    per_thread = buffer_sizes(plan).nbytes + BYTES_PER_ELEMENT * largest
    base = machine.resident_memory() + MEMORY_MARGIN + LIBRARIES_MEMORY
    base += manifest_memory(request.output)
    threads = fit_threads(request.max_memory, request.threads, base, per_thread)
    return threads, base + threads * per_thread


def buffer_sizes(plan: Plan[Options]) -> BufferSizes:
    """What a worker needs to read any matrix."""
    target = plan.target
    assert isinstance(target, GpuTarget)
    matrices = [m for u in plan.layers if u.layer for m in u.layer.experts[0].values()]
    matrices += target.decoded.values()
    return BufferSizes(max((source_buffer(matrix).source for matrix in matrices), default=0))


def device_of(name: str) -> str:
    """The device that `--device` means. UsageError for one that PyTorch does not see here."""
    import torch

    name = name.lower()
    found = torch.accelerator.current_accelerator(check_available=True)
    there = ["cpu"]
    if found is not None:
        there += [
            found.type,
            *(f"{found.type}:{n}" for n in range(torch.accelerator.device_count())),
        ]
    if name == "auto":
        return there[1] if found else "cpu"
    if name not in there:
        raise UsageError(
            f"--device {name} cannot be used: PyTorch sees {', '.join(there)} here",
            "use one of these, or install the PyTorch that is made for your GPU",
        )
    return name


class GpuConversion(Conversion[Options]):
    """What both methods share: everything but how an expert's matrix is rounded."""

    @property
    def target(self) -> GpuTarget:
        assert isinstance(self.plan.target, GpuTarget)
        return self.plan.target

    def buffers(self) -> BufferSizes:
        return buffer_sizes(self.plan)

    def copy_task(self, reader: SourceReader, tensor: TensorRef, name: str) -> BufferedTask:
        matrix = self.target.decoded.get(tensor.name)
        if matrix is None:
            return super().copy_task(reader, tensor, name)
        return DecodedCopy(reader, matrix, name, self.request.verify)

    def made_files(self) -> Mapping[str, bytes]:
        return {CONFIG: config.config_json(self.plan), RECIPE: config.recipe_yaml(self.plan)}

    def card(self) -> str:
        return config.card(self.plan)


class Rtn(GpuConversion):
    """Every matrix by itself, through llm-compressor's model-free path."""

    _rounder: Rounder

    def begin(self, pending: Sequence[Unit]) -> None:
        layers = [unit.layer for unit in self.plan.layers if unit.layer]
        request = self.request
        assert isinstance(request, Request)
        device = device_of(request.device)
        self._rounder = Rounder(self.target.scheme, target_pattern(layers), device)

    def origin(self) -> Record:
        """Who rounds: another version might round otherwise."""
        return {"quantizer": {name: version(name) for name in QUANTIZERS}}

    def convert(self, pending: Sequence[Unit]) -> None:
        from transformers.initialization import no_init_weights

        # llm-compressor makes a linear layer for every matrix, to fill it at once.
        with no_init_weights():
            super().convert(pending)

    def expert_tasks(self, unit: Unit, reader: SourceReader) -> Iterator[BufferedTask]:
        assert unit.layer is not None
        for expert in unit.experts:
            for proj in PROJECTIONS:
                yield RtnTask(
                    reader,
                    unit.layer,
                    expert,
                    proj,
                    self.target.scheme,
                    self._rounder,
                    self.request.verify,
                )
