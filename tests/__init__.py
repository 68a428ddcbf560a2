"""Tests of rules, stores, engine, SDK, server, client and command line."""
