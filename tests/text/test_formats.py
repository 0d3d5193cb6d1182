"""Which format is chosen, and what is refused by name."""

import pytest
import vocabulary

from batchmla.errors import JobError
from batchmla.text.formats.registry import NOT_BUILT, choose_format
from batchmla.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    return Tokenizer.load(vocabulary.byte_level(tmp_path_factory.mktemp("thinker")))


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    return Tokenizer.load(vocabulary.byte_level(tmp_path_factory.mktemp("talker"), plain=()))


def test_auto_goes_by_the_marker_tokens(thinker, talker):
    assert choose_format("auto", thinker).name == "deepseek_r1"
    assert choose_format("auto", talker).name == "none"


def test_a_format_can_be_named(thinker):
    assert choose_format("none", thinker).start is None
    assert choose_format("deepseek_r1", thinker).end == "</think>"


def test_own_markers_replace_the_formats(thinker):
    own = choose_format("none", thinker, start="<a>", end="</a>")
    assert (own.start, own.end) == ("<a>", "</a>")
    with pytest.raises(JobError, match="go together"):
        choose_format("auto", thinker, start="<a>")
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
