"""Start the command line: `python -m optax_lsdp`."""

from optax_lsdp.cli import main

if __name__ == "__main__":
    main()
