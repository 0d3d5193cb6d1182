"""Contents under a grammar: whatever is drawn from the masks parses; the impossible is refused."""

import json
import random
import re
import sys

import jsonschema
import numpy as np
import pytest
import vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmla.text.grammar import BadGrammar, GrammarCompiler
from batchmla.text.tokenizer import Tokenizer

STEPS = 400


@pytest.fixture(scope="module", params=["bytes", "pieces"])
def tokenizer(request, tmp_path_factory):
    at = tmp_path_factory.mktemp("model")
    if request.param == "bytes":
        return Tokenizer.load(vocabulary.byte_level(at))
    return Tokenizer.load(vocabulary.piece_level(at, template=None))


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer)


def allowed_ids(grammar, state, size):
    masks = np.zeros((1, -(-size // 32)), np.int32)
    grammar.fill([state], masks)
    return np.flatnonzero(np.unpackbits(masks.view(np.uint8)[0], bitorder="little")[:size])


def written(tokenizer, grammar, seed):
    """A content drawn at random from the masks, short tokens of structure first; None if cut."""
    random_ = random.Random(seed)
    state = grammar.start()
    text = b""
    for step in range(STEPS):
        if state.is_over or (state.can_end and step and random_.random() < 0.5):
            return text
        sure = state.sure_id if step % 2 else None  # asked before the mask, or after it
        ids = allowed_ids(grammar, state, len(tokenizer)).tolist()
        if step % 2 == 0:
            sure = state.sure_id
        assert sure is None or (ids == [sure] and not state.can_end)
        assert ids or state.can_end, (text, state.fault)
        if not ids:
            return text
        closing = [n for n in ids if tokenizer.token_bytes(n)[:1] in b'"]},:0123']
        chosen = random_.choice(closing if closing and random_.random() < 0.7 else ids)
        assert not tokenizer.is_control(np.array([chosen])).any()
        state.push(chosen)
        assert state.fault is None, state.fault
        text += tokenizer.token_bytes(chosen)
    return None


def schemas(depth: int = 2) -> st.SearchStrategy[dict]:
    numbers = st.tuples(st.integers(-9, 9), st.integers(0, 9)).map(
        lambda two: {"type": "integer", "minimum": two[0], "maximum": two[0] + two[1]}
    )
    texts = st.tuples(st.integers(0, 3), st.integers(0, 3)).map(
        lambda two: {"type": "string", "minLength": two[0], "maxLength": two[0] + two[1]}
    )
    choices = st.lists(
        st.one_of(st.text("aé\"\\\n", max_size=3), st.integers(-5, 5), st.booleans(), st.none()),
        min_size=1, max_size=3, unique_by=repr,
    ).map(lambda values: {"enum": values})  # fmt: skip
    patterns = st.sampled_from(["^[a-c]{1,3}$", "^x+y$", "^[0-9]{4}-[0-9]{2}$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    )
    plain = st.one_of(
        numbers, texts, choices, patterns, st.just({"type": "boolean"}), st.just({"type": "null"})
    )
    if depth == 0:
        return plain
    inner = schemas(depth - 1)
    lists = st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
        lambda parts: {
            "type": "array", "items": parts[0], "minItems": parts[1],
            "maxItems": parts[1] + parts[2],
        }
    )  # fmt: skip
    maps = st.dictionaries(st.text("ab é\"", min_size=1, max_size=3), inner, max_size=3).flatmap(
        lambda properties: st.sets(st.sampled_from([*properties, ""])).map(
            lambda needed: {
                "type": "object", "properties": properties, "additionalProperties": False,
                "required": sorted(needed & set(properties)),
            }
        )
    )  # fmt: skip
    several = st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts})
    return st.one_of(plain, lists, maps, several)


@settings(max_examples=60, deadline=None)
@given(schema=schemas(), seed=st.integers(0, 2**32))
def test_contents_of_random_schemas_satisfy_them(tokenizer, compiler, schema, seed):
    jsonschema.Draft202012Validator.check_schema(schema)
    text = written(tokenizer, compiler.compile("json_schema", schema), seed)
    if text is not None:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def test_the_name_of_the_only_property_is_sure(tokenizer, compiler):
    schema = {
        "type": "object", "required": ["quantity"], "additionalProperties": False,
        "properties": {"quantity": {"enum": [1, 2]}},
    }  # fmt: skip
    grammar = compiler.compile("json_schema", schema)
    state = grammar.start()
    for letter in (b"{", b'"'):
        ids = allowed_ids(grammar, state, len(tokenizer)).tolist()
        state.push(next(n for n in ids if tokenizer.token_bytes(n) == letter))
    text = b""
    while (sure := state.sure_id) is not None:
        text += tokenizer.token_bytes(sure)
        state.push(sure)
    assert len(text) >= 6 and b'quantity":'.startswith(text), text
    assert state.fault is None and len(allowed_ids(grammar, state, len(tokenizer))) > 1


def test_most_random_contents_are_finished(tokenizer, compiler):
    """The property above says something only where contents end."""
    schema = {
        "type": "object", "required": ["a", "b"], "additionalProperties": False,
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    }  # fmt: skip
    grammar = compiler.compile("json_schema", schema)
    texts = [written(tokenizer, grammar, seed) for seed in range(12)]
    assert sum(text is not None for text in texts) >= 10
    for text in texts:
        if text is not None:
            jsonschema.validate(json.loads(text), schema)


@settings(max_examples=60, deadline=None)
@given(
    choices=st.lists(st.text('ab"\\\n\té🦙', min_size=1, max_size=4), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_a_choice_is_one_of_the_texts_exactly(tokenizer, compiler, choices, seed):
    text = written(tokenizer, compiler.compile("choice", choices), seed)
    assert text is not None and text.decode() in choices


@pytest.mark.parametrize(
    "pattern", ["[0-9]{3}-[a-f]+", "(yes|no)( sir)?", "é+", r"[0-9]+[.][0-9]{2}"]
)
def test_a_content_matches_its_whole_regex(tokenizer, compiler, pattern):
    grammar = compiler.compile("regex", pattern)
    for seed in range(5):
        text = written(tokenizer, grammar, seed)
        assert text is not None and re.fullmatch(pattern, text.decode())


def test_a_lark_grammar(tokenizer, compiler):
    lark = 'start: "sum=" number ("+" number)*\nnumber: /[0-9]{1,2}/'
    grammar = compiler.compile("grammar", lark)
    for seed in range(5):
        text = written(tokenizer, grammar, seed)
        assert text is not None
        assert re.fullmatch(r"sum=[0-9]{1,2}(\+[0-9]{1,2})*", text.decode())


IMPOSSIBLE = [
    ("json_schema", {"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    ("json_schema", {"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible types"),
    ("json_schema", False, "no text follows"),
    ("json_schema", {"type": "object", "properties": {"a": False}, "required": ["a"]}, "'a'"),
    ("json_schema", {"type": "string", "minLength": 4, "maxLength": 2}, "minLength"),
    ("json_schema", {"type": "strin"}, "strin"),
    ("json_schema", {"not": {"type": "integer"}}, "not"),
    ("json_schema", {"type": "array", "uniqueItems": True}, "uniqueItems"),
    ("json_schema", {"$ref": "http://x.y/z"}, "http://x.y/z"),
    ("regex", "(a", "unclosed group"),
    ("regex", "a(?=b)", "look-ahead"),
    ("regex", r"[^\s\S]", "no text follows"),
    ("grammar", "start: foo", "foo"),
]


@pytest.mark.parametrize(("kind", "value", "said"), IMPOSSIBLE)
def test_what_is_impossible_or_not_known_is_refused(compiler, kind, value, said):
    with pytest.raises(BadGrammar, match=re.escape(said)) as caught:
        compiler.compile(kind, value)
    assert "\n" not in str(caught.value)


def test_equal_grammars_are_compiled_once_and_states_are_separate(tokenizer, compiler):
    schema = {"type": "integer"}
    grammar = compiler.compile("json_schema", schema)
    assert compiler.compile("json_schema", dict(schema)) is grammar
    first, second = grammar.start(), grammar.start()
    digit = next(n for n in range(len(tokenizer)) if tokenizer.token_bytes(n) == b"7")
    first.push(digit)
    assert first.can_end and not second.can_end


def test_properties_come_in_the_order_of_the_schema(tokenizer, compiler):
    for names in (("a", "b"), ("b", "a")):
        schema = {
            "type": "object", "required": list(names), "additionalProperties": False,
            "properties": {name: {"enum": [1]} for name in names},
        }  # fmt: skip
        text = written(tokenizer, compiler.compile("json_schema", schema), 1)
        assert text is not None and tuple(json.loads(text)) == names


def test_a_missing_library_is_named(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(BadGrammar, match=r'pip install "batchmla\[structured\]"'):
        GrammarCompiler(tokenizer)


def test_masks_of_a_batch_are_those_of_its_rows(tokenizer, compiler):
    grammars = [compiler.compile("regex", p) for p in ("[0-9]+", "[a-z]+", "x")]
    states = [grammar.start() for grammar in grammars]
    words = -(-len(tokenizer) // 32)
    together = np.zeros((3, words), np.int32)
    grammars[0].fill(states, together)
    for row, state in enumerate(states):
        alone = np.zeros((1, words), np.int32)
        grammars[row].fill([state], alone)
        assert (alone[0] == together[row]).all() and alone.any()
    narrow = np.zeros((3, 2), np.int32)
    grammars[0].fill(states, narrow)
    assert (narrow == together[:, :2]).all()


def test_a_token_outside_the_grammar_is_a_fault_of_that_state_only(tokenizer, compiler):
    grammar = compiler.compile("regex", "[0-9]+")
    letter = next(n for n in range(len(tokenizer)) if tokenizer.token_bytes(n) == b"a")
    bad, good = grammar.start(), grammar.start()
    bad.push(letter)
    assert bad.fault and "\n" not in bad.fault and not bad.is_over
    masks = np.zeros((2, -(-len(tokenizer) // 32)), np.int32)
    grammar.fill([bad, good], masks)
    assert good.fault is None and not masks[0].any() and masks[1].any()
