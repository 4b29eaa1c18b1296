"""`python -m decoder_svc`: one decoder, one process."""

from common.stage_main import main

main("decode", "decoder_svc")
