"""Arguments of `UserData` and `average_examples` that are refused, each with one sentence."""

from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lsdp.sampling import Batch
from optax_lsdp.training import DataError, UserData, average_examples
from tests.training.problem import bits, fit, loss, make_data, make_params, make_plan

DATA = make_data()
KEY = jax.random.key(0)
OWNERS = np.arange(400) % 60
USERS = UserData(DATA, OWNERS, max_examples=3)
EVERYONE = Batch(np.arange(60), np.ones(60, bool))
PEOPLE = make_plan(unit="user", dataset_size=60, expected_batch_size=60, sampling="full")


def draw(users, mask=None):
    users = np.array(users)
    mask = np.ones(users.shape, bool) if mask is None else np.array(mask)
    return USERS.batch(Batch(users, mask), 0, key=KEY)


def of_user(user):
    return average_examples(lambda params, example: params)(1.0, user)


def test_padding_may_repeat_any_index():
    alone, padded = draw([3]), draw([3, 3, -7, 99], [True, False, False, False])
    assert bits(padded.examples["x"][:1]) == bits(alone.examples["x"])
    assert not padded.mask[1:].any() and not padded.users[1:].any()


ROWS = np.zeros((4, 2), np.float32)
CASES = {
    "ids of the wrong length": (
        lambda: UserData(ROWS, [1, 2], max_examples=1),
        r"`users` must have one id per example, got ids of shape \(2,\)",
    ),
    "ids with two axes": (
        lambda: UserData(ROWS, np.zeros((4, 1), int), max_examples=1),
        r"`users` must have one id per example, got ids of shape \(4, 1\)",
    ),
    "arrays of different lengths": (
        lambda: UserData((ROWS, ROWS[:3]), [1, 2, 3, 4], max_examples=1),
        "`users` must have one id per example",
    ),
    "NaN": (
        lambda: UserData(ROWS, [1, 2, 3, np.nan], max_examples=1),
        "`users` must hold integers or strings, got float64; leave out",
    ),
    "strings that NumPy would shorten": (
        lambda: UserData(ROWS, ["a", "a\0", "b", "c"], max_examples=1),
        "`users` must hold integers or strings, got an id that ends with the character NUL, which",
    ),
    "bytes that NumPy would shorten": (
        lambda: UserData(ROWS, np.array([b"a", b"a\0", b"b", b"c"], object), max_examples=1),
        "`users` must hold integers or strings, got an id that ends with the character NUL, which",
    ),
    "NaN among strings": (
        lambda: UserData(ROWS, ["a", np.nan, "b", np.nan], max_examples=1),
        "`users` must hold integers or strings, got float and str; leave out",
    ),
    "NaN among strings of a deque": (
        lambda: UserData(ROWS, deque(["a", np.float32("nan"), "b", "c"]), max_examples=1),
        "`users` must hold integers or strings, got float32 and str; leave out",
    ),
    "NaN among strings of an array": (
        lambda: UserData(ROWS, np.array(["a", np.nan, "b", "c"], object), max_examples=1),
        "`users` must hold integers or strings, got object; leave out",
    ),
    "integers among strings": (
        lambda: UserData(ROWS, ["1", 1, "2", 2], max_examples=1),
        "`users` must hold integers or strings, got int and str",
    ),
    "bools among integers": (
        lambda: UserData(ROWS, [1, True, 2, 3], max_examples=1),
        "`users` must hold integers or strings, got bool and int",
    ),
    "an empty list": (
        lambda: UserData(ROWS, [], max_examples=1),
        r"`users` must have one id per example, got ids of shape \(0,\)",
    ),
    "integers of more than 64 bits": (
        lambda: UserData(ROWS, [1, 2, 3, 2**64], max_examples=1),
        "`users` must hold integers from −2⁶³ to .*, got integers outside of this range; convert",
    ),
    "integers of 64 bits with and without a sign": (
        lambda: UserData(ROWS, [-1, 2, 3, 2**63], max_examples=1),
        "`users` must hold integers from −2⁶³ to .*, got integers outside of this range; convert",
    ),
    "lists of ids of different lengths": (
        lambda: UserData(ROWS, [[1], [2, 3], [4], [5]], max_examples=1),
        "`users` must have one id per example, got list, which NumPy cannot convert",
    ),
    "objects": (
        lambda: UserData(ROWS, np.array([1, None, "a", 2], object), max_examples=1),
        "`users` must hold integers or strings, got object",
    ),
    "masked ids": (
        lambda: UserData(ROWS, np.ma.array([1, 2, 3, 4], mask=[0, 0, 0, 1]), max_examples=1),
        "`users` must hold integers or strings, got a masked array",
    ),
    "no examples": (
        lambda: UserData(ROWS[:0], np.zeros(0, int), max_examples=1),
        "`arrays` must hold at least one example",
    ),
    "none of a user": (
        lambda: UserData(ROWS, [1, 2, 3, 4], max_examples=0),
        "`max_examples` must be a whole number, 1 or more, got 0",
    ),
    "more than memory can hold": (
        lambda: UserData(ROWS, [1, 1, 2, 2], max_examples=10**11),
        "`max_examples` must be at most .* memory, 1000000, got 100000000000",
    ),
    "one and a half": (
        lambda: UserData(ROWS, [1, 2, 3, 4], max_examples=1.5),
        "`max_examples` must be a whole number, 1 or more, got 1.5",
    ),
    "a list": (
        lambda: UserData(ROWS.tolist(), [1, 2, 3, 4], max_examples=1),
        "`arrays` must be an array, or a dict or tuple of arrays, got list",
    ),
    "text": (
        lambda: UserData(np.array(["a"] * 4), [1, 2, 3, 4], max_examples=1),
        "`arrays` must hold numbers, got <U1",
    ),
    "users without examples": (
        lambda: fit(make_plan(dataset_size=61, unit="user"), USERS),
        "`data` must have 61 users, the plan's `dataset_size`, got 60 different ids",
    ),
    "a plan for users without users": (
        lambda: fit(make_plan(unit="user"), DATA),
        "`data` must be a UserData if the plan's unit is 'user', got dict",
    ),
    "users without a plan for users": (
        lambda: fit(make_plan(dataset_size=60), USERS),
        '`plan` must have unit="user" if `data` is a UserData',
    ),
    "no such unit": (
        lambda: make_plan(unit="household"),
        "`unit` must be one of 'example', 'user', got 'household'",
    ),
    "a mask of numbers": (
        lambda: average_examples(jnp.vdot)(jnp.ones(2), (jnp.ones((3, 2)), jnp.ones(3))),
        r"`user` must be a pair \(examples, mask\), with a row and a bool for each example, got",
    ),
    "a loss of several numbers": (
        lambda: average_examples(jnp.multiply)(1.0, (jnp.ones((3, 2)), jnp.ones(3, bool))),
        "`loss_fn` must return a scalar for one example",
    ),
    "no loss": (
        lambda: average_examples(None),
        "`loss_fn` must be a function of parameters and one example, got None",
    ),
    "a user without mask": (
        lambda: of_user(jnp.ones((2, 3))),
        r"`user` must be a pair \(examples, mask\), .*, got float32\[2, 3\]; pass",
    ),
    "a user of one part": (lambda: of_user((jnp.ones(3),)), "`user` must be a pair"),
    "a user without arrays": (lambda: of_user(((), jnp.ones(3, bool))), "`user` must be a pair"),
    "no user": (lambda: of_user(None), "`user` must be a pair"),
    "a user whose mask is None": (lambda: of_user((jnp.ones(3), None)), "`user` must be a pair"),
    "a user with a number": (lambda: of_user((1.0, jnp.ones(3, bool))), "`user` must be a pair"),
    "a user with arrays of different lengths": (
        lambda: of_user(((jnp.ones(3), jnp.ones(2)), jnp.ones(3, bool))),
        r"`user` must be a pair \(examples, mask\), with a row and a bool for each example",
    ),
    "a loss that averages already": (
        lambda: fit(PEOPLE, USERS, loss_fn=average_examples(loss)),
        "`user` must be a pair .* or an example's loss to `fit`",
    ),
    "the loss of one example for users": (
        lambda: PEOPLE.clipped_grad(loss)(
            make_params(), USERS.batch(EVERYONE, 0, key=KEY), EVERYONE.mask
        ),
        r"`loss_fn` .* a single example of a user; pass `training.average_examples\(loss_fn\)",
    ),
    "no batch": (
        lambda: USERS.batch(None, 0, key=KEY),
        "`batch` must hold different indices .*, got NoneType; pass a batch",
    ),
    "a user twice": (
        lambda: draw([3, 5, 3]),
        "`batch` must hold different indices of users from 0 to 59 .* got user 3 more than once;",
    ),
    "a negative user": (lambda: draw([3, -1]), "`batch` must hold .*, got user -1; pass a batch"),
    "a user too many": (lambda: draw([3, 60]), "`batch` must hold .*, got user 60; pass a batch"),
    "users in fractions": (
        lambda: draw([1.0, 2.0]),
        r"`batch` must hold .*, got indices of type float64 and shape \(2,\)",
    ),
    "a batch with two axes": (
        lambda: draw([[1, 2]]),
        r"`batch` must hold .*, got indices of type int64 and shape \(1, 2\)",
    ),
    "a mask of another length": (
        lambda: draw([1, 2], [True]),
        r"`batch` must hold .*, got a mask of type bool and shape \(1,\) for 2 users",
    ),
    "a mask of a batch in numbers": (
        lambda: draw([1, 2], [1, 0]),
        r"`batch` must hold .*, got a mask of type int64 and shape \(2,\) for 2 users",
    ),
    "a key of another generator": (
        lambda: USERS.batch(EVERYONE, 0, key=jax.random.key(0, impl="rbg")),
        "`key` must be a Threefry key, got rbg",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_gets_one_sentence(name):
    call, message = CASES[name]
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        call()
    assert str(caught.value).count(". ") == 0, caught.value


def test_data_that_are_not_finite_name_the_example():
    x = DATA["x"].copy()
    x[17] = np.nan
    with pytest.raises(DataError, match=r"finite as float32, .* in example 17 at 'x'"):
        UserData({**DATA, "x": x}, OWNERS, max_examples=99).batch(EVERYONE, 0, key=KEY)


@pytest.mark.parametrize("ids", [["b", "a", "b", "c"], [7, 5, 7, 2**40]])
def test_an_array_of_objects_counts_as_the_list(ids):
    found = UserData(ROWS, np.array(ids, object), max_examples=2)
    np.testing.assert_array_equal(found.owners, UserData(ROWS, ids, max_examples=2).owners)
