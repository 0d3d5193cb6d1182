"""Recipes: each is a job that loads, with templates that parse; writing one never loses a file."""

from pathlib import Path

import jinja2
import pytest

from batchmla.errors import JobError
from batchmla.jobs.init import list_recipes, read_recipe, write_recipe
from batchmla.jobs.spec import load_spec

NAMES = ["classify", "distill", "docstrings", "extract", "judge", "summarise", "translate"]


def test_every_recipe_is_listed_with_a_line() -> None:
    found = list_recipes()
    assert list(found) == NAMES
    assert all(line.endswith(".") and 20 < len(line) <= 95 for line in found.values())


@pytest.mark.parametrize("name", NAMES)
def test_recipe_is_a_valid_job(name: str, tmp_path: Path) -> None:
    path = write_recipe(name, tmp_path / "job.yaml")
    spec = load_spec(path).spec
    assert spec.name == "job"
    assert spec.reasoning.budget is not None
    prompt = spec.prompt.user
    if prompt is not None:
        template = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(prompt)
        with pytest.raises(jinja2.UndefinedError):
            template.render()  # it uses a column
    assert "#" in read_recipe(name).partition("\n")[2]  # commented


def test_a_recipe_is_never_written_over_a_file(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("mine")
    with pytest.raises(JobError, match="exists and is left as it is"):
        write_recipe("judge", path)
    assert path.read_text() == "mine"


def test_an_unknown_recipe_or_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="there is no recipe sumarize; did you mean summarise"):
        write_recipe("sumarize", tmp_path / "x.yaml")
    with pytest.raises(JobError, match="there is no folder"):
        write_recipe("judge", tmp_path / "nowhere" / "x.yaml")


def test_the_default_file_is_the_recipes_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert write_recipe("judge").read_text(encoding="utf-8") == read_recipe("judge")
    assert (tmp_path / "judge.yaml").exists()
