"""The demo, interrupted in mid-window: the limit is cleared, every GPU restored, nothing left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from testbed.cluster import REPO, processes_naming

pytestmark = pytest.mark.cluster


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=["ctrl-c", "terminal closed"])
def test_interrupted_in_mid_window_it_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "demo"
    # Everything that the demo starts has its temporary folder in its command line or environment.
    base = Path(tempfile.mkdtemp(prefix="pfi-demo-", dir="/tmp"))
    base.chmod(0o755)
    environment = {**os.environ, "TMPDIR": str(base), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "testbed.demo", "--out", str(out)]
    with subprocess.Popen(
        command,
        cwd=REPO,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as demo:
        assert demo.stdout is not None
        told: list[str] = []
        for line in demo.stdout:
            told.append(line)
            if line.strip().startswith("economic limit:"):
                assert len(processes_naming(base)) > 10, "the demo is in mid-window, with all its daemons"
                demo.send_signal(number)
        assert demo.wait(timeout=60) == 130, "".join(told)[-2000:]
    assert any(line.startswith("interrupted:") for line in told)
    assert not [line for line in told if line.startswith("a fault of ours:")]
    assert processes_naming(base) == {}
    assert list(base.iterdir()) == []
    base.rmdir()
    before = {gpu["uuid"]: gpu["requested_mw"] for gpu in json.loads((out / "before.json").read_text())}
    lowest_mw = min(before.values())
    for node in (out / "nodes").iterdir():
        last = {}
        for text in (node / "trace.jsonl").read_text().splitlines():
            entry = json.loads(text)
            if entry["event"] == "limit":
                last[entry["uuid"]] = entry["effective_mw"]
                lowest_mw = min(lowest_mw, entry["effective_mw"])
        assert last == {uuid: before[uuid] for uuid in last}
    assert lowest_mw < min(before.values()), "caps were in force when it was interrupted"
