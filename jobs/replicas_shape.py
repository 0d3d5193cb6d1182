"""What one replica asks of a Ray cluster. Pure: nodes in, sizes out."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A living node of a cluster, with the processors and GPUs it lends."""

    num_cpus: int
    num_gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaShape:
    """A replica lies on one node, or in `num_parts` equal parts of `part_ranks` ranks, each part on
    one node. Processors and GPUs are those of a part. `memory_share` is its part of the node's
    memory that the engines may use; on GPUs each engine has its own.
    """

    num_cpus: int
    num_gpus: int
    memory_share: float
    num_parts: int = 1
    part_ranks: int = 1

    @property
    def is_spread(self) -> bool:
        """Whether each rank is an actor of its own."""
        return self.num_parts > 1

    @property
    def num_ranks(self) -> int:
        """Of a replica that is spread."""
        return self.num_parts * self.part_ranks

    @property
    def total_cpus(self) -> int:
        """Of all parts."""
        return self.num_parts * self.num_cpus

    @property
    def bundle(self) -> dict[str, float]:
        """As a placement group takes it; no GPU is asked for where none is used."""
        bundle = {"CPU": float(self.num_cpus)}
        return bundle | ({"GPU": float(self.num_gpus)} if self.num_gpus else {})

    @property
    def actor(self) -> dict[str, int]:
        """What rank 0's actor takes of its bundle; every other takes the same of a spread one."""
        ranks = self.part_ranks if self.is_spread else 1
        return {"num_cpus": self.num_cpus // ranks, "num_gpus": self.num_gpus // ranks}

    @property
    def words(self) -> str:
        """For messages."""
        words = f"{self.num_cpus} CPU{'s' if self.num_cpus > 1 else ''}"
        if self.num_gpus:
            words = f"{self.num_gpus} GPU{'s' if self.num_gpus > 1 else ''} and {words}"
        return f"{self.num_parts} parts of {words}" if self.is_spread else words

    def fitting(self, nodes: Sequence[Node]) -> int:
        """How many such replicas empty nodes hold."""
        return sum(self._on(node) for node in nodes) // self.num_parts

    def _on(self, node: Node) -> int:
        many = node.num_cpus // self.num_cpus
        return min(many, node.num_gpus // self.num_gpus) if self.num_gpus else many


def shape_of(
    nodes: Sequence[Node],
    *,
    num_replicas: int,
    num_ranks: int,
    on_gpu: bool,
    wished_cpus: int | None = None,
) -> ReplicaShape:
    """On GPUs one and a processor for each rank. Without, the most processors each with which
    `num_replicas` fit, and no less than one a rank; or `wished_cpus` where a node has as many.

    A replica is spread where no node has room for all its ranks.
    """
    part_ranks = _part_ranks(nodes, num_replicas, num_ranks, on_gpu)
    num_parts = num_ranks // part_ranks
    parts = {"num_parts": num_parts, "part_ranks": part_ranks}
    if on_gpu:
        return ReplicaShape(num_cpus=part_ranks, num_gpus=part_ranks, memory_share=1.0, **parts)
    part_cpus = None if wished_cpus is None else max(1, wished_cpus // num_parts)
    if part_cpus is None or all(node.num_cpus < part_cpus for node in nodes):
        part_cpus = _most_cpus(nodes, num_replicas * num_parts, part_ranks)
    crowd = max((node.num_cpus // part_cpus for node in nodes), default=1)
    most = max(1, min(crowd, num_replicas * num_parts))
    return ReplicaShape(num_cpus=part_cpus, num_gpus=0, memory_share=1 / most, **parts)


def _part_ranks(nodes: Sequence[Node], num_replicas: int, num_ranks: int, on_gpu: bool) -> int:
    """The most ranks of a replica to lie together with which all replicas fit, else one; where
    not even one does, the most that a node has room for, since more like it may come."""
    rooms = [min(node.num_gpus, node.num_cpus) if on_gpu else node.num_cpus for node in nodes]
    largest = max(rooms, default=0)
    if largest == 0 or largest >= num_ranks:
        return num_ranks
    sizes = [each for each in range(largest, 0, -1) if num_ranks % each == 0]
    for count in (num_replicas, 1):
        for size in sizes:
            if size * sum(room // size for room in rooms) >= count * num_ranks:
                return size
    return sizes[0]


def _most_cpus(nodes: Sequence[Node], num_parts: int, num_ranks: int) -> int:
    most_cpus = max((node.num_cpus for node in nodes), default=0)
    return next(
        (
            each
            for each in range(most_cpus, num_ranks, -1)
            if sum(node.num_cpus // each for node in nodes) >= num_parts
        ),
        num_ranks,
    )
