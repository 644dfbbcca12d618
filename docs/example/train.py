"""Train the small mixture-of-experts checkpoint that ``make demo`` converts.

    python docs/example/train.py --output docs/example/tiny-moe
    python docs/example/train.py --output DIR --hidden 1024 --expert-size 512  # wider: 55 MB

The tokenizer and the weights are learned from corpus.txt; eval.txt is never
trained on and only measures the result. Needs torch and transformers. The same
seed, thread count and library versions give the same weights on the same machine;
other machines add floats in another order and differ in the last digits.
"""

import argparse
import json
import math
import random
import shutil
import time
from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

HERE = Path(__file__).resolve().parent
END = "<|end|>"
VOCABULARY = 768
WINDOW = 128  # tokens per window, in training and in the perplexity
BATCH = 16
PEAK_RATE = 2e-3
WARMUP = 40
# The corpus is small: without these three the held-out perplexity turns after 200 steps.
NOISE = 0.15  # share of input tokens replaced at random
DROPOUT = 0.25  # on the embedding and on what attention adds
DECAY = 1.0
# The experts are the point of this model: they begin small and learn fast, so that their
# weights are what was learned and not the random start.
EXPERT_START = 0.25
EXPERT_RATE = 2.0
EXPERT_DECAY = 0.1
SHARD = "2MB"  # small, so that the example has more than one shard


def build_tokenizer(text: str) -> Tokenizer:
    """Byte-level BPE: every text round-trips, also one that the corpus has no letters for."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        [text],
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return bpe


def build_model(hidden: int = 128, expert_size: int = 256) -> Qwen3MoeForCausalLM:
    """H % 128 == 0 and (I / 2) % 128 == 0: INT4 works with one or two NUMA parts."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=256,
        moe_intermediate_size=expert_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        router_aux_loss_coef=0.02,
        max_position_embeddings=512,
        initializer_range=0.02,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".experts." in name:
                weight *= EXPERT_START
    return model


def perplexity(model: Qwen3MoeForCausalLM, tokens: torch.Tensor) -> float:
    """exp of the mean loss over windows of WINDOW predicted tokens, none counted twice."""
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, WINDOW):
            window = tokens[start : start + WINDOW + 1]
            logits = model(window[None, :-1]).logits[0].float()
            total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
            count += len(window) - 1
    return math.exp(total / count)


def expert_shares(model: Qwen3MoeForCausalLM, tokens: torch.Tensor) -> list[list[float]]:
    """For each layer, the share of the routed tokens that each expert receives."""
    model.eval()
    counts = torch.zeros(model.config.num_hidden_layers, model.config.num_experts)
    top_k = model.config.num_experts_per_tok
    with torch.no_grad():
        for start in range(0, len(tokens), WINDOW):
            out = model(tokens[None, start : start + WINDOW], output_router_logits=True)
            for layer, logits in enumerate(out.router_logits):
                chosen = logits.topk(top_k, dim=-1).indices.flatten()
                counts[layer] += torch.bincount(chosen, minlength=counts.shape[1])
    return [[round(x, 3) for x in row] for row in (counts / counts.sum(1, keepdim=True)).tolist()]


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a tenth of the peak."""
    if step < WARMUP:
        return PEAK_RATE * (step + 1) / WARMUP
    progress = (step - WARMUP) / max(1, steps - WARMUP)
    return PEAK_RATE * (0.55 + 0.45 * math.cos(math.pi * progress))


def batch(tokens: torch.Tensor, chooser: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows: (inputs with noise, the tokens that follow)."""
    starts = [chooser.randrange(len(tokens) - WINDOW - 1) for _ in range(BATCH)]
    windows = torch.stack([tokens[s : s + WINDOW + 1] for s in starts])
    inputs = windows[:, :-1].clone()
    noisy = torch.rand(inputs.shape) < NOISE
    inputs[noisy] = torch.randint(0, VOCABULARY, (int(noisy.sum()),))
    return inputs, windows[:, 1:]


def add_dropout(model: Qwen3MoeForCausalLM) -> None:
    """Qwen3-MoE has dropout on attention scores only; hooks leave the saved model as it is."""

    def drop(module: torch.nn.Module, _: object, out: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(out, DROPOUT, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)


def build_optimizer(model: Qwen3MoeForCausalLM) -> torch.optim.Optimizer:
    experts, matrices, vectors = [], [], []
    for name, weight in model.named_parameters():
        kind = experts if ".experts." in name else matrices if weight.ndim > 1 else vectors
        kind.append(weight)
    return torch.optim.AdamW(
        [
            {"params": experts, "weight_decay": EXPERT_DECAY, "rate": EXPERT_RATE},
            {"params": matrices, "weight_decay": DECAY, "rate": 1.0},
            {"params": vectors, "weight_decay": 0.0, "rate": 1.0},
        ],
        lr=PEAK_RATE,
        betas=(0.9, 0.95),
    )


def balance_loss(
    model: Qwen3MoeForCausalLM, router_logits: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Mean over the layers. The model's own loss pools them, and an expert that one layer
    never uses is then made up for by its namesake in another."""
    experts, top_k = model.config.num_experts, model.config.num_experts_per_tok
    losses = [load_balancing_loss_func((layer,), experts, top_k) for layer in router_logits]
    return torch.stack(losses).mean()


def train(
    model: Qwen3MoeForCausalLM,
    tokens: torch.Tensor,
    held_out: torch.Tensor,
    steps: int,
    chooser: random.Random,
) -> None:
    optimizer = build_optimizer(model)
    add_dropout(model)
    began = time.monotonic()
    for step in range(steps):
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps) * group["rate"]
        inputs, targets = batch(tokens, chooser)
        out = model(inputs, output_router_logits=True)
        loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), targets.flatten())
        balance = balance_loss(model, out.router_logits)
        (loss + model.config.router_aux_loss_coef * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 50 == 0:
            print(
                f"step {step + 1}/{steps}: loss {loss.item():.3f}, balance {balance.item():.3f}, "
                f"held-out perplexity {perplexity(model, held_out):.2f}, "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )


def save(output: Path, model: Qwen3MoeForCausalLM, bpe: Tokenizer) -> None:
    if output.exists():
        shutil.rmtree(output)
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=0, do_sample=False)
    model.save_pretrained(output, max_shard_size=SHARD)
    length = model.config.max_position_embeddings
    PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END, model_max_length=length
    ).save_pretrained(output)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the example checkpoint.")
    parser.add_argument("--output", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size")
    parser.add_argument("--expert-size", type=int, default=256, help="intermediate size of experts")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.output.exists() and not (arguments.output / "training.json").is_file():
        raise SystemExit(f"{arguments.output} exists and holds something else: left as it is")
    torch.set_num_threads(2)
    torch.manual_seed(arguments.seed)
    chooser = random.Random(arguments.seed)

    text = (HERE / "corpus.txt").read_text(encoding="utf-8")
    bpe = build_tokenizer(text)
    tokens = torch.tensor(bpe.encode(text).ids)
    held_out = torch.tensor(bpe.encode((HERE / "eval.txt").read_text(encoding="utf-8")).ids)
    model = build_model(arguments.hidden, arguments.expert_size)
    before = perplexity(model, held_out)
    print(f"{len(tokens)} tokens to train on, {len(held_out)} held out")
    print(f"held-out perplexity before: {before:.2f}")

    train(model, tokens, held_out, arguments.steps, chooser)
    save(arguments.output, model, bpe)
    # Measured as a user will load it.
    model = Qwen3MoeForCausalLM.from_pretrained(arguments.output, dtype=torch.bfloat16)
    after = perplexity(model, held_out)
    print(f"held-out perplexity after, in bf16: {after:.2f}")
    record = {
        "steps": arguments.steps,
        "seed": arguments.seed,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "training_tokens": len(tokens),
        "held_out_tokens": len(held_out),
        "window": WINDOW,
        "perplexity_untrained": round(before, 3),
        "perplexity_bf16": round(after, 3),
        "expert_shares": expert_shares(model, held_out),
    }
    (arguments.output / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    size = sum(f.stat().st_size for f in arguments.output.iterdir())
    print(f"{arguments.output}: {size} bytes")


if __name__ == "__main__":
    main()
