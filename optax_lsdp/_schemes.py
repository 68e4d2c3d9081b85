"""The table of sampling schemes, and the table of neighbouring relations.

A sampling scheme says how batches are drawn. An attacker must not be able to distinguish two
neighbouring datasets. A neighbouring relation says how these datasets differ. To add a scheme, add
its name to `Sampling`, a row to `SCHEMES`, its sampler to `sampling`, and its analysis to
`accounting`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Sampling = Literal[
    "poisson", "without_replacement", "full", "shuffled", "cyclic_poisson", "fixed_order"
]
Neighbouring = Literal["add_remove", "replace_one", "zero_out"]
Unit = Literal["example", "user"]  # the unit of privacy; a user has several examples


@dataclass(frozen=True)
class Relation:
    """How two neighbouring datasets differ."""

    sensitivity: float  # how far clipped sums of neighbouring datasets may differ, in clip norms
    change: str  # what happens to one example, in a few words
    secret: str  # what an attacker tries to find out, in the words of `accounting.statement`
    secret_of_user: str  # `secret`, if the unit of privacy is a user


@dataclass(frozen=True)
class Scheme:
    """How batches are drawn, and what the accountant can say about them."""

    title: str  # the scheme's name in prose
    sampler: str  # the name of the class in `optax_lsdp.sampling` that draws such batches
    neighbouring: tuple[Neighbouring, ...]  # the relations for which the accountant has an analysis
    batches: str  # how batches are drawn. `describe` fills in `{unit}`, `{rate}` and `{epoch}`. For
    # cyclic Poisson batches, it also fills in `{chosen}`: how an example's part is chosen.
    remark: str = ""  # what the command line prints after the ε of this scheme
    amplified: bool = False  # whether the randomness of the batches lowers ε
    tight: bool = False  # whether the accountant's ε is the true ε up to rounding
    random_size: bool = False  # whether batches are padded, and `max_batch_size` can limit them
    whole_dataset: bool = False  # whether every batch is the whole dataset
    once_per_epoch: bool = False  # whether an epoch of ⌊n/b⌋ batches uses no example twice
    correlated: bool = False  # whether the scheme is for correlated noise only

    @property
    def keeps_order(self) -> bool:
        """Return whether batches are ordered by epochs or cycles, which begin anew at a restart."""
        return self.once_per_epoch or self.correlated

    @property
    def default_neighbouring(self) -> Neighbouring | None:
        """Return "add_remove", or None if the scheme has no analysis for it."""
        return "add_remove" if "add_remove" in self.neighbouring else None

    def describe(
        self, rate: str = "q", epoch: str = "⌊1/q⌋", unit: str = "example", chosen: str = ""
    ) -> str:
        """Return how batches are drawn, in words."""
        return self.batches.format(rate=rate, epoch=epoch, unit=unit, chosen=chosen)

    def steps_per_epoch(self, dataset_size: int, batch_size: int) -> float:
        """Return n/b, or ⌊n/b⌋ for schemes that use each example at most once per epoch."""
        return dataset_size // batch_size if self.once_per_epoch else dataset_size / batch_size


RELATIONS: Mapping[Neighbouring, Relation] = {
    "add_remove": Relation(
        sensitivity=1.0,
        change="one example added or removed",
        secret="whether any one example was in the data",
        secret_of_user="whether the examples of any one person were in the data",
    ),
    "replace_one": Relation(
        sensitivity=2.0,
        change="one example replaced",
        secret="which of two values any one example had",
        secret_of_user="which of two sets of examples any one person had",
    ),
    "zero_out": Relation(
        sensitivity=1.0,
        change="one example blanked out",
        secret="whether any one example was used or a blank in its place",
        secret_of_user="whether the examples of any one person were used or blanks in their place",
    ),
}

SCHEMES: Mapping[Sampling, Scheme] = {
    "poisson": Scheme(
        title="Poisson",
        sampler="PoissonSampler",
        neighbouring=("add_remove", "replace_one", "zero_out"),
        batches="every {unit} is in every batch with probability {rate}, independently of all "
        "else (Poisson sampling; a shuffled data loader does not do this)",
        amplified=True,
        tight=True,
        random_size=True,
    ),
    "without_replacement": Scheme(
        title="fixed size without replacement",
        sampler="FixedSizeSampler",
        neighbouring=("replace_one",),
        batches="every batch is a fresh uniform subset of fixed size, a fraction {rate} of the "
        "data, independent of the other batches (a shuffled data loader does not do this)",
        amplified=True,
    ),
    "full": Scheme(
        title="full",
        sampler="FullBatchSampler",
        neighbouring=("add_remove", "replace_one", "zero_out"),
        batches="every batch is the whole dataset, whose size is public",
        tight=True,
        whole_dataset=True,
    ),
    "shuffled": Scheme(
        title="shuffled",
        sampler="ShuffledSampler",
        neighbouring=("zero_out", "replace_one"),
        batches="every {unit} is used at most once in each epoch of {epoch} batches, in any "
        "order; no benefit of a random order is claimed, as no tight analysis is known",
        remark="at most, in any order",
        once_per_epoch=True,
    ),
    "cyclic_poisson": Scheme(
        title="cyclic Poisson",
        sampler="CyclicPoissonSampler",
        neighbouring=("add_remove", "replace_one", "zero_out"),
        batches="each {unit} is assigned {chosen} to one of {epoch} parts of the data; step t "
        "draws each {unit} of part t mod {epoch} with probability {rate}, independently of all "
        "else",
        amplified=True,
        random_size=True,
        correlated=True,
    ),
    "fixed_order": Scheme(
        title="fixed order",
        sampler="ShuffledSampler",
        neighbouring=("zero_out", "replace_one"),
        batches="two uses of one {unit} are at least {epoch} steps apart, in an order that may be "
        "known",
        once_per_epoch=True,
        correlated=True,
    ),
}
INDEPENDENT = {name: scheme for name, scheme in SCHEMES.items() if not scheme.correlated}
CORRELATED = {name: scheme for name, scheme in SCHEMES.items() if scheme.correlated}
