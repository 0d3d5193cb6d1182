"""The tokenizer of the model: byte-level BPE with single digits and DeepSeek's control tokens.

Writes `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`; encodes samples.
"""

import itertools
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.tally.documents import Document, training_documents

BAR, LOW = "\uff5c", "\u2581"
BOS = f"<{BAR}begin{LOW}of{LOW}sentence{BAR}>"
EOS = f"<{BAR}end{LOW}of{LOW}sentence{BAR}>"
PAD = f"<{BAR}{LOW}pad{LOW}{BAR}>"
USER = f"<{BAR}User{BAR}>"
ASSISTANT = f"<{BAR}Assistant{BAR}>"
THINK, END_THINK = "<think>", "</think>"
VOCAB_SIZE = 512
NUM_TEXTS = 4000

CHAT_TEMPLATE = (
    "{%- if not add_generation_prompt is defined -%}{%- set add_generation_prompt = false -%}"
    "{%- endif -%}"
    "{{- bos_token -}}"
    "{%- for message in messages if message['role'] == 'system' -%}"
    "{{- message['content'] -}}"
    "{%- endfor -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}"
    "{{- '" + USER + "' + message['content'] -}}"
    "{%- elif message['role'] == 'assistant' -%}"
    "{{- '" + ASSISTANT + "' + message['content'].split('</think>')[-1] + '" + EOS + "' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{- '" + ASSISTANT + "' + '<think>\\n' -}}"
    "{%- endif -%}"
)


def train_tokenizer() -> Tokenizer:
    """Train the vocabulary on the training generator's own text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [BOS, EOS, PAD, USER, ASSISTANT]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 2,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    documents = itertools.islice(training_documents(seed=1_000_003), NUM_TEXTS)
    tokenizer.train_from_iterator(
        (f"{document.text}\n{document.answer}" for document in documents), trainer
    )
    tokenizer.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in (THINK, END_THINK)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer's files into a model folder."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


class SampleEncoder:
    """Turns documents into token ids the way the chat template and the engine do."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.bos, self.eos, self.pad, self.user, self.assistant, self.think, self.end_think = (
            self._id(text) for text in (BOS, EOS, PAD, USER, ASSISTANT, THINK, END_THINK)
        )
        self.newline = self.text_ids("\n")
        (self.space,), (self.plus,), (self.equals,) = map(self.text_ids, " +=")

    def _id(self, text: str) -> int:
        token_id = self.tokenizer.token_to_id(text)
        assert token_id is not None, text
        return token_id

    def text_ids(self, text: str) -> list[int]:
        """Encode plain text."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def prompt(self, document: str) -> list[int]:
        """Encode a document as a user turn with the opened reasoning."""
        head = [self.bos, self.user, *self.text_ids(document)]
        return [*head, self.assistant, self.think, *self.newline]

    def completion(self, document: Document) -> tuple[list[int], list[int]]:
        """Encode the reasoning and what follows it: end marker, answer, end of sentence."""
        answer = self.text_ids(document.answer)
        return self.text_ids(document.reasoning), [self.end_think, *answer, self.eos]
