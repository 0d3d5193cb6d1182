"""Which format is chosen, and what is refused by name."""

import pytest
import vocabulary
from chat_templates import FAMILIES

from batchmla.errors import JobError
from batchmla.text.formats.registry import ALIASES, NOT_BUILT, choose_format
from batchmla.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    return Tokenizer.load(vocabulary.byte_level(tmp_path_factory.mktemp("thinker")))


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    return Tokenizer.load(vocabulary.byte_level(tmp_path_factory.mktemp("talker"), plain=()))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    return {name: Tokenizer.load(each.write(folder / name)) for name, each in FAMILIES.items()}


def test_without_a_config_auto_goes_by_the_vocabulary(thinker, talker, tokenizers):
    assert choose_format("auto", thinker).name == "deepseek_r1"
    assert choose_format("auto", talker).name == "none"
    for name in ("qwen3", "minimax_m2", "kimi_k2"):
        assert choose_format("auto", tokenizers[name]).name == name


def test_auto_goes_by_the_model_before_the_vocabulary(tokenizers):
    deepseek = tokenizers["deepseek_v4"]  # the vocabulary that all of them have
    for model, name in (
        ({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}, "deepseek_r1"),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "deepseek_v32"),
        ({"model_type": "deepseek_v4"}, "deepseek_v4"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "qwen3"),
        ({"model_type": "outer", "text_config": {"model_type": "kimi_k2"}}, "kimi_k2"),
        ({"architectures": None}, "deepseek_r1"),
    ):
        assert choose_format("auto", deepseek, model=model).name == name


def test_minimax_m3_shares_turns_with_m2_and_not_the_tags_of_reasoning(tmp_path):
    plain = ("<mm:think>", "</mm:think>")
    folder = vocabulary.byte_level(tmp_path, special=("]~!b[", "]~b]", "[e~["), plain=plain)
    m3 = Tokenizer.load(folder)
    model = {"architectures": ["MiniMaxM3SparseForConditionalGeneration"]}
    for known in (None, model, {"model_type": "minimax_m3_vl"}):
        chosen = choose_format("auto", m3, model=known)
        assert (chosen.name, chosen.start, chosen.end) == ("minimax_m3", *plain)
    assert choose_format("minimax_m3", m3) == chosen
    with pytest.raises(JobError, match="minimax_m2 needs the token <think>"):
        choose_format("minimax_m2", m3)


def test_auto_asks_the_template_where_models_of_two_formats_are_alike(tokenizers):
    deepseek = tokenizers["deepseek_v31"]
    model = {"model_type": "deepseek_v3"}
    for template, name in (
        (FAMILIES["deepseek_r1"].template, "deepseek_r1"),
        (FAMILIES["deepseek_v31"].template, "deepseek_v3"),
        ("{{ 'thinking' }}{# thinking #}", "deepseek_r1"),
        ("{% for", "deepseek_r1"),
    ):
        assert choose_format("auto", deepseek, model=model, template=template).name == name
    model = {"model_type": "deepseek_v32"}  # V3.2-Exp has a template of V3.1's kind
    v31 = FAMILIES["deepseek_v31"].template
    assert choose_format("auto", deepseek, model=model, template=v31).name == "deepseek_v3"
    assert choose_format("auto", deepseek, model=model, template="｜DSML｜").name == "deepseek_v32"


def test_a_model_that_cannot_think_may_call_tools(tmp_path):
    family = FAMILIES["kimi_k2"]
    plain = tuple(token for token in family.plain if "think" not in token)
    folder = vocabulary.byte_level(
        tmp_path, special=family.special, plain=plain, template=None, bos="[BOS]", eos="[EOS]"
    )
    chosen = choose_format("auto", Tokenizer.load(folder), model={"model_type": "kimi_k2"})
    assert (chosen.name, chosen.start, chosen.end) == ("kimi_k2", None, None)
    assert chosen.tools is not None


def test_a_chat_without_thinking_or_calls_has_no_format(tmp_path):
    special = vocabulary.CHATML_SPECIAL
    folder = vocabulary.byte_level(
        tmp_path, special=special, plain=(), template=None, bos=None, eos="<|im_end|>"
    )
    assert choose_format("auto", Tokenizer.load(folder)).name == "none"


def test_a_format_can_be_named(thinker):
    assert choose_format("none", thinker).start is None
    assert choose_format("deepseek_r1", thinker).end == "</think>"
    for name in ALIASES:
        assert choose_format(name, thinker).name == ALIASES[name]


def test_own_markers_replace_the_formats(thinker):
    own = choose_format("none", thinker, start="<a>", end="</a>")
    assert (own.start, own.end, own.tools) == ("<a>", "</a>", None)
    own = choose_format("qwen3", thinker, start="<a>", end="</a>")
    assert own.start == "<a>" and own.tools is choose_format("qwen3", thinker).tools
    with pytest.raises(JobError, match="go together"):
        choose_format("auto", thinker, start="<a>")
    with pytest.raises(JobError, match="go together"):
        choose_format("auto", thinker, end="<a>")
    with pytest.raises(JobError, match="two different texts"):
        choose_format("auto", thinker, start="<a>", end="<a>")


def test_a_format_needs_its_tokens(talker):
    with pytest.raises(JobError, match="deepseek_r1 needs the token <think>"):
        choose_format("deepseek_r1", talker)


@pytest.mark.parametrize("name", NOT_BUILT)
def test_later_formats_are_refused_by_name(thinker, name):
    with pytest.raises(JobError, match=f"{name} is not built yet"):
        choose_format(name, thinker)


def test_unknown_formats_name_the_nearest(thinker):
    with pytest.raises(JobError, match="did you mean deepseek_r1"):
        choose_format("deepseekr1", thinker)
