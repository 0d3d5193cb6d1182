"""DeepSeek-V4: thinking as in V3.2, another block around calls. See `encode_v4.py`."""

from batchmla.text.formats.dsml import dsml_syntax
from batchmla.text.formats.format import Format

BLOCK = "tool_calls"

FORMAT = Format(name="deepseek_v4", start="<think>", end="</think>", tools=dsml_syntax(BLOCK))
