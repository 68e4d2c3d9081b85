"""Measure the audits: broken pipelines, sound pipelines, and how much of a claimed ε is proved.

Every audit errs with probability 1e-5 at most. The script writes each result at once.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import optax_lsdp as lsdp
from benchmarks import _timing
from benchmarks._pipeline import SOUND, Audit
from benchmarks._planted import PLANTED
from optax_lsdp.accounting import calibrate_noise_multiplier
from optax_lsdp.auditing import audit_epsilon

DELTA, FAILURE = 1e-5, 1e-5
LEVELS = np.geomspace(0.1, 10, 20)
TRIALS, MANY = 1_000_000, 4_000_000  # the second for ε below 0.3


def repeated(audit: Audit, seeds: int) -> dict[str, str | int]:
    """Return the kind of an audit, and for how many seeds it passes."""
    return {"by": audit.by, "seeds": seeds, "passed": sum(bool(audit.run(s)) for s in range(seeds))}


def level(epsilon: float, trials: int) -> dict[str, float | int | bool | None]:
    """Return the bounds that an attack with the worst canary proves for one step of DP-LSSGD."""
    multiplier = calibrate_noise_multiplier(
        epsilon=epsilon, delta=DELTA, steps=1, sampling="full", sampling_rate=1.0
    )

    def train(key: jax.Array, is_in: jax.Array) -> jax.Array:
        params, canary = jnp.zeros(4), jnp.full((1, 4), 100.0)
        optimizer = lsdp.dp_lssgd(
            1.0, clip_norm=1.0, noise_multiplier=multiplier, expected_batch_size=1, key=key
        )
        total = lsdp.clipped_grad(jnp.vdot, clip_norm=1.0)(params, canary, is_in[None])
        updates, _ = optimizer.update(total, optimizer.init(params), params)
        return -jnp.sum(
            updates
        )  # along the canary's gradient, a constant, which smoothing preserves

    report = audit_epsilon(
        train,
        delta=DELTA,
        claimed=epsilon,
        trials=trials,
        failure=FAILURE,
        gaussian=True,
        key=jax.random.key(round(1e6 * epsilon)),
    )
    return {
        "claimed": epsilon,
        "noise_multiplier": multiplier,
        "any_mechanism": report.epsilon,
        "gaussian": report.gaussian_epsilon,
        "trials": report.trials,
        "passed": report.passed,
    }


def main() -> None:
    """Run all audits that the record does not have yet."""
    args = _timing.arguments(__doc__ or "", "auditing.json")
    seeds, trials = (1, 10_000) if args.smoke else (20, TRIALS)
    few = 2 if args.smoke else None
    levels = [float(f"{epsilon:.3g}") for epsilon in LEVELS[:few]]
    first = -2 if args.smoke else 0  # the last audits are the fastest
    work = {
        "levels": {
            f"{e:g}": partial(level, e, MANY if e < 0.3 and not args.smoke else trials)
            for e in levels
        }
    }
    for part, audits in (("planted", PLANTED), ("sound", SOUND)):
        chosen = list(audits.items())[first:]
        work[part] = {name: partial(repeated, audit, seeds) for name, audit in chosen}
    _timing.measure_missing(args.output, work)


if __name__ == "__main__":
    main()
