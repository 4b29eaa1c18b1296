"""`python -m denoise_svc`: one denoiser, one process."""

from common.stage_main import main

main("denoise", "denoise_svc")
