"""Runs generated programs against tests: ``run_tests(program, tests, limits)`` gives a ``Verdict``.

The tests never enter the program's process. A *judge* process evaluates them; the *worker* process of the program,
forked before the judge reads them, answers single calls with plain data. Only values of exact built-in types are
compared, so an object with its own ``__eq__`` proves nothing. The judge alone writes the verdict, with a nonce that the
worker never sees: leaving early, patched builtins, printed verdicts, frames and memory give no pass.

The worker has resource limits, no environment variables and no capabilities. Landlock (Linux 5.13) leaves it Python's
library and a temporary folder. A system-call filter (x86_64, aarch64) refuses sockets, signals and new processes. At
the end, also that of the evaluator, the process group is killed and the folder removed. Where the system refuses
Landlock or the filter, programs run without, and a warning says so once; for root that is a SandboxError instead.

This stops a language model's careless or cheating program, not a determined attacker. Not covered: weak tests; helpers
that a test takes from the program; the sum of all files; arguments changed in place. Functions as arguments are errors.
"""

from rlkv.evaluation.sandbox.run import Limits, SandboxError, Verdict, run_tests

__all__ = ["Limits", "SandboxError", "Verdict", "run_tests"]
