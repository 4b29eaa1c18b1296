"""`python -m models.training --out DIR`: makes the bundled model from nothing, in about 1.5 hours.

Every stage keeps its state in the work directory, and `--resume` goes on from there. The stages
may also be run one at a time; `encode` in several processes, one a size, where there are cores.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

# Before torch is imported: one thread, not spinning, is the fastest beside other processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

FLOW_STEPS = 13_500


def main() -> None:
    """Parse the command line and run the stages asked for."""
    parser = argparse.ArgumentParser(prog="python -m models.training", description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="directory to write the pipeline to"
    )
    parser.add_argument(
        "--work", type=Path, help="directory for the stages' state (default: OUT.work)"
    )
    parser.add_argument(
        "--stage", choices=("vae", "reading", "encode", "flow", "all"), default="all"
    )
    parser.add_argument(
        "--size", help="with --stage encode: only this size, as 128x128 (height first)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flow-steps", type=int, default=FLOW_STEPS)
    parser.add_argument("--resume", action="store_true", help="go on where an earlier run stopped")
    args = parser.parse_args()
    work = args.work or args.out.with_name(args.out.name + ".work")
    work.mkdir(parents=True, exist_ok=True)

    # After the environment is set, and only when there is work to do: torch is slow to import.
    import torch
    from diffusers import AutoencoderKLQwenImage

    from models.training import assemble, flow, latents, reading, vae

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if args.stage in ("vae", "all"):
        vae.train(work, args.seed, args.resume)
    if args.stage in ("reading", "all"):
        reading.train(work, args.seed, args.resume)
    if args.stage in ("encode", "all"):
        only = tuple(int(side) for side in args.size.split("x")) if args.size else None
        for size in latents.COUNTS:
            if only in (None, size):
                latents.encode_all(work, args.seed, size)
    if args.stage in ("flow", "all"):
        trained = AutoencoderKLQwenImage.from_pretrained(work / "vae")

        def save(model: flow.Model) -> None:
            assemble.save_pipeline(
                args.out, trained, model.transformer, model.text_encoder, model.tokenizer
            )

        flow.train(work, args.flow_steps, args.seed, args.resume, save)


if __name__ == "__main__":
    main()
