"""What a child does first: it dies with its parent, however that ends, and leaves no core file."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap

import pytest

from kvasir_console import child

LINUX = sys.platform.startswith("linux")


def parent_of(script: str) -> tuple[subprocess.Popen[str], int]:
    """A process that starts ``script`` as its child, and a descriptor of that child."""
    starter = f"""
        import os, subprocess, sys
        print(subprocess.Popen([sys.executable, "-c", {textwrap.dedent(script)!r}, str(os.getpid())]).pid, flush=True)
        sys.stdin.read()
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(starter)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    descriptor = os.pidfd_open(int(parent.stdout.readline()))
    assert parent.stdout.readline() == "ready\n"
    return parent, descriptor


@pytest.mark.skipif(not LINUX, reason="watches processes by descriptor")
@pytest.mark.parametrize("platform", ["linux", "darwin"])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, None])
def test_a_child_ends_with_its_parent(platform, end):
    """Where the kernel does not tell, a thread looks."""
    parent, descriptor = parent_of(
        f"""
        import sys, time
        from kvasir_console import child
        sys.platform, child.PARENT_POLL_S = {platform!r}, 0.05
        child.die_with_parent(int(sys.argv[1]))
        print("ready", flush=True)
        time.sleep(300)
        """
    )
    assert not select.select([descriptor], [], [], 0.2)[0]
    if end is None:
        parent.communicate(timeout=120)
    else:
        parent.send_signal(end)
    assert select.select([descriptor], [], [], 120)[0]
    os.close(descriptor)
    parent.wait(120)


def test_a_parent_that_is_gone_already_ends_it_at_once():
    script = "from kvasir_console import child\nchild.die_with_parent(1)\nimport time\ntime.sleep(300)"
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == -signal.SIGTERM


@pytest.mark.skipif(not LINUX, reason="asks the kernel of Linux")
def test_a_process_that_holds_secrets_leaves_no_core_and_is_not_read_by_others():
    script = """
        import ctypes, resource
        from kvasir_console.child import forbid_core_dumps
        forbid_core_dumps()
        print(resource.getrlimit(resource.RLIMIT_CORE), ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))
    """
    output = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert output.stdout == "(0, 0) 0\n"  # PR_GET_DUMPABLE


def test_a_module_is_run_with_its_own_arguments(capsys, monkeypatch):
    seen: list[int] = []
    monkeypatch.setattr(sys, "argv", ["child", str(os.getppid()), "json.tool", "--help"])
    monkeypatch.setattr(child, "die_with_parent", seen.append)
    with pytest.raises(SystemExit):
        child.main()
    assert seen == [os.getppid()]
    assert "usage: json.tool" in capsys.readouterr().out.replace("python -m ", "")
