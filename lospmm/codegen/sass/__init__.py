"""Machine code written directly: no compiler sees the tiles, only the few lines that jump to them.

A tile's schedule is fully known when it is made, so nothing is left for a compiler to find out, and one takes time that
grows faster than the code is long. To add a GPU generation, add its instructions to ``generations``.
"""
