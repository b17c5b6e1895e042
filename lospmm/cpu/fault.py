"""Error of machine code that cannot be run on a CPU."""


class SassFault(Exception):
    """The reason why an instruction cannot be executed."""
