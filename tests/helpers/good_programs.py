"""Right programs for the sandbox, each with its tests, in the ways that programs and tests are
written.
"""

import re

# "## name", the program, then its tests: each begins with assert, or after "# test"
_TEXT = r"""
## plain
def f(x): return x + 1
assert f(3) == 4
assert f(-1) == 0
## prints
print('a' * 900_000)
def f(x):
    print(x)
    return x
assert f(1) == 1
## threads
import threading
done = []
def f(n):
    threads = [threading.Thread(target=done.append, args=(i,)) for i in range(n)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    return sorted(done)
assert f(8) == list(range(8))
## recursion
def f(n): return 0 if n == 0 else 1 + f(n - 1)
assert f(900) == 900
## imports
import bisect, collections, datetime, decimal, fractions, functools
import heapq, itertools, json, math, random, re
import statistics, string, typing
@functools.lru_cache
def f(n: typing.Optional[int]) -> float:
    return math.sqrt(n) + len(re.findall('a', 'banana')) + heapq.nsmallest(1, [2, 1])[0]
assert math.isclose(f(16), 8.0, rel_tol=1e-9)
# test
import math; assert math.floor(f(17)) == 8
## own_class
class Pair:
    def __init__(self, a, b): self.a, self.b = a, b
    def __str__(self): return f'{self.a},{self.b}'
    def total(self): return self.a + self.b
def f(pairs): return sum(p.total() for p in pairs)
assert f([Pair(1, 2), Pair(3, 4)]) == 10
# test
p = Pair(1, 2); p.a = 5; assert (p.total(), p.a, str(p)) == (7, 5, '5,2')
## dataclass
from dataclasses import dataclass
@dataclass
class P: x: int
def f(x): return P(x)
assert f(3).x == 3
## iterators
def f(n): yield from range(n)
def g(n): return map(str, range(n))
def h(d): return d.items()
assert list(f(3)) == [0, 1, 2]
assert set(g(2)) == {'0', '1'}
assert sorted(h({2: 3, 1: 2})) == [(1, 2), (2, 3)]
## plain_subclasses
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
Point = namedtuple('Point', 'x y')
def f(s): return [Counter(s), OrderedDict(a=1), defaultdict(int, b=2), deque([1]), Point(1, 2)]
# test
import collections; assert f('aab') == [{'a': 2, 'b': 1}, {'a': 1}, {'b': 2}, collections.deque([1]), (1, 2)]
## name_of_a_builtin
def sum(a, b): return a * b
assert sum(10, 15) == 150
## name_of_a_module
def bisect(a): return a // 2
assert bisect(10) == 5
## variable
table = [1, 2]
def f(): return table
assert f() == table
assert table[0] == 1
## expected_exception
def f(x): raise ValueError('negative')
# test
try:
    f(-1)
    assert False
except ValueError as error:
    assert 'negative' in str(error)
## check_function
def f(x): return x * 2
# test
def check(candidate):
    assert candidate(2) == 4
    assert all(candidate(n) == 2 * n for n in range(5))
check(f)
## own_files
import os
def f(text):
    with open('a.txt', 'w') as file: file.write(text)
    return open('a.txt').read()
assert f('hello') == 'hello'
## unicode
def f(s): return s[::-1] + '\ud800'
assert f('äß中') == '中ßä\ud800'
## script_part
def f(): return 1
if __name__ == '__main__': exit(0)
assert f() == 1
"""

GOOD: dict[str, tuple[str, list[str]]] = {}
for _part in _TEXT.split("## ")[1:]:
    _name, _, _source = _part.partition("\n")
    _program, *_tests = re.split(r"\n(?=assert |# test\n)", _source)
    GOOD[_name] = (_program, _tests)
