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
    by_prefix = sorted(range(len(keys)), key=keys.__getitem__)
    groups: list[list[int]] = []
    for place, position in enumerate(by_prefix):
        before = by_prefix[place - 1]
        longer = max(len(prompts[position].token_ids), len(prompts[before].token_ids))
        shared_bytes = 4 * min(longer // 2, KEY_TOKENS)
        if place and shared_bytes and keys[before][:shared_bytes] == keys[position][:shared_bytes]:
            groups[-1].append(position)
        else:
            groups.append([position])

    def length_class(group: list[int]) -> int:
        longest = max(len(prompts[position].token_ids) for position in group)
        return (longest + output_tokens).bit_length()

    groups.sort(key=length_class, reverse=True)  # stable: neighbours by prefix stay neighbours
    return [position for group in groups for position in group]
