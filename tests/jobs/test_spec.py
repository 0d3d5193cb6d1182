"""Job files: YAML 1.2 core, every fault named with its place, sources of values, refusals."""

from pathlib import Path
from typing import Any

import pytest

from batchmla.errors import JobError
from batchmla.jobs.sampling_values import ROW_FIELDS
from batchmla.jobs.settings import JobSpec
from batchmla.jobs.spec import build_spec, load_spec
from batchmla.jobs.structured import KINDS
from batchmla.jobs.unbuilt import UNBUILT
from batchmla.jobs.wording import known_keys
from batchmla.jobs.yaml_text import core_scalar, parse_yaml

MINIMAL = """\
model: {path: builtin:tally}
input: {path: data.jsonl}
prompt: {user: "{{ text }}"}
output: {path: out}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(JobError) as caught:
        load_spec(write(folder, text), overrides)
    return str(caught.value)


def test_defaults_are_those_of_the_contract(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, MINIMAL)).spec
    assert spec.name == "job"
    assert spec.model.memory_utilization == 0.92
    assert spec.model.speculative == "off"
    assert spec.sampling.temperature is None  # the model's own
    assert spec.sampling.max_tokens is None  # the rest of the context
    assert (spec.engine.window_rows, spec.output.rows_per_file) == (100_000, 10_000)
    assert (spec.errors.max, spec.errors.malformed, spec.errors.stop_after) == (0.01, "fail", 1000)
    assert (spec.output.compression, spec.output.prefix) == ("zstd", "")
    assert spec.input.columns is None


def test_every_key_of_the_contract_exists() -> None:
    sections = {
        "model": "path revision device dtype kv_cache_dtype load_format max_model_len "
        "memory_utilization parallel speculative",
        "model.parallel": "tensor expert attention_data",
        "input": "path format id columns check",
        "prompt": "system user messages raw tools chat_template too_long",
        "sampling": "max_tokens min_tokens temperature top_p top_k min_p repetition_penalty "
        "frequency_penalty presence_penalty logit_bias bad_words seed n stop stop_token_ids "
        "ignore_eos logprobs prompt_logprobs structured",
        "reasoning": "parser start end thinking budget budget_share budget_message loop_guard "
        "stop_in_reasoning",
        "engine": "max_num_seqs max_batched_tokens prefix_caching block_size order window_rows "
        "dedupe deterministic",
        "executor": "kind replicas address",
        "executor.replicas": "min max",
        "output": "path format rows_per_file compression token_ids prefix",
        "errors": "max malformed stop_after",
    }
    expected = {"name"} | set(sections)
    for section, keys in sections.items():
        expected |= {f"{section}.{key}" for key in keys.split()}
    by_row = (*ROW_FIELDS, "logprobs", "prompt_logprobs", "n")
    expected |= {f"sampling.{name}.column" for name in by_row}
    expected |= {f"sampling.structured.{kind}" for kind in (*KINDS, "column")}
    expected |= {f"sampling.structured.{kind}.column" for kind in KINDS}
    assert {".".join(path) for path in known_keys(JobSpec)} == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on", "on"), ("off", "off"), ("yes", "yes"), ("No", "No"), ("y", "y"),
        ("true", True), ("FALSE", False), ("null", None), ("~", None), ("", None),
        ("1e-3", 0.001), ("1E3", 1000.0), (".5", 0.5), ("-.5", -0.5), ("1.", 1.0), ("+7", 7),
        ("0o17", 15), ("0x1F", 31), ("017", 17), ("1_000", "1_000"), ("0b1", "0b1"),
        ("2024-01-01", "2024-01-01"), ("12:30:45", "12:30:45"), (".inf", float("inf")),
        ("1e", "1e"), ("<<", "<<"), ("=", "="), ("0.92", 0.92), ("1\n", "1\n"),
    ],
)  # fmt: skip
def test_plain_scalars_follow_the_core_schema(text: str, value: Any) -> None:
    found = core_scalar(text)
    assert found == value
    assert type(found) is type(value)


def test_quoted_scalars_are_text_and_anchors_are_shared() -> None:
    value = parse_yaml("a: '1'\nb: \"null\"\nc: &x [1, !!str 2]\nd: *x\ne: |\n  no\n", "f").value
    assert value == {"a": "1", "b": "null", "c": [1, "2"], "d": [1, "2"], "e": "no\n"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\na: 3\n", "f, line 3: the key a is given twice"),
        ("a: {b: 1,\n c: 2, b: 3}\n", "f, line 2: the key a.b is given twice"),
        ("1: x\n1: y\n", "f, line 2: the key 1 is given twice"),
        ("a: [1", "f, line 1: not valid YAML"),
        ("a: b: c", "f, line 1: not valid YAML"),
        ("a: 1\n---\nb: 2\n", "f, line 2: a second document"),
        ("a: !!python/object:os.system x\n", "f, line 1: the tag"),
        ("a: *nobody\n", "f, line 1: *nobody names no anchor"),
        ("a: " + "[" * 480, "not valid YAML"),
        ("[1, 2]: 3\n", "a key must be a plain word"),
        ("a: {b: 1", "f, line 1: not valid YAML: a map that begins with { is not closed"),
        ("{a: 1}}", "f, line 1: not valid YAML: a bracket closes that none opened"),
        ("a: @b", "f, line 1: not valid YAML: text that begins with @, ` or % needs quotes"),
        ("a:\n\t- b", "f, line 2: not valid YAML: a tab cannot indent; use spaces"),
        ('a: "x', "not valid YAML: a quoted text is not closed"),
        ("a:\n - 1\n b: 2", "f, line 3: not valid YAML: this line does not fit the indentation"),
        ("a: &", "found the end of the text"),
        ("a: \x01", "f: not valid YAML: the character U+0001 is not allowed; remove it"),
        ("~: 1\nnull: 2", "f, line 2: the key null is given twice"),
        ("x: {true: 1, True: 2}", "f, line 1: the key x.true is given twice"),
    ],
)
def test_faulty_yaml_is_named_with_its_line(text: str, said: str) -> None:
    with pytest.raises(JobError) as caught:
        parse_yaml(text, "f")
    assert said in str(caught.value)
    assert "('" not in str(caught.value) and "None" not in str(caught.value)


def test_a_job_file_must_be_there_and_be_a_map(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    with pytest.raises(JobError, match=r"does not exist; did you mean .*job\.yaml"):
        load_spec(path.with_name("jbo.yaml"))
    with pytest.raises(JobError, match="is a folder"):
        load_spec(tmp_path)
    assert "is a map of sections" in refusal(tmp_path, "- a\n- b\n")
    path.write_bytes(b"name: \xff\n")
    with pytest.raises(JobError, match="not UTF-8"):
        load_spec(path)


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_spec(path).spec.model.path == "builtin:tally"


def test_empty_file_names_what_is_missing(tmp_path: Path) -> None:
    said = refusal(tmp_path, "# nothing yet\n")
    for key in ("model.path", "input.path", "output.path"):
        assert key in said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("samplng: {seed: 1}", "unknown key samplng; did you mean sampling?"),
        ("sampling: {budget: 5}", "unknown key sampling.budget; did you mean reasoning.budget?"),
        ("sampling: {temprature: 1}", "sampling.temprature; did you mean sampling.temperature?"),
        ("engine: {rows_per_file: 5}", "engine.rows_per_file; did you mean output.rows_per_file?"),
        ("thinking: {budgett: 128}", "thinking.budgett; did you mean reasoning.budget?"),
        ("reasoning_content: x", "the reasoning field is called reasoning"),
        ("sampling: {max_new_tokens: 5}", "here it is sampling.max_tokens"),
        ("engine: {tensor_parallel_size: 2}", "here it is model.parallel.tensor"),
        ("errors: {1: 2}", "unknown key errors.1"),
        ("output_path: x", "unknown key output_path"),
        ("null: 3", "unknown key null"),
        ("true: {~: 3}", "unknown key true.null"),
        ("engine: [{~: 1}, null, [true]]", "the list [{null}, null, [true]]"),
    ],
)
def test_unknown_keys_name_the_nearest(tmp_path: Path, line: str, said: str) -> None:
    found = refusal(tmp_path, MINIMAL + line)
    assert said in found
    assert "job.yaml, line 5: " in found


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("sampling.top_p=1.5", "sampling.top_p is 1.5; it must be a number above 0 and at most 1"),
        ("sampling.top_p=0", "sampling.top_p is 0"),
        ("sampling.n=0", "sampling.n is 0; it must be a whole number of at least 1"),
        (
            "sampling.temperature=hot",
            'is the text "hot"; it must be a number of at least 0 or {column: NAME} or null',
        ),
        ("sampling.temperature=.nan", "sampling.temperature is nan"),
        ("sampling.seed=1.5", "sampling.seed is 1.5; it must be a whole number"),
        ("sampling.max_tokens='5'", 'sampling.max_tokens is the text "5"'),
        ("sampling.ignore_eos=yes", 'is the text "yes"; it must be true or false'),
        ("sampling.stop_token_ids=[1, x]", 'is the text "x" at position 1; it must be a list'),
        ("sampling.stop_token_ids=5", "sampling.stop_token_ids is 5; it must be a list"),
        ("engine.block_size=big", "it must be a whole number of at least 1 or auto"),
        ("engine.max_num_seqs=true", "engine.max_num_seqs is true"),
        ("engine=5", "engine is 5; it must be a map with the keys max_num_seqs"),
        ("model.device=gpu", 'is the text "gpu"; it must be auto, cuda, cpu'),
        ("model.path=", "model.path is null; it must be text"),
        ("model.memory_utilization=92", "above 0 and at most 1"),
        ("output.rows_per_file=0", "output.rows_per_file is 0"),
        (
            "errors.max=1.0",
            "errors.max is 1.0; it must be a whole number of at least 0 or a number",
        ),
        ("errors.max=true", "errors.max is true"),
        ("errors.max=-1", "errors.max is -1"),
        ("errors.max=1.5", "errors.max is 1.5"),
        ("name=2024", "name is 2024; it must be text"),
        ("reasoning.budget=-1", "reasoning.budget is -1"),
        ("reasoning.budget_share=2", "reasoning.budget_share is 2"),
        ("input.columns=text", 'input.columns is the text "text"; it must be a list'),
    ],
)
def test_wrong_values_are_one_sentence_with_what_is_allowed(
    tmp_path: Path, override: str, said: str
) -> None:
    found = refusal(tmp_path, MINIMAL, override)
    assert said in found
    assert found.startswith("--set: ")
    assert len(found.splitlines()) == 1
    assert "validation error" not in found


def test_all_faults_come_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = MINIMAL + "sampling: {max_token: 64, top_p: 1.5}\nengine:\n  compute: 4\n  dedupe: 1\n"
    lines = refusal(tmp_path, text, "errors.mx=1", "model.speculative=mtp").splitlines()
    assert len(lines) == 6
    placed = [line for line in lines if line.startswith(str(tmp_path))]
    assert [line.split("line ")[1][0] for line in placed] == ["5", "5", "7", "8"]


@pytest.mark.parametrize(
    "override",
    [
        "model.path=s3://bucket/model",
        "model.speculative=mtp",
        "output.path=hf://someone/out",
    ],
)  # fmt: skip
def test_values_of_unbuilt_features_are_refused_by_name(tmp_path: Path, override: str) -> None:
    found = refusal(tmp_path, MINIMAL, override)
    assert "is not built yet; " in found
    assert override.split("=")[0] in found
    assert len(found.splitlines()) == 1


def test_the_table_of_refusals_names_only_known_keys() -> None:
    known = {".".join(path) for path in known_keys(JobSpec)}
    for entry in UNBUILT:
        assert entry.field.removesuffix(".*") in known


@pytest.mark.parametrize(
    "override",
    [
        "model.parallel={tensor: 1, expert: 8, attention_data: 8}", "model.parallel=auto",
        "executor.replicas=1",
        "executor.address=auto", "sampling.n=1", "sampling.stop=[]", "sampling.logit_bias={}",
        "sampling.frequency_penalty=0", "sampling.structured=null", "engine.deterministic=true",
        "reasoning.loop_guard=null", "executor={kind: local, replicas: 1, address: auto}",
        "executor={kind: ray, replicas: 4}", "executor={kind: ray, replicas: {min: 1, max: 8}}",
        "executor={kind: ray, address: '10.0.0.1:6379'}",
        "sampling.bad_words=[]", "prompt.too_long=error", "sampling.temperature=0",
        "prompt.too_long=truncate_middle",
        "errors.max=1", "errors.max=0", "errors.max=0.0", "errors.max=0.999",
        "sampling.temperature={column: t}", "sampling.seed={column: t}",
        "sampling.max_tokens={column: t}", "sampling.ignore_eos={column: t}",
        "sampling.frequency_penalty={column: t}", "sampling.stop={column: t}",
        "sampling.logit_bias={column: t}", "sampling.logit_bias={5: 1.0, 7: -100}",
        "sampling.bad_words=[no]", "sampling.stop=[END]", "sampling.stop=END",
        "sampling.logprobs=5", "sampling.logprobs={column: t}", "sampling.prompt_logprobs=0",
        "sampling.structured={choice: [a]}", "sampling.structured={column: t}",
        "sampling.structured={json_schema: {column: t}}",
        "sampling.structured={json_schema: {type: object, properties: {a: {type: integer}}}}",
        "sampling.structured={regex: '[0-9]+'}", "reasoning.loop_guard=8",
        "reasoning.stop_in_reasoning=true",
        "input.path=[a.jsonl, b.jsonl]", "reasoning.budget=0", "engine.block_size=16",
    ],
)  # fmt: skip
def test_neutral_values_are_accepted(tmp_path: Path, override: str) -> None:
    load_spec(write(tmp_path, MINIMAL), [override])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["executor.replicas=2"], "executor.replicas needs executor.kind: ray"),
        (["executor.replicas={min: 1, max: 8}"], "executor.replicas needs executor.kind: ray"),
        (["executor.address=local"], "executor.address needs executor.kind: ray"),
        (["executor={kind: ray, replicas: {min: 3, max: 2}}"], "min 3 is more than"),
        (["prompt={}"], "give exactly one of prompt.user, prompt.messages and prompt.raw"),
        (["prompt.raw=x"], "found prompt.user and prompt.raw"),
        (["prompt={system: s, messages: chat}"], "prompt.system goes with prompt.user"),
        (["sampling.max_tokens=5", "sampling.min_tokens=6"], "min_tokens 6 is more than"),
        (["reasoning.start=<t>"], "go together"),
        (["reasoning.budget=5", "reasoning.budget_share=0.5"], "two ways to say one thing"),
        (["reasoning.budget_message=x"], "needs reasoning.budget"),
        (["reasoning.budget=5", "reasoning.parser=none"], "a reasoning budget needs markers"),
        (["input.path=[]"], "an empty list"),
        (["sampling.stop=['']"], "text of at least one character"),
        (["sampling.bad_words=[a, '']"], "sampling.bad_words"),
        (["sampling.logit_bias={a: 1}"], "sampling.logit_bias"),
        (["sampling.logit_bias={3: 101}"], "sampling.logit_bias"),
        (["sampling.structured={}"], "exactly one of json_schema, regex"),
        (["sampling.structured={regex: a, choice: [b]}"], "found regex and choice"),
        (["sampling.structured={json: {}}"], "sampling.structured.json"),
        (["output.format=openai_batch", "sampling.logprobs=1"], "not built yet; choose parquet"),
    ],
)
def test_values_that_contradict_each_other(tmp_path: Path, overrides: list[str], said: str) -> None:
    assert said in refusal(tmp_path, MINIMAL, *overrides)


def test_overrides_win_and_every_value_has_its_source(tmp_path: Path) -> None:
    text = MINIMAL + "sampling: {seed: 3, top_k: 5}\nengine:\n"
    loaded = load_spec(
        write(tmp_path, text),
        ["sampling.seed=7", "sampling.stop_token_ids=[1, 2]", "input={path: [a, b]}", "name=x=y"],
    )
    spec, sources = loaded.spec, loaded.sources
    assert (spec.sampling.seed, spec.sampling.top_k, spec.name) == (7, 5, "x=y")
    assert spec.sampling.stop_token_ids == (1, 2)
    assert spec.input.paths == ("a", "b")
    assert sources["sampling.seed"] == "set"
    assert sources["sampling.stop_token_ids"] == "set"
    assert sources["input.path"] == "set"
    assert sources["sampling.top_k"] == "file"
    assert sources["input.format"] == sources["engine.order"] == "default"
    flat = loaded.resolved()
    for name in sources:
        value: Any = flat
        for key in name.split("."):
            value = value[key]


@pytest.mark.parametrize("text", ["sampling.seed", "=5", "sampling..seed=1", ".seed=1"])
def test_an_override_without_key_or_value_is_refused(tmp_path: Path, text: str) -> None:
    assert "write it as section.key=value" in refusal(tmp_path, MINIMAL, text)


def test_an_override_may_replace_a_scalar_by_a_section(tmp_path: Path) -> None:
    text = MINIMAL.replace("model: {path: builtin:tally}", "model: nonsense")
    assert load_spec(write(tmp_path, text), ["model.path=m"]).spec.model.path == "m"


def test_a_job_given_as_maps_is_checked_alike() -> None:
    values = {
        "model": {"path": "m"},
        "input": {"path": ["a", "b"]},
        "prompt": {"raw": "text"},
        "output": {"path": "o"},
    }
    assert build_spec(values).spec.input.paths == ("a", "b")
    assert "name" not in values
    with pytest.raises(JobError, match=r"engine\.windw_rows; did you mean engine\.window_rows"):
        build_spec(values | {"engine": {"windw_rows": 5}})


@pytest.mark.parametrize(
    ("limit", "failed", "rows", "allowed"),
    [(0, 0, 10, True), (0, 1, 10, False), (3, 3, 3, True), (0.01, 1, 100, True),
     (0.01, 1, 99, False), (0.01, 0, 0, True)],
)  # fmt: skip
def test_errors_max_is_a_count_or_a_share(
    tmp_path: Path, limit: float, failed: int, rows: int, allowed: bool
) -> None:
    spec = load_spec(write(tmp_path, MINIMAL), [f"errors.max={limit}"]).spec
    assert spec.errors.allows(failed, rows) is allowed


def test_an_unknown_key_without_a_value_is_refused_too(tmp_path: Path) -> None:
    assert refusal(tmp_path, MINIMAL + "thinking:\n").endswith(
        "line 5: unknown key thinking; did you mean reasoning.thinking?"
    )
    assert "--set: unknown key nope" in refusal(tmp_path, MINIMAL, "nope=")
    assert load_spec(write(tmp_path, MINIMAL + "sampling:\n")).spec.sampling.seed == 0


def test_surrogate_pairs_of_json_are_one_character_and_halves_are_refused(tmp_path: Path) -> None:
    pair = load_spec(write(tmp_path, MINIMAL), ['output.path="\\ud83e\\udd99"']).spec
    assert pair.output.path == "\U0001f999"
    message = refusal(tmp_path, MINIMAL + 'name: "a\\udd99"\n')
    assert "job.yaml, line 5: a lone surrogate" in message


@pytest.mark.parametrize("field", ["model.path", "input.path", "output.path"])
@pytest.mark.parametrize("value", ['"a\\0b"', '""'])
def test_a_path_that_is_none_is_refused(tmp_path: Path, field: str, value: str) -> None:
    message = refusal(tmp_path, MINIMAL, f"{field}={value}")
    assert message == f"--set: {field} must be a path: text that is not empty and holds no NUL"
