"""Machine code without a compiler, except for the prologue that jumps to the tiles.

A tile's schedule is fully known when it is made, so nothing is left for a compiler to find out, and compile time
grows faster than the code's length. To add a GPU generation, add its instructions to ``generations``.
"""
