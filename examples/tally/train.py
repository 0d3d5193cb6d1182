"""Train the model from nothing on one thread and export it as a Hugging Face folder.

    python -m examples.tally.train --export batchmla/builtin/tally

A checkpoint is written every `--save-every` steps to `--work`; the same command resumes from it.
"""

import argparse
import itertools
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from examples.tally.batches import Batch, all_batches
from examples.tally.export import export
from examples.tally.model import Mixture, Tally, TallyConfig, compile_model
from examples.tally.muon import Muon
from examples.tally.tokens import SampleEncoder, train_tokenizer

BIAS_RATE = 0.002
WARMUP_STEPS = 40


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=7000)
    parser.add_argument("--draft-steps", type=int, default=200)
    parser.add_argument("--decay-share", type=float, default=0.4)
    parser.add_argument("--batch-tokens", type=int, default=2560)
    parser.add_argument("--accumulate", type=int, default=2, help="batches of one step")
    parser.add_argument("--reading-pools", type=int, default=30)
    parser.add_argument("--reading-weight", type=float, default=6.0)
    parser.add_argument("--matrix-rate", type=float, default=0.02)
    parser.add_argument("--other-rate", type=float, default=0.003)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--work", type=Path, default=Path("examples/tally/out/train"))
    parser.add_argument("--export", type=Path, default=Path("examples/tally/out/model"))
    return parser.parse_args()


def learning_share(step: int, steps: int, decay_share: float) -> float:
    """Give the share of the full learning rate: warm-up, plateau, linear decay."""
    left = (steps - step) / max(steps * decay_share, 1)
    return min(1.0, (step + 1) / WARMUP_STEPS, left)


def main_loss(model: Tally, batch: Batch) -> torch.Tensor:
    """Give the mean loss over the tokens that count, and move the routers' biases."""
    states, routes = model(batch.ids, torch.bfloat16)
    is_counted = (batch.targets != -100).flatten().nonzero().squeeze(1)
    picked = states.flatten(0, 1).index_select(0, is_counted)
    logits = F.linear(picked, model.head.to(picked.dtype)).float()
    is_real = torch.arange(batch.ids.shape[1]) < batch.lengths.unsqueeze(1)
    mixtures = [block.ffn for block in model.blocks if isinstance(block.ffn, Mixture)]
    for mixture, weights in zip(mixtures, routes, strict=True):
        balance(mixture, weights.detach(), is_real)
    losses = F.cross_entropy(
        logits, batch.targets.flatten().index_select(0, is_counted), reduction="none"
    )
    weights = batch.weights.flatten().index_select(0, is_counted)
    return (losses * weights).sum() / weights.sum()


def balance(mixture: Mixture, weights: torch.Tensor, is_real: torch.Tensor) -> None:
    """Raise the choice bias of experts used too little, lower that of the others."""
    load = ((weights > 0) & is_real.unsqueeze(-1)).sum((0, 1)).float()
    mixture.bias += BIAS_RATE * (load.mean() - load).sign()


def draft_loss(model: Tally, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the draft layer's loss and its share of right tokens."""
    with torch.no_grad():
        states, _ = model(batch.ids, torch.bfloat16)
    cos, sin = model.angles(torch.arange(batch.ids.shape[1] - 1).unsqueeze(0))
    drafted = model.draft(states[:, :-1], batch.ids[:, 1:], cos, sin)
    targets = batch.targets[:, 1:].flatten()
    is_counted = (targets != -100).nonzero().squeeze(1)
    picked = drafted.flatten(0, 1).index_select(0, is_counted)
    logits = F.linear(picked, model.draft.head.to(picked.dtype)).float()
    wanted = targets.index_select(0, is_counted)
    right = (logits.argmax(-1) == wanted).float().mean()
    return F.cross_entropy(logits, wanted), right


class Run:
    """A training run with its checkpoint."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        args.work.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(args.seed)
        tokenizer_file = args.work / "tokenizer.json"
        if not tokenizer_file.exists():
            train_tokenizer().save(str(tokenizer_file))
        self.tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self.encoder = SampleEncoder(self.tokenizer)
        self.model = Tally(TallyConfig())
        self.model.draft.requires_grad_(False)
        self.optimiser = Muon(self.model, args.matrix_rate, args.other_rate)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        if (args.work / "main.pt").exists():
            self.load()

    def load(self) -> None:
        """Resume from the last checkpoint."""
        saved = torch.load(self.args.work / "main.pt", weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimiser.load(saved["optimiser"])
        self.step, self.tokens, self.seconds = saved["step"], saved["tokens"], saved["seconds"]

    def save(self) -> None:
        """Write a checkpoint, whole or not at all."""
        state = {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state(),
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
        }
        torch.save(state, self.args.work / "main.tmp")
        (self.args.work / "main.tmp").replace(self.args.work / "main.pt")

    def train_main(self) -> None:
        """Train everything but the draft layer."""
        args, started = self.args, time.time() - self.seconds
        batches = all_batches(
            self.encoder,
            args.seed,
            args.batch_tokens,
            args.reading_pools,
            skip=self.step * args.accumulate,
            reading_weight=args.reading_weight,
        )
        losses = []
        while self.step < args.steps:
            for batch in itertools.islice(batches, args.accumulate):
                loss = main_loss(self.model, batch) / args.accumulate
                loss.backward()
                self.tokens += int(batch.lengths.sum())
                losses.append(loss.item() * args.accumulate)
            self.optimiser.step(learning_share(self.step, args.steps, args.decay_share))
            self.step += 1
            self.seconds = time.time() - started
            if self.step % 20 == 0:
                mean = sum(losses) / len(losses)
                rate = self.tokens / self.seconds
                print(
                    f"step {self.step} loss {mean:.4f} tokens {self.tokens} "
                    f"seconds {self.seconds:.0f} tokens/s {rate:.0f}",
                    flush=True,
                )
                losses = []
            if self.step % args.save_every == 0 or self.step == args.steps:
                self.save()

    def train_draft(self) -> None:
        """Train the draft layer on the frozen model."""
        args, model = self.args, self.model
        model.requires_grad_(False)
        model.draft.embed.copy_(model.embed)
        model.draft.head.copy_(model.head)
        for name, parameter in model.draft.named_parameters():
            parameter.requires_grad_(name not in ("embed", "head"))
        optimiser = Muon(model.draft, args.matrix_rate, args.other_rate)
        tokens = args.batch_tokens * args.accumulate
        batches = all_batches(self.encoder, args.seed + 1, tokens, reading_pools=0)
        for step in range(args.draft_steps):
            loss, right = draft_loss(model, next(batches))
            loss.backward()
            optimiser.step(learning_share(step, args.draft_steps, 0.6))
            if (step + 1) % 20 == 0:
                print(f"draft {step + 1} loss {loss:.4f} right {right:.4f}", flush=True)


def main() -> None:
    """Train, then export."""
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    run = Run(args)
    if args.compile:
        compile_model(run.model)
    run.train_main()
    started = time.time()
    run.train_draft()
    print(f"main {run.seconds:.0f} s, draft {time.time() - started:.0f} s, {run.tokens} tokens")
    export(run.model, run.tokenizer, args.export)


if __name__ == "__main__":
    main()
