"""JSON text of a plan or a ledger is read completely, or refused in one sentence."""

import json

import pytest

import optax_lsdp as lsdp
from optax_lsdp.accounting import Ledger, SampledGaussian
from optax_lsdp.planning import Piecewise

FULL_BATCHES = {
    "dataset_size": 100,
    "expected_batch_size": 100,
    "steps": 10,
    "noise_multiplier": 9.0,
    "delta": 1e-3,
    "sampling": "full",
}
PLAN = lsdp.PrivacyPlan(
    **FULL_BATCHES,
    clip_norm={"w": 1.0, "b": 2.0},
    noise_schedule=Piecewise((0, 5), (1.0, 2.0)),
)
LEDGER = Ledger([SampledGaussian(1.0, 1.0, 10, max_batch_size=2, dataset_size=3)])
READ = {"plan": lsdp.PrivacyPlan.from_json, "ledger": Ledger.from_json}
FIELDS = [("plan", name) for name in json.loads(PLAN.to_json())]
FIELDS += [("ledger", name) for name in json.loads(LEDGER.to_json())]
FIELDS += [("ledger", f"phases/{name}") for name in json.loads(LEDGER.to_json())["phases"][0]]
WRONG = ("-1", "1e999", "NaN", "-Infinity", '"1"', "[]", "[[1, 2]]", "{}", '{"x": []}', "0.5e-999")
WRONG += ('{"$tuple": 5}', '{"$piecewise": 5}', '{"$piecewise": [[0], [1], [2]]}', "9" * 5000)
WRONG += (
    '{"$piecewise": [["a"], [1]]}',
    '{"$piecewise": [[0], ["a"]]}',
    '{"$piecewise": [[0], []]}',
)
WRONG += ('{"$piecewise": [[0, null], [1, 2]]}', "1" + "0" * 400, '{"$piecewise": [[1], [1]]}')
WRONG += ("[" * 60 + "]" * 60, "[" * 500 + "]" * 500, '{"a":' * 90 + "1" + "}" * 90)


def written(kind, name, value):
    """Return the text with one field replaced."""
    found = json.loads((PLAN if kind == "plan" else LEDGER).to_json())
    inside = found["phases"][0] if name.startswith("phases/") else found
    inside[name.removeprefix("phases/")] = "HERE"
    return json.dumps(found).replace('"HERE"', value)


def test_reading_returns_what_was_written():
    assert lsdp.PrivacyPlan.from_json(PLAN.to_json()) == PLAN
    assert Ledger.from_json(LEDGER.to_json()) == LEDGER


@pytest.mark.filterwarnings("ignore:`delta` should be far below")
@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_every_wrong_value_is_refused_in_one_sentence(kind, name):
    accepted = []
    for value in WRONG:
        try:
            accepted.append((value, READ[kind](written(kind, name, value))))
        except (ValueError, TypeError) as error:
            assert str(error).startswith("`") and " must " in str(error), (value, error)
            assert len(str(error)) < 1000
    # Some values make another valid plan: schedules, no clip norms, no phases.
    assert len(accepted) <= (4 if name in ("clip_norm", "smoothing") else 1), accepted


@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "5",
        "[]",
        "{}",
        "[" * 100_000,
        '{"a":' * 100_000,
        "[" * 900 + "]" * 900,
        "9" * 100_000,
        "\ud800",
        b"\xff",
        None,
        5,
    ],
    ids=lambda text: str(text)[:12],
)
def test_other_text_is_refused_in_one_sentence(kind, text):
    with pytest.raises(ValueError, match=r"^`text` must be"):
        READ[kind](text)


@pytest.mark.parametrize("kind", READ)
def test_a_name_that_occurs_twice_is_refused(kind):
    text = (PLAN if kind == "plan" else LEDGER).to_json()
    field = '"delta": 0.5, ' if kind == "plan" else '"phases": [], '
    with pytest.raises(ValueError, match="occurs twice"):
        READ[kind](text.replace("{", "{" + field, 1))


@pytest.mark.parametrize("steps", [10**9 + 1, 10**12, 10**18, 10**400])
def test_absurd_numbers_of_steps_are_refused_at_once(steps):
    with pytest.raises(ValueError, match=r"`steps` must be .*at most"):
        READ["plan"](written("plan", "steps", str(steps)))


def test_a_plan_with_an_infinite_epsilon_is_refused():
    with pytest.raises(ValueError, match="`noise_multiplier` must be large enough for a finite ε"):
        READ["plan"](
            written("plan", "noise_multiplier", "1e-300").replace(
                f'"epsilon": {PLAN.epsilon!r}', '"epsilon": null'
            )
        )


def test_deeply_nested_clip_norms_are_refused():
    nested = 1.0
    for _ in range(100):
        nested = [nested]
    with pytest.raises(ValueError, match=r"`clip_norm` must be .* nested too deeply"):
        lsdp.PrivacyPlan(**FULL_BATCHES, clip_norm=nested)
