"""OpenAI batch files as input: requests become prompts with sampling values of their own."""

import json
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest
import vocabulary

from batchmla.core import Prompt
from batchmla.errors import JobError
from batchmla.jobs.openai_body import CHAT, TEXT
from batchmla.jobs.prompt import PromptMaker, stream_key
from batchmla.jobs.read import InputTable, open_input, open_job_input
from batchmla.jobs.sampling import resolve_sampling
from batchmla.jobs.settings import InputSettings, SamplingSettings
from batchmla.jobs.spec import build_spec
from batchmla.text.chat import ChatTemplate
from batchmla.text.formats.registry import choose_format
from batchmla.text.reasoning import Reasoner
from batchmla.text.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vocabulary.byte_level(tmp_path_factory.mktemp("model"))


def request(name: str = "r1", url: str = CHAT, **body: Any) -> dict[str, Any]:
    body = {"messages": HELLO, **body} if url == CHAT else body
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def put(folder: Path, lines: list[Any], name: str = "batch.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def table(path: Path, malformed: Literal["fail", "row"] = "fail") -> InputTable:
    settings = InputSettings(path=str(path), format="openai_batch")
    return open_input(settings, malformed=malformed)


def maker(folder: Path, *, has_chat: bool = True, **sampling: Any) -> PromptMaker:
    spec = build_spec(
        {
            "model": {"path": "m"},
            "input": {"path": "i", "format": "openai_batch"},
            "output": {"path": "o"},
        }
    ).spec
    tokenizer = Tokenizer.load(folder)
    return PromptMaker(
        spec,
        tokenizer=tokenizer,
        chat=ChatTemplate.load(folder, tokenizer) if has_chat else None,
        sampling=resolve_sampling(
            SamplingSettings.model_validate(sampling), {"temperature": 0.6}, eos_ids=[1]
        ),
        reasoner=Reasoner(tokenizer, choose_format("auto", tokenizer)),
        columns=("custom_id", "method", "url", "body"),
        limit_tokens=None,
    )


def prompts(tmp_path: Path, making: PromptMaker, *lines: dict[str, Any]) -> list[Prompt | str]:
    source = table(put(tmp_path, list(lines)))
    source.scan()
    rows = [row for batch in source.rows(columns=making.columns) for row in batch]
    return making.prompts(rows)


def test_requests_are_rows_with_their_id_and_body(tmp_path: Path) -> None:
    lines = [request("a", seed=1), request("b", TEXT, prompt="x")]
    del lines[1]["method"]
    source = table(put(tmp_path, lines))
    assert source.scan().num_rows == 2
    assert [row.typed_id for batch in source.rows() for row in batch] == ["a", "b"]
    assert source.carried == pa.schema(
        [(name, pa.string()) for name in ("custom_id", "method", "url", "body")]
    )
    found = pa.Table.from_batches(source.carried_batches(), source.carried).to_pylist()
    assert [json.loads(row.pop("body")) for row in found] == [line["body"] for line in lines]
    assert found[1] == {"custom_id": "b", "method": None, "url": TEXT}


def test_lines_that_are_no_requests_are_malformed(tmp_path: Path) -> None:
    good = request()
    lines: list[Any] = [
        good,
        {**good, "custom_id": None},
        {**good, "custom_id": 7},
        {**good, "body": "text"},
        {"custom_id": "x", "url": CHAT},
        {**good, "custom_id": "y", "extra": 1},
        [1],
    ]
    with pytest.raises(JobError) as caught:
        table(put(tmp_path, lines)).scan()
    said = str(caught.value)
    assert "the input has 6 malformed rows" in said
    for line, reason in (
        (2, "a request of a batch has a custom_id, which is missing here"),
        (3, "the value of custom_id is not text"),
        (4, "the body is not an object"),
        (5, "a request of a batch has a body, which is missing here"),
        (6, "the key extra is not known in a request of a batch"),
        (7, "a list, not an object"),
    ):
        assert f"batch.jsonl:{line}: {reason}" in said


def test_chat_and_completion_requests_become_prompts(tmp_path: Path, folder: Path) -> None:
    making = maker(folder)
    talk = [{"role": "system", "content": "Be brief."}, *HELLO]
    chat, text = prompts(
        tmp_path, making, request("a", messages=talk), request("b", TEXT, prompt="Once upon")
    )
    tokenizer = Tokenizer.load(folder)
    assert isinstance(chat, Prompt) and isinstance(text, Prompt)
    shown = tokenizer.decode(chat.token_ids).text
    assert shown.endswith(f"Be brief.{vocabulary.USER}hello{vocabulary.ASSISTANT}<think>\n")
    assert tokenizer.decode(text.token_ids).text.endswith("Once upon")
    assert chat.row_id == "a" and chat.params.temperature == 0.6


def test_a_model_without_a_chat_template_completes_texts_only(tmp_path: Path, folder: Path) -> None:
    making = maker(folder, has_chat=False)
    chat, text = prompts(tmp_path, making, request("a"), request("b", TEXT, prompt="Once"))
    assert chat == "the model has no chat template; give one as prompt.chat_template"
    assert isinstance(text, Prompt)


def test_sampling_fields_of_a_body_win_over_the_jobs(tmp_path: Path, folder: Path) -> None:
    making = maker(folder, max_tokens=50, top_k=9, seed=5)
    body = {
        "model": "any", "temperature": 0, "top_p": 0.5, "min_p": 0.1, "seed": 7, "min_tokens": 2,
        "repetition_penalty": 1.25, "stop_token_ids": [4], "max_completion_tokens": 20,
        "max_tokens": 30, "user": "me", "n": 1, "stream": False, "stop": None, "tools": [],
    }  # fmt: skip
    own, plain, off = prompts(
        tmp_path,
        making,
        request("a", **body),
        request("b"),
        request("c", top_k=-1, ignore_eos=True),
    )
    assert isinstance(own, Prompt) and isinstance(plain, Prompt) and isinstance(off, Prompt)
    params = own.params
    assert (params.temperature, params.top_p, params.min_p, params.top_k) == (0.0, 0.5, 0.1, 9)
    assert (params.max_tokens, params.min_tokens, params.repetition_penalty) == (20, 2, 1.25)
    assert params.stop_ids == {1, 4} and own.stream_key == stream_key(7, "a", 0)
    assert (plain.params.max_tokens, plain.params.temperature) == (50, 0.6)
    assert plain.stream_key == stream_key(5, "b", 0)
    assert off.params.top_k == 0 and off.params.stop_ids == frozenset()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (request(stop=["x", ""]), "body.stop: ['x', '']: it must be a list of texts that are not"),
        (request(n=2), "body.n: 2 is not built yet"),
        (request(n=True), "body.n: true is not built yet"),
        (request(stream=True), "body.stream: true is not built yet"),
        (request(tools=[{}]), "body.tools: tool 0 has no function.name"),
        (request(logprobs=True), "body.logprobs: true is not built yet"),
        (request(response_format={"type": "xml"}), "body.response_format must be {type: text}"),
        (request(response_format={"type": "json_schema"}), "body.response_format must be"),
        (request(guided_regex="a", guided_choice=["b"]), "body.guided_regex and body.guided_cho"),
        (request(frequency_penalty=5), "body.frequency_penalty: 5 is out of range"),
        (request(logit_bias={"x": 1}), "body.logit_bias: 'x' is no token id"),
        (request(temprature=1), "body.temprature is not known in a request to /v1/chat"),
        (request(temperature="hot"), "body.temperature: 'hot' is out of range"),
        (request(max_completion_tokens=0), "body.max_completion_tokens: 0 is out of range"),
        (request(messages=None), "body.messages is missing"),
        (request(messages="hi"), "body.messages holds the text \"hi\", which is not a list"),
        (request(messages=[]), "body.messages: the conversation is empty"),
        (request(url=TEXT), "body.prompt is missing or no text"),
        (request(url=TEXT, prompt=""), "the prompt is empty"),
        (request(url=TEXT, prompt=["a", "b"]), "body.prompt: the list form"),
        (request(url="/v1/embeddings", input="x"), "url '/v1/embeddings' is not built yet"),
        ({**request(), "method": "GET"}, "method 'GET': a request of a batch is a POST"),
    ],
)  # fmt: skip
def test_what_is_not_built_or_wrong_is_the_rows_fault(
    tmp_path: Path, folder: Path, line: dict[str, Any], said: str
) -> None:
    fault, good = prompts(tmp_path, maker(folder), line, request("good"))
    assert isinstance(fault, str) and fault.startswith(said)
    assert isinstance(good, Prompt)


def spec_of(path: Path, **sections: Any) -> Any:
    return build_spec(
        {
            "model": {"path": "m"},
            "input": {"path": str(path)},
            "output": {"path": "o"},
            **sections,
        }
    ).spec


def test_a_job_without_a_prompt_takes_a_batch_for_one(tmp_path: Path) -> None:
    spec = spec_of(put(tmp_path, [request()]))
    assert open_job_input(spec).files[0].format == "openai_batch"
    spec = spec_of(tmp_path / "batch.jsonl", prompt={"messages": "body"})
    assert open_job_input(spec).files[0].format == "jsonl"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
def test_other_input_needs_a_prompt(tmp_path: Path, name: str) -> None:
    path = put(tmp_path, [{"id": "a", "text": "x"}], name)
    with pytest.raises(JobError, match=r"found none, and .*rows\.\w+ is no OpenAI batch file"):
        open_job_input(spec_of(path))
    with pytest.raises(JobError, match=r"give exactly one of prompt\.user"):
        spec_of(path, input={"path": str(path), "format": "jsonl"})


def test_a_batch_brings_its_prompts(tmp_path: Path) -> None:
    source = {"path": "x.jsonl", "format": "openai_batch"}
    with pytest.raises(JobError, match=r"prompt\.user: the requests of an OpenAI batch hold"):
        spec_of(tmp_path, input=source, prompt={"user": "{{ x }}"})
