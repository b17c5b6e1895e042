"""Operator ``lospmm::apply`` for PyTorch, in C++ (docs/embedding.md).

Importing this loads it; ``LIBRARY`` is for a program of C++, which loads it with dlopen.
"""

from pathlib import Path

import torch

LIBRARY = Path(__file__).with_name("liblospmm_torch.so")

torch.ops.load_library(str(LIBRARY))
