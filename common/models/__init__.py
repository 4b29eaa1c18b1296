"""A diffusers model directory, split into the three stages.

The only package under `common/` that imports torch; importing the package itself does
not, so that `stages.build_stage` can set the thread environment first.
"""
