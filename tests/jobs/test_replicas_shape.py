"""What replicas ask of a cluster."""

import pytest

from batchmla.jobs.replicas_shape import Node, shape_of


def cpu_nodes(*counts: int) -> list[Node]:
    return [Node(num_cpus=count, num_gpus=0) for count in counts]


@pytest.mark.parametrize(
    ("counts", "replicas", "cpus", "share"),
    [
        ((8,), 1, 8, 1.0),
        ((8,), 2, 4, 1 / 2),
        ((8,), 3, 2, 1 / 3),
        ((2, 2, 2), 4, 1, 1 / 2),
        ((16, 4), 5, 4, 1 / 4),
        ((0, 8), 2, 4, 1 / 2),  # a head that lends nothing
        ((1,), 4, 1, 1.0),
        ((), 2, 1, 1.0),  # nodes are yet to come
    ],
)
def test_processors_are_shared_among_all_replicas(
    counts: tuple[int, ...], replicas: int, cpus: int, share: float
) -> None:
    shape = shape_of(cpu_nodes(*counts), num_replicas=replicas, num_ranks=1, on_gpu=False)
    assert (shape.num_cpus, shape.num_gpus, shape.memory_share) == (cpus, 0, share)
    assert shape.bundle == {"CPU": float(cpus)}, "no GPU is asked for on a CPU host"


def test_a_job_in_exact_mode_keeps_its_threads_where_a_node_has_as_many() -> None:
    def cpus(*counts: int) -> tuple[int, float]:
        shape = shape_of(
            cpu_nodes(*counts), num_replicas=4, num_ranks=1, on_gpu=False, wished_cpus=4
        )
        return shape.num_cpus, shape.memory_share

    assert cpus(4) == (4, 1.0)
    assert cpus(64, 64) == (4, 1 / 4)
    assert cpus(2, 3) == (1, 1 / 3)  # the run is then refused by its manifest


def test_each_rank_has_a_processor() -> None:
    shape = shape_of(cpu_nodes(2), num_replicas=4, num_ranks=2, on_gpu=False)
    assert shape.num_cpus == 2
    assert shape.fitting(cpu_nodes(2, 5, 1)) == 3


def test_each_rank_has_a_gpu_of_one_node() -> None:
    nodes = [Node(num_cpus=4, num_gpus=0), Node(num_cpus=64, num_gpus=8)]
    shape = shape_of(nodes, num_replicas=2, num_ranks=4, on_gpu=True)
    assert shape.bundle == {"CPU": 4.0, "GPU": 4.0}
    assert shape.memory_share == 1.0 and shape.words == "4 GPUs and 4 CPUs"
    assert shape.fitting(nodes) == 2


def gpu_nodes(*counts: int) -> list[Node]:
    return [Node(num_cpus=64, num_gpus=count) for count in counts]


@pytest.mark.parametrize(
    ("counts", "ranks", "parts", "part_ranks"),
    [
        ((8, 8), 16, 2, 8),
        ((8, 8), 8, 1, 8),
        ((8,), 16, 2, 8),  # another node may come
        ((4, 2, 0), 6, 3, 2),  # threes would not fit
        ((2, 1), 3, 3, 1),
        ((8, 8, 8), 12, 2, 6),
        ((0,), 16, 1, 16),  # nodes with GPUs are yet to come
    ],
)
def test_a_replica_is_cut_into_equal_parts_where_no_node_has_room_for_it(
    counts: tuple[int, ...], ranks: int, parts: int, part_ranks: int
) -> None:
    shape = shape_of(gpu_nodes(*counts), num_replicas=1, num_ranks=ranks, on_gpu=True)
    assert (shape.num_parts, shape.num_gpus) == (parts, part_ranks)
    assert shape.bundle == {"CPU": part_ranks, "GPU": part_ranks}


def test_each_rank_of_a_spread_replica_takes_its_share_of_a_part() -> None:
    shape = shape_of(gpu_nodes(8, 8, 8, 8), num_replicas=2, num_ranks=16, on_gpu=True)
    assert shape.actor == {"num_cpus": 1, "num_gpus": 1} and shape.num_ranks == 16
    assert shape.words == "2 parts of 8 GPUs and 8 CPUs"
    assert [shape.fitting(gpu_nodes(*[8] * count)) for count in (1, 2, 3, 4)] == [0, 1, 1, 2]
    whole = shape_of(gpu_nodes(8), num_replicas=1, num_ranks=8, on_gpu=True)
    assert whole.actor == {"num_cpus": 8, "num_gpus": 8}, "its ranks are processes of one actor"


def test_parts_on_processors_share_a_nodes_memory() -> None:
    nodes = cpu_nodes(6, 6, 6)
    shape = shape_of(nodes, num_replicas=2, num_ranks=8, on_gpu=False)  # fours hold only one
    assert (shape.num_parts, shape.part_ranks, shape.num_cpus) == (4, 2, 2)
    assert shape.memory_share == 1 / 3 and shape.total_cpus == 8 and shape.fitting(nodes) == 2
    assert shape.actor == {"num_cpus": 1, "num_gpus": 0}
