"""At the end of a long fuzz run, what it saw is printed."""

from tests.fuzz import corpus


def pytest_terminal_summary(terminalreporter):
    """Print what was tried."""
    if corpus.IS_LONG:
        for line in corpus.summary():
            terminalreporter.write_line(line)
