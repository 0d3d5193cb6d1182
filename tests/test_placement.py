"""Who holds what of a model that is spread over ranks."""

from dataclasses import replace

import pytest

from batchmla.errors import JobError
from batchmla.placement import Placement


@pytest.mark.parametrize(
    ("tensor", "expert", "attention_data"),
    [(1, 1, 1), (4, 1, 1), (4, 4, 1), (1, 4, 4), (1, 1, 4), (2, 4, 2), (2, 2, 2), (2, 2, 4),
     (2, 4, 4), (2, 8, 4), (4, 1, 2)],
)  # fmt: skip
def test_all_ranks_together_hold_every_expert_once(
    tensor: int, expert: int, attention_data: int
) -> None:
    held = [0] * 16 * 32  # experts by features
    for rank in range(tensor * attention_data):
        mine = Placement(tensor=tensor, expert=expert, attention_data=attention_data, rank=rank)
        assert mine.num_ranks == tensor * attention_data
        assert mine.group * tensor + mine.tensor_rank == rank
        assert len(mine.expert_ids(16)) == mine.local_experts(16) == 16 // expert
        features = mine.local_expert_features(32)
        for expert_id in mine.expert_ids(16):
            first = expert_id * 32 + mine.expert_share * features
            for place in range(first, first + features):
                held[place] += 1
    assert held == [1] * len(held)


def test_eight_gpus_hold_32_whole_experts_each() -> None:
    last = Placement(tensor=1, expert=8, attention_data=8, rank=7)
    assert (last.num_ranks, last.expert_tensor) == (8, 1)
    assert last.expert_ids(256) == range(224, 256)


def test_groups_cut_whole_units_among_them_or_nothing() -> None:
    place = Placement(tensor=2, expert=8, attention_data=4)
    assert place.common(place.local(129_280)) == 4
    assert place.common(18_432 // 2, 128) == 4
    assert place.common(18_432 // 2, 1024) == 1, "nine units"
    assert place.common(6) == 1
    assert Placement(tensor=8).common(64) == 1
    assert replace(place, has_whole_groups=True).common(64) == 1


def test_sizes_that_make_no_placement_are_refused_by_name() -> None:
    with pytest.raises(JobError, match=r"model\.parallel\.expert is 3.* must be 1, 2, 4 or 8"):
        Placement(tensor=2, expert=3, attention_data=4)
    with pytest.raises(JobError, match=r"model\.parallel\.attention_data is 0"):
        Placement(attention_data=0)
    with pytest.raises(JobError, match="10 experts cannot be dealt to 4 holders"):
        Placement(tensor=4, expert=4).local_experts(10)
    with pytest.raises(JobError, match="30 expert features cannot be split over 4 devices"):
        Placement(tensor=4).local_expert_features(30)
