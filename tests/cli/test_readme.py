"""The lines of use in the README are lines that work."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_lines_of_use_run_as_they_are_printed(tmp_path: Path) -> None:
    use = re.search(r"<!-- use:begin -->\n```python\n(.*?)```\n<!-- use:end -->", README.read_text(), re.DOTALL)
    assert use is not None
    told = re.findall(r"print\(.*?\)\s+# (.*)", use[1])

    done = subprocess.run([sys.executable, "-c", use[1]], capture_output=True, text=True, cwd=tmp_path, timeout=60)

    assert (done.returncode, done.stderr) == (0, "")
    assert len(use[1].splitlines()) <= 30
    assert done.stdout.splitlines() == told
