"""`--algorithm gptq`: samples pass through the model layer by layer; each is final at once.

A killed run keeps its finished layers, and what the samples are behind them; the next one goes on
there. Where only the layers are left, samples run through them again, with their weights as the
first run computed with them. The result is the same as without the interruption.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import convert
from msgspec.structs import asdict

from ktconv.conversion.pipeline import Observer
from ktconv.conversion.plan import LayerUnit, Unit
from ktconv.errors import (
    CheckpointError,
    DiskFullError,
    DiskSpaceError,
    MemoryShortError,
    UsageError,
)
from ktconv.model.load import check_language_model, way_out
from ktconv.quantize.encoded.conversion import Encode
from ktconv.quantize.encoded.deviation import write_matrix
from ktconv.quantize.encoded.request import Preflight, Request
from ktconv.quantize.llm_compressor.gptq.calibration import (
    WITHOUT_MODEL,
    Samples,
    check_settings,
    load_tokenizer,
    read_samples,
)
from ktconv.quantize.llm_compressor.gptq.coverage import LayerCoverage
from ktconv.quantize.llm_compressor.library import device_of
from ktconv.source import Checkpoint, Projection, TensorRef, read_header
from ktconv.system.arrays import Array
from ktconv.system.files import make_directory
from ktconv.system.opened import opened_source
from ktconv.system.text import Notify, silent
from ktconv.system.threads import torch_threads
from ktconv.system.units import counted
from ktconv.targets.encoded.module_classes import class_of
from ktconv.targets.encoded.stacking import unstacked
from ktconv.targets.encoded.target import Plan, weight_dtype
from ktconv.writer.journal import Record
from ktconv.writer.manifest import read_manifest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ktconv.model.streamed.parts import PartedModel
    from ktconv.model.streamed.plan import PassPlan
    from ktconv.quantize.llm_compressor.gptq.runner import FinishedLayer, QuantizedMatrix
    from ktconv.quantize.llm_compressor.gptq.selftest import SelfTest

PASS = "pass"  # folder beside the journal: what the samples are between two layers
_LIBRARIES = ("llmcompressor", "compressed-tensors", "torch", "transformers")


@cache  # each call reads and parses the metadata of the packages
def _libraries() -> Mapping[str, str]:
    """Versions of the libraries that calibration depends on."""
    return {name: version(name) for name in _LIBRARIES}


def coverage_of(output: Path) -> dict[int, LayerCoverage]:
    """Layer -> what its experts saw, from the manifest of a finished output."""
    manifest = read_manifest(output)
    return {
        int(key.split("-")[1]): convert(record["coverage"], LayerCoverage)
        for key, record in (manifest.units if manifest else {}).items()
        if "coverage" in record
    }


def _is_calibrated(unit: LayerUnit) -> bool:
    """transformers builds no layers for multi-token prediction: those are rounded to nearest."""
    return not unit.layer.is_mtp and len(unit.experts) > 0


class Gptq(Encode):
    """One calibrated run, and the `runner.Events` of its layers. Layers that transformers does not
    build, for multi-token prediction, are rounded to nearest as `Encode` does."""

    @staticmethod
    def check(request: Request, plan: Plan) -> int:
        """Check all that headers and settings show; the memory of a run on the CPU.

        UsageError for options that exclude one another or a missing dataset.
        """
        options = plan.target.options
        if options.calibration is None:
            raise UsageError(
                "--algorithm gptq needs --dataset",
                "give a .jsonl or .txt file, or a dataset's name",
            )
        if options.dampening is None or not 0 < options.dampening < 10:
            raise UsageError(f"--dampening {options.dampening} is out of range", "use 0.01 to 0.1")
        if request.layers is not None:
            raise UsageError(
                "--layers cannot be given with --algorithm gptq: each layer is calibrated "
                "on the output of the layers before it",
                "omit it; an interrupted run continues where it stopped",
            )
        check_settings(options.calibration)
        used = options.calibration
        parted = _parted(plan.checkpoint)
        return _plan(parted, [used.max_seq_len] * used.samples, request).peak_memory

    def __init__(self, preflight: Preflight, observer: Observer, notify: Notify = silent) -> None:
        super().__init__(preflight, observer, notify)
        options = self.plan.target.options
        assert options.calibration is not None and options.dampening is not None
        self.settings, self.dampening = options.calibration, options.dampening
        self.device = device_of(self.request.device)
        checkpoint = self.plan.checkpoint
        tokenizer = load_tokenizer(checkpoint.side_directory or checkpoint.path)
        self.samples: Samples = read_samples(self.settings, tokenizer)
        self._check_vocabulary()
        self.tested: SelfTest | None = None
        self._coverage: dict[int, LayerCoverage] = {}
        self._calibrated = {u.layer.index: u for u in self.plan.layers if _is_calibrated(u)}
        self._progress = dict.fromkeys(self._calibrated, 0.0)  # fractions that are done

    def origin(self) -> Record:
        """The samples: a resumed run with others would mix two calibrations."""
        return {"calibration": {**self.samples.facts, "libraries": dict(_libraries())}}

    def more(self) -> Record:
        """Coverage of all layers, and the self-test of this run."""
        coverage = coverage_of(self.output)
        return {
            "self_test": asdict(self.tested) if self.tested else None,
            "coverage": {str(layer): seen.record() for layer, seen in coverage.items()},
        }

    # ---- converting ----

    def convert(self, pending: Sequence[Unit]) -> None:
        """Calibrated layers first: what is wrong with them shows in the first one."""
        mine = [unit for unit in self._calibrated.values() if unit in pending]
        self.observer.begin([unit.key for unit in pending])
        if mine:
            count, wanted = len(self.samples.ids), self.settings.samples
            fewer = f" (the dataset has no more; --samples is {wanted})" if count < wanted else ""
            self.notify(
                f"calibrating on {counted(count, 'sample')}{fewer}, "
                f"{counted(self.samples.tokens, 'token')}"
            )
            with _ways_out(), torch_threads(self.preflight.threads):
                self._calibrate(mine)
        if others := [unit for unit in pending if unit not in mine]:
            self.run_pipeline(others)

    def _check_vocabulary(self) -> None:
        """CheckpointError for a tokenizer with tokens that the model does not know."""
        tensors = self.plan.checkpoint.other_tensors
        rows = [tensor.shape[0] for tensor in tensors if class_of(tensor.name) == "embeddings"]
        size, largest = max(rows, default=None), max(map(max, self.samples.ids))
        if size is not None and largest >= size:
            raise CheckpointError(
                f"the tokenizer of {self.plan.checkpoint.path} makes token {largest}, but the "
                f"model knows {size}",
                "copy tokenizer.json and tokenizer_config.json of this model next to its weights",
            )

    def _calibrate(self, pending: Sequence[LayerUnit]) -> None:
        """Run the samples through the model. What they are between layers is kept next to
        the journal, so that a run that is killed goes on at its layer."""
        import torch

        from ktconv.quantize.llm_compressor.gptq.runner import NotFinished

        parted = _parted(self.plan.checkpoint, self.device)
        for unit in pending:
            if unit.layer.index not in parted.experts:
                raise CheckpointError(
                    f"transformers builds no experts for layer {unit.layer.index}, so they cannot "
                    "be calibrated"
                )
        windows = [torch.tensor([list(ids)]) for ids in self.samples.ids]
        folder = self.journal.directory / PASS
        while True:
            make_directory(folder)
            try:
                self._pass(parted, windows, folder)
                break
            except NotFinished:  # a file of a finished layer was lost since
                shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)

    def _pass(self, parted: PartedModel, windows: Sequence[Tensor], folder: Path) -> None:
        from ktconv.model.streamed.run import StreamedPass
        from ktconv.model.streamed.states import Scratch, States
        from ktconv.quantize.llm_compressor.gptq.rounding import Rounding
        from ktconv.quantize.llm_compressor.gptq.runner import GptqRunner

        chosen = {index: unit.experts for index, unit in self._calibrated.items()}
        keys = {unit.key for unit in self._calibrated.values()}
        tested = self._tested if self.request.self_test and not self.done & keys else None
        runner = GptqRunner(
            parted.checkpoint, chosen, Rounding(self._weights(), self.dampening), self,
            parted.dtype, self.device, tested,
        )  # fmt: skip
        plan = _plan(parted, [ids.shape[1] for ids in windows], self.request, folder)
        parked = plan.parked
        if self.device != "cpu":
            parked = min(parked, self._parked_on_gpu(parted, max(ids.shape[1] for ids in windows)))
        with (
            States(folder, 1, len(windows)) as states,
            Scratch(folder, plan.scratch_memory) as file,
        ):
            streamed = StreamedPass(
                parted, windows, states, file, parked=parked, notify=self.notify
            )
            streamed.run(runner, layers=max(chosen) + 1)

    def _parked_on_gpu(self, parted: PartedModel, longest: int) -> int:
        """Samples that may wait for experts in half of the GPU's free memory."""
        import torch

        index = torch.device(self.device).index or 0
        free, total = torch.accelerator.get_memory_info(index)
        if (most := self.request.max_gpu_memory) is not None:
            free = min(free, most)
            if self.device.startswith("cuda"):
                torch.cuda.set_per_process_memory_fraction(min(1, most / total), index)
        hidden = max(layer.source.hidden_size for layer in parted.experts.values())
        return int(free // 2 // (longest * 8 * 2 * hidden + 2 * longest**2))

    def _tested(self, found: SelfTest) -> None:
        self.tested = found
        found.check()
        self.notify(found.words())

    def _weights(self) -> Any:
        from compressed_tensors.quantization import QuantizationArgs

        return QuantizationArgs(**self.plan.target.scheme.weight_arguments())

    # ---- `runner.Events` ----

    def finished_layer(self, layer: int) -> FinishedLayer | None:
        unit = self._calibrated[layer]
        return _Finished(self.output, unit, self.plan) if unit.key in self.done else None

    def layer_started(self, layer: int) -> None:
        self.observer.unit_started(self._calibrated[layer].key)

    def progressed(self, layer: int, share: float) -> None:
        before, size = self._progress[layer], self._calibrated[layer].source_bytes
        self._progress[layer] = min(1.0, before + share)
        self.observer.advanced(round(size * self._progress[layer]) - round(size * before))

    def layer_done(
        self,
        layer: int,
        matrices: Iterator[QuantizedMatrix],
        coverage: Callable[[], LayerCoverage],
    ) -> None:
        unit = self._calibrated[layer]
        staging = self.stage(unit)
        tensors: dict[str, Any] = {}
        try:
            for matrix in matrices:
                source = unit.layer.experts[matrix.expert][matrix.projection]
                arrays = {part: as_array(tensor) for part, tensor in matrix.tensors.items()}
                tensors |= write_matrix(
                    staging, self.plan.target.scheme,
                    self.plan.target.module(unit.layer, matrix.expert, matrix.projection),
                    as_array(matrix.source), arrays, weight_dtype(source), self.request.verify,
                )  # fmt: skip
            files = staging.commit()
        except BaseException:
            staging.abandon()
            raise
        self._coverage[layer] = coverage()
        self.finished(unit, files, tensors)
        self.observer.unit_finished(unit.key)

    def unit_facts(self, unit: Unit) -> Record:
        seen = self._coverage.get(unit.layer.index) if isinstance(unit, LayerUnit) else None
        return super().unit_facts(unit) | ({"coverage": seen.record()} if seen else {})


def as_array(tensor: Tensor) -> Array:
    """A tensor of torch as a numpy array; two-byte floats as their bits."""
    import torch

    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        bits: Array = tensor.view(torch.int16).numpy().view(np.uint16)
        return bits
    array: Array = tensor.numpy()
    return array


class _Finished:
    """The experts of a layer as an earlier run wrote them."""

    def __init__(self, output: Path, unit: LayerUnit, plan: Plan) -> None:
        self._unit, self._target = unit, plan.target
        found = [ref for name in unit.shard_names for ref in read_header(output / name).tensors]
        if unit.slots:
            found = list(unstacked(found))
        self._refs = {ref.name: ref for ref in found}

    def __call__(self, expert: int) -> Mapping[Projection, Mapping[str, Tensor]]:
        """The packed form of its matrices."""
        layer = self._unit.layer
        return {
            projection: {
                part: _read(self._refs[f"{module}.{part}"])
                for module in [self._target.module(layer, expert, projection)]
                for part in self._target.scheme.parts
            }
            for projection in layer.projections
        }


def _read(ref: TensorRef) -> Tensor:
    import torch

    dtype = {
        "I32": torch.int32, "I64": torch.int64, "BF16": torch.bfloat16, "F16": torch.float16
    }[ref.dtype]  # fmt: skip
    data = np.empty(ref.nbytes, np.uint8)
    with opened_source(ref.file) as opened:
        opened.read(data.data, ref.offset)
    return torch.from_numpy(data).view(dtype).reshape(ref.shape)


def _parted(checkpoint: Checkpoint, device: str = "cpu") -> PartedModel:
    from ktconv.model.streamed.parts import PartedModel

    with _ways_out():
        check_language_model(checkpoint.side_directory or checkpoint.path)
        return PartedModel(checkpoint, model_dtype(checkpoint), device=device)


def _plan(
    parted: PartedModel, windows: Sequence[int], request: Request, folder: Path | None = None
) -> PassPlan:
    """ResourceError if memory, or the disk of `folder`, is too small for samples of these
    numbers of tokens."""
    from ktconv.model.streamed.plan import plan_pass
    from ktconv.quantize.llm_compressor.gptq.runner import runner_memory

    layers = [layer.source for layer in parted.experts.values()]
    with _ways_out():
        return plan_pass(
            parted, windows, head=False, taps=runner_memory(layers, max(windows)),
            max_memory=request.max_cpu_memory, option="--max-cpu-memory", folder=folder,
        )  # fmt: skip


@contextmanager
def _ways_out() -> Iterator[None]:
    """Hints that name options of this command."""
    from ktconv.model.streamed.parts import NotCut

    with way_out(WITHOUT_MODEL):
        try:
            yield
        except (DiskSpaceError, DiskFullError) as error:
            error.hint = "free some space, or use fewer --samples; what is finished is kept"
            raise
        except MemoryShortError as error:
            error.hint = "use a smaller --max-seq-len or --algorithm rtn"
            raise
        except NotCut as error:
            error.hint = WITHOUT_MODEL
            raise


def model_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype to compute a model in: that of its experts' scales in the output.

    CheckpointError where experts do not agree.
    """
    import torch

    dtypes = {matrix.tensor.dtype for layer in checkpoint.layers for matrix in layer.kinds}
    if "F16" in dtypes and len(dtypes) > 1:
        raise CheckpointError("experts of different dtypes cannot be calibrated together")
    return torch.float16 if dtypes == {"F16"} else torch.bfloat16
