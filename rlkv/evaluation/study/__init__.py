"""One study of rankings of KV heads: which analyses there are, what each measures, and the report of all of them.

A study measures *conditions* (a task under an allocation of heads and a policy) once each, however many analyses
request them; analyses turn what was measured into metrics, and metrics into a part of the report.
"""
