"""Leaves are told apart by construction: no two draw the same noise or share a clip norm."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

import optax_lsdp as lsdp
from optax_lsdp._keys import fold_in_texts
from optax_lsdp._trees import leaf_addresses
from optax_lsdp.discrete import add_discrete_gaussian_noise, quantized_grad


@jax.tree_util.register_pytree_with_keys_class
class Node:
    """A container that gives its children the keys that it likes."""

    def __init__(self, *items):
        self.items = items

    def tree_flatten_with_keys(self):
        """Return children with their keys."""
        return self.items, tuple(key for key, _ in self.items)

    @classmethod
    def tree_unflatten(cls, keys, children):
        """Return a container of other children."""
        return cls(*zip(keys, children, strict=True))


class Alike:
    """A key of a dict that is written like all others of its kind."""

    def __init__(self, number):
        self.number = number

    def __repr__(self):
        return "alike"

    def __lt__(self, other):
        return self.number < other.number


class Pair(NamedTuple):
    """Two children."""

    a: object
    b: object


def zeros():
    return jnp.zeros(40)


COLLIDING = {
    "plain integers": Node((1, Node((11, zeros()))), (11, Node((1, zeros())))),
    "one attribute twice": Node((GetAttrKey("a"), zeros()), (GetAttrKey("a"), zeros())),
    "attributes with dots": Node(
        (GetAttrKey("a"), Node((GetAttrKey("b.c"), zeros()))),
        (GetAttrKey("a.b"), Node((GetAttrKey("c"), zeros()))),
    ),
    "keys of equal repr": {Alike(0): zeros(), Alike(1): zeros()},
    "keys that look escaped": Node(("\0001:a#0", zeros()), ("a", zeros()), ("a", zeros())),
}
PLAIN = {
    "nested": {
        "a": [zeros(), (zeros(), None)],
        "b": Pair(zeros(), {"c": zeros()}),
    },
    "masked": {"a": optax.MaskedNode(), "b": {"c": zeros()}},
    "a leaf": zeros(),
}


@pytest.mark.parametrize("name", COLLIDING)
def test_no_two_leaves_draw_the_same_noise(name):
    tree = COLLIDING[name]
    texts = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]
    if name != "keys that look escaped":
        assert len(set(texts)) < len(texts)  # so that they collide
    assert len(set(leaf_addresses(tree))) == len(texts)
    link = lsdp.add_gaussian_noise(1.0, key=jax.random.key(0))
    noise = jax.tree.leaves(link.update(tree, link.init(tree))[0])
    assert len(np.unique(np.stack(noise))) == np.stack(noise).size
    grad = quantized_grad(
        lambda p, x: sum(jnp.vdot(x, y) for y in jax.tree.leaves(p)), clip_norm=1.0, resolution=100
    )
    exact = add_discrete_gaussian_noise(9.0, key=jax.random.key(0))
    total = grad(tree, jnp.zeros((1, 40)))
    one, other, *_ = jax.tree.leaves(exact.update(total, exact.init(tree))[0])
    assert (np.asarray(one) != np.asarray(other)).mean() > 0.5


@pytest.mark.parametrize("name", COLLIDING)
def test_two_groups_of_clip_norms_stay_two(name):
    """Each leaf's gradient is 40 ones, of norm 6.3."""
    tree = COLLIDING[name]
    leaves, structure = jax.tree.flatten(tree)
    norms = jax.tree.unflatten(structure, [float(10**n) for n in range(len(leaves))])

    def loss(params, x):
        return x * sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params))

    for engine in ("bookkeeping", "vmap"):
        total = lsdp.clipped_grad(loss, clip_norm=norms, engine=engine)(tree, jnp.ones(1))
        found = [float(jnp.linalg.norm(leaf)) for leaf in jax.tree.leaves(total)]
        expected = [min(10.0**n, 40**0.5) for n in range(len(leaves))]
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_trees_are_addressed_by_their_keystr(name):
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(PLAIN[name])]
    assert leaf_addresses(PLAIN[name]) == paths


def test_masking_one_of_two_alike_changes_no_address():
    """Links for different groups of a model see the others masked."""
    one, other = Node((1, zeros()), (11, zeros())), Node((1, zeros()))
    whole = Node((GetAttrKey("a"), one), (GetAttrKey("a"), other))
    first = Node((GetAttrKey("a"), one), (GetAttrKey("a"), optax.MaskedNode()))
    second = Node((GetAttrKey("a"), optax.MaskedNode()), (GetAttrKey("a"), other))
    assert leaf_addresses(first) + leaf_addresses(second) == leaf_addresses(whole)


KEYS = st.one_of(
    st.integers(0, 11),
    st.text("ab.[]'#:0\0", max_size=3),
    st.builds(GetAttrKey, st.text("ab.[]", max_size=3)),
    st.builds(DictKey, st.one_of(st.integers(0, 11), st.text("ab']", max_size=2))),
    st.builds(SequenceKey, st.integers(0, 11)),
)
TREES = st.recursive(
    st.just(0.0),
    lambda inner: st.lists(st.tuples(KEYS, inner), max_size=4).map(lambda items: Node(*items)),
    max_leaves=12,
)


@given(TREES)
def test_addresses_are_different_whatever_the_keys(tree):
    addresses = leaf_addresses(tree)
    assert len(set(addresses)) == len(addresses) == len(jax.tree.leaves(tree))


def test_texts_that_would_share_a_key_are_refused():
    with pytest.raises(ValueError, match="`texts` must all be different"):
        fold_in_texts(jax.random.key(0), ["a", "b", "a"])
