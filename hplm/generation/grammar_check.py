"""Compiles the grammar in its input, in a process of its own: a few small ones take minutes or all memory, whatever the limits.

python -m hplm.generation.grammar_check < GRAMMAR: writes what is wrong, if anything, and exits with 0.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from functools import lru_cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

SECONDS = 1.0  # of a core
MEMORY = 2**30  # bytes
PATIENCE = 30.0  # seconds, however busy the machine is
REMEMBERED = 256  # grammars that can be compiled
LIMITS = LLParserLimits(verbose_errors=False, step_lexer_fuel=100_000, max_lexer_states=50_000)  # of a token: milliseconds


@lru_cache(REMEMBERED)
def check(grammar: str) -> None:
    """Raises ValueError if the grammar is wrong, or takes too long to compile."""
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(command, input=grammar.encode(), capture_output=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode:
        raise ValueError("it takes too long to compile, or too much memory: make it simpler")
    if done.stdout:
        raise ValueError(done.stdout.decode())


def main() -> None:
    grammar, tokenizer = sys.stdin.buffer.read().decode(), LLTokenizer("byte")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process, also while it is not in Python
    sys.stdout.write(LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS).get_error())


if __name__ == "__main__":
    main()
