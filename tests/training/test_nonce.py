"""What is taken again under other circumstances has noise that nobody can foretell."""

import random
import secrets

import numpy as np

from optax_lsdp.training import _journal

RENEWALS = 40
HEX = set("0123456789abcdef")


def renewed(folder, seed=0):
    """Return the nonces of a journal that is renewed at the same steps, from the same seeds."""
    random.seed(seed)
    np.random.seed(seed)
    folder.mkdir(exist_ok=True)
    journal, nonces = _journal.Journal(folder, 100), []
    for change in range(RENEWALS + 1):
        journal.renew({"data": str(change)}, 0)
        journal.record(0, "a", safe=False)
        nonces.append(journal.nonce)
    journal.close()
    assert nonces[0] == _journal.FIRST  # which is a function of the key
    return nonces[1:]


def test_no_nonce_is_ever_drawn_again(tmp_path):
    # The same journal, written twice: by time, by a counter, by a hash of all that is known, or by
    # a generator with a seed, nonces would come again.
    one, other = renewed(tmp_path / "one"), renewed(tmp_path / "other")
    assert len({*one, *other}) == 2 * RENEWALS


def test_every_digit_of_a_nonce_is_random(tmp_path):
    nonces = renewed(tmp_path / "run")
    assert all(len(nonce) >= 16 and set(nonce) <= HEX for nonce in nonces)  # 64 bits at least
    for place in range(16):
        digits = [nonce[place] for nonce in nonces]
        assert len(set(digits)) >= 8  # of 16; fewer have a probability of 1e-9 in 40 draws
    bits = np.array([[int(b) for b in f"{int(n[:16], 16):064b}"] for n in nonces])
    steps = np.diff(np.array([int(nonce[:12], 16) for nonce in nonces]))
    assert len(set(steps.tolist())) == RENEWALS - 1  # no counter
    assert abs(bits.mean() - 0.5) < 6 * 0.5 / np.sqrt(bits.size)


def test_a_nonce_comes_from_the_operating_system(tmp_path, monkeypatch):
    drawn = []

    def urandom(size=None):
        drawn.append("f00d" * 8)
        return drawn[-1][: 2 * (size or 32)]

    monkeypatch.setattr(secrets, "token_hex", urandom)
    journal = _journal.Journal(tmp_path, 100)
    journal.renew({}, 0)
    assert not drawn
    journal.record(0, "a", safe=False)
    journal.renew({"data": "other"}, 0)
    journal.close()
    assert drawn and journal.nonce == drawn[-1][: len(journal.nonce)]
