"""`ktconv quantize-gpu`: experts as engines load them, rounded to nearest or with GPTQ.

report = quantize_gpu(Request(model="path/to/model", output=Path("out")))
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from ktconv.conversion.pipeline import Observer
from ktconv.conversion.run import Report
from ktconv.errors import UsageError
from ktconv.quantize.encoded import run
from ktconv.quantize.encoded.conversion import Encode
from ktconv.quantize.encoded.request import Preflight, Request
from ktconv.quantize.llm_compressor.gptq.run import Gptq
from ktconv.system.text import Notify, silent
from ktconv.targets.encoded.stacking import is_flat

LIBRARIES_MEMORY = 700 << 20  # torch, transformers and llm-compressor once imported
INSTALL = "pip install 'ktconv[gpu]'"
GPTQ_SCHEMES = ("W4A16", "W8A16")
METHODS: Mapping[str, type[Encode]] = {"rtn": Encode, "gptq": Gptq}


def prepare(request: Request) -> Preflight:
    """Open the checkpoint and plan. Reads headers only, writes nothing; gptq alone needs torch."""
    method = request.options.method
    if method not in METHODS:
        raise UsageError(f"--algorithm {method} is unknown", f"available: {', '.join(METHODS)}")
    if method != "gptq":
        return run.prepare(request)
    _require_libraries()
    if request.options.scheme not in GPTQ_SCHEMES:
        raise UsageError(
            f"--scheme {request.options.scheme} does not go with --algorithm gptq, which rounds to "
            "integers",
            f"use --scheme {' or '.join(GPTQ_SCHEMES)}, or --algorithm rtn",
        )
    if is_flat(layout := request.options.expert_layout):
        raise UsageError(
            f"--expert-layout {layout} does not go with --algorithm gptq",
            "use --expert-layout stacked, or --algorithm rtn",
        )
    if request.source.prune is not None:
        raise UsageError(
            f"--prune cannot be combined with --algorithm {method}: transformers loads the model, "
            "with all of its experts",
            "write the pruned checkpoint with ktconv prune, and quantize that; or use --algorithm "
            "rtn",
        )
    if request.source.map is not None:
        raise UsageError(
            f"--map cannot be combined with --algorithm {method}: transformers loads the model, "
            "and by its own names",
            "use --algorithm rtn",
        )
    return run.prepare(request, Gptq, LIBRARIES_MEMORY)


def quantize_gpu(
    request: Request,
    observer: Observer | None = None,
    preflight: Preflight | None = None,
    notify: Notify = silent,
) -> Report:
    """Quantize; see `Request`. `notify` gets what happens around the layers. Raises KtconvError,
    or KeyboardInterrupt with all state kept."""
    preflight = preflight or prepare(request)
    method = METHODS[request.options.method]
    return method(preflight, observer or Observer(), notify).run()


def _require_libraries() -> None:
    for package in ("torch", "transformers", "compressed_tensors", "llmcompressor"):
        if find_spec(package) is None:
            raise UsageError(f"--algorithm gptq needs {package}, which is not installed", INSTALL)
