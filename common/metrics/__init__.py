"""Figures of each process for Prometheus."""
