"""Fine-tunes a trained model by LoRA in its experts, and the same in plain torch beside it.

    python benchmarks/finetune.py [MODEL] --method bf16 --method int8 --steps 200 --plot curves.png

For each method: the experts are packed, `ktconv.train.prepare` puts LoRA beside them, and AdamW
trains it on C code (of this repository, if not told) for some steps. Then the model's own experts
get the dequantized weights, and autograd through transformers' own code trains the same matrices,
from the same beginning and on the same batches, in float32; once more from another beginning, for
how far two such runs are apart anyway. Reported: losses, perplexity of held-out windows before and
after, seconds of a step, and what of the answers changes when the adapter is saved and loaded, or
saved and merged.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import measure
import torch
from torch import Tensor, nn
from torch.func import functional_call

from ktconv.model import load_model
from ktconv.model.sites import find_experts
from ktconv.model.stored import StoredExperts
from ktconv.train import LoRAExperts, load, merge, prepare, save

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLE = REPOSITORY / "docs/example/tiny-moe"
TEXT_BYTES = 400_000
HELD_OUT = 10  # every tenth window
SMOOTHED = 10  # steps of a mean


def default_text() -> str:
    """C code, which models of prose know nothing of."""
    files = sorted((REPOSITORY / "native").rglob("*.c"))
    return "\n".join(file.read_text() for file in files)[:TEXT_BYTES]


def windows(tokenizer: Any, text: str, length: int) -> tuple[Tensor, Tensor]:
    """[N, length] to train on, and held out."""
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    every = ids[: len(ids) // length * length].reshape(-1, length)
    held = torch.arange(len(every)) % HELD_OUT == 0
    return every[~held], every[held]


class PlainExperts(nn.Module):
    """The model's own experts with W + scale * B A in the place of each W, all in float32."""

    def __init__(self, own: StoredExperts, lora: LoRAExperts) -> None:
        super().__init__()
        self.own, self.stored = own.module, own
        self.scale = lora.scale
        self.lora = nn.ParameterDict(
            {name: one.detach().float().clone() for name, one in lora.named_parameters()}
        )

    def forward(self, *given: Tensor, **named: Tensor) -> Any:
        weights = {
            name: tensor + self._added(what) for name, tensor, what in self.stored.parameters
        }
        return functional_call(self.own, weights, given, named)

    def _added(self, projections: Sequence[str]) -> Tensor:
        """[E, outputs, inputs] as the parameter with these matrices has them."""
        parts = [self.lora[f"{one}_b"] @ self.lora[f"{one}_a"] for one in projections]
        stacked = torch.cat(parts, dim=1) * self.scale
        return stacked.transpose(1, 2) if self.stored.transposed else stacked


def put_plain(model: Any, lora: Mapping[int, LoRAExperts]) -> list[nn.Parameter]:
    """Plain experts into the model, on the weights that the packed ones have; their parameters."""
    model.requires_grad_(False)
    found: list[nn.Parameter] = []
    for layer, site in find_experts(model).items():
        own = site.stored
        packed = lora[layer].layer.packed
        for expert in range(own.count):
            streams = zip(("gate", "up", "down"), packed.streams(expert), strict=True)
            for projection, matrix in streams:
                if matrix is not None:
                    values = torch.from_numpy(matrix.values())
                    own.matrices(expert)[projection].copy_(values)  # type: ignore[index]
        plain = PlainExperts(own, lora[layer])
        setattr(site.parent, site.name, plain)
        found += plain.lora.values()
    return found


def train(
    model: Any, parameters: Sequence[nn.Parameter], data: Tensor, options: argparse.Namespace
) -> tuple[list[float], float]:
    """The loss of each step, and seconds of one."""
    optimizer = torch.optim.AdamW(parameters, options.rate, weight_decay=0.0)
    model.train()
    losses, begin = [], time.perf_counter()
    for batch in batches(data, options):
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses, (time.perf_counter() - begin) / options.steps


def batches(data: Tensor, options: argparse.Namespace) -> Iterator[Tensor]:
    """The same ones in each run."""
    generator = torch.Generator().manual_seed(options.seed)
    for _ in range(options.steps):
        yield data[torch.randint(len(data), (options.batch,), generator=generator)]


@torch.no_grad()
def perplexity(model: Any, data: Tensor) -> float:
    losses = [model(input_ids=one[None], labels=one[None], use_cache=False).loss for one in data]
    return torch.stack(losses).mean().exp().item()


@torch.no_grad()
def logits(model: Any, data: Tensor) -> Tensor:
    found: Tensor = model(input_ids=data[:4], use_cache=False).logits
    return found


def apart(one: Tensor, other: Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


def compared(method: str, options: argparse.Namespace) -> dict[str, Any]:
    """All runs of a method."""

    def fresh(seed: int = options.seed) -> tuple[Any, Any, Any]:
        model, tokenizer = load_model(options.model, "float32")
        torch.manual_seed(seed)
        prepared = prepare(
            model, rank=options.rank, alpha=2 * options.rank, method=method, keep=True
        )
        return model, tokenizer, prepared

    model, tokenizer, prepared = fresh()
    data, held = windows(tokenizer, options.text, options.length)
    before = perplexity(model, held)
    initial = fresh()[2].lora, fresh(options.seed + 1)[2].lora
    losses, seconds = train(model, prepared.parameters(), data, options)
    found = {
        "method": method, "tokens": data.numel(), "perplexity before": before,
        "perplexity": perplexity(model, held), "seconds": seconds, "losses": losses,
    }  # fmt: skip
    found |= round_trip(model, fresh, held, options.model)
    for name, lora in zip(("plain", "plain, other seed"), initial, strict=True):
        plain, _ = load_model(options.model, "float32")
        parameters = put_plain(plain, lora)
        losses, seconds = train(plain, parameters, data, options)
        found[name] = {"losses": losses, "seconds": seconds, "perplexity": perplexity(plain, held)}
    return found


def round_trip(model: Any, fresh: Any, held: Tensor, source: Path) -> dict[str, float]:
    """What changes in logits when the adapter is saved and loaded, and when it is merged into the
    model's own weights: in float32, against an unmerged model of packed bf16, and beside that what
    training has changed."""
    expected = logits(model, held)
    with tempfile.TemporaryDirectory() as directory:
        save(model, directory)
        other, _, _ = fresh()
        untrained = logits(other, held)
        load(other, directory)
        merged, _ = load_model(source, "float32")
        merge(merged, directory)
    return {
        "loaded": apart(logits(other, held), expected),
        "merged": apart(logits(merged, held), expected),
        "by training": apart(untrained, expected),
    }


def smoothed(losses: Sequence[float]) -> Tensor:
    return torch.tensor(losses).unfold(0, SMOOTHED, 1).mean(dim=1)


def report(found: Mapping[str, Any]) -> None:
    plain, other = found["plain"], found["plain, other seed"]
    ours = smoothed(found["losses"])
    distance = (ours - smoothed(plain["losses"])).abs().max().item()
    seeds = (smoothed(other["losses"]) - smoothed(plain["losses"])).abs().max().item()
    print(
        f"| {found['method']} | {found['losses'][0]:.3f} | {ours[-1]:.4f} | "
        f"{smoothed(plain['losses'])[-1]:.4f} | {distance:.4f} | {seeds:.4f} | "
        f"{found['perplexity before']:.2f} | {found['perplexity']:.3f} | "
        f"{plain['perplexity']:.3f} | {found['loaded']:.1g} | {found['merged']:.4f} | "
        f"{found['by training']:.2f} | {1000 * found['seconds']:.0f} | "
        f"{1000 * plain['seconds']:.0f} |"
    )


def plot(all_found: Sequence[Mapping[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = path.name
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(all_found), figsize=(6 * len(all_found), 4), sharey=True)
    for axis, found in zip(axes if len(all_found) > 1 else [axes], all_found, strict=True):
        axis.plot(smoothed(found["plain, other seed"]["losses"]), ":", label="torch, other seed")
        axis.plot(
            smoothed(found["plain"]["losses"]), label="torch, float32", linewidth=3, alpha=0.5
        )
        axis.plot(smoothed(found["losses"]), label=f"ktconv, {found['method']}", linewidth=1)
        axis.set(title=f"{found['method']} experts", xlabel="step", ylabel="loss, mean of 10 steps")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, default=EXAMPLE)
    parser.add_argument("--method", action="append", help="default: bf16 and int8")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.text = options.text.read_text() if options.text else default_text()
    torch.set_num_threads(options.threads)
    print(f"{measure.cpu_model()}\n{options.model.name}, {options.steps} steps")
    columns = (
        "base", "first loss", "last", "last, torch", "apart at most", "two seeds apart",
        "perplexity before", "after", "after, torch", "loaded", "merged", "by training",
        "ms a step", "ms, torch",
    )  # fmt: skip
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    found = []
    for method in options.method or ("bf16", "int8"):
        found.append(compared(method, options))
        report(found[-1])
    if options.json:
        options.json.write_text(json.dumps(found))
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
