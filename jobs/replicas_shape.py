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
    """A replica lies on one node. `memory_share` is its part of the node's memory that the
    engines may use; on GPUs each engine has its own.
    """

    num_cpus: int
    num_gpus: int
    memory_share: float

    @property
    def bundle(self) -> dict[str, float]:
        """As a placement group takes it; no GPU is asked for where none is used."""
        bundle = {"CPU": float(self.num_cpus)}
        return bundle | ({"GPU": float(self.num_gpus)} if self.num_gpus else {})

    @property
    def words(self) -> str:
        """For messages."""
        cpus = f"{self.num_cpus} CPU{'s' if self.num_cpus > 1 else ''}"
        if not self.num_gpus:
            return cpus
        return f"{self.num_gpus} GPU{'s' if self.num_gpus > 1 else ''} and {cpus}"

    def fitting(self, nodes: Sequence[Node]) -> int:
        """How many such replicas empty nodes hold."""
        return sum(self._on(node) for node in nodes)

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
    """
    if on_gpu:
        return ReplicaShape(num_cpus=num_ranks, num_gpus=num_ranks, memory_share=1.0)
    if wished_cpus is None or all(node.num_cpus < wished_cpus for node in nodes):
        wished_cpus = _most_cpus(nodes, num_replicas, num_ranks)
    crowd = max((node.num_cpus // wished_cpus for node in nodes), default=1)
    most = max(1, min(crowd, num_replicas))
    return ReplicaShape(num_cpus=wished_cpus, num_gpus=0, memory_share=1 / most)


def _most_cpus(nodes: Sequence[Node], num_replicas: int, num_ranks: int) -> int:
    most_cpus = max((node.num_cpus for node in nodes), default=0)
    return next(
        (
            each
            for each in range(most_cpus, num_ranks, -1)
            if sum(node.num_cpus // each for node in nodes) >= num_replicas
        ),
        num_ranks,
    )
