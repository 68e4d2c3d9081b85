"""Benchmarks: each script writes results/<script>.json, and report.py fills the pages from them."""
