"""DeepSeek-V3.2: thinking as in V3.1, calls in DSML. The prompt's encoder is `encode_v32.py`."""

from batchmla.text.formats.dsml import dsml_syntax
from batchmla.text.formats.format import Format

BLOCK = "function_calls"

FORMAT = Format(name="deepseek_v32", start="<think>", end="</think>", tools=dsml_syntax(BLOCK))
