"""The examples with Ray: a Ray Data pipeline, a manifest for KubeRay, Slurm on several nodes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import yaml

from batchmla.api import Engine
from batchmla.jobs.spec import load_spec

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TEXTS = [f"{n + 1} pens at 2.50." for n in range(6)]


# Ray Data


@pytest.fixture
def ray_here() -> Iterator[Any]:
    if find_spec("ray") is None:
        pytest.skip("ray is not installed")
    import ray
    from ray_nodes import ray_nodes

    with ray_nodes(2) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield ray
        ray.shutdown()


def test_a_ray_data_pipeline_answers_as_the_engine_does(
    ray_here: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"n": range(6), "text": TEXTS}), tmp_path / "in.parquet")
    sys.path.insert(0, str(EXAMPLES / "ray_data"))
    try:
        import answers
    finally:
        sys.path.pop(0)
    ray_here.cloudpickle.register_pickle_by_value(answers)
    words = [str(tmp_path / "in.parquet"), str(tmp_path / "out"), "--rows", "3"]
    monkeypatch.setattr(sys, "argv", ["answers.py", *words])
    answers.main()
    found = ds.dataset(tmp_path / "out").to_table().sort_by("n").to_pylist()
    assert [row["text"] for row in found] == TEXTS
    with Engine("builtin:tally") as engine:
        expected = engine.generate(TEXTS, {"temperature": 0, "max_tokens": 400})
    same = sum(row["content"] == one.content for row, one in zip(found, expected, strict=True))
    assert same >= 5, "a near-tie may fall the other way in another batch"
    assert all(row["error"] is None and row["finish_reason"] for row in found)


# KubeRay: the manifest is not applied anywhere, but it must agree with itself


def manifest() -> tuple[dict[str, Any], dict[str, Any]]:
    text = (EXAMPLES / "kuberay" / "rayjob.yaml").read_text()
    config, job = yaml.safe_load_all(text)
    return config, job


def pods(job: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each group with its pod's specification."""
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield group, group["template"]["spec"]


def test_the_manifest_has_the_form_of_a_ray_job() -> None:
    config, job = manifest()
    assert (config["apiVersion"], config["kind"]) == ("v1", "ConfigMap")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert set(job["spec"]) <= {
        "entrypoint", "submissionMode", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished",
        "backoffLimit", "rayClusterSpec",
    }  # fmt: skip
    images = set()
    for group, pod in pods(job):
        volumes = {volume["name"] for volume in pod["volumes"]}
        (container,) = pod["containers"]
        images.add(container["image"])
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    assert len(images) == 1, "all pods have the same packages"


def test_the_job_in_the_manifest_is_sound_and_fits_its_pods(tmp_path: Path) -> None:
    config, job = manifest()
    path = tmp_path / "job.yaml"
    path.write_text(config["data"]["job.yaml"])
    spec = load_spec(path, []).spec
    (head, head_pod), (workers, worker_pod) = pods(job)
    mounts = {m["name"]: m["mountPath"] for m in head_pod["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in head_pod["volumes"]}
    (name,) = [n for n, v in volumes.items() if v.get("configMap") == {"name": "answers-job"}]
    assert job["spec"]["entrypoint"] == f"batchmla run {mounts[name]}/job.yaml"
    assert spec.executor.kind == "ray" and spec.executor.address == "auto"
    fewest, most = workers["minReplicas"], workers["maxReplicas"]
    assert spec.executor.bounds == (fewest, most)
    assert spec.model.parallel != "auto" and spec.model.device == "cuda"
    gpus = worker_pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == workers["rayStartParams"]["num-gpus"] == str(spec.model.parallel.tensor)
    assert head["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
    assert spec.output.path.startswith("s3://"), "the head's disk ends with the head"


# Slurm: srun, scontrol, ray and batchmla are stand-ins on the path, bash is real


def run_sbatch(folder: Path, code: int, *words: str) -> tuple[int, list[str]]:
    """The exit code and what was called, in order."""
    log = folder / "log"
    programs = {
        "srun": 'while [[ $1 == --* ]]; do shift; done\nexec "$@"',
        "scontrol": f'echo "scontrol $*" >> {log}\n[ "$1" = show ] && printf "n1\\nn2\\n"; true',
        "ray": f'echo "ray $*" >> {log}\n[ "$1" = start ] && exec sleep 60; true',
        "batchmla": f'echo "batchmla $*" >> {log}\nexit {code}',
    }
    for name, script in programs.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "42", "SLURM_JOB_NUM_NODES": "3",
        "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_CPUS_PER_TASK": "8",
    }  # fmt: skip
    script = str(EXAMPLES / "slurm" / "replicas.sbatch")
    done = subprocess.run(["bash", script, *words], env=environment, timeout=60, check=False)
    return done.returncode, log.read_text().splitlines() if log.exists() else []


def test_slurms_script_for_several_nodes_is_sound() -> None:
    script = EXAMPLES / "slurm" / "replicas.sbatch"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


@pytest.mark.parametrize(("code", "is_queued"), [(0, False), (2, False), (3, True), (143, False)])
def test_slurm_starts_a_head_its_workers_and_the_job(
    tmp_path: Path, code: int, is_queued: bool
) -> None:
    found, calls = run_sbatch(tmp_path, code, "job.yaml")
    assert found == code
    starts = sorted(call for call in calls if call.startswith("ray start"))
    rest = "--num-cpus 8 --disable-usage-stats --block"
    assert starts == [
        f"ray start --address=n1:20042 {rest}",
        f"ray start --head --port=20042 --include-dashboard=false {rest}",
    ]
    assert "batchmla run job.yaml --set executor.address=n1:20042" in calls
    assert ("scontrol requeue 42" in calls) == is_queued


def test_slurms_script_for_several_nodes_asks_for_the_job_file(tmp_path: Path) -> None:
    assert run_sbatch(tmp_path, 0) == (2, [])
