"""Training batches: endless, seeded, grouped by length and padded on the right."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.tally.documents import Document, training_documents
from examples.tally.tokens import SampleEncoder

POOL_DOCUMENTS = 768
CUT_SHARE = 0.08
COPYING_WEIGHT = 3.0
"""What a token copied from the line above weighs in the loss, against one of the sums."""
LABEL_WEIGHTS = {"D": 2.0, "E": 3.0, "G": 10.0, "H": 15.0}
"""How many times more the tokens read after a label weigh: late items are rare."""
CLOSING_WEIGHT = 8.0
"""What a token of the total that closes the reasoning weighs: five of them, four look-ups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """`ids` [B, S]; `targets` [B, S] holds the next token where it counts, else -100.

    `weights` [B, S] says how much each target counts.
    """

    ids: Tensor
    targets: Tensor
    weights: Tensor
    lengths: Tensor


def make_sample(
    encoder: SampleEncoder, document: Document, rng: random.Random, only_reading: bool
) -> tuple[list[int], int]:
    """Give the ids of a sample and the index of the first that counts.

    A share of the samples has its reasoning cut anywhere: only the answer counts there.
    `only_reading` keeps of each line what is read from the document, and leaves out the answer.
    """
    prompt = encoder.prompt(document.text)
    if only_reading:
        lines = document.reasoning.split("\n")[:-2]
        text = "".join(line.split(" ")[0] + "\n" for line in lines) + "="
        return prompt + encoder.text_ids(text), len(prompt)
    reasoning, answer = encoder.completion(document)
    if rng.random() < CUT_SHARE:
        reasoning = reasoning[: rng.randrange(len(reasoning))]
        return [*prompt, *reasoning, *answer], len(prompt) + len(reasoning) + 1
    return [*prompt, *reasoning, *answer], len(prompt)


def token_weights(encoder: SampleEncoder, ids: list[int], reading_weight: float) -> list[float]:
    """Give each token's weight in the loss.

    Read from the document, `reading_weight`: all before a line's first space. Copied from the
    line above: what follows the first `+` of a step. The line that starts with `=` closes the
    reasoning.
    """
    weights, weight, num_pluses, before = [], reading_weight, 0, encoder.newline[0]
    labels = {encoder.text_ids(label)[0]: factor for label, factor in LABEL_WEIGHTS.items()}
    for token in ids:
        if token == encoder.equals and before == encoder.newline[0]:
            weight = CLOSING_WEIGHT
        elif token in (encoder.space, encoder.end_think):
            weight, num_pluses = 1.0, 0
        is_copied = before == encoder.plus and num_pluses == 1
        weights.append(COPYING_WEIGHT if is_copied else weight)
        num_pluses += token == encoder.plus
        if token == encoder.newline[0]:
            weight = reading_weight
        elif before == encoder.newline[0]:
            weight *= labels.get(token, 1.0)
        before = token
    return weights


def make_batch(
    encoder: SampleEncoder, samples: list[tuple[list[int], int]], reading_weight: float
) -> Batch:
    """Pad samples to one length, a multiple of 16."""
    longest = max(len(ids) for ids, _ in samples)
    width = (longest + 15) // 16 * 16
    ids = torch.full((len(samples), width), encoder.pad)
    targets = torch.full((len(samples), width), -100)
    weights = torch.ones(len(samples), width)
    for row, (sample, first) in enumerate(samples):
        ids[row, : len(sample)] = torch.tensor(sample)
        targets[row, first - 1 : len(sample) - 1] = torch.tensor(sample[first:])
        weighed = torch.tensor(token_weights(encoder, sample[first:], reading_weight))
        weights[row, first - 1 : len(sample) - 1] = weighed
    return Batch(
        ids=ids,
        targets=targets,
        weights=weights,
        lengths=torch.tensor([len(s) for s, _ in samples]),
    )


def pool_batches(
    encoder: SampleEncoder,
    seed: int,
    pool: int,
    batch_tokens: int,
    only_reading: bool,
    reading_weight: float,
) -> list[Batch]:
    """Give the batches of one pool of documents, in a shuffled order; a last small one is left out.

    Batches of one length keep padding small; a step takes several, so that it sees several lengths.
    """
    rng = random.Random(f"tally-pool-{seed}-{pool}")
    documents = itertools.islice(training_documents(seed * 1_000_000 + pool), POOL_DOCUMENTS)
    samples = [make_sample(encoder, document, rng, only_reading) for document in documents]
    samples.sort(key=lambda sample: -len(sample[0]))
    batches, group = [], []
    for sample in samples:
        if group and (len(group) + 1) * len(group[0][0]) > batch_tokens:
            batches.append(make_batch(encoder, group, reading_weight))
            group = []
        group.append(sample)
    rng.shuffle(batches)
    return batches


def all_batches(
    encoder: SampleEncoder,
    seed: int,
    batch_tokens: int,
    reading_pools: int,
    skip: int = 0,
    reading_weight: float = 1.0,
) -> Iterator[Batch]:
    """Yield batches without end, the first pools reading only; `skip` batches are passed over."""
    for pool in itertools.count():
        batches = pool_batches(
            encoder, seed, pool, batch_tokens, pool < reading_pools, reading_weight
        )
        yield from batches[skip:]
        skip = max(skip - len(batches), 0)
