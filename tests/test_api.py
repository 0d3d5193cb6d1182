"""The engine in a program of one's own: results in order, a bad prompt is one result's error."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import vocabulary
from tiny import oracle_logits, write_tiny

import batchmla
from batchmla.api import Engine, Result
from batchmla.errors import DeviceError, JobError
from batchmla.text.grammar import Content
from batchmla.text.tokenizer import Tokenizer

DOCUMENT = "Receipt from Corner Shop: 2 x bread at 1.20"


@pytest.fixture(scope="module")
def tally() -> Iterator[Engine]:
    with Engine("builtin:tally", max_num_seqs=4, max_model_len=512, deterministic=True) as engine:
        yield engine


def test_a_chat_is_split_and_keeps_its_order(tally: Engine) -> None:
    texts = [f"{DOCUMENT}, {n} x milk at 0.99" for n in range(5)]
    conversations = [[{"role": "user", "content": text}] for text in texts]
    params = {"temperature": 0, "max_tokens": 24}
    results = tally.chat(conversations, params, reasoning={"budget": 12})
    assert len(results) == 5
    for result in results:
        assert result.error is None and result.reasoning is not None
        assert result.reasoning_state in ("budget", "closed")
        assert 0 < result.reasoning_tokens <= 12 and len(result.token_ids) <= 24
        assert result.text.startswith(result.reasoning) and result.content in result.text
        assert "</think>" in result.text and "</think>" not in result.content
    again = tally.chat(conversations[::-1], params, reasoning={"budget": 12}, progress=True)
    assert [r.token_ids for r in results] == [r.token_ids for r in again[::-1]]


def test_what_cannot_run_is_the_error_of_its_own_result(tally: Engine) -> None:
    results = tally.generate(["", "1 + 1", "1" * 600], {"max_tokens": 3, "ignore_eos": True})
    assert [result.error is None for result in results] == [False, True, False]
    assert results[0].error == "the prompt is empty" and results[0].text is None
    assert "too long" in results[2].error and results[2].finish_reason == "error"
    assert results[1].finish_reason == "length" and len(results[1].token_ids) == 3
    assert tally.generate([]) == []


def test_stops_and_log_probabilities_come_with_the_results(tally: Engine) -> None:
    conversation = [{"role": "user", "content": f"{DOCUMENT}, 1 x milk at 0.99"}]
    params = {"temperature": 0, "logprobs": 1, "prompt_logprobs": 0, "stop": ['s":', "no"]}
    (result,) = tally.chat([conversation], params, reasoning={"budget": 4})
    assert result.content == '{"item' and result.text.endswith('{"item')
    assert [entry[0]["token_id"] for entry in result.logprobs] == list(result.token_ids)
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == result.prompt_tokens
    table = Engine.to_arrow([result])
    assert table.column("logprobs").to_pylist()[0] == list(result.logprobs)
    schema = {"json_schema": {"type": "object", "additionalProperties": {"type": "integer"}}}
    (result,) = tally.chat(
        [conversation], {"structured": schema, "max_tokens": 60}, reasoning={"budget": 4}
    )
    assert result.content.startswith("{") and result.error is None


def test_tokens_that_a_schema_settles_change_nothing_but_the_steps(
    tally: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["quantity_of_bread", "quantity_of_milk"]
    schema = {
        "type": "object", "required": names, "additionalProperties": False,
        "properties": {name: {"type": "integer", "maximum": 99} for name in names},
    }  # fmt: skip
    talks = [[{"role": "user", "content": f"{DOCUMENT}, {n} x milk at 0.99"}] for n in range(1, 6)]

    def run(temperature: float) -> tuple[list[Result], int]:
        before = tally._core.stats().steps
        params = {
            "structured": {"json_schema": schema}, "temperature": temperature, "max_tokens": 90
        }  # fmt: skip
        results = tally.chat(talks, params, reasoning={"budget": 3})
        return results, tally._core.stats().steps - before

    quick = [run(temperature) for temperature in (0.0, 1.0)]
    monkeypatch.setattr(Content, "sure_id", None)
    slow = [run(temperature) for temperature in (0.0, 1.0)]
    for (results, num_steps), (plain, num_plain_steps) in zip(quick, slow, strict=True):
        assert [r.token_ids for r in results] == [r.token_ids for r in plain]
        assert num_steps < 0.8 * num_plain_steps
        for result in results:
            assert list(json.loads(result.content)) == names


def test_results_are_a_table_with_the_types_of_a_job(tally: Engine) -> None:
    results = tally.generate(["1 + 1", ""], {"max_tokens": 2})
    table = Engine.to_arrow(results)
    assert table.column_names[:3] == ["text", "reasoning", "content"]
    assert str(table.schema.field("token_ids").type) == "list<element: int32>".replace(
        "element", table.schema.field("token_ids").type.value_field.name
    )
    assert str(table.schema.field("prompt_tokens").type) == "int32"
    assert [
        Result(**row | {"token_ids": tuple(row["token_ids"])}) for row in table.to_pylist()
    ] == (results)
    assert Engine.to_arrow([]).schema == table.schema


def test_texts_go_to_the_model_as_they_are(tmp_path: Path) -> None:
    vocabulary.byte_level(tmp_path, template=None)
    vocab_size = len(Tokenizer.load(tmp_path))
    oracle = write_tiny(tmp_path, "llama", vocab_size=vocab_size)
    prompts = ["some text", "<think> other text"]
    with Engine(str(tmp_path), dtype="float32", device="cpu") as engine:
        params = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
        results = engine.generate(prompts, params, reasoning={"parser": "none"})
    tokenizer = Tokenizer.load(tmp_path)
    for prompt, result in zip(prompts, results, strict=True):
        ids = tokenizer.encode_plain(prompt).tolist()
        start = len(ids)
        for _ in range(6):
            ids.append(int(torch.argmax(oracle_logits(oracle, ids)[-1])))
        assert list(result.token_ids) == ids[start:]
        assert result.text == tokenizer.decode(ids[start:]).text == result.content
        assert result.prompt_tokens == start


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_length": 9}, "no option 'max_model_length'; did you mean max_model_len"),
        ({"max_model_len": 0}, r"model\.max_model_len"),
        ({"device": "tpu"}, r"model\.device"),
        ({"path": "x"}, "no option 'path'|multiple values"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(JobError, match=message):
        Engine("builtin:tally", **options)


def test_wrong_use_is_named(tally: Engine) -> None:
    with pytest.raises(JobError, match="put the text into a list"):
        tally.generate("text")
    with pytest.raises(JobError, match="put the conversation into a list"):
        tally.chat([{"role": "user", "content": "x"}])
    with pytest.raises(JobError, match=r"sampling\.temprature.*did you mean"):
        tally.generate(["x"], {"temprature": 1})
    for number in (2, {"column": "times"}):
        with pytest.raises(JobError, match=r"sampling\.n: give a prompt as often as samples"):
            tally.generate(["x"], {"n": number})
    assert tally.chat([[{"role": "bot", "content": "x"}]])[0].error is not None


def test_a_model_that_is_missing_or_too_big_is_named() -> None:
    with pytest.raises(JobError, match="does not exist"):
        Engine("./nowhere")
    with pytest.raises(DeviceError):
        Engine("builtin:tally", memory_utilization=1e-9)


def test_the_package_offers_both_names_lazily() -> None:
    code = (
        "import sys, batchmla; before = 'torch' in sys.modules or 'pydantic' in sys.modules\n"
        "assert batchmla.JobSpec.__name__ == 'JobSpec'\n"
        "print(before, 'torch' in sys.modules, hasattr(batchmla, 'Enigne'))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.stdout == "False False False\n", done.stderr
    assert batchmla.Engine is Engine


def test_tools_are_for_models_that_know_them(tally: Engine) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(JobError, match=r"prompt\.tools: .* has no place for tool definitions"):
        tally.chat([[{"role": "user", "content": "1 + 1"}]], tools=tools)


def test_calls_are_in_the_table(tally: Engine) -> None:
    calls = ({"name": "f", "arguments": '{"a": 1}'},)
    table = Engine.to_arrow([Result(tool_calls=calls), Result(tool_error="cut")])
    assert table.column("tool_calls").to_pylist() == [list(calls), None]
    assert table.column("tool_error").to_pylist() == [None, "cut"]
