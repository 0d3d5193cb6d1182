"""No row makes a template run without end: its work is counted, whether it writes or not."""

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchmla.jobs.conversation import ColumnTemplate, RowFault
from batchmla.text import bounds
from batchmla.text.control import ControlStrings

ITEMS = [f"item {n}" for n in range(300)]
TOO_LONG = "prompt.user: it takes more than .* steps: its loops are too long for this row"


def column(source: str) -> ColumnTemplate:
    return ColumnTemplate(source, "prompt.user", ("items",), ControlStrings(()))


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in items %}{% for b in items %}{% endfor %}{% endfor %}",
        "{% for a in items %}{% for b in items if b == 'x' %}{{ b }}{% endfor %}{% endfor %}",
        "{% for a in items %}{% if 'x' in items %}y{% endif %}{% endfor %}",
        "{% for a in items %}{% if a == 'x' %}{% elif items == items %}{% endif %}{% endfor %}",
        "{% for a in items recursive %}{{ loop(items) if loop.depth < 9 }}{% endfor %}",
        "{% for a in items %}{% set n = items | length %}{% endfor %}",
        "{% for a in items %}{% set n = items | select('in', items) | list %}{% endfor %}",
        "{% for a in items %}{% set n = items[1:] %}{% endfor %}",
        "{% for a in items %}{% set n = items + items %}{% endfor %}",
        "{% for a in items %}{% set n = items.count(a) %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(60) }}",
        "{% set ns = namespace(s='') %}{% for a in items %}{% for b in items %}"
        "{% set ns.s = ns.s ~ 'more and more and more' %}{% endfor %}{% endfor %}",
    ],
)
def test_work_that_grows_faster_than_a_row_is_its_fault(
    monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr(bounds, "MAX_STEPS", 20_000)
    template = column(source)
    with pytest.raises(RowFault, match=TOO_LONG):
        template.render({"items": ITEMS})


def test_every_rendering_has_all_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_STEPS", 1000)
    template = column("{% for a in items %}{{ a }},{% endfor %}")
    for _ in range(5):
        assert template.render({"items": ITEMS}).text == ",".join(ITEMS) + ","
    with pytest.raises(RowFault, match=TOO_LONG):
        template.render({"items": ITEMS * 4})
    assert template.render({"items": ["a"]}).text == "a,"


def test_the_bound_itself_is_reached_within_seconds() -> None:
    with pytest.raises(RowFault, match="more than 1,000,000 steps"):
        column("{% for a in items %}{% for b in items %}{% endfor %}{% endfor %}").render(
            {"items": ITEMS * 10}
        )


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in items if a != 'item 3' %}{{ loop.index }}{{ a | upper }};{% else %}-"
        "{% endfor %}",
        "{% for a in items[5:9] if a not in items %}x{% else %}none{% endfor %}",
        "{{ items | reject('in', ['item 1']) | select('eq', 'item 2') | list | tojson }}",
        "{% for k, v in {'a': 1, 'b': 2}.items() if v > 1 %}{{ k ~ v }}{% endfor %}",
        "{{ 1 < 2 < 3 }} {{ 'a' < 'b' }} {{ 3 in [1, 2] }} {{ 'em' not in items[0] }}",
    ],
)
def test_what_is_counted_is_what_jinja_does(source: str) -> None:
    theirs = ImmutableSandboxedEnvironment().from_string(source).render(items=ITEMS)
    assert column(source).render({"items": ITEMS}).text == theirs
