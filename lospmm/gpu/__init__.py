"""Everything that touches a GPU: a driver with two adapters, timing, the correctness gate, the worker.

A GPU can be driven through more than one library; each is a row of ``driver.DRIVERS``. Nothing outside this package and
``lospmm.gpu.bench`` imports one. ``worker.py`` is the process that runs kernels, ``lospmm.gpu.bench`` its other end.
"""
