"""Training batches: endless, seeded, grouped by length and padded on the right."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.tally.documents import MAX_ITEMS, Document, training_documents
from examples.tally.tokens import SampleEncoder

POOL_DOCUMENTS = 768
CUT_SHARE = 0.08


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """`ids` [B, S]; `targets` [B, S] holds the next token where it counts, else -100."""

    ids: Tensor
    targets: Tensor
    lengths: Tensor


def make_sample(
    encoder: SampleEncoder, document: Document, rng: random.Random
) -> tuple[list[int], int]:
    """Give the ids of a sample and the index of the first that counts.

    A share of the samples has its reasoning cut anywhere: only the answer counts there.
    """
    prompt = encoder.prompt(document.text)
    reasoning, answer = encoder.completion(document)
    if rng.random() < CUT_SHARE:
        reasoning = reasoning[: rng.randrange(len(reasoning))]
        return [*prompt, *reasoning, *answer], len(prompt) + len(reasoning) + 1
    return [*prompt, *reasoning, *answer], len(prompt)


def make_batch(samples: list[tuple[list[int], int]], pad: int) -> Batch:
    """Pad samples to one length, a multiple of 16."""
    longest = max(len(ids) for ids, _ in samples)
    width = (longest + 15) // 16 * 16
    ids = torch.full((len(samples), width), pad)
    targets = torch.full((len(samples), width), -100)
    for row, (sample, first) in enumerate(samples):
        ids[row, : len(sample)] = torch.tensor(sample)
        targets[row, first - 1 : len(sample) - 1] = torch.tensor(sample[first:])
    return Batch(ids=ids, targets=targets, lengths=torch.tensor([len(s) for s, _ in samples]))


def pool_batches(
    encoder: SampleEncoder, seed: int, pool: int, batch_tokens: int, max_items: int = MAX_ITEMS
) -> list[Batch]:
    """Give the batches of one pool of documents, in a shuffled order; a last small one is left out.

    The compiled parts of the model hold for batches of more than 4,096 tokens.
    """
    rng = random.Random(f"tally-pool-{seed}-{pool}")
    documents = itertools.islice(
        training_documents(seed * 1_000_000 + pool, max_items), POOL_DOCUMENTS
    )
    samples = [make_sample(encoder, document, rng) for document in documents]
    samples.sort(key=lambda sample: -len(sample[0]))
    batches, group = [], []
    for sample in samples:
        if group and (len(group) + 1) * len(group[0][0]) > batch_tokens:
            batches.append(make_batch(group, encoder.pad))
            group = []
        group.append(sample)
    rng.shuffle(batches)
    return batches


def all_batches(
    encoder: SampleEncoder, seed: int, batch_tokens: int, easy_pools: int, skip: int = 0
) -> Iterator[Batch]:
    """Yield batches without end, the first pools with few items; `skip` batches are passed over."""
    for pool in itertools.count():
        max_items = 2 if pool < easy_pools else MAX_ITEMS
        batches = pool_batches(encoder, seed, pool, batch_tokens, max_items)
        yield from batches[skip:]
        skip = max(skip - len(batches), 0)
