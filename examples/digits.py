"""Train a small network on handwritten digits, prune 90 % of its weights, tune every layer, run it through the kernels.

It needs no GPU and downloads nothing: scikit-learn brings the images, and the CPU runs the very text that is shipped.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import scipy.sparse
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from threadpoolctl import threadpool_limits

import lospmm
from lospmm.errors import LospmmError
from lospmm.toolchain.discover import find_host_compiler

DEVICE = "h200"
HIDDEN = (512, 256)
SPARSITY = 0.9
TEST_IMAGES = 360
EPOCHS = 30
BATCHES = 12  # per epoch

FOLDER = Path("build/demo")

Array = NDArray[np.float32]
Multiply = Callable[[Array], Array]  # B (k, n) to A x B (m, n)


def main(folder: Path = FOLDER) -> int:
    """The exit status: 0 where the kernels predict what the pruned network does, for every test image."""
    print(f"Training 64-{'-'.join(map(str, HIDDEN))}-10 on the handwritten digits of scikit-learn ...")
    images, digits = load_digits(return_X_y=True)
    train_images, test_images, train_digits, test_digits = train_test_split(
        (images / 16).astype(np.float32), digits, test_size=TEST_IMAGES, random_state=0, stratify=digits
    )
    network = MLPClassifier(HIDDEN, random_state=0)
    train(network, train_images, train_digits)
    dense_accuracy = np.mean(network.predict(test_images) == test_digits)
    train(network, train_images, train_digits, masks=prune(network))

    # One column per image, so that a layer is A x B: A (out, in) and B (in, images).
    weights = {f"layer{i}": scipy.sparse.csr_array(w.T) for i, w in enumerate(network.coefs_, start=1)}
    last = f"layer{len(weights)}"
    print(f"Tuning its {len(weights)} layers for {DEVICE}, {TEST_IMAGES} images at a time ...\n")
    ptx = tune(weights, "ptx", folder)
    # CUDA C++ for a CPU takes g++.
    cuda = {} if find_host_compiler() is None else tune({last: weights[last]}, "cuda", folder)
    print_kernels([*ptx.items(), *cuda.items()])

    products = {"SciPy": [layer.dot for layer in weights.values()]}
    products["the emitted PTX"] = [kernel.run_on_cpu for kernel in ptx.values()]
    if cuda:
        products[f"the emitted PTX, {last} by CUDA C++"] = [kernel.run_on_cpu for kernel in (ptx | cuda).values()]
    predictions = {by: predict(network, test_images, multiply) for by, multiply in products.items()}
    print(f"\n{dense_accuracy:7.2%} of the test images recognised before pruning")
    for by, predicted in predictions.items():
        print(f"{np.mean(predicted == test_digits):7.2%} with {SPARSITY:.0%} of the weights pruned, by {by}")
    different = sum(np.count_nonzero(predicted != predictions["SciPy"]) for predicted in predictions.values())
    if different:
        print(f"\n{different} predictions of the kernels differ from SciPy's", file=sys.stderr)
        return 1
    print("Kernels and SciPy agree on every image.")
    print_next_steps(folder)
    return 0


def train(
    network: MLPClassifier, images: Array, digits: NDArray[np.int64], masks: Sequence[NDArray[np.bool_]] = ()
) -> None:
    """EPOCHS of Adam. ``masks``, one for each layer of a pruned network, say which weights may differ from zero."""
    rng = np.random.default_rng(0)
    # Several BLAS threads wait for each other longer than these products take.
    with threadpool_limits(limits=1):
        for _ in range(EPOCHS):
            for batch in np.array_split(rng.permutation(len(images)), BATCHES):
                network.partial_fit(images[batch], digits[batch], classes=range(10))
                for coefficients, mask in zip(network.coefs_, masks, strict=bool(masks)):
                    coefficients *= mask


def prune(network: MLPClassifier) -> list[NDArray[np.bool_]]:
    """Which weights stay: in each layer all but the share SPARSITY that is closest to zero."""
    magnitudes = [np.abs(coefficients) for coefficients in network.coefs_]
    return [magnitude >= np.quantile(magnitude, SPARSITY) for magnitude in magnitudes]


def tune(weights: Mapping[str, scipy.sparse.csr_array], emitter: str, folder: Path) -> dict[str, lospmm.Kernel]:
    """The kernel of each layer, which is also saved."""
    kernels = {}
    for name, layer in weights.items():
        # The same on every machine, one with this GPU too: nothing is timed.
        options = {"emitter": emitter, "measure": "none", "verify": "cpu"}
        kernels[name] = lospmm.tune(layer, n=TEST_IMAGES, device=DEVICE, **options)
        kernels[name].save(folder / f"{name}-{emitter}")
    return kernels


def predict(network: MLPClassifier, images: Array, products: Sequence[Multiply]) -> NDArray[np.intp]:
    """The digit in each image; ``products`` multiply by the weights, layer by layer."""
    activations = images.T
    for multiply, bias in zip(products, network.intercepts_, strict=True):
        sums = multiply(activations) + bias[:, np.newaxis]
        activations = np.maximum(sums, 0)
    return np.asarray(np.argmax(sums, axis=0))


def print_kernels(kernels: Iterable[tuple[str, lospmm.Kernel]]) -> None:
    print("layer   text  shape      nonzeros  tile size  tiles  registers  seconds  max relative error")
    for name, kernel in kernels:
        manifest, tile = kernel.manifest, kernel.manifest["tile"]
        shape, size = f"{manifest['m']} x {manifest['k']}", f"{tile['rows']} x {tile['cols']}"
        print(
            f"{name}  {manifest['emitter']:4}  {shape:9}  {manifest['nnz']:8,}  {size:>9}  {tile['count']:5}"
            f"  {manifest['registers']:9}  {manifest['seconds']['total']:7.2f}"
            f"  {manifest['verified']['max_relative_error']:18.1e}"
        )


def print_next_steps(folder: Path) -> None:
    print(f"\nEach kernel is a folder in {folder}/: the cubin, its source and a manifest. Next:")
    print(f"  .venv/bin/lospmm inspect {folder / 'layer1-ptx'}")
    print(f"  .venv/bin/lospmm tune YOUR_WEIGHTS.npz --n {TEST_IMAGES} --device {DEVICE} --out build/yours")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LospmmError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
