"""Building the kernels: once, found again, and never required."""

from __future__ import annotations

import logging
import os
import stat
import threading
from pathlib import Path

import pytest
from native_blocks import TARGETS

from kvasir_console.engine import native
from kvasir_console.engine.native.build import build
from kvasir_console.engine.native.library import Library


def _compiler(folder: Path, body: str, name: str = "cxx-of-a-test") -> str:
    """A program on the path that stands in for a compiler; ``$out`` is what it is to make, if anything."""
    folder.mkdir(exist_ok=True)
    script = folder / name
    head = '#!/bin/sh\nout=\nwhile [ $# -gt 0 ]; do if [ "$1" = -o ]; then out=$2; fi; shift; done\n'
    script.write_text(head + body + "\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return name


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tools"
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def test_the_kernels_of_this_machine_are_built_once(model_cache):
    first = native.load(model_cache / "kernels")
    if first is None:
        pytest.skip("there is no C++ compiler here")
    before = first.path.stat()
    second = native.load(model_cache / "kernels")
    assert second is not None
    assert second.path == first.path
    assert (second.path.stat().st_mtime_ns, second.path.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    assert first.isa in ("avx512", "avx2", "portable")
    assert first.path.parent.stat().st_mode & 0o077 == 0


def test_builds_for_two_processors_share_nothing_in_one_process(model_cache):
    """Not their threads, and so none of the memory that their kernels keep: it is laid out as each was compiled."""
    paths = [build(model_cache / "kernels", targets=(flags,)) for flags in TARGETS.values()]
    kernels = [Library(path) for path in paths if path is not None]
    if len(kernels) < 2:
        pytest.skip("no C++ compiler here takes the flags of two processors")
    before = [library.threads for library in kernels]
    try:
        for count, library in enumerate(kernels, start=1):
            library.set_threads(count)
        assert [library.threads for library in kernels] == list(range(1, len(kernels) + 1))
    finally:
        for count, library in zip(before, kernels, strict=True):
            library.set_threads(count)


def test_without_a_compiler_there_are_no_kernels_and_the_log_says_why(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    caplog.set_level(logging.INFO)
    assert native.load(tmp_path / "cache") is None
    assert "no C++ compiler is on the path (g++, clang++, c++)" in caplog.text


def test_a_compiler_that_fails_leaves_nothing_behind(tmp_path, tools, caplog):
    name = _compiler(tools, 'if [ -n "$out" ]; then echo "too old" >&2; exit 1; fi; echo "#define X"')
    caplog.set_level(logging.INFO)
    assert build(tmp_path / "cache", compilers=(name,)) is None
    assert "too old" in caplog.text
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == ["build.lock"]


def test_a_compiler_that_hangs_is_stopped(tmp_path, tools, caplog):
    name = _compiler(tools, 'if [ -n "$out" ]; then sleep 600; fi; echo "#define X"')
    caplog.set_level(logging.INFO)
    assert build(tmp_path / "cache", compilers=(name,), timeout_s=0.5) is None
    assert "took more than" in caplog.text


def test_the_first_target_that_the_compiler_takes_is_used(tmp_path, tools):
    body = 'case "$all" in *-march*) exit 1;; esac; [ -n "$out" ] && echo made > "$out"; echo "#define X"'
    name = _compiler(tools, body)
    script = tools / name
    script.write_text(script.read_text().replace("out=\n", 'out=; all="$*"\n', 1))
    assert build(tmp_path / "cache", compilers=(name,), targets=(("-march=native",),)) is None
    made = build(tmp_path / "cache", compilers=(name,))
    assert made is not None
    assert made.read_text() == "made\n"


def test_another_compiler_processor_or_flag_means_another_library(tmp_path, tools):
    one = _compiler(tools, '[ -n "$out" ] && echo one > "$out"; echo "#define __VERSION__ 1"', "cxx-one")
    two = _compiler(tools, '[ -n "$out" ] && echo two > "$out"; echo "#define __VERSION__ 2"', "cxx-two")
    found = [
        build(tmp_path / "cache", compilers=("cxx-missing", one)),
        build(tmp_path / "cache", compilers=(one, two)),
        build(tmp_path / "cache", compilers=(two,)),
        build(tmp_path / "cache", compilers=(one,), targets=(("-mavx",),)),
    ]
    assert found[0] == found[1]
    assert len(set(found)) == 3
    assert [path.read_text() for path in found if path is not None] == ["one\n", "one\n", "two\n", "one\n"]


def test_builds_at_the_same_time_compile_once(tmp_path, tools):
    count = tmp_path / "count"
    body = f'[ -n "$out" ] && echo x >> {count} && sleep 0.2 && echo made > "$out"; echo "#define X"'
    name = _compiler(tools, body)
    paths: list[Path | None] = []
    threads = [
        threading.Thread(target=lambda: paths.append(build(tmp_path / "cache", compilers=(name,)))) for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1
    assert paths[0] is not None
    assert count.read_text() == "x\n"


def test_a_damaged_library_is_built_again_once(tmp_path, tools, monkeypatch, caplog):
    count = tmp_path / "count"
    name = _compiler(tools, f'[ -n "$out" ] && echo x >> {count} && echo damaged > "$out"; echo "#define X"', "g++")
    assert name == "g++"
    assert native.load(tmp_path / "cache") is None
    assert count.read_text() == "x\nx\n"
    assert "cannot be loaded" in caplog.text


def test_a_directory_of_someone_elses_is_not_used(tmp_path, tools, caplog):
    name = _compiler(tools, '[ -n "$out" ] && echo made > "$out"; echo "#define X"')
    (tmp_path / "cache").write_text("a file")
    caplog.set_level(logging.INFO)
    assert build(tmp_path / "cache", compilers=(name,)) is None
    assert "no compiled kernels" in caplog.text
