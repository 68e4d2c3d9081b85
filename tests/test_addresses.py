"""No two leaves of a tree have the same address, so none share noise or a clip norm by accident."""

import itertools
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
    """A container whose children have arbitrary keys."""

    def __init__(self, *items):
        self.items = items

    def tree_flatten_with_keys(self):
        """Return the children with their keys."""
        return self.items, tuple(key for key, _ in self.items)

    @classmethod
    def tree_unflatten(cls, keys, children):
        """Return a container with other children."""
        return cls(*zip(keys, children, strict=True))


class Alike:
    """A key of a dict with the same repr as all other keys of its class."""

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
    return np.zeros(40, np.float32)


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
def test_leaves_with_the_same_keystr_have_different_addresses(name):
    tree = COLLIDING[name]
    texts = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]
    if name != "keys that look escaped":
        assert len(set(texts)) < len(texts)  # the plain texts do collide
    assert len(set(leaf_addresses(tree))) == len(texts)


def test_no_two_leaves_draw_the_same_noise():
    tree = COLLIDING
    link = lsdp.add_gaussian_noise(1.0, key=jax.random.key(0))
    noise = jax.tree.leaves(jax.jit(link.update)(tree, link.init(tree))[0])
    assert len(np.unique(np.stack(noise))) == np.stack(noise).size
    grad = quantized_grad(
        lambda p, x: sum(jnp.vdot(x, y) for y in jax.tree.leaves(p)), clip_norm=1.0, resolution=100
    )
    exact = add_discrete_gaussian_noise(9.0, key=jax.random.key(0))
    total = jax.jit(grad)(tree, np.zeros((1, 40), np.float32))
    drawn = map(np.asarray, jax.tree.leaves(exact.update(total, exact.init(tree))[0]))
    for one, other in itertools.combinations(drawn, 2):
        assert (one != other).mean() > 0.5


@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
def test_leaves_with_similar_keys_keep_their_own_clip_norms(engine):
    """The gradient of each leaf is 40 ones, with norm 6.3."""
    norms, expected = {}, []
    for name in sorted(COLLIDING):  # the order of leaves
        leaves, structure = jax.tree.flatten(COLLIDING[name])
        powers = [10.0**n for n in range(len(leaves))]
        norms[name] = jax.tree.unflatten(structure, powers)
        expected += [min(power, 40**0.5) for power in powers]

    def loss(params, x):
        return x * sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params))

    clip = jax.jit(lsdp.clipped_grad(loss, clip_norm=norms, engine=engine))
    total = clip(COLLIDING, np.ones(1, np.float32))
    found = [float(np.linalg.norm(leaf)) for leaf in jax.tree.leaves(total)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("name", PLAIN)
def test_addresses_of_plain_trees_are_their_keystr(name):
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(PLAIN[name])]
    assert leaf_addresses(PLAIN[name]) == paths


def test_masking_one_of_two_similar_leaves_changes_no_address():
    """Transforms for different groups of a model see the other groups masked."""
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
def test_addresses_differ_for_any_keys(tree):
    addresses = leaf_addresses(tree)
    assert len(set(addresses)) == len(addresses) == len(jax.tree.leaves(tree))


def test_equal_texts_are_refused_because_they_would_share_a_key():
    with pytest.raises(ValueError, match="`texts` must all be different"):
        fold_in_texts(jax.random.key(0), ["a", "b", "a"])
