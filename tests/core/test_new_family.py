"""Adding an algorithm is one file and one word: in a copy of the package, with the suite's own tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "pages" / "add-an-algorithm.md"
TESTS = ("tests/core/test_registry.py", "tests/core/test_capabilities.py")


def test_one_file_and_one_word(tmp_path: Path) -> None:
    for folder in ("autoconv", "tests", "configs", "cache"):
        # with its bytecode, but for what another process is writing
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.pyc.*"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (source,) = re.findall(r'^```python\n("""autoconv/cpu/product\.py.*?)^```$', PAGE.read_text(), re.M | re.DOTALL)
    (tmp_path / "autoconv" / "cpu" / "product.py").write_text(source)
    table = tmp_path / "autoconv" / "cpu" / "__init__.py"
    before = table.read_text()
    table.write_text(before.replace("FAMILIES = (", 'FAMILIES = ("product", ', 1))
    assert table.read_text() != before
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "AUTOCONV_CACHE_DIR": str(tmp_path / "records")}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", "product", "--full"]
    done = subprocess.run(
        [*command, *TESTS], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 5, done.stdout[-2000:]
