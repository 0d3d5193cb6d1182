"""Worker: this project's engine under the job's packer. Started by `benchmarks/peers.py`."""

import sys
import time

import numpy as np
import torch
from packing_sim import make_packer

from batchmla.core import EngineOptions, Prompt, SamplingParams
from batchmla.engine import engine as engines
from batchmla.engine.engine import load_engine, plan_engine
from batchmla.engine.hardware import detect
from batchmla.jobs.collector import rare_collections
from batchmla.weights.folder import find_model, read_config
from race.op_times import OpTimes
from race.serve import Message, PeakWatch, anonymous_bytes, serve


def _prompt(index: int, ids: list[int], num_new: int) -> Prompt:
    params = SamplingParams(temperature=0.0, max_tokens=num_new)
    return Prompt(
        row_id=str(index), index=index, params=params, token_ids=np.asarray(ids, np.int32)
    )


def main() -> None:
    """Arguments: model folder, threads, longest sequence, 1 to time every op."""
    folder, threads, max_model_len, is_profiled = sys.argv[1], *map(int, sys.argv[2:5])
    torch.set_num_threads(threads)
    before_bytes = anonymous_bytes()
    watch = PeakWatch()
    times = OpTimes()
    if is_profiled:
        load_ops = engines.kernels.load
        engines.kernels.load = lambda *args, **kinds: times.watch(load_ops(*args, **kinds))
    options = EngineOptions(
        model=folder, device="cpu", dtype="bfloat16", max_model_len=max_model_len
    )
    plan = plan_engine(read_config(find_model(folder)), options, detect("cpu"))
    engine = load_engine(options)
    load_peak_bytes = watch.peak_bytes - before_bytes

    def run(message: Message) -> Message:
        watch.reset()
        times.entries.clear()
        rows = zip(message["prompts"], message["num_new"], strict=True)
        prompts = [_prompt(index, ids, count) for index, (ids, count) in enumerate(rows)]
        before, completions = engine.stats(), []
        with rare_collections():
            start_s = time.perf_counter()
            packer = make_packer(prompts, is_packed=True)
            for completion in engine.generate(packer):
                packer.learn(completion)
                packer.finish([completion])
                completions.append(completion)
            seconds = time.perf_counter() - start_s
        after = engine.stats()
        completions.sort(key=lambda completion: completion.index)
        counts = [len(completion.token_ids) for completion in completions]
        assert counts == message["num_new"], f"wrong lengths: {counts}"
        return {
            "seconds": seconds,
            "generated": sum(counts),
            "first": [int(completion.token_ids[0]) for completion in completions],
            "steps": after.steps - before.steps,
            "computed": after.computed_tokens - before.computed_tokens,
            "cached": after.cached_tokens - before.cached_tokens,
            "preemptions": after.preemptions - before.preemptions,
            "peak_bytes": watch.peak_bytes - before_bytes,
            "profile": times.table(seconds) if is_profiled else None,
        }

    hello = {
        "version": f"torch {torch.__version__}",
        "plan": {
            "weights_bytes": plan.memory.weights_bytes,
            "workspace_bytes": plan.memory.workspace_bytes,
            "pool_bytes": plan.kv_pool_bytes,
            "page_bytes": plan.layout.page_bytes,
            "page_tokens": plan.layout.page_tokens,
            "max_num_seqs": plan.max_num_seqs,
            "max_batched_tokens": plan.max_batched_tokens,
        },
        "load_peak_bytes": load_peak_bytes,
    }
    serve({"run": run}, hello)


if __name__ == "__main__":
    main()
