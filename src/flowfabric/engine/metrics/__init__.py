"""Counters, histograms and gauges of one engine."""
