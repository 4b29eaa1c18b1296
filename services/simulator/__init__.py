"""The coordinator's own core and policies under a virtual clock: docs/simulator.md."""
