"""Benchmarks of the engine on a store, compared with a control: a bare table on the same server.

Only ratios within one run are meaningful, since machines differ, and so does one machine over time. The engine and its
control therefore take turns, round by round, and medians are reported. The named store is not touched: benchmarks run
in a scratch database (or file) that is created beside it and removed at the end.
"""
