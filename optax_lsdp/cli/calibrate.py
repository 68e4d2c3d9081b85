"""The command `calibrate`: print how much noise a privacy budget needs."""

import argparse
from dataclasses import asdict, replace

from optax_lsdp.accounting import calibrate_noise_multiplier, show_epsilon
from optax_lsdp.cli.epsilon import answer, read_run


def run(args: argparse.Namespace) -> None:
    """Print the smallest noise multiplier within the budget, and what the run guarantees."""
    unit, delta = read_run(args)
    settings = asdict(unit.dominating)
    del settings["noise_multiplier"]
    try:
        noise_multiplier = calibrate_noise_multiplier(epsilon=args.epsilon, delta=delta, **settings)
    except ValueError as error:
        args.parser.refuse(error)
    if not args.json:  # round up, because less noise would not suffice
        print(f"Noise multiplier z = {show_epsilon(noise_multiplier, 6)}.\n")
    answer(args, replace(unit, noise_multiplier=noise_multiplier), delta)
