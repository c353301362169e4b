"""Which commit a measurement is of."""

import subprocess
from pathlib import Path

import pytest

from kvplan.core.errors import UsageError
from kvplan.core.git import checkout, top_of


def git(folder: Path, *arguments: str) -> str:
    names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *names, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    return tmp_path


def test_a_checkout_says_its_commit_and_whether_it_was_changed(repository: Path) -> None:
    head = git(repository, "rev-parse", "HEAD")
    assert checkout(repository) == head
    git(repository, "tag", "v1")  # a tag's name would not say which commit that was
    assert checkout(repository) == head
    (repository / "file").write_text("two")
    assert checkout(repository) == f"{head}-dirty"


def test_a_second_worktree_says_its_own(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("worktree") / "other"
    git(repository, "worktree", "add", "--quiet", "--detach", str(other))
    git(other, "commit", "--quiet", "--allow-empty", "-m", "second")
    assert checkout(other) == git(other, "rev-parse", "HEAD") != checkout(repository)


def test_what_lies_within_a_repository_is_not_of_its_commit(repository: Path) -> None:
    (repository / "site-packages").mkdir()
    assert checkout(repository / "site-packages") is None


def test_a_repository_of_another_user_is_said_with_its_cure(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    (repository / "folder").mkdir()
    with pytest.raises(UsageError) as caught:
        top_of(repository / "folder")
    assert str(caught.value) == (
        f"git: detected dubious ownership in repository at '{repository}'; "
        f"if you trust it, run `git config --global --add safe.directory '{repository}'`"
    )


def test_without_git_or_a_commit_there_is_none(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path_factory.mktemp("empty")
    git(empty, "init", "--quiet")
    assert checkout(empty) is None
    monkeypatch.setenv("PATH", str(empty))
    assert checkout(repository) is None
