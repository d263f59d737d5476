"""Programs that the tests start."""

import subprocess
import sys


def run(*command, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, **options
    )


def run_python(code: str) -> str:
    process = run(sys.executable, "-c", code)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()
