"""Starts and watches a pool's processes on one host: `slackwater up`, tests and benchmarks."""
