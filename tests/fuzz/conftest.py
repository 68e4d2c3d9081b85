"""Print a summary at the end of a long fuzz run."""

from tests.fuzz import corpus


def pytest_terminal_summary(terminalreporter):
    """Print how many cases were tried, and the largest values found."""
    if corpus.IS_LONG:
        for line in corpus.summary():
            terminalreporter.write_line(line)
