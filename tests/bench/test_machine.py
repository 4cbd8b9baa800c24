"""What a result file says about its origin."""

import subprocess
from importlib import metadata
from types import SimpleNamespace

import jax
import pytest

import tjk
from bench import machine


def test_cpu_device_has_the_seed_keys_and_no_gpu():
    device = machine.device()
    assert device["backend"] == "cpu"
    assert device["devices"] == [str(d) for d in jax.devices()]
    assert (device["gpu"], device["driver"], device["gpu_memory_gb"]) == (None, None, None)
    assert machine.label(device) == device["cpu"] != ""


def test_gpu_device_takes_driver_and_memory_of_its_card(monkeypatch):
    card = SimpleNamespace(platform="gpu", device_kind="NVIDIA GeForce RTX 3090")
    monkeypatch.setattr(machine.jax, "devices", lambda: [card])
    lines = "580.1, 143771, NVIDIA H200\n615.78.08, 24576, NVIDIA GeForce RTX 3090"
    monkeypatch.setattr(machine, "_output", lambda *command: lines)
    device = machine.device()
    assert (device["driver"], device["gpu_memory_gb"]) == ("615.78.08", 24.0)
    assert machine.label(device) == device["gpu"] == device["device_kind"] == card.device_kind
    monkeypatch.setattr(machine, "_output", lambda *command: None)
    assert machine.device()["driver"] is None


def test_versions(monkeypatch):
    versions = machine.versions()
    assert versions["jax"] == jax.__version__
    assert versions["numpy"] == metadata.version("numpy")
    assert versions["tjk"] == tjk.__version__
    monkeypatch.setitem(machine.PACKAGES, "absent", "no-such-package-is-installed")
    assert machine.versions()["absent"] is None


@pytest.fixture
def repository(tmp_path):
    def run(*arguments):
        identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True)

    run("init", "--quiet")
    (tmp_path / "file").write_text("1")
    run("add", "file")
    run("commit", "--quiet", "--message", "first")
    return tmp_path


def test_git_names_the_commit_and_changes_of_tracked_files(repository):
    clean = machine.git(repository)
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (repository / "gpu_nn.json").write_text("{}")
    assert machine.git(repository) == clean
    (repository / "file").write_text("2")
    assert machine.git(repository) == {"commit": clean["commit"], "dirty": True}


def test_git_of_no_repository_or_of_a_folder_in_another(repository, tmp_path_factory):
    nothing = {"commit": None, "dirty": None}
    folder = repository / "folder"
    folder.mkdir()
    assert machine.git(folder) == nothing
    assert machine.git(tmp_path_factory.mktemp("plain")) == nothing
