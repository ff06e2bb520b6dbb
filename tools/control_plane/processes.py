"""Processes of the benchmark that answer in lines of JSON, and their resource usage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


class Talking:
    """A process that prints a line of JSON at its start, and another for each line of input."""

    def __init__(self, script: str, asked: dict[str, Any]) -> None:
        command = [sys.executable, str(HERE / script), json.dumps(asked)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.first = self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a process of the benchmark ended with {self.process.wait()}")
        facts: dict[str, Any] = json.loads(line)
        return facts

    def next(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._read()

    def end(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.process.kill()
        self.process.wait()
