"""`python -m encoder_svc`: one encoder, one process."""

from common.stage_main import main

main("encode", "encoder_svc")
