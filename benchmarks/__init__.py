"""Measurements: each script writes results/<script>.json, from which report.py fills README."""
