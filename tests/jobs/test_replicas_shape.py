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
