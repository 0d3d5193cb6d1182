"""DeepSeek-R1 and its distillations: the prompt opens `<think>`, or the model does."""

from batchmla.text.formats.format import Format

FORMAT = Format(name="deepseek_r1", start="<think>", end="</think>")
