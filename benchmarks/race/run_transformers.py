"""Worker: transformers, by `generate` over padded batches or by its continuous batching, which is
what `generate_batch` is made of. Started by `benchmarks/peers.py`.
"""

import sys
import time
from typing import Any

import torch
import transformers

from race.serve import Message, PeakWatch, anonymous_bytes, serve

PAD_ID = 0
PAGE_TOKENS = 256
CACHE_BYTES = 2 << 30
MOST_TOGETHER = 64


def batches(prompts: list[list[int]], num_new: list[int], size: int) -> list[list[int]]:
    """Rows of like lengths together: the completion counts first, as all wait for the longest."""
    order = sorted(range(len(prompts)), key=lambda row: (num_new[row], len(prompts[row])))
    return [order[start : start + size] for start in range(0, len(order), size)]


class Peer:
    """The model, and its continuous batching once it was asked for."""

    def __init__(self, folder: str) -> None:
        config = transformers.AutoConfig.from_pretrained(folder)
        has_experts = getattr(config, "n_routed_experts", None) is not None
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.bfloat16,
            attn_implementation="sdpa",
            **({"experts_implementation": "grouped_mm"} if has_experts else {}),
        ).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = PAD_ID

    @torch.inference_mode()
    def padded(self, prompts: list[list[int]], num_new: list[int], size: int) -> list[list[int]]:
        """`generate` batch by batch; what a row gets beyond its own length is thrown away."""
        found: list[list[int]] = [[]] * len(prompts)
        for batch in batches(prompts, num_new, size):
            longest, most = max(len(prompts[i]) for i in batch), max(num_new[i] for i in batch)
            ids = torch.full((len(batch), longest), PAD_ID)
            mask = torch.zeros_like(ids)
            for row, index in enumerate(batch):
                ids[row, longest - len(prompts[index]) :] = torch.tensor(prompts[index])
                mask[row, longest - len(prompts[index]) :] = 1
            out = self.model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=most, do_sample=False
            )
            for index, tokens in zip(batch, out[:, longest:].tolist(), strict=True):
                found[index] = tokens[: num_new[index]]
        return found

    def continuous(self, prompts: list[list[int]], num_new: list[int]) -> list[list[int]]:
        """All rows at once; raises where the model does not support it."""
        config = self.model.config
        row_bytes = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        settings = transformers.ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=CACHE_BYTES // (PAGE_TOKENS * row_bytes),
            max_batch_tokens=1024,
            max_requests_per_batch=MOST_TOGETHER,
        )
        greedy = transformers.GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=PAD_ID, max_new_tokens=max(num_new)
        )
        found: dict[int, list[int]] = {}
        with self.model.continuous_batching_context_manager(
            generation_config=greedy, continuous_batching_config=settings, warmup=False
        ) as manager:
            for index, (ids, count) in enumerate(zip(prompts, num_new, strict=True)):
                name = str(index)
                manager.add_request(ids, request_id=name, max_new_tokens=count, eos_token_id=-1)
            while len(found) < len(prompts):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(result.error)
                    found[int(result.request_id)] = list(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError("continuous batching ended before its rows did")
        return [found[index] for index in range(len(prompts))]


def main() -> None:
    """Arguments: model folder, threads."""
    folder, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    before_bytes = anonymous_bytes()
    watch = PeakWatch()
    peer = Peer(folder)

    def run(message: Message) -> Message:
        prompts, num_new = message["prompts"], message["num_new"]
        watch.reset()
        start_s = time.perf_counter()
        if message["mode"] == "generate_batch":
            found = peer.continuous(prompts, num_new)
        else:
            found = peer.padded(prompts, num_new, message["batch"])
        seconds = time.perf_counter() - start_s
        counts = [len(tokens) for tokens in found]
        assert counts == num_new, f"wrong lengths: {counts}"
        return {
            "seconds": seconds,
            "generated": sum(counts),
            "first": [tokens[0] for tokens in found],
            "peak_bytes": watch.peak_bytes - before_bytes,
        }

    def attempt(message: Message) -> Message:
        """Whether continuous batching runs at all: its error, if not."""
        try:
            return run(message | {"mode": "generate_batch"})
        except Exception as error:
            words = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return {"refusal": words[:300]}

    hello = {"version": f"{transformers.__version__}, torch {torch.__version__}"}
    serve({"run": run, "attempt": attempt}, hello)


if __name__ == "__main__":
    main()
