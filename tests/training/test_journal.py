"""The journal announces steps before they are taken, and gives unpredictable nonces to restarts."""

import random
import secrets

import numpy as np
import pytest

from optax_lsdp.training._journal import FIRST_NONCE, Journal
from tests.training.problem import Source, fit, make_data, make_plan

RESTARTS = 40
HEX = set("0123456789abcdef")
FINGERPRINT = {"data": "f"}


def open_journal(folder, steps=10**6):
    return Journal(folder, steps)


def test_a_line_cut_by_a_crash_is_removed(tmp_path):
    journal = open_journal(tmp_path)
    journal.restart(FINGERPRINT, 0)
    journal.record(0, "a", sync=True)
    journal.close()
    path = tmp_path / "examples-0.jsonl"
    path.write_text(path.read_text() + '{"step": 1, "exa')
    again = open_journal(tmp_path)
    assert again.changed(FINGERPRINT) == [] and again.seen_since(0, "first") == [range(64)]
    assert again.differs(0, "b") and not again.differs(1, "b")
    again.record(1, "b", sync=False)
    again.close()
    path.write_text(path.read_text()[:-1])  # the newline was lost
    third = open_journal(tmp_path)
    third.record(2, "c", sync=False)
    third.close()
    last = open_journal(tmp_path)
    assert last.differs(1, "c") and last.differs(2, "d")


@pytest.mark.parametrize("damage", [b"{", b"5", b"null", b"\xff\xfe"])
def test_a_damaged_line_is_refused(damage, tmp_path):
    journal = open_journal(tmp_path)
    journal.restart(FINGERPRINT, 0)
    journal.close()
    path = tmp_path / "journal.jsonl"
    path.write_bytes(damage + b"\n" + path.read_bytes())
    with pytest.raises(ValueError, match="`folder` must hold an intact journal"):
        open_journal(tmp_path)


@pytest.mark.parametrize(
    ("name", "line", "got"),
    [
        ("journal", '{"announced": 3}', "no 'nonce' in line 1"),
        ("journal", '{"nonce": "first", "fingerprint": {}}', "no 'start' in line 1"),
        ("journal", '{"nonce": "a", "start": 0}\n{}', "no 'announced' in line 2"),
        ("journal", '{"nonce": "a", "start": "b"}', r"\{'nonce': 'a', 'start': 'b'\} in line 1"),
        ("journal", '{"nonce": "a", "start": 0, "fingerprint": "b"}', ".* in line 1"),
        ("examples-0", '{"step": 0, "examples": "a"}', "no 'nonce' in line 1"),
        ("examples-0", '{"nonce": "", "step": 0}', "no 'examples' in line 1"),
    ],
)
def test_a_line_without_a_key_or_with_a_wrong_type_is_named(name, line, got, tmp_path):
    (tmp_path / f"{name}.jsonl").write_text(line + "\n")
    sentence = f"`folder` must hold an intact journal, got {got} of .*{name}.jsonl; start again in"
    with pytest.raises(ValueError, match=sentence):
        open_journal(tmp_path)


def test_examples_of_sources_are_on_the_disk_before_each_step(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("os.fsync", lambda number: synced.append(number))
    plan = make_plan(steps=10)
    fit(plan, make_data(), folder=tmp_path / "arrays", save_every=100)
    arrays = len(synced)
    fit(plan, Source(make_data()), folder=tmp_path / "source", save_every=100)
    assert len(synced) - arrays == arrays + plan.steps


def nonces_of_restarts(folder, seed=0):
    """Return the nonces of a journal that restarts at the same steps, with the same seeds."""
    random.seed(seed)
    np.random.seed(seed)
    folder.mkdir(exist_ok=True)
    journal, nonces = Journal(folder, 100), []
    for change in range(RESTARTS + 1):
        journal.restart({"data": str(change)}, 0)
        journal.record(0, "a", sync=False)
        nonces.append(journal.nonce)
    journal.close()
    assert nonces[0] == FIRST_NONCE  # so that the key alone decides on the noise
    return nonces[1:]


def test_no_nonce_is_ever_drawn_twice(tmp_path):
    # The same journal is written twice: nonces made of the time, of a counter, of a hash of all
    # inputs or of a seeded generator would repeat.
    one, other = (nonces_of_restarts(tmp_path / name) for name in ("one", "other"))
    assert len({*one, *other}) == 2 * RESTARTS


def test_every_digit_of_a_nonce_is_random(tmp_path):
    nonces = nonces_of_restarts(tmp_path / "run")
    assert all(len(nonce) >= 16 and set(nonce) <= HEX for nonce in nonces)  # 64 bits at least
    for place in range(16):
        digits = [nonce[place] for nonce in nonces]
        assert len(set(digits)) >= 8  # of 16; fewer have a probability of 1e-9 in 40 draws
    bits = np.array([[int(b) for b in f"{int(n[:16], 16):064b}"] for n in nonces])
    differences = np.diff(np.array([int(nonce[:12], 16) for nonce in nonces]))
    assert len(set(differences.tolist())) == RESTARTS - 1  # no counter
    assert abs(bits.mean() - 0.5) < 6 * 0.5 / np.sqrt(bits.size)


def test_a_nonce_comes_from_the_operating_system(tmp_path, monkeypatch):
    drawn = []

    def token_hex(size=None):
        drawn.append("f00d" * 8)
        return drawn[-1][: 2 * (size or 32)]

    monkeypatch.setattr(secrets, "token_hex", token_hex)
    journal = Journal(tmp_path, 100)
    journal.restart({}, 0)
    assert not drawn
    journal.record(0, "a", sync=False)
    journal.restart({"data": "other"}, 0)
    journal.close()
    assert drawn and journal.nonce == drawn[-1][: len(journal.nonce)]
