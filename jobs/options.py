"""The engine's part of a job file as `EngineOptions`."""

from pathlib import Path

from batchmla.core import EngineOptions
from batchmla.jobs.settings import ParallelSettings
from batchmla.jobs.spec import JobSpec


def engine_options(spec: JobSpec, folder: Path) -> EngineOptions:
    """What the job asks of an engine for the model in `folder`; "auto" sizes become None."""
    model, engine = spec.model, spec.engine
    sizes = ParallelSettings() if isinstance(model.parallel, str) else model.parallel
    return EngineOptions(
        model=str(folder),
        device=model.device,
        dtype=model.dtype,
        kv_cache_dtype=model.kv_cache_dtype,
        load_format=model.load_format,
        max_model_len=_size(model.max_model_len),
        memory_utilization=model.memory_utilization,
        max_num_seqs=_size(engine.max_num_seqs),
        max_batched_tokens=_size(engine.max_batched_tokens),
        block_size=_size(engine.block_size),
        prefix_caching=engine.prefix_caching,
        deterministic=engine.deterministic,
        tensor_parallel=sizes.tensor,
        expert_parallel=sizes.expert,
        attention_data=sizes.attention_data,
        is_parallel_auto=model.parallel == "auto",
    )


def _size(value: int | str) -> int | None:
    return value if isinstance(value, int) else None
