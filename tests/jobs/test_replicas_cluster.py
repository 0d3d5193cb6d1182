"""What can be refused before a cluster is joined, and replicas that do not belong to a job."""

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from published import DEEPSEEK_R1

from batchmla.engine.hardware import parse_hardware
from batchmla.errors import JobError
from batchmla.jobs.manifest import versions
from batchmla.jobs.replicas_actor import ReplicaFacts
from batchmla.jobs.replicas_cluster import require_ray
from batchmla.jobs.replicas_seams import _refusal, settled_ranks
from batchmla.jobs.settings import InputSettings, ModelSettings, OutputSettings, ParallelSettings
from batchmla.jobs.spec import JobSpec

FILES = {"config.json": "a", "model.safetensors": "b"}
NUMERICS = {"threads": "4", "dtype": "bfloat16"}


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(JobError, match=r'pip install "batchmla\[ray\]"'):
        require_ray("auto")


def test_a_ray_clients_address_is_refused_with_the_way_out() -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    with pytest.raises(JobError, match=r"ray://head:10001 is a Ray client's address; run batchmla"):
        require_ray("ray://head:10001")
    require_ray("10.0.0.1:6379")


def refusal(files: dict[str, str], numerics: dict[str, str], is_exact: bool = True) -> str | None:
    facts = ReplicaFacts(effective={}, numerics=numerics, model_files=files, node="10.0.0.7")
    return _refusal(facts, model_files=FILES, numerics=NUMERICS, is_exact=is_exact)


def test_a_replica_with_other_files_of_the_model_is_refused() -> None:
    same = {**NUMERICS, **versions()}
    assert refusal(FILES, same) is None
    found = refusal(FILES | {"model.safetensors": "c"}, same, is_exact=False)
    assert found is not None and "10.0.0.7" in found and "model.safetensors differs" in found


def test_a_replica_that_computes_otherwise_is_refused_in_exact_mode_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = {**NUMERICS, **versions(), "threads": "8"}
    words = "threads is 8 on 10.0.0.7 and 4 here"
    assert refusal(FILES, other) == f"engine.deterministic needs equal nodes, but {words}"
    with caplog.at_level(logging.WARNING):
        assert refusal(FILES, other, is_exact=False) is None
    assert words in caplog.text
    lacks = {**NUMERICS, **versions(), "torch": "1.0"}
    assert "torch is 1.0" in (refusal(FILES, lacks) or "")


def test_every_process_of_a_replica_is_looked_at() -> None:
    same = {**NUMERICS, **versions()}
    good, bad = (
        ReplicaFacts(effective={}, numerics=same, model_files=files, node=node)
        for files, node in ((FILES, "10.0.0.7"), (FILES | {"config.json": "c"}, "10.0.0.8"))
    )
    facts = replace(good, others=(good, bad))
    found = _refusal(facts, model_files=FILES, numerics=NUMERICS, is_exact=True)
    assert found is not None and "10.0.0.8" in found and "config.json differs" in found
    assert facts.nodes == "10.0.0.7 and 10.0.0.8"


@pytest.mark.parametrize(
    ("machine", "num_nodes", "sizes"),
    [("8xH200", 4, None), ("8xH100", 4, 16), ("8xH100", 1, None)],
)
def test_auto_takes_the_fewest_nodes_on_which_the_model_fits(
    tmp_path: Path, machine: str, num_nodes: int, sizes: int | None
) -> None:
    """R1 in fp8 has 642 GiB of weights: eight GPUs of 140 GiB hold it, eight of 79 do not."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_R1))
    spec = JobSpec(
        model=ModelSettings(path=str(tmp_path), device="cuda", parallel="auto"),
        input=InputSettings(path="in.jsonl"),
        output=OutputSettings(path="out"),
    )
    hardware = replace(parse_hardware(machine), is_local=True)
    settled, num_ranks = settled_ranks(spec, tmp_path, hardware, num_nodes)
    if sizes is None:
        assert settled.model.parallel == "auto" and num_ranks <= 8
    else:
        named = settled.model.parallel
        assert isinstance(named, ParallelSettings) and num_ranks == sizes
        assert named.tensor * named.attention_data == sizes
