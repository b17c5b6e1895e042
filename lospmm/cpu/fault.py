"""Why machine code cannot be run on a CPU."""


class SassFault(Exception):
    """Why the instruction at hand cannot be executed."""
