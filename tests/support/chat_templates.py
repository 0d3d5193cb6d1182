"""Chat templates of the families, written anew from what their prompts look like.

They make the same text as the published ones for conversations of the kinds that `conversations.py`
draws; the wording of tool sections is ours. Each comes with its vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path

import vocabulary

R1 = """{%- set calls = namespace(open=false, first=true) -%}
{{- bos_token -}}
{%- for m in messages if m.role == 'system' -%}{%- if loop.last -%}{{- m.content -}}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}
    {%- set calls.open = false -%}
    {{- '<｜User｜>' ~ m.content -}}
  {%- elif m.role == 'tool' -%}
    {{- '\\n' if calls.open else '<｜tool▁outputs▁begin｜>' -}}
    {{- '<｜tool▁output▁begin｜>' ~ m.content ~ '<｜tool▁output▁end｜>' -}}
    {%- set calls.open = true -%}
  {%- elif m.role == 'assistant' and m.tool_calls -%}
    {{- '<｜Assistant｜><｜tool▁calls▁begin｜>' -}}
    {%- for call in m.tool_calls -%}
      {{- '\\n' if not loop.first else '' -}}
      {{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' ~ call.function.name -}}
      {{- '\\n```json\\n' ~ call.function.arguments ~ '\\n```<｜tool▁call▁end｜>' -}}
    {%- endfor -%}
    {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' -}}
  {%- elif m.role == 'assistant' -%}
    {{- '<｜tool▁outputs▁end｜>' if calls.open else '<｜Assistant｜>' -}}
    {{- m.content.split('</think>')[-1] ~ '<｜end▁of▁sentence｜>' -}}
    {%- set calls.open = false -%}
  {%- endif -%}
{%- endfor -%}
{%- if calls.open -%}{{- '<｜tool▁outputs▁end｜>' -}}
{%- elif add_generation_prompt -%}{{- '<｜Assistant｜><think>\\n' -}}{%- endif -%}
"""

V31 = """{%- set thinks = thinking is defined and thinking -%}
{%- set state = namespace(asked=false, system='') -%}
{%- for m in messages if m.role == 'system' -%}
  {%- set state.system = m.content if loop.first else state.system ~ '\\n\\n' ~ m.content -%}
{%- endfor -%}
{{- bos_token ~ state.system -}}
{%- if tools -%}
  {{- '\\n\\nTools:\\n' -}}
  {%- for tool in tools -%}{{- tool.function | tojson ~ '\\n' -}}{%- endfor -%}
{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}
    {{- '<｜User｜>' ~ m.content -}}
    {%- set state.asked = true -%}
  {%- elif m.role == 'tool' -%}
    {{- '<｜tool▁output▁begin｜>' ~ m.content ~ '<｜tool▁output▁end｜>' -}}
    {%- set state.asked = false -%}
  {%- elif m.role == 'assistant' -%}
    {{- '<｜Assistant｜></think>' if state.asked else '' -}}
    {%- set state.asked = false -%}
    {%- if m.tool_calls -%}
      {{- (m.content or '') ~ '<｜tool▁calls▁begin｜>' -}}
      {%- for call in m.tool_calls -%}
        {{- '<｜tool▁call▁begin｜>' ~ call.function.name ~ '<｜tool▁sep｜>' -}}
        {{- call.function.arguments ~ '<｜tool▁call▁end｜>' -}}
      {%- endfor -%}
      {{- '<｜tool▁calls▁end｜>' -}}
    {%- elif '</think>' in m.content -%}
      {{- m.content.split('</think>', 1)[1] -}}
    {%- else -%}
      {{- m.content -}}
    {%- endif -%}
    {{- '<｜end▁of▁sentence｜>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and state.asked -%}
  {{- '<｜Assistant｜>' ~ ('<think>' if thinks else '</think>') -}}
{%- endif -%}
"""

QWEN3 = """{%- set has_system = messages[0].role == 'system' -%}
{%- if tools -%}
  {{- '<|im_start|>system\\n' ~ (messages[0].content ~ '\\n\\n' if has_system else '') -}}
  {{- '# Tools\\n<tools>' -}}
  {%- for tool in tools -%}{{- '\\n' ~ tool | tojson -}}{%- endfor -%}
  {{- '\\n</tools>\\nA call: <tool_call>\\n{"name": …, "arguments": …}\\n</tool_call>' -}}
  {{- '<|im_end|>\\n' -}}
{%- elif has_system -%}
  {{- '<|im_start|>system\\n' ~ messages[0].content ~ '<|im_end|>\\n' -}}
{%- endif -%}
{%- set last = namespace(query=-1) -%}
{%- for m in messages -%}
  {%- if m.role == 'user' and not m.content.startswith('<tool_response>') -%}
    {%- set last.query = loop.index0 -%}
  {%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'user' or (m.role == 'system' and not loop.first) -%}
    {{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' -}}
  {%- elif m.role == 'assistant' -%}
    {%- set said = m.content or '' -%}
    {%- set thought = m.reasoning_content or '' -%}
    {%- if not thought and '</think>' in said -%}
      {%- set thought = said.split('</think>')[0].rstrip('\\n').split('<think>')[-1] -%}
      {%- set thought = thought.lstrip('\\n') -%}
      {%- set said = said.split('</think>')[-1].lstrip('\\n') -%}
    {%- endif -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if loop.index0 > last.query and (loop.last or thought) -%}
      {{- '<think>\\n' ~ thought.strip('\\n') ~ '\\n</think>\\n\\n' ~ said.lstrip('\\n') -}}
    {%- else -%}
      {{- said -}}
    {%- endif -%}
    {%- for call in m.tool_calls or [] -%}
      {{- '\\n' if said or not loop.first else '' -}}
      {{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' -}}
      {%- set given = call.function.arguments -%}
      {{- given if given is string else given | tojson -}}
      {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- elif m.role == 'tool' -%}
    {%- set before = messages[loop.index0 - 1].role if not loop.first else '' -%}
    {{- '' if before == 'tool' else '<|im_start|>user' -}}
    {{- '\\n<tool_response>\\n' ~ m.content ~ '\\n</tool_response>' -}}
    {{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' else '' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}
    {{- '<think>\\n\\n</think>\\n\\n' -}}
  {%- endif -%}
{%- endif -%}
"""

MINIMAX_M2 = """{%- set has_system = messages[0].role == 'system' -%}
{%- set talk = messages[1:] if has_system else messages -%}
{{- ']~!b[]~b]system\\n' ~ (messages[0].content if has_system else 'Be helpful.') -}}
{%- if tools -%}
  {{- '\\n\\n# Tools\\n<tools>\\n' -}}
  {%- for tool in tools -%}{{- '<tool>' ~ tool.function | tojson ~ '</tool>\\n' -}}{%- endfor -%}
  {{- '</tools>\\nA call: <minimax:tool_call></minimax:tool_call>' -}}
{%- endif -%}
{{- '[e~[\\n' -}}
{%- set last = namespace(user=-1) -%}
{%- for m in talk -%}
  {%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in talk -%}
  {%- if m.role == 'assistant' -%}
    {{- ']~b]ai\\n' -}}
    {%- set said = m.content or '' -%}
    {%- set thought = m.reasoning_content or '' -%}
    {%- if not thought and '</think>' in said -%}
      {%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
      {%- set said = said.split('</think>')[-1].strip('\\n') -%}
    {%- endif -%}
    {%- if thought and loop.index0 > last.user -%}
      {{- '<think>\\n' ~ thought ~ '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- said -}}
    {%- if m.tool_calls -%}
      {{- '\\n<minimax:tool_call>\\n' -}}
      {%- for call in m.tool_calls -%}
        {{- '<invoke name="' ~ call.function.name ~ '">\\n' -}}
        {%- for name, value in call.function.arguments.items() -%}
          {{- '<parameter name="' ~ name ~ '">' -}}
          {{- value if value is string else value | tojson -}}
          {{- '</parameter>\\n' -}}
        {%- endfor -%}
        {{- '</invoke>\\n' -}}
      {%- endfor -%}
      {{- '</minimax:tool_call>' -}}
    {%- endif -%}
    {{- '[e~[\\n' -}}
  {%- elif m.role == 'tool' -%}
    {%- set before = talk[loop.index0 - 1].role if not loop.first else '' -%}
    {{- '' if before == 'tool' else ']~b]tool' -}}
    {{- '\\n<response>' ~ m.content ~ '</response>' -}}
    {{- '[e~[\\n' if loop.last or talk[loop.index0 + 1].role != 'tool' else '' -}}
  {%- else -%}
    {{- ']~b]user\\n' ~ m.content ~ '[e~[\\n' -}}
  {%- endif -%}
{%- endfor -%}
{{- ']~b]ai\\n<think>\\n' if add_generation_prompt else '' -}}
"""

KIMI_K2 = """{%- if tools -%}
  {{- '<|im_system|>tool_declare<|im_middle|>' ~ tools | tojson ~ '<|im_end|>' -}}
{%- endif -%}
{%- if messages[0].role != 'system' -%}
  {{- '<|im_system|>system<|im_middle|>Be helpful.<|im_end|>' -}}
{%- endif -%}
{%- set last = namespace(answer=-1) -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' and not m.tool_calls -%}
    {%- set last.answer = loop.index0 -%}
  {%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
  {%- set kind = m.role if m.role in ('user', 'assistant') else 'system' -%}
  {{- '<|im_' ~ kind ~ '|>' ~ m.role ~ '<|im_middle|>' -}}
  {%- if m.role == 'assistant' -%}
    {%- set thought = m.reasoning_content or '' -%}
    {{- '<think>' ~ (thought if loop.index0 > last.answer else '') ~ '</think>' -}}
    {{- m.content or '' -}}
    {%- if m.tool_calls -%}
      {{- '<|tool_calls_section_begin|>' -}}
      {%- for call in m.tool_calls -%}
        {{- '<|tool_call_begin|>' ~ call.id ~ '<|tool_call_argument_begin|>' -}}
        {{- call.function.arguments ~ '<|tool_call_end|>' -}}
      {%- endfor -%}
      {{- '<|tool_calls_section_end|>' -}}
    {%- endif -%}
  {%- elif m.role == 'tool' -%}
    {{- '## Return of ' ~ m.tool_call_id ~ '\\n' ~ m.content -}}
  {%- else -%}
    {{- m.content -}}
  {%- endif -%}
  {{- '<|im_end|>' -}}
{%- endfor -%}
{{- '<|im_assistant|>assistant<|im_middle|>' if add_generation_prompt else '' -}}
"""

_DEEPSEEK_CALLS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
)
_THINK = ("<think>", "</think>")


@dataclass(frozen=True, kw_only=True)
class Family:
    """A template with the added tokens of its vocabulary and the names of its config.json."""

    template: str | None
    special: tuple[str, ...]
    plain: tuple[str, ...] = _THINK
    bos: str | None = None
    eos: str
    config: tuple[str, str]  # architecture, model_type
    switch: str | None = None
    arguments: str = "text"

    def write(self, folder: Path) -> Path:
        """A model folder with this tokenizer and config.json."""
        made = vocabulary.byte_level(
            folder,
            special=self.special,
            plain=self.plain,
            template=self.template,
            bos=self.bos,
            eos=self.eos,
        )
        architecture, model_type = self.config
        (folder / "config.json").write_text(
            f'{{"architectures": ["{architecture}"], "model_type": "{model_type}"}}'
        )
        return made


def _deepseek(template: str | None, *config: str, switch: str | None = None) -> Family:
    return Family(
        template=template,
        special=(vocabulary.BOS, vocabulary.EOS),
        plain=(vocabulary.USER, vocabulary.ASSISTANT, *_THINK, *_DEEPSEEK_CALLS, "｜DSML｜"),
        bos=vocabulary.BOS,
        eos=vocabulary.EOS,
        config=(config[0], config[1]),
        switch=switch,
    )


FAMILIES = {
    "deepseek_r1": _deepseek(R1, "DeepseekV3ForCausalLM", "deepseek_v3"),
    "distill_qwen": _deepseek(R1, "Qwen2ForCausalLM", "qwen2"),
    "distill_llama": _deepseek(R1, "LlamaForCausalLM", "llama"),
    "deepseek_v31": _deepseek(V31, "DeepseekV3ForCausalLM", "deepseek_v3", switch="thinking"),
    "deepseek_v32": _deepseek(None, "DeepseekV32ForCausalLM", "deepseek_v32"),
    "deepseek_v4": _deepseek(None, "DeepseekV4ForCausalLM", "deepseek_v4"),
    "qwen3": Family(
        template=QWEN3,
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        plain=(*_THINK, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        eos="<|im_end|>",
        config=("Qwen3ForCausalLM", "qwen3"),
        switch="enable_thinking",
    ),
    "minimax_m2": Family(
        template=MINIMAX_M2,
        special=("]~!b[", "]~b]", "[e~["),
        plain=(*_THINK, "<minimax:tool_call>", "</minimax:tool_call>"),
        bos="]~!b[",
        eos="[e~[",
        config=("MiniMaxM2ForCausalLM", "minimax_m2"),
        arguments="object",
    ),
    "kimi_k2": Family(
        template=KIMI_K2,
        special=("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>"),
        plain=(
            "<|im_system|>",
            "<|im_middle|>",
            *_THINK,
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
        bos="[BOS]",
        eos="<|im_end|>",
        config=("DeepseekV3ForCausalLM", "kimi_k2"),
    ),
}
WITH_TEMPLATE = tuple(name for name, family in FAMILIES.items() if family.template is not None)
