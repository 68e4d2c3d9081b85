"""A run's folder is closed to other users, or refused: its checkpoints hold the noise key."""

import os

import pytest

from optax_lsdp.training import _access
from optax_lsdp.training._folder import RunFolder
from tests.training.problem import PLAN


def mode(path):
    return path.stat().st_mode & 0o7777


def make_folder(path, bits):
    path.mkdir()
    path.chmod(bits)
    return path


@pytest.mark.parametrize("bits", [0o755, 0o750, 0o711, 0o777, 0o2770, 0o704])
def test_a_folder_that_others_may_enter_is_closed_and_that_is_said(bits, tmp_path):
    folder = make_folder(tmp_path / "run", bits)
    with pytest.warns(UserWarning, match=f"with mode {bits:04o}; it has mode {bits & 0o7700:04o}"):
        RunFolder(folder, PLAN).close()
    assert mode(folder) & 0o077 == 0
    RunFolder(folder, PLAN).close()  # without a word


def test_who_could_have_read_a_run_is_said_when_it_goes_on(tmp_path):
    RunFolder(tmp_path / "run", PLAN).close()
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run").chmod(0o755)
    with pytest.warns(UserWarning, match="may know the noise of the run"):
        RunFolder(tmp_path / "run", PLAN).close()
    assert mode(tmp_path / "run") == 0o700


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_new_folder_is_closed_whatever_the_umask_and_those_above_it_are_as_usual(umask, tmp_path):
    before = os.umask(umask)
    try:
        _access.make_private_folder(tmp_path / "above" / "run")
    except UserWarning as said:  # a folder above it to which everybody may write
        assert umask == 0 and "everybody may write" in str(said)
    finally:
        os.umask(before)
    assert mode(tmp_path / "above" / "run") == 0o700
    assert mode(tmp_path / "above") == 0o777 & ~umask


def test_a_folder_with_other_things_in_it_is_refused_and_left_as_it_is(tmp_path):
    folder = make_folder(tmp_path / "home", 0o755)
    (folder / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match=r"mode 0755 and 'thesis.tex' in it.*inside of it"):
        RunFolder(folder, PLAN)
    assert mode(folder) == 0o755 and os.listdir(folder) == ["thesis.tex"]
    folder.chmod(0o700)
    RunFolder(folder, PLAN).close()


def test_the_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "theirs", 0o700)
    me = os.geteuid()
    monkeypatch.setattr(_access.os, "geteuid", lambda: me + 1)
    monkeypatch.setattr(_access, "_owner_of_new_files", lambda path: me + 1)
    with pytest.raises(ValueError, match=f"`folder` must be your own, got .* of user {me}"):
        RunFolder(folder, PLAN)
    assert not os.listdir(folder)


def test_a_file_system_that_knows_no_users_will_do(tmp_path, monkeypatch):
    me = os.geteuid()
    monkeypatch.setattr(_access.os, "geteuid", lambda: me + 1)
    RunFolder(tmp_path / "run", PLAN).close()


def test_a_file_system_that_keeps_no_modes_is_warned_of(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "run", 0o755)
    monkeypatch.setattr(_access.Path, "chmod", lambda self, bits: None)
    with pytest.warns(UserWarning, match="keeps no modes: whoever can read it has the noise key"):
        RunFolder(folder, PLAN).close()


def test_a_folder_that_cannot_be_closed_is_refused(tmp_path, monkeypatch):
    def refuse(self, bits):
        raise PermissionError(1, "Operation not permitted")

    folder = make_folder(tmp_path / "run", 0o755)
    monkeypatch.setattr(_access.Path, "chmod", refuse)
    with pytest.raises(ValueError, match=r"cannot be changed \(Operation"):
        RunFolder(folder, PLAN)


def test_a_link_is_followed_once_and_the_folder_behind_it_is_closed(tmp_path):
    folder = make_folder(tmp_path / "run", 0o755)
    (tmp_path / "link").symlink_to(folder)
    with pytest.warns(UserWarning, match="with mode 0755"):
        run = RunFolder(tmp_path / "link", PLAN)
    run.close()
    assert run.path == folder.resolve() and mode(folder) == 0o700


def test_a_place_where_everybody_may_replace_the_folder_is_warned_of(tmp_path):
    make_folder(tmp_path / "shared", 0o777)
    with pytest.warns(UserWarning, match="everybody may write to the folder above it"):
        RunFolder(tmp_path / "shared" / "run", PLAN).close()
    (tmp_path / "shared").chmod(0o1777)
    RunFolder(tmp_path / "shared" / "run", PLAN).close()
