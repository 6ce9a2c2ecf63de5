"""Hostile programs for the sandbox: ``f`` should return x + 1, and none of these may count as right.

Those that try to break out return the right answer only after a break-out worked. Names in capitals between @ are
filled in by the test: PID (the evaluator), FILE (a file of the evaluator), PORT (where it listens), SOCKET (abstract
socket), VARIABLE (of its environment).
"""

from textwrap import dedent

from tests.helpers.hostile_fakes import EARLY, FAKES
from tests.helpers.hostile_harm import BREAKOUTS, GREEDY

TESTS = ["assert f(3) == 4", "assert f(10) == 11"]

PROGRAMS = {
    f"{kind}:{name}": dedent(source)
    for kind, group in [("early", EARLY), ("fake", FAKES), ("greedy", GREEDY), ("breakout", BREAKOUTS)]
    for name, source in group.items()
}
