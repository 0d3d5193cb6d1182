"""In which order waiting prompts should reach the engine. Pure; an advice, the scheduler decides.

Long rows first, so that no long row is left alone at the end; rows that share a prefix side by
side, so that the second finds the first one's pages. Length counts in powers of two, within one
prefixes decide.
"""

from collections.abc import Sequence

from batchmla.core import Prompt

KEY_TOKENS = 1024  # of a prompt's start are compared


def packed_order(prompts: Sequence[Prompt], output_tokens: int) -> list[int]:
    """Positions of `prompts` in the order to admit them; each is expected to add `output_tokens`.

    A group is a run of neighbours (sorted by their ids) of which each shares at least half of the
    longer prompt with the next; it stays together and counts as long as its longest row.
    """
    keys = [prompt.token_ids[:KEY_TOKENS].tobytes() for prompt in prompts]
    lengths = [len(prompt.token_ids) for prompt in prompts]
    groups: list[list[int]] = []
    longest: list[int] = []  # tokens of each group's longest prompt
    key_before, length_before = b"", 0
    for position in sorted(range(len(keys)), key=keys.__getitem__):
        key, length = keys[position], lengths[position]
        longer = length if length > length_before else length_before
        shared_bytes = 4 * min(longer // 2, KEY_TOKENS)
        if groups and shared_bytes and key_before[:shared_bytes] == key[:shared_bytes]:
            groups[-1].append(position)
            longest[-1] = max(longest[-1], length)
        else:
            groups.append([position])
            longest.append(length)
        key_before, length_before = key, length
    classes = [(length + output_tokens).bit_length() for length in longest]
    # stable: neighbours by prefix stay neighbours
    order = sorted(range(len(groups)), key=classes.__getitem__, reverse=True)
    return [position for place in order for position in groups[place]]
