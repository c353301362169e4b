"""A program that answers a line with its process id, or dies of "crash": for tests of `LineProcess` alone."""

import json
import os
import signal
import sys

for line in sys.stdin:
    if line.strip() == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    print(json.dumps(os.getpid()), flush=True)
