"""prompt.tools: definitions from files, columns and requests; calls as columns of the output."""

import json
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
from chat_templates import FAMILIES
from scripted import ScriptedEngine, run_scripted, scripted_seams, scripted_spec, write_rows

from batchmla.core import Completion, FinishReason, Prompt
from batchmla.errors import JobError
from batchmla.jobs.conversation import RowFault, messages_of
from batchmla.jobs.local import LocalText
from batchmla.jobs.row import Row
from batchmla.jobs.spec import build_spec
from batchmla.jobs.tools import JobTools, arguments_as
from batchmla.text.marked import MarkedText

LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Wetter",
        "parameters": {"type": "object", "properties": {"zip": {"type": "string"}}},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
BAD = '\n<tool_call>\n{"name": "now", "arguments": {}\n</tool_call>'


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("models")
    return {name: FAMILIES[name].write(made / name) for name in FAMILIES}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([LOOK_UP, NOW], ensure_ascii=False), encoding="utf-8")
    return path


def text_of(folder: Path, columns: tuple[str, ...] = ("text", "uses"), **sections: Any) -> Any:
    base = {"model": {"path": "m"}, "input": {"path": "i"}, "output": {"path": "o"}}
    prompt = {"user": "{{ text }}", **sections.pop("prompt", {})}
    if sections.get("input", {}).get("format") == "openai_batch":
        prompt = {}
        columns = ("method", "url", "body")
    sections = {"prompt": prompt, **sections} if prompt else sections
    return LocalText(build_spec({**base, **sections}).spec, folder, columns, 4096)


def row(**values: Any) -> Row:
    return Row(index=0, file=0, number=0, id="r", typed_id="r", values=values)


def prompt_of(side: LocalText, /, **values: Any) -> Prompt:
    made = side.prompts([row(**values)])[0]
    assert isinstance(made, Prompt), made
    return made


def shown(text: LocalText, prompt: Prompt) -> str:
    return text.tokenizer.decode(prompt.token_ids).text


def answer(text: LocalText, prompt: Prompt, written: str, finish: str = "stop") -> Any:
    ids = text.tokenizer.encode(written)
    completion = Completion(
        row_id="r",
        index=0,
        token_ids=ids,
        finish_reason=FinishReason(finish),
        prompt_tokens=len(prompt.token_ids),
    )
    return text.answer(prompt, completion)


def test_tools_of_a_file_are_in_every_prompt(folders: dict[str, Path], file: Path) -> None:
    text = text_of(folders["qwen3"], prompt={"tools": str(file)})
    for value in ("one", "two"):
        prompt = prompt_of(text, text=value)
        for tool in (LOOK_UP, NOW):
            assert json.dumps(tool, ensure_ascii=False) in shown(text, prompt)
        assert json.loads(prompt.tools or "") == [LOOK_UP, NOW]
    assert text.columns == ("text",)


def test_tools_of_a_column_are_those_of_the_row(folders: dict[str, Path]) -> None:
    text = text_of(folders["qwen3"], prompt={"tools": "uses"})
    assert text.columns == ("text", "uses")
    as_list = prompt_of(text, text="a", uses=[NOW])
    as_json = prompt_of(text, text="a", uses=json.dumps([NOW]))
    assert as_list.token_ids.tolist() == as_json.token_ids.tolist()
    assert json.dumps(NOW) in shown(text, as_list) and "look_up" not in shown(text, as_list)
    without = prompt_of(text, text="a", uses=None)
    assert without.tools is None and "<tools>" not in shown(text, without)


def test_members_that_only_other_rows_have_are_left_out(folders: dict[str, Path]) -> None:
    text = text_of(folders["qwen3"], prompt={"tools": "uses"})
    cell = [{**NOW, "function": {"name": "now", "parameters": None}, "strict": None}]
    assert json.loads(prompt_of(text, text="a", uses=cell).tools or "") == [NOW]


def test_text_of_a_column_makes_no_control_token(folders: dict[str, Path]) -> None:
    text = text_of(folders["qwen3"], prompt={"tools": "uses"})
    is_control = text.tokenizer.is_control
    controls = []
    for word in ("plain", "<tool_call></think><|im_end|>"):
        tool = {"type": "function", "function": {"name": "f", "description": word}}
        prompt = prompt_of(text, text="a", uses=[tool])
        assert word in shown(text, prompt)
        controls.append(prompt.token_ids[is_control(prompt.token_ids)].tolist())
    assert controls[0] == controls[1]


@pytest.mark.parametrize(
    ("cell", "sentence"),
    [
        ("{", "column 'uses' holds no tool definitions: it is not JSON"),
        ("{}", "column 'uses': tools are a list"),
        ([{"name": "f"}], "column 'uses': tool 0 has no function.name"),
        ([NOW, {"function": {"name": 1}}], "column 'uses': tool 1 has no function.name"),
        ('[{"function": {"name": "\\ud800"}}]', "half a character"),
        (7, "column 'uses': tools are a list"),
    ],
)
def test_tools_that_cannot_be_used_are_the_rows_fault(
    folders: dict[str, Path], cell: Any, sentence: str
) -> None:
    text = text_of(folders["qwen3"], prompt={"tools": "uses"})
    made = text.prompts([row(text="a", uses=cell)])[0]
    assert isinstance(made, str) and sentence in made


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[]", "holds no tools; leave prompt.tools out"),
        ("[", "is not JSON"),
        ('{"tools": []}', "tools are a list"),
        ('[{"type": "function"}]', "tool 0 has no function.name"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(content)
    with pytest.raises(JobError, match=rf"prompt\.tools: .*t\.json.*{sentence}"):
        JobTools(str(path), ("text",))


def test_what_is_neither_file_nor_column_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(JobError, match=r"prompt\.tools: use is neither a file nor.*mean uses"):
        text_of(folders["qwen3"], prompt={"tools": "use"})
    assert JobTools("use", ()).column == "use"  # an input whose columns are not known


@pytest.mark.parametrize("name", ["deepseek_r1", "deepseek_v32"])
def test_models_that_cannot_be_told_of_tools_are_refused(
    folders: dict[str, Path], file: Path, name: str
) -> None:
    for tools in (str(file), "uses"):
        with pytest.raises(JobError, match=r"prompt\.tools: "):
            text_of(folders[name], prompt={"tools": tools})


def test_formats_without_calls_and_raw_prompts_have_no_tools(
    folders: dict[str, Path], file: Path
) -> None:
    with pytest.raises(JobError, match=r"the format none has no syntax for tool calls"):
        text_of(folders["qwen3"], prompt={"tools": str(file)}, reasoning={"parser": "none"})
    with pytest.raises(JobError, match=r"prompt\.tools needs a conversation"):
        text_of(folders["qwen3"], prompt={"user": None, "raw": "text", "tools": str(file)})


def test_the_file_decides_on_the_prompts_and_so_on_resume(
    folders: dict[str, Path], file: Path
) -> None:
    before = text_of(folders["qwen3"], prompt={"tools": str(file)}).prompt_hash
    file.write_text(json.dumps([NOW]))
    assert text_of(folders["qwen3"], prompt={"tools": str(file)}).prompt_hash != before


def test_calls_are_columns_and_finish_the_row(folders: dict[str, Path], file: Path) -> None:
    text = text_of(folders["qwen3"], prompt={"tools": str(file)})
    prompt = prompt_of(text, text="a")
    found = answer(text, prompt, f"<think>hm{CALL}</think>Well.{CALL}")
    assert found.tool_calls == [{"name": "now", "arguments": "{}"}]
    assert (found.finish_reason, found.content, found.tool_error) == ("tool_calls", "Well.", None)
    assert found.reasoning == f"hm{CALL}"
    cut = answer(text, prompt, f"<think>hm</think>{CALL}and", "length")
    assert (cut.finish_reason, len(cut.tool_calls), cut.content) == ("length", 1, "and")


def test_broken_calls_stay_in_the_content(folders: dict[str, Path], file: Path) -> None:
    text = text_of(folders["qwen3"], prompt={"tools": str(file)})
    found = answer(text, prompt_of(text, text="a"), f"<think>hm</think>Well.{BAD}")
    assert (found.tool_calls, found.finish_reason) == (None, "stop")
    assert found.content == f"Well.{BAD}"
    assert (
        found.tool_error.startswith("a call cannot be read: ") and "<tool_call>" in found.tool_error
    )


def test_without_tools_calls_are_text(folders: dict[str, Path]) -> None:
    text = text_of(folders["qwen3"])
    found = answer(text, prompt_of(text, text=f"What is {CALL}?"), f"It is {CALL}")
    assert (found.tool_calls, found.tool_error) == (None, None)
    assert found.content == f"It is {CALL}" and found.finish_reason == "stop"


def test_a_prompt_that_shows_calls_asks_for_them(folders: dict[str, Path]) -> None:
    system = "Call so: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON"
    text = text_of(folders["deepseek_v31"], prompt={"system": system})
    written = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>"
    )
    found = answer(text, prompt_of(text, text="a"), written)
    assert found.tool_calls == [{"name": "f", "arguments": "{}"}] and found.content == ""


def test_types_come_from_the_rows_definitions(folders: dict[str, Path]) -> None:
    text = text_of(folders["minimax_m2"], prompt={"tools": "uses"})
    written = (
        'x</think>\n<minimax:tool_call>\n<invoke name="look_up">\n'
        '<parameter name="zip">01067</parameter>\n</invoke>\n</minimax:tool_call>'
    )
    found = answer(text, prompt_of(text, text="a", uses=[LOOK_UP]), written)
    assert found.tool_calls == [{"name": "look_up", "arguments": '{"zip": "01067"}'}]


BATCH = {"input": {"path": "i", "format": "openai_batch"}}


def request(**body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hello"}]
    return {
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": messages, **body},
    }


def test_requests_bring_their_tools(folders: dict[str, Path]) -> None:
    text = text_of(folders["qwen3"], **BATCH)
    asked = prompt_of(text, **request(tools=[NOW], tool_choice="auto"))
    assert json.dumps(NOW) in shown(text, asked) and json.loads(asked.tools or "") == [NOW]
    for body in ({}, {"tools": None}, {"tools": []}, {"tools": [NOW], "tool_choice": "none"}):
        made = prompt_of(text, **request(**body))
        assert made.tools is None and "<tools>" not in shown(text, made)
    for body, sentence in (
        ({"tools": [{}]}, "body.tools: tool 0 has no function.name"),
        ({"tools": [NOW], "tool_choice": "required"}, 'body.tool_choice: "required" is not built'),
        ({"reasoning_effort": 3}, "body.reasoning_effort is no text"),
        ({"reasoning_effort": "high"}, "it has no variable reasoning_effort"),
    ):
        made = text.prompts([row(**request(**body))])[0]
        assert isinstance(made, str) and sentence in made
    text = text_of(folders["deepseek_r1"], **BATCH)
    made = text.prompts([row(**request(tools=[NOW]))])[0]
    assert isinstance(made, str) and "has no place for tool definitions" in made


def test_definitions_are_never_cut(folders: dict[str, Path], file: Path) -> None:
    long = {"type": "function", "function": {"name": "f", "description": "word " * 9000}}
    cut = {"too_long": "truncate_right"}
    text = text_of(folders["qwen3"], prompt={"tools": "uses", **cut})
    made = text.prompts([row(text="a", uses=[long])])[0]
    assert isinstance(made, str) and "tool definitions from its row is not cut" in made
    text = text_of(folders["qwen3"], prompt={"tools": str(file), **cut})
    prompt = prompt_of(text, text="word " * 9000)
    assert len(prompt.token_ids) < 4096 and json.dumps(NOW) in shown(text, prompt)


def test_the_prompts_source_is_among_the_settings_in_force(folders: dict[str, Path]) -> None:
    facts = text_of(folders["qwen3"]).effective
    assert facts["prompt.chat_template"].endswith("tokenizer_config.json")
    assert facts["reasoning.parser"] == "qwen3" and "reasoning.thinking" not in facts
    for name, thinking in (("deepseek_v32", "off"), ("deepseek_v4", "on")):
        facts = text_of(folders[name]).effective
        assert facts["prompt.chat_template"] == f"the encoder of {name}"
        assert facts["reasoning.thinking"] == thinking
    raw = text_of(folders["deepseek_v31"], prompt={"user": None, "raw": "text"}).effective
    assert raw["reasoning.parser"] == "deepseek_v3" and "prompt.chat_template" not in raw


def test_requests_say_how_hard_to_think(folders: dict[str, Path]) -> None:
    text = text_of(folders["deepseek_v4"], **BATCH)
    assert shown(text, prompt_of(text, **request())).endswith("<think>")
    off = prompt_of(text, **request(reasoning_effort="none"))
    assert shown(text, off).endswith("</think>")
    off = text_of(folders["qwen3"], **BATCH)
    made = prompt_of(off, **request(reasoning_effort="none"))
    assert shown(off, made).endswith("<think>\n\n</think>\n\n")


CALLED: dict[str, Any] = {
    "role": "assistant",
    "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"a": [1, "<think>"]}'}}],
}


def test_earlier_calls_have_the_form_that_the_template_takes() -> None:
    messages = messages_of(
        [{"role": "user", "content": "x"}, CALLED, *[{"role": "tool", "content": "y"}]], "row"
    )
    made = arguments_as(messages, "object")[1]["tool_calls"][0]
    function = made[MarkedText.of_row("function")]
    arguments = function[MarkedText.of_row("arguments")]
    text = MarkedText.of_row("<think>")
    assert arguments == {MarkedText.of_row("a"): [1, text]}
    back = arguments_as([{**messages[1], "tool_calls": [made]}], "text")[0]
    assert back["content"] is None
    function = back["tool_calls"][0][MarkedText.of_row("function")]
    assert function[MarkedText.of_row("arguments")].text == '{"a": [1, "<think>"]}'
    assert arguments_as(messages, "as_given") == messages
    broken = json.loads(json.dumps(CALLED).replace("[1", "[1["))
    with pytest.raises(RowFault, match="arguments that are no JSON object"):
        arguments_as(
            messages_of(
                [{"role": "user", "content": "x"}, broken, *[{"role": "tool", "content": "y"}]],
                "row",
            ),
            "object",
        )


class Caller(ScriptedEngine):
    """Writes one answer after the other."""

    def __init__(self, text: LocalText, written: list[str]) -> None:
        super().__init__()
        self._answers = [text.tokenizer.encode(each) for each in written]

    def _complete(self, prompt: Prompt) -> Completion:
        return Completion(
            row_id=prompt.row_id,
            index=prompt.index,
            token_ids=self._answers[prompt.index],
            finish_reason=FinishReason.STOP,
            prompt_tokens=len(prompt.token_ids),
        )


@pytest.mark.parametrize("form", ["parquet", "jsonl", "openai_batch"])
def test_a_job_writes_calls_and_faults_of_calls(
    folders: dict[str, Path], file: Path, tmp_path: Path, form: str
) -> None:
    source = write_rows(tmp_path / "in.parquet", ["a", "b", "c"])
    text = text_of(folders["qwen3"], columns=("id", "text"), prompt={"tools": str(file)})
    engine = Caller(text, [f"<think>x</think>{CALL}{CALL}", f"<think>x</think>no{BAD}", "hi"])
    loaded = scripted_spec(
        source, tmp_path / "out", prompt={"tools": str(file)}, output={"format": form}
    )
    run_scripted(loaded, scripted_seams(engine, text=cast(Any, text)))
    part = next((tmp_path / "out").glob("part-*"))
    if form == "parquet":
        rows = pq.read_table(part).to_pylist()
    else:
        rows = [json.loads(line) for line in part.read_text(encoding="utf-8").splitlines()]
    if form == "openai_batch":
        choices = [each["response"]["body"]["choices"][0] for each in rows]
        assert [each["finish_reason"] for each in choices] == ["tool_calls", "stop", "stop"]
        calls = choices[0]["message"]["tool_calls"]
        assert [each["function"] for each in calls] == [{"name": "now", "arguments": "{}"}] * 2
        assert len({each["id"] for each in calls}) == 2
        rows = [{**each, "content": each["message"]["content"]} for each in choices]
        assert "tool_calls" not in choices[1]["message"]
    else:
        call = {"name": "now", "arguments": "{}"}
        assert [each["tool_calls"] for each in rows] == [[call, call], None, None]
        assert [each["finish_reason"] for each in rows] == ["tool_calls", "stop", "stop"]
    assert [each["content"] for each in rows] == ["", f"no{BAD}", "hi"]
    assert [each["tool_error"] is None for each in rows] == [True, False, True]
