"""Commands run by a user who owns nothing: without a home, with one that cannot be written, and with one that can.

    python -m benchmarks.attacks.users          # as root, who alone can become another user

One that needs no file of its own must be answered; one that needs a place, a port or another's process may be refused.
Each breaks when it ends in a traceback, or leaves a file where nobody may write.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.attacks.outcomes import Outcome, Tally

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
MODEL = ("llama-3.1-8b", "--gpu", "l40s", "--ctx", "4k")
LOAD = ("--prompt-tokens", "100", "--output-tokens", "10", "--rate", "1", "--num-requests", "5")
ANSWERED = (
    ("--version",), ("estimate", *MODEL), ("check", "examples/kvplan.policy.yaml"), ("simulate", *MODEL, *LOAD),
    ("doctor",),
    ("why", "examples/vllm-did-not-start.log"), ("models", "qwen3-8b"), ("reconcile", "reports/cpu-2core"),
    ("diff", "llama-3.1-8b", "qwen3-8b", "--gpu", "l40s", "--ctx", "4k"), ("trace", "stats", "examples/trace.csv"),
)  # fmt: skip
REFUSED = (
    ("check", "--init", "--gpu", "l40s", "--from-pid", "1"), ("check", "--init", *MODEL, "-o", "CLOSED/p.yaml"),
    ("estimate", *MODEL, "--report", "CLOSED/p.json"), ("estimate", "org/none", "--gpu", "l40s", "--ctx", "4k"),
    ("profile", "-o", "CLOSED/run", "--num-seqs", "1", "--lengths", "const:10", "--output-tokens", "2"),
    ("serve", *MODEL[:1], "--simulate", "l40s", "--ctx", "4k", "--port", "80"), ("check", "CLOSED/none.yaml"),
    ("explore", *MODEL, "-o", "CLOSED/e.html"), ("reconcile", "--log", "CLOSED/none.log", "--gpu", "l40s"),
    ("trace", "stats", "CLOSED/t.csv"),
)  # fmt: skip


def run(words: Sequence[str], home: Path) -> Outcome:
    """The command as the user nobody, with no more than a search path and a home in its environment."""
    packages = os.pathsep.join(path for path in sys.path if "site-packages" in path)
    done = subprocess.run(
        [shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable, "-m", "kvplan", *words],
        user=NOBODY, group=NOBODY, extra_groups=[], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
        stdin=subprocess.DEVNULL,
        env={
            "PATH": "/usr/bin:/bin", "HOME": str(home), "PYTHONPATH": f"{ROOT}{os.pathsep}{packages}",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
    )  # fmt: skip
    return Outcome(done.returncode, done.stdout, done.stderr)


def attack(answered: Sequence[Sequence[str]] = ANSWERED, refused: Sequence[Sequence[str]] = REFUSED) -> Tally:
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)
        for name, mode in (("closed", 0o755), ("home", 0o777)):
            (root / name).mkdir()
            (root / name).chmod(mode)
        for home in (root / "none", root / "closed", root / "home"):
            for kind, commands in (("valid", answered), ("hostile", refused)):
                for words in commands:
                    outcome = run([word.replace("CLOSED", str(root / "closed")) for word in words], home)
                    tally.judge(kind, f"{home.name}: {' '.join(words)}", outcome)
        if list((root / "closed").iterdir()):
            tally.broken.append("a file is where nobody may write")
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    if os.getuid():
        print("users: only root can become another user; nothing was tried", file=sys.stderr)
        return 3
    return attack().closing()


if __name__ == "__main__":
    sys.exit(main())
