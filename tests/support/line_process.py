"""A Python process that answers questions one line at a time, for what cannot run inside the test's own process."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class LineProcess:
    """`python -m MODULE`: each question is a line to its stdin, each answer one line of JSON from its stdout.

    A process that dies answers with an error that says how, and the next question starts a new one.
    """

    def __init__(self, module: str, env: Mapping[str, str], errors: Path) -> None:
        self._command = [sys.executable, "-m", module]
        self._env = {**os.environ, **env}
        self._errors = errors
        self._process: subprocess.Popen[str] | None = None

    def ask(self, question: str) -> Any:
        """The answer; raises ChildProcessError when the process ends instead of answering."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(question + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it died before reading: the empty answer below says so
        if line := process.stdout.readline():
            return json.loads(line)
        code = process.wait()
        self.close()
        tail = self._errors.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise ChildProcessError(f"{' '.join(self._command[1:])}: ended with {code} on {question!r}; {tail}")

    def close(self) -> None:
        """Let the process end."""
        if self._process is not None:
            self._process.communicate()
            self._process = None

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            with self._errors.open("w", encoding="utf-8") as errors:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=self._env,
                    cwd=ROOT,
                    text=True,
                )
        return self._process
