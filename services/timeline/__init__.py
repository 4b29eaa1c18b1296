"""What the scheduler did, to look at: the chunks of a live or a simulated pool (docs/timeline.md).

`runs.py` is the one form that both come in; `stream.py` and `live.py` read it from a pool, and
`terminal.py`, `page.py`, `png.py` and `trace_events.py` draw it.
"""
