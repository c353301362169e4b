"""Chat templates rendered in a process of their own, with a budget of processor time, memory and output.

A template comes with a model, from whoever published it. jinja2's sandbox keeps it from the machine, but not from
looping for ever or from filling the memory: `'a' * 10**12` is a single step, and jinja2 evaluates it as it compiles.
"""

import atexit
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any, Final

MAX_MEMORY: Final = 1 << 30  # bytes of address space; Python and jinja2 take 50 MB
MAX_CHARS: Final = 1 << 24  # of a prompt's text
SECONDS: Final = 2.0  # of processor time for a template or a prompt
Render = Callable[..., str]


class TemplateFailure(Exception):
    """A template that is wrong, rejects its messages or exceeds its budget."""


def compiled(source: str) -> Render:
    """Return the function that renders a template with variables, in this process. Raise jinja2.TemplateError."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The `{% generation %}` tag, which marks a response for training and does not change the text."""

        tags = {"generation"}  # noqa: RUF012 -- jinja2's own form

        def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
            parser.stream.expect("name:generation")
            body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return body

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _refuse, "strftime_now": datetime.now().strftime}
    return environment.from_string(source).render


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise ValueError(message)


class Renderer:
    """The other process: started at the first template, and again after one that exceeded its budget."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def text(self, source: str, variables: dict[str, Any] | None) -> str:
        """Return a template's text; without variables, only compile it. Raise TemplateFailure."""
        job = json.dumps({"source": source, "variables": variables, "seconds": SECONDS})
        with self._lock:
            line = self._line(job.encode() + b"\n")
        if not line:
            problem = f"takes more than {SECONDS:g} s of processor time or {MAX_MEMORY >> 30} GiB of memory"
            raise TemplateFailure(problem)
        text, problem = json.loads(line)
        if problem is not None:
            raise TemplateFailure(problem)
        return str(text)

    def _line(self, job: bytes) -> bytes:
        """Answer of the process, or nothing if it has ended."""
        if self._process is None:
            code = f"import sys; sys.path[:] = {sys.path!r}; from kvplan.serve.rendering import main; main()"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt of the terminal is for the server, which ends this process, too
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.write(job)
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self.close()
        return line

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with suppress(OSError):
                process.communicate()


# --- in the other process ---------------------------------------------------------------------------------------------


def main() -> None:
    """Answer each line of standard input until it ends; a signal ends the process when a job's time is over."""
    import resource
    import signal

    with suppress(ValueError, OSError):  # not every system can
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    templates: dict[str, Render] = {}
    for line in sys.stdin.buffer:
        try:
            job = json.loads(line)
            signal.setitimer(signal.ITIMER_PROF, job["seconds"])
            answer = json.dumps([_rendered(templates, job["source"], job["variables"]), None])
        except Exception as error:  # a template can raise anything
            answer = json.dumps([None, (str(error) or type(error).__name__)[:200]])
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(answer.encode() + b"\n")
        sys.stdout.buffer.flush()


def _rendered(templates: dict[str, Render], source: str, variables: dict[str, Any] | None) -> str:
    if source not in templates:
        templates.clear()
        templates[source] = compiled(source)
    text = "" if variables is None else templates[source](**variables)
    if len(text) > MAX_CHARS:
        raise ValueError(f"writes more than {MAX_CHARS:,} characters")
    return text
