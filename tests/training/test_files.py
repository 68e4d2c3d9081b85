"""The folder of a run is closed to other users, because checkpoints hold the noise key."""

import errno
import os

import pytest

from optax_lsdp.training import _checkpoint, _journal
from optax_lsdp.training._checkpoint import RunFolder
from tests.training.problem import PLAN


def mode(path):
    return path.stat().st_mode & 0o7777


def make_folder(path, bits):
    path.mkdir()
    path.chmod(bits)
    return path


@pytest.mark.parametrize("bits", [0o755, 0o750, 0o711, 0o777, 0o2770, 0o704])
def test_a_folder_that_others_may_enter_is_closed_with_a_warning(bits, tmp_path):
    folder = make_folder(tmp_path / "run", bits)
    with pytest.warns(
        UserWarning,
        match=f"with mode {bits:04o}; `fit` has changed the mode to {bits & 0o7700:04o}",
    ):
        RunFolder(folder, PLAN).close()
    assert mode(folder) & 0o077 == 0
    RunFolder(folder, PLAN).close()  # without a warning


def test_a_warning_says_that_others_may_have_read_the_checkpoints(tmp_path):
    RunFolder(tmp_path / "run", PLAN).close()
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run").chmod(0o755)
    with pytest.warns(UserWarning, match="may know the noise of the run"):
        RunFolder(tmp_path / "run", PLAN).close()
    assert mode(tmp_path / "run") == 0o700


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_new_folder_is_closed_whatever_the_umask_and_its_parents_follow_the_umask(
    umask, tmp_path
):
    before = os.umask(umask)
    try:
        _checkpoint.make_private_folder(tmp_path / "above" / "run")
    except UserWarning as warning:  # of a parent folder that everybody can write to
        assert umask == 0 and "everybody can write" in str(warning)
    finally:
        os.umask(before)
    assert mode(tmp_path / "above" / "run") == 0o700
    assert mode(tmp_path / "above") == 0o777 & ~umask


def test_a_folder_with_other_files_is_refused_and_left_unchanged(tmp_path):
    folder = make_folder(tmp_path / "home", 0o755)
    (folder / "thesis.tex").write_text("mine")
    with pytest.raises(
        ValueError, match=r"mode 0755 and with the file 'thesis.tex'.*inside this folder"
    ):
        RunFolder(folder, PLAN)
    assert mode(folder) == 0o755 and os.listdir(folder) == ["thesis.tex"]
    folder.chmod(0o700)
    RunFolder(folder, PLAN).close()


def test_the_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "theirs", 0o700)
    me = os.geteuid()
    monkeypatch.setattr(_checkpoint.os, "geteuid", lambda: me + 1)
    monkeypatch.setattr(_checkpoint, "_owner_of_new_files", lambda path: me + 1)
    with pytest.raises(ValueError, match=f"`folder` must belong to you, got .* of user {me}"):
        RunFolder(folder, PLAN)
    assert not os.listdir(folder)


def test_a_file_system_without_users_is_accepted(tmp_path, monkeypatch):
    me = os.geteuid()
    monkeypatch.setattr(_checkpoint.os, "geteuid", lambda: me + 1)
    RunFolder(tmp_path / "run", PLAN).close()


def test_a_file_system_without_permissions_gets_a_warning(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "run", 0o755)
    monkeypatch.setattr(_checkpoint.Path, "chmod", lambda self, bits: None)
    with pytest.warns(UserWarning, match="stores no permissions; choose another file system"):
        RunFolder(folder, PLAN).close()


def test_a_folder_that_cannot_be_closed_is_refused(tmp_path, monkeypatch):
    def refuse(self, bits):
        raise PermissionError(1, "Operation not permitted")

    folder = make_folder(tmp_path / "run", 0o755)
    monkeypatch.setattr(_checkpoint.Path, "chmod", refuse)
    with pytest.raises(ValueError, match=r"cannot be changed \(Operation"):
        RunFolder(folder, PLAN)


def test_a_link_is_resolved_and_the_folder_behind_it_is_closed(tmp_path):
    folder = make_folder(tmp_path / "run", 0o755)
    (tmp_path / "link").symlink_to(folder)
    with pytest.warns(UserWarning, match="with mode 0755"):
        run = RunFolder(tmp_path / "link", PLAN)
    run.close()
    assert run.path == folder.resolve() and mode(folder) == 0o700


def test_a_parent_folder_that_everybody_may_write_to_gets_a_warning(tmp_path):
    make_folder(tmp_path / "shared", 0o777)
    with pytest.warns(UserWarning, match="whose parent folder everybody can write to"):
        RunFolder(tmp_path / "shared" / "run", PLAN).close()
    (tmp_path / "shared").chmod(0o1777)
    RunFolder(tmp_path / "shared" / "run", PLAN).close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_whether_python_or_orbax_reports_it(number, tmp_path):
    for error in (OSError(number, "cut"), ValueError(f"write failed: {os.strerror(number)}")):
        message = str(_journal.cannot_write(tmp_path, error))
        assert message.startswith("`folder` must have room") and "free some space" in message


def test_other_failures_to_write_are_named_and_not_called_a_full_disk(tmp_path):
    for error in (PermissionError(errno.EACCES, "denied"), ValueError("no such codec")):
        message = str(_journal.cannot_write(tmp_path, error))
        assert f"{type(error).__name__} ({error})" in message and "room" not in message
