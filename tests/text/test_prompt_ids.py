"""The ids of prompts equal those of transformers, for every family that has a template.

Run as a script it compares more, and other templates:

    python -P tests/text/test_prompt_ids.py --conversations 500 --templates FOLDER

FOLDER holds files NAME.jinja, NAME one of the families here.
"""

import argparse
import functools
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

import pytest
from chat_templates import FAMILIES, WITH_TEMPLATE, Family
from conversations import conversation, tools

from batchmla.jobs.conversation import messages_of
from batchmla.text.renderer import load_renderer
from batchmla.text.tokenizer import Tokenizer

CONVERSATIONS = 24


def compare(family: Family, count: int, seed: int, *, has_null: bool = True) -> int:
    """Renders `count` conversations both ways and returns how many tokens were the same.

    `has_null`: whether the content beside calls may be null, which some templates refuse.
    """
    from transformers import PreTrainedTokenizerFast

    folder = family.write(Path(tempfile.mkdtemp(prefix="prompt-ids-")))
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = Tokenizer.load(folder)
    renderers = {
        thinking: load_renderer(folder, tokenizer, model={}, thinking=thinking)
        for thinking in (("auto", "on", "off") if family.switch else ("auto",))
    }
    random_ = random.Random(seed)
    num_tokens = 0
    for place in range(count):
        has_calls = place % 2 == 1
        takes_tools = has_calls and "tools" in (family.template or "")
        talk = conversation(
            random_, has_calls=has_calls, arguments=family.arguments, has_null=has_null
        )
        given = tools(random_) if takes_tools and random_.random() < 0.7 else None
        thinking = random_.choice(list(renderers))
        switch = {} if thinking == "auto" else {family.switch: thinking == "on"}
        expected = theirs.apply_chat_template(
            talk, tools=given, add_generation_prompt=True, return_dict=False, **switch
        )
        text = renderers[thinking].render(messages_of(talk, "row"), tools=given or ())
        assert tokenizer.encode(text).tolist() == expected, (talk, given, thinking, text.text)
        num_tokens += len(expected)
    return num_tokens


@functools.cache
def _compared(name: str) -> int:
    return compare(FAMILIES[name], CONVERSATIONS, seed=sum(map(ord, name)))


@pytest.mark.parametrize("name", WITH_TEMPLATE)
def test_ids_equal_those_of_transformers(name: str) -> None:
    assert _compared(name) > 100 * CONVERSATIONS


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--templates", type=Path)
    asked = parser.parse_args()
    for name in WITH_TEMPLATE:
        family = FAMILIES[name]
        file = None if asked.templates is None else asked.templates / f"{name}.jinja"
        if file is not None and not file.is_file():
            continue
        if file is not None:
            family = replace(family, template=file.read_text(encoding="utf-8"))
        has_null = file is None or not name.startswith(("deepseek", "distill", "qwen"))
        num_tokens = compare(family, asked.conversations, seed=1, has_null=has_null)
        print(f"{name}: {asked.conversations} conversations, {num_tokens:,} tokens, all equal")


if __name__ == "__main__":
    main()
