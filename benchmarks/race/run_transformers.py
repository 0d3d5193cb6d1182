"""Worker: transformers' `generate`. Started by `benchmarks/engine.py`."""

import sys
import time

import torch
import transformers

from race.serve import Message, PeakWatch, anonymous_bytes, serve

PAD_ID = 0


def main() -> None:
    """Arguments: model folder, threads."""
    folder, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    before_bytes = anonymous_bytes()
    watch = PeakWatch()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",
    ).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD_ID

    def batches(prompts: list[list[int]], size: int) -> list[list[int]]:
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        return [order[start : start + size] for start in range(0, len(order), size)]

    @torch.inference_mode()
    def run(message: Message) -> Message:
        prompts, num_new = message["prompts"], message["num_new"]
        torch.set_num_threads(message["threads"])
        watch.reset()
        first = [0] * len(prompts)
        generated, start_s = 0, time.perf_counter()
        for batch in batches(prompts, message["batch"]):
            longest = max(len(prompts[index]) for index in batch)
            pads = [longest - len(prompts[index]) for index in batch]
            ids = torch.tensor(
                [[PAD_ID] * pad + prompts[index] for index, pad in zip(batch, pads, strict=True)]
            )
            mask = torch.ones_like(ids)
            for row, pad in enumerate(pads):
                mask[row, :pad] = 0
            out = model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=num_new, do_sample=False
            )
            assert out.shape[1] == longest + num_new, f"{out.shape[1] - longest} new tokens"
            generated += len(batch) * num_new
            for index, token in zip(batch, out[:, longest].tolist(), strict=True):
                first[index] = token
        seconds = time.perf_counter() - start_s
        return {
            "seconds": seconds,
            "generated": generated,
            "first": first,
            "peak_bytes": watch.peak_bytes - before_bytes,
        }

    serve({"run": run}, {"version": f"{transformers.__version__}, torch {torch.__version__}"})


if __name__ == "__main__":
    main()
