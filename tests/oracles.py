"""Slow and obvious reference implementations in float64 NumPy or mpmath."""

import functools
import itertools
import math

import mpmath
import numpy as np
import scipy.linalg
import scipy.stats


def second_difference(size: int, boundary: str = "periodic") -> np.ndarray:
    """Return L, the second difference, on a ring or with reflecting ends (neumann)."""
    matrix = np.zeros((size, size))
    for i in range(size):
        for neighbour in (i - 1, i + 1):
            seen = neighbour % size
            if boundary == "neumann" and not 0 <= neighbour < size:
                seen = i  # reflected
            matrix[i, seen] += 1
            matrix[i, i] -= 1
    return matrix


def smooth_dense(
    v: np.ndarray, smoothing: float, boundary: str = "periodic", order: int = 1
) -> np.ndarray:
    """Solve (I + (−1)ⁿ σ Lⁿ) u = v for a vector by Gaussian elimination."""
    return smooth_grid(np.asarray(v), smoothing, (0,), boundary, order)


def smooth_grid(
    x: np.ndarray,
    smoothing: float,
    axes: tuple[int, ...],
    boundary: str = "periodic",
    order: int = 1,
) -> np.ndarray:
    """Solve (I + (−1)ⁿ σ (Σₐ Lₐ)ⁿ) u = x over the given axes by Gaussian elimination."""
    x = np.asarray(x, np.float64)
    total = np.zeros((x.size, x.size))
    for axis in axes:
        factors = [np.eye(n) for n in x.shape]
        factors[axis] = second_difference(x.shape[axis], boundary)
        total += functools.reduce(np.kron, factors)
    matrix = np.eye(x.size) + (-1) ** order * smoothing * np.linalg.matrix_power(total, order)
    return np.linalg.solve(matrix, x.reshape(-1)).reshape(x.shape)


def smooth_tridiagonal(v: np.ndarray, smoothing: float, boundary: str = "periodic") -> np.ndarray:
    """Solve (I − σL) u = v for a long vector; a ring is a line plus a correction of rank one."""
    v = np.asarray(v, np.float64)
    size = v.size
    bands = np.tile([[-smoothing], [1 + 2 * smoothing], [-smoothing]], (1, size))
    if boundary == "neumann":
        bands[1, [0, -1]] -= smoothing
        return scipy.linalg.solve_banded((1, 1), bands, v)
    corner = np.zeros(size)
    corner[0], corner[-1] = 1, -1
    bands[1, [0, -1]] -= smoothing  # the correction adds it back
    line, image = scipy.linalg.solve_banded((1, 1), bands, np.stack([v, corner], axis=1)).T
    jump = smoothing * (corner @ line) / (1 + smoothing * (corner @ image))
    return line - jump * image


def flatten_rows(leaves: list[np.ndarray]) -> np.ndarray:
    """Return one row per example, with its entries in all leaves, in float64."""
    n = len(leaves[0])
    return np.concatenate([np.asarray(x, np.float64).reshape(n, -1) for x in leaves], axis=1)


def clip_rows(rows: np.ndarray, clip_norm: float) -> np.ndarray:
    """Scale each row to norm at most C; rows that float32 cannot scale become zero."""
    clipped = np.zeros_like(rows, dtype=np.float64)
    for i, row in enumerate(np.asarray(rows, np.float64)):
        norm = np.linalg.norm(row)
        limits = np.finfo(np.float32)
        if 0 < norm <= min(float(limits.max), clip_norm / float(limits.tiny)):
            clipped[i] = row * min(1.0, clip_norm / norm)
    return clipped


def slack_rows(rows: np.ndarray, clip_norm: float, size: int) -> np.ndarray:
    """Return the slack of clipped rows, (n, K): ⌊K(1 − r²/C²)⌋ times C/√K, then zeros.

    Here r is the norm of a row, and K is `size`. A row that is longer than C has no slack.
    """
    slack = np.zeros((len(rows), size))
    for row, coordinates in zip(rows, slack, strict=True):
        room = math.floor(size * (1 - float(row @ row) / clip_norm**2))
        coordinates[: max(room, 0)] = clip_norm / math.sqrt(size)
    return slack


def walk_like_pytorch(kernel: np.ndarray) -> np.ndarray:
    """Flatten a Flax kernel in the order of `weight.view(-1)` of the same layer in PyTorch."""
    if kernel.ndim == 2:  # Linear stores (out, in)
        return np.array([kernel[i, o] for o in range(kernel.shape[1]) for i in range(len(kernel))])
    height, width, inputs, outputs = kernel.shape  # Conv2d stores (out, in, height, width)
    return np.array(
        [
            kernel[h, w, i, o]
            for o in range(outputs)
            for i in range(inputs)
            for h in range(height)
            for w in range(width)
        ]
    )


def batches(size: int, sampling: str, drawn: float, most: int | None = None):
    """Return {batch of indices below `size`: its probability} by enumerating all batches.

    `drawn` is the rate of Poisson sampling, or the number of examples in a fixed-size batch.
    """
    chosen = {}
    for members in itertools.product([0, 1], repeat=size):
        batch = tuple(i for i in range(size) if members[i])
        if sampling == "poisson":
            chosen[batch] = drawn ** len(batch) * (1 - drawn) ** (size - len(batch))
        elif len(batch) == drawn:
            chosen[batch] = 1 / math.comb(size, int(drawn))
    if most is None:
        return chosen
    kept: dict = {}
    for batch, probability in chosen.items():
        subsets = list(itertools.combinations(batch, min(most, len(batch))))
        for subset in subsets:
            kept[subset] = kept.get(subset, 0.0) + probability / len(subsets)
    return kept


def noisy_sums(data: tuple[float, ...], chosen: dict, x: np.ndarray) -> np.ndarray:
    """Return the density at x of the sum of a random batch plus standard Gaussian noise."""
    centres = np.array([sum(data[i] for i in batch) for batch in chosen])
    bumps = np.exp(-((x[:, None] - centres) ** 2) / 2) / math.sqrt(2 * math.pi)
    return bumps @ np.array(list(chosen.values()))


def hockey_stick(p: np.ndarray, q: np.ndarray, width: float, epsilon: float) -> float:
    """Return ∫ max(p − e^ε q, 0) for densities on a grid with spacing `width`."""
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * width)


def delta_of_one_step(centres, base, change, epsilon):
    """Return δ(ε) between Σ(b + d)N(m) and Σ bN(m), in mpmath, if P/Q is increasing."""
    m, b, d = (list(map(mpmath.mpf, values)) for values in (centres, base, change))
    weights = [j - mpmath.expm1(epsilon) * i for i, j in zip(b, d, strict=True)]

    def excess(x):
        return sum(w * mpmath.exp(c * x - c * c / 2) for w, c in zip(weights, m, strict=True))

    low, high = mpmath.mpf(-60), mpmath.mpf(60)
    for _ in range(160):
        middle = (low + high) / 2
        low, high = (low, middle) if excess(middle) > 0 else (middle, high)
    return sum(w * mpmath.ncdf(c - high) for w, c in zip(weights, m, strict=True))


def delta_by_contour(loss_and_density, steps, epsilon, tilt):
    """Return δ(ε) = (1/2πi)∫ M(s)^T e^(−sε)/(s(s + 1)) ds over Re s = tilt, to 15 digits or more.

    `loss_and_density(x)` returns both as mpmath numbers, for noise of x standard deviations.
    """
    edges = [mpmath.mpf(edge) for edge in np.linspace(-14, 18, 33)]
    rule = mpmath.calculus.quadrature.GaussLegendre(mpmath.mp).calc_nodes(4, mpmath.mp.prec)
    nodes = []
    for low, high in itertools.pairwise(edges):
        half = (high - low) / 2
        nodes += [(*loss_and_density(low + half * (1 + x)), half * w) for x, w in rule]
    spacing, total, height = mpmath.mpf(tilt) / 16, mpmath.mpf(0), 0
    while True:
        s = mpmath.mpc(tilt, height * spacing)
        moment = sum(mpmath.exp(s * loss) * density * width for loss, density, width in nodes)
        term = moment**steps * mpmath.exp(-s * epsilon) / (s * (s + 1))
        total += term.real / 2 if height == 0 else term.real
        if height and abs(term) < mpmath.mpf(10) ** -18 * abs(total):
            return total * spacing / mpmath.pi
        height += 1


def truncated_sum(others, value, members, worth, rate, most):
    """Return {sum: probability} of Poisson batches truncated to `most`, by enumeration.

    A group of `members` examples have the value `worth`, and the `others` have `value`.
    """
    rate, sums = mpmath.mpf(rate), {}
    for n, m in itertools.product(range(others + 1), range(members + 1)):
        drawn = math.comb(others, n) * math.comb(members, m) * rate ** (n + m)
        drawn *= (1 - rate) ** (others + members - n - m)
        size = min(n + m, most)
        for kept in range(max(0, size - n), min(m, size) + 1):
            ways = mpmath.mpf(math.comb(m, kept) * math.comb(n, size - kept))
            centre = kept * worth + (size - kept) * value
            sums[centre] = sums.get(centre, 0) + drawn * ways / math.comb(n + m, size)
    return sums


def delta_of_sums(p, q, noise, epsilon):
    """Return ∫ max(P − e^ε Q, 0) of two noisy sums, in mpmath.

    P − e^ε Q is integrated in closed form between its zeros. The scan could miss a pair of zeros
    closer than its step; the result would then be too small, never too large.
    """
    noise, scale = mpmath.mpf(noise), mpmath.exp(mpmath.mpf(epsilon))
    weights = {c: p.get(c, 0) - scale * q.get(c, 0) for c in {*p, *q}}
    terms = [(mpmath.mpf(c) / noise, w) for c, w in weights.items() if w]
    if not terms:
        return mpmath.mpf(0)
    centres, sizes = (np.array([float(x) for x in column]) for column in zip(*terms, strict=True))
    reach = 40.0
    scan = np.arange(centres.min() - reach, centres.max() + reach, 0.05)
    exponents = np.log(np.abs(sizes)) - (scan[:, None] - centres) ** 2 / 2
    top = exponents.max(axis=1, keepdims=True)
    signs = np.sign(np.exp(exponents - top) @ np.diag(np.sign(sizes)) @ np.ones(len(sizes)))

    def excess(x):
        return sum(w * mpmath.exp(-((x - c) ** 2) / 2) for c, w in terms)

    ends = [-mpmath.inf]
    for i in np.flatnonzero(signs[1:] != signs[:-1]):
        low, high = mpmath.mpf(scan[i]), mpmath.mpf(scan[i + 1])
        rises = excess(high) > 0
        for _ in range(75):  # the integral depends on the error of a zero to second order
            middle = (low + high) / 2
            low, high = (low, middle) if (excess(middle) > 0) == rises else (middle, high)
        ends.append(high)
    ends.append(mpmath.inf)
    parts = (
        sum(w * (mpmath.ncdf(c - low) - mpmath.ncdf(c - high)) for c, w in terms)
        for low, high in itertools.pairwise(ends)
    )
    return sum((max(part, mpmath.mpf(0)) for part in parts), mpmath.mpf(0))


def delta_of_two_steps(p, q, noise, epsilon):
    """Return δ(ε) of a noisy sum that is released twice: ∫ P(x)·δ(ε − log P/Q(x)) dx."""
    noise, width = (
        mpmath.mpf(noise),
        mpmath.mpf(1) / 4,
    )  # the trapezoidal rule converges exponentially here
    low, high = min({*p, *q}) / noise - 9, max({*p, *q}) / noise + 9

    def density(sums, x):
        return sum(w * mpmath.npdf(x - c / noise) for c, w in sums.items())

    total = mpmath.mpf(0)
    for i in range(int((high - low) / width) + 1):
        at_p, at_q = (density(sums, low + i * width) for sums in (p, q))
        total += at_p * delta_of_sums(p, q, noise, epsilon - mpmath.log(at_p / at_q))
    return total * width


def sum_of_users(
    gradients: np.ndarray, owners: np.ndarray, clip_norm: float, most: int | None = None
) -> np.ndarray:
    """Average the gradients of each user's first `most` examples, clip the averages, and sum."""
    total = np.zeros(gradients.shape[1])
    for user in sorted(set(owners.tolist())):
        own = [row for row, owner in zip(gradients, owners, strict=True) if owner == user][:most]
        mean = sum(np.asarray(row, np.float64) for row in own) / len(own)
        total += clip_rows(mean[None], clip_norm)[0]
    return total


def work_along(path: np.ndarray, gradients: np.ndarray) -> np.ndarray:
    """Return Σ ½⟨Δₜ, ḡₜ + ḡₜ₊₁⟩ over the first 0, 1, 2, … steps of a path: (..., steps + 1, d)."""
    path, gradients = np.asarray(path, np.float64), np.asarray(gradients, np.float64)
    moves = np.diff(path, axis=-2)
    works = 0.5 * (moves * (gradients[..., :-1, :] + gradients[..., 1:, :])).sum(-1)
    return np.concatenate([np.zeros_like(works[..., :1]), works.cumsum(-1)], axis=-1)


def toeplitz_dense(column: np.ndarray) -> np.ndarray:
    """Return the lower-triangular Toeplitz matrix with a given first column."""
    size = len(column)
    return np.array([[column[i - j] if i >= j else 0.0 for j in range(size)] for i in range(size)])


def workload_dense(
    steps: int, momentum: float = 0.0, rates: np.ndarray | None = None
) -> np.ndarray:
    """Return the matrix that maps gradients to the parameters after each step of SGD."""
    matrix = np.zeros((steps, steps))
    for source in range(steps):
        velocity = place = 0.0
        for step in range(steps):
            velocity = momentum * velocity + (step == source)
            place += velocity * (1.0 if rates is None else rates[step])
            matrix[step, source] = place
    return matrix


def largest_movement(matrix: np.ndarray, separation: int) -> float:
    """Return the largest norm of a signed sum of columns that are `separation` or more apart."""
    size = matrix.shape[1]
    largest = 0.0
    for signs in itertools.product((-1, 0, 1), repeat=size):
        used = np.flatnonzero(signs)
        if (np.diff(used) >= separation).all():
            largest = max(largest, float(np.linalg.norm(matrix @ np.array(signs))))
    return largest


def impulse_response(numerator, denominator, steps: int) -> np.ndarray:
    """Return h₀, h₁, … of y_t = (Σₖ bₖ x_(t−k) − Σₖ₍₁₎ aₖ y_(t−k)) / a₀ from its definition."""
    response = []
    for t in range(steps):
        value = numerator[t] if t < len(numerator) else 0.0
        value -= sum(a * response[t - k] for k, a in enumerate(denominator) if 1 <= k <= t)
        response.append(value / denominator[0])
    return np.array(response)


def filter_in_time(x: np.ndarray, numerator, denominator) -> np.ndarray:
    """Convolve x, with shape (steps, …), and divide by the response to a constant signal."""
    h = impulse_response(numerator, denominator, len(x))
    return np.stack(
        [np.tensordot(h[t::-1], x[: t + 1], 1) / h[: t + 1].sum() for t in range(len(x))]
    )


def filtered_variance(variances: np.ndarray, numerator, denominator) -> np.ndarray:
    """Return the variance behind `filter_in_time` of independent noise with these variances."""
    h = impulse_response(numerator, denominator, len(variances))
    steps = range(len(variances))
    return np.array([h[t::-1] ** 2 @ variances[: t + 1] / h[: t + 1].sum() ** 2 for t in steps])


def debiased_adam(x: np.ndarray, variances: np.ndarray, floor: float, b1=0.9, b2=0.999, eps=1e-8):
    """Return the last step of Adam with moments written as weighted means, without the noise."""
    ages = np.arange(len(x))[::-1]
    first, second = (b**ages / np.sum(b**ages) for b in (b1, b2))
    noise = second @ variances
    error = noise * np.sqrt(2 * np.sum(second**2))  # of a mean of squares of Gaussian noise
    moment = np.maximum(np.tensordot(second, x**2, 1) - noise, floor * error)
    return np.tensordot(first, x, 1) / (np.sqrt(moment) + eps)


def choose_smoothing(total, variance, sampling, matrices, last):
    """Return (place among `matrices`, length) by the rule of `auto_smooth`, in dense arithmetic.

    `total` is D as a vector, `matrices` are all candidates A, the identity first, and `last` is the
    choice before.
    """
    quantile = scipy.stats.norm.ppf(1 - 0.05 / len(matrices))
    signals, scores = [], []
    for matrix in matrices:
        square = np.trace(matrix @ matrix)
        margin = quantile + (quantile**2 - 1) / 6 * np.sqrt(8 / square)
        signal = total @ matrix @ total - variance * np.trace(matrix) - sampling
        lower = max(0.0, signal - margin * variance * np.sqrt(2 * square))
        signals.append(signal)
        scores.append(lower**2 / np.sum((matrix @ total) ** 2))
    best = int(np.argmax(scores))
    if scores[best] == 0:
        return last if signals[last[0]] > 0 else (0, 1.0)
    ratio = np.linalg.norm(total) / np.linalg.norm(matrices[best] @ total)
    return best, float(np.clip(ratio, 1, 4))
