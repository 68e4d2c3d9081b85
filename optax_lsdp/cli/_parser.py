"""Arguments of the command line: text goes in, a value or one line about the mistake comes out."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser that answers a mistake with one line."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where help is."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def number(name: str, check: Callable[[str, float], None], kind: type = float) -> Callable:
    """Return a converter from text to a number that `check` admits."""

    def convert(text: str) -> float:
        try:
            value = kind(text)
            check(name, value)
        except ValueError as error:
            wanted = "a whole number" if kind is int else "a number"
            reason = str(error).rstrip(".") if "must" in str(error) else f"{text!r} is not {wanted}"
            raise argparse.ArgumentTypeError(reason) from error
        return value

    return convert


def in_options(sentence: str) -> str:
    """Return a sentence about arguments of a function as one about options of a command.

    >>> in_options("`max_batch_size` must come with sampling='poisson', got None.")
    '--max-batch-size must come with --sampling poisson, got none'
    """

    def option(match: re.Match[str]) -> str:
        return "--" + match[1].replace("_", "-")

    sentence = re.sub(r"`(\w+)`", option, sentence)
    sentence = re.sub(r"\b(\w+)='(\w+)'", r"--\1 \2", sentence)
    return sentence.replace("got None", "got none").rstrip(".")


def picture(text: str) -> Path:
    """Return the path of a PNG that can be made."""
    path = Path(text)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"must end in .png, got {text!r}")
    return writable(text)


def writable(text: str) -> Path:
    """Return the path of a file that can be made."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"is a folder: {text!r}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"no such folder: {str(path.parent)!r}")
    return path
