"""Greedy answers to held-out documents in plain torch: share of exact ones, by thinking budget.

python -m examples.tally.evaluate --model batchmla/builtin/tally --documents 1000
python -m examples.tally.evaluate --model batchmla/builtin/tally --budgets 0 32 64 128 256
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.tally.documents import Document, heldout_documents
from examples.tally.export import load_model
from examples.tally.model import Attention, Block, Tally, rms_norm
from examples.tally.tokens import SampleEncoder

MAX_NEW_TOKENS = 640


class Decoder:
    """Right-padded sequences over a cache of latents and rotated keys, in absorbed form."""

    def __init__(self, model: Tally, dtype: torch.dtype, rows: int, positions: int) -> None:
        c = model.config
        self.model, self.dtype = model, dtype
        self.caches = [
            torch.zeros(rows, positions, c.kv_rank + c.rope, dtype=dtype) for _ in model.blocks
        ]

    def run(self, ids: Tensor, starts: Tensor) -> Tensor:
        """Feed ids [B, S] at positions starts[b] + s; give the final states [B, S, M]."""
        model = self.model
        positions = starts.unsqueeze(1) + torch.arange(ids.shape[1])
        cos, sin = model.angles(positions)
        is_seen = torch.arange(int(positions.max()) + 1) <= positions.unsqueeze(-1)
        rows = torch.arange(len(ids)).unsqueeze(1)
        x = F.embedding(ids, model.embed).to(self.dtype)
        for block, cache in zip(model.blocks, self.caches, strict=True):
            assert isinstance(block, Block)
            h = rms_norm(x, block.attention_norm, block.eps)
            cache[rows, positions] = torch.cat(block.attention.latents(h, cos, sin), dim=-1)
            q = block.attention.queries(h, cos, sin)
            z = absorbed(block.attention, q, cache[:, : is_seen.shape[-1]], is_seen)
            x, _ = block.after(x, z)
        return rms_norm(x, model.norm, model.config.eps)

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these."""
        self.caches = [cache[rows] for cache in self.caches]


def absorbed(attention: Attention, q: Tensor, cache: Tensor, is_seen: Tensor) -> Tensor:
    """Attend q [B, S, H, D] to a cache [B, K, kv_rank + rope] where is_seen [B, S, K].

    Gives [B, H, S, value].
    """
    c = attention.config
    up = attention.kv_b.weight.to(q.dtype).view(c.heads, c.nope + c.value, c.kv_rank)
    q_latent = torch.einsum("bshn,hnr->bshr", q[..., : c.nope], up[:, : c.nope])
    q_cache = torch.cat([q_latent, q[..., c.nope :]], dim=-1).flatten(1, 2)  # [B, S*H, rank+rope]
    scores = torch.bmm(q_cache * attention.scale, cache.mT).float().unflatten(1, (-1, c.heads))
    scores = scores.masked_fill(~is_seen.unsqueeze(2), -torch.inf)
    chosen = scores.softmax(-1).to(q.dtype).flatten(1, 2)
    z = torch.bmm(chosen, cache[..., : c.kv_rank]).unflatten(1, (-1, c.heads))
    return torch.einsum("bshr,hvr->bhsv", z, up[:, c.nope :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the model wrote for one prompt."""

    ids: list[int]
    thinking_tokens: int


@torch.inference_mode()
def complete(
    model: Tally,
    encoder: SampleEncoder,
    prompts: list[list[int]],
    budget: int | None,
    dtype: torch.dtype,
) -> list[Completion]:
    """Continue prompts greedily; after `budget` tokens of reasoning its end marker is forced."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.full((len(prompts), int(lengths.max())), encoder.pad)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    decoder = Decoder(model, dtype, len(prompts), int(lengths.max()) + MAX_NEW_TOKENS + 1)
    states = decoder.run(ids, torch.zeros_like(lengths))
    states = states[torch.arange(len(prompts)), lengths - 1]
    head = model.head.to(dtype)
    written: list[list[int]] = [[] for _ in prompts]
    thinking = [0] * len(prompts)
    alive = list(range(len(prompts)))
    is_thinking = torch.ones(len(prompts), dtype=torch.bool)
    for count in range(MAX_NEW_TOKENS):
        tokens = F.linear(states, head).float().argmax(-1)
        if budget is not None and count == budget:
            tokens = torch.where(is_thinking, encoder.end_think, tokens)
        is_thinking = is_thinking & (tokens != encoder.end_think)
        for row, token, thinks in zip(alive, tokens.tolist(), is_thinking.tolist(), strict=True):
            written[row].append(token)
            thinking[row] += thinks
        kept = (tokens != encoder.eos).nonzero().squeeze(1)
        if len(kept) < len(alive):
            decoder.keep(kept)
            alive = [alive[i] for i in kept.tolist()]
            tokens, is_thinking, lengths = tokens[kept], is_thinking[kept], lengths[kept]
        if not alive:
            break
        states = decoder.run(tokens.unsqueeze(1), lengths).squeeze(1)
        lengths = lengths + 1
    return [
        Completion(ids=ids, thinking_tokens=tokens)
        for ids, tokens in zip(written, thinking, strict=True)
    ]


def answer_text(encoder: SampleEncoder, completion: Completion) -> str:
    """Give the text between the end of the reasoning and the end of the sentence."""
    ids = completion.ids
    if encoder.end_think not in ids or ids[-1] != encoder.eos:
        return ""
    first = len(ids) - ids[::-1].index(encoder.end_think)
    return encoder.tokenizer.decode(ids[first:-1], skip_special_tokens=False)


def answer_all(
    model: Tally,
    encoder: SampleEncoder,
    documents: list[Document],
    budget: int | None,
    dtype: torch.dtype,
    rows: int,
) -> list[tuple[Document, Completion]]:
    """Complete all documents, those of like length together."""
    order = sorted(documents, key=lambda document: len(document.items))
    results = []
    for first in range(0, len(order), rows):
        chunk = order[first : first + rows]
        prompts = [encoder.prompt(document.text) for document in chunk]
        results += zip(chunk, complete(model, encoder, prompts, budget, dtype), strict=True)
    return results


@torch.inference_mode()
def draft_share(
    model: Tally, encoder: SampleEncoder, documents: list[Document], dtype: torch.dtype
) -> float:
    """Give the share of the right text's tokens that the draft layer predicts."""
    right, counted = 0, 0
    for document in documents:
        prompt = encoder.prompt(document.text)
        reasoning, answer = encoder.completion(document)
        ids = torch.tensor([prompt + reasoning + answer])
        states, _ = model(ids, dtype)
        cos, sin = model.angles(torch.arange(ids.shape[1] - 1).unsqueeze(0))
        drafted = model.draft(states[:, :-1], ids[:, 1:], cos, sin)
        tokens = F.linear(drafted, model.draft.head.to(dtype)).float().argmax(-1)[0]
        wanted = ids[0, 2:]
        right += int((tokens[:-1] == wanted)[len(prompt) - 1 :].sum())
        counted += len(wanted) - len(prompt) + 1
    return right / counted


def main() -> None:
    """Print the shares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("batchmla/builtin/tally"))
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--budgets", type=int, nargs="*", default=[])
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = torch.float32 if args.float32 else torch.bfloat16
    model, tokenizer = load_model(args.model)
    encoder = SampleEncoder(tokenizer)
    documents = list(heldout_documents(args.seed, args.documents))
    for budget in args.budgets or [None]:
        started = time.time()
        results = answer_all(model, encoder, documents, budget, dtype, args.rows)
        seconds = time.time() - started
        wrong = [(d, c) for d, c in results if answer_text(encoder, c) != d.answer]
        written = sum(len(c.ids) for _, c in results)
        print(
            f"budget {budget} exact {1 - len(wrong) / len(results):.4f} of {len(results)} "
            f"tokens {written} thinking {sum(c.thinking_tokens for _, c in results)} "
            f"seconds {seconds:.0f}",
            flush=True,
        )
        for document, completion in wrong[: args.show]:
            print(document.text, document.reasoning + document.answer, sep="\n--\n")
            print("got:", tokenizer.decode(completion.ids, skip_special_tokens=False), "\n=====")
    share = draft_share(model, encoder, documents[:100], dtype)
    print(f"draft layer right on {share:.4f} of the tokens of 100 documents")


if __name__ == "__main__":
    main()
