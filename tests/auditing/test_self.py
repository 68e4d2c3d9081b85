"""The command `optax-lsdp audit`: this installation passes, and a broken one is told."""

import pytest

from optax_lsdp.__main__ import main
from optax_lsdp.auditing import _self


def test_this_installation_passes(capsys):
    main(["audit"])
    shown = capsys.readouterr().out
    assert shown.count("verdict: passed") == 6 and "REJECTED" not in shown


@pytest.mark.full
def test_a_broken_installation_is_told(monkeypatch, capsys):
    draw = _self._noise
    monkeypatch.setattr(_self, "_noise", lambda params, scale, key: draw(params, 0.9 * scale, key))
    with pytest.raises(SystemExit, match="Rejected: noise"):
        main(["audit", "--seed", "1"])
    assert capsys.readouterr().out.count("REJECTED") == 1
