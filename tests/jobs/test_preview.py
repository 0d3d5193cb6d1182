"""`preview`: the first prompts as the model gets them, and how they are printed."""

import io
import json

import pytest
import vocabulary
from rich.console import Console

from batchmla.errors import JobError
from batchmla.jobs.preview import preview, print_preview
from batchmla.jobs.spec import build_spec

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 448,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


@pytest.fixture
def job(tmp_path):
    folder = vocabulary.byte_level(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    rows = [
        {"id": "a", "text": "hi <think> 🙂"},
        {"id": "b", "text": None},
        {"id": "c", "text": "x" * 500},
        {"id": "d", "text": "\x1b[31mred\x1b[0m [bold]"},
        {"id": "e", "text": "not shown"},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(lines, encoding="utf-8")

    def make(**sections):
        return build_spec(
            {
                "name": "shown",
                "model": {"path": str(folder), "device": "cpu"},
                "input": {"path": str(tmp_path / "rows.jsonl")},
                "prompt": {"user": "Q: {{ text }}"},
                "output": {"path": str(tmp_path / "out")},
                **sections,
            }
        )

    return make


def test_the_first_prompts_as_the_model_gets_them(job):
    made = preview(job(), 4)
    assert [prompt.row_id for prompt in made.prompts] == ["a", "b", "c", "d"]
    first = made.prompts[0]
    assert first.text == (
        f"{vocabulary.BOS}{vocabulary.USER}Q: hi <think> 🙂{vocabulary.ASSISTANT}<think>\n"
    )
    controls = [piece.text for piece in first.pieces if piece.is_control]
    assert controls == [vocabulary.BOS, vocabulary.USER, vocabulary.ASSISTANT, "<think>"]
    assert first.prompt_tokens == len(first.token_ids) and first.is_reasoning_open
    assert "column 'text' is null" in made.prompts[1].error
    assert "too long" in made.prompts[2].error and made.prompts[2].prompt_tokens == 0
    assert made.settings["sampling.temperature"] == {"value": 0.6, "source": "generation_config"}
    shown = json.loads(json.dumps(made.to_json()))
    assert shown["prompts"][0]["token_ids"] == first.token_ids
    assert shown["prompts"][0]["text"] == first.text


def test_printing_marks_control_tokens_and_disarms_the_rest(job):
    out = io.StringIO()
    print_preview(preview(job(), 4), Console(file=out, width=1000, highlight=False))
    text = out.getvalue()
    assert "⟦<｜User｜>⟧Q: hi <think> 🙂⟦<｜Assistant｜>⟧⟦<think>⟧" in text
    assert "\x1b" not in text and "\\x1b[31mred\\x1b[0m [bold]" in text
    assert "row 1  id b  error: column 'text' is null" in text
    assert "sampling.temperature: 0.6 (generation_config)" in text
    assert "tokens  ends inside the reasoning" in text and "ids 420 " in text


def test_faults_of_the_job_are_found(job):
    with pytest.raises(JobError, match="did you mean text"):
        preview(job(prompt={"user": "{{ txt }}"}), 1)
    with pytest.raises(JobError, match="is not built yet"):
        preview(job(reasoning={"parser": "glm45"}), 1)
