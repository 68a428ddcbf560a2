"""Measurements: what the engine makes of a store, beside what a bare table on the same server makes.

Only ratios of one run mean something: machines differ, and so do the moments of one machine. So the engine and its
control take turns, round by round, and medians are told. Nothing here touches the store that was named: the work is
done in a scratch database (or file) made beside it and removed in the end.
"""
