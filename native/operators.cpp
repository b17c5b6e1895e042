// Operators that run tuned kernels without Python: lospmm::apply and lospmm::linear.
//
// A kernel is a tensor of bytes, its package (lospmm/nn/package.py writes it): what a launch needs, and the cubin. It is
// read once for each GPU, and found by the digest that calls pass as two numbers; so it may lie on a CPU or a GPU and
// move. The operators allocate their results through PyTorch, launch on its current stream and wait for nothing but a
// package that is on the GPU, once: a CUDA graph can capture them after a first call.
//
// Only PyTorch's stable ABI and libcuda are used: one library serves PyTorch 2.10 and newer, of any CUDA version.

#include <dlfcn.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

// lospmm/gpu/transpose.fatbin, as it is.
asm(".section .rodata\n.balign 16\nlospmm_transposes:\n.incbin \"transpose.fatbin\"\n.byte 0\n.previous\n");
extern "C" __attribute__((visibility("hidden"))) const char lospmm_transposes[];

// What libcuda has, by its own names; found when a kernel first runs, so that a machine without a GPU can load this.
struct Cuda {
  using Number = int;
  Number (*load)(void **, const void *);
  Number (*function)(void **, void *, const char *);
  Number (*set_attribute)(void *, int, int);
  Number (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
  Number (*copy_to_host)(void *, std::uint64_t, std::size_t);
  Number (*device)(int *, int);
  Number (*current_context)(void **);
  Number (*retain_context)(void **, int);
  Number (*set_context)(void *);
  Number (*device_attribute)(int *, int, int);
  Number (*error_name)(int, const char **);

  Cuda() {
    void *const library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) throw std::runtime_error("lospmm: the NVIDIA driver cannot be used: libcuda.so.1 is missing");
    const auto find = [library](auto &pointer, const char *name) {
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(dlsym(library, name));
      if (!pointer) throw std::runtime_error(std::string("lospmm: libcuda has no ") + name);
    };
    find(load, "cuModuleLoadData");
    find(function, "cuModuleGetFunction");
    find(set_attribute, "cuFuncSetAttribute");
    find(launch, "cuLaunchKernel");
    find(copy_to_host, "cuMemcpyDtoH_v2");
    find(device, "cuDeviceGet");
    find(current_context, "cuCtxGetCurrent");
    find(retain_context, "cuDevicePrimaryCtxRetain");
    find(set_context, "cuCtxSetCurrent");
    find(device_attribute, "cuDeviceGetAttribute");
    find(error_name, "cuGetErrorName");
  }
};

const Cuda &cuda() {
  static const Cuda found;
  return found;
}

void check(int status, const char *what) {
  if (status == 0) return;
  const char *name = nullptr;
  cuda().error_name(status, &name);
  throw std::runtime_error(std::string("lospmm: ") + what + ": " + (name ? name : std::to_string(status)));
}

void require(bool holds, const char *what) {
  if (!holds) throw std::runtime_error(std::string("lospmm: ") + what);
}

// An uninitialized contiguous tensor like ``x``; by the C interface alone, which takes half the time of a dispatched call.
Tensor empty_like(const Tensor &x, const std::vector<std::int64_t> &sizes) {
  std::vector<std::int64_t> strides(sizes.size());
  std::int64_t step = 1;
  for (std::size_t at = sizes.size(); at-- > 0; step *= sizes[at] > 1 ? sizes[at] : 1) strides[at] = step;
  std::int32_t dtype = 0;
  require(aoti_torch_get_dtype(x.get(), &dtype) == 0, "a tensor has no type");
  AtenTensorHandle made = nullptr;
  require(aoti_torch_empty_strided(static_cast<std::int64_t>(sizes.size()), sizes.data(), strides.data(), dtype,
                                   aoti_torch_device_type_cuda(), x.get_device(), &made) == 0,
          "no memory for a result");
  return Tensor(made);
}

// Makes ``index`` PyTorch's device for a while, and gives a new thread the context in which PyTorch works.
class OnDevice {
 public:
  explicit OnDevice(int index) : guard_(index) {
    void *context = nullptr;
    check(cuda().current_context(&context), "no context");
    if (context) return;
    int device = 0;
    check(cuda().device(&device, index), "no such GPU");
    check(cuda().retain_context(&context, device), "no context");
    check(cuda().set_context(context), "no context");
  }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
};

void *stream_of(int device) {
  // Not in a PyTorch without CUDA, in which nothing here runs, but which may load this library.
  using Current = AOTITorchError (*)(std::int32_t, void **);
  static void *const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  require(library, "this PyTorch is without CUDA");
  static const auto current = reinterpret_cast<Current>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  void *stream = nullptr;
  require(current(device, &stream) == 0, "PyTorch has no current stream");
  return stream;
}

// The first bytes of a package; the entry's name and the cubin follow. Little-endian, as every machine with these GPUs.
struct Head {
  char magic[8];
  std::int64_t digest[2];
  std::uint32_t grid[3], block, shared_bytes, alignment_bytes, element_bytes, name_bytes;
  std::uint64_t b_elements, c_elements, cubin_bytes;
};
static_assert(sizeof(Head) == 80);
constexpr char MAGIC[8] = {'L', 'O', 'S', 'P', 'M', 'M', 'P', '1'};

struct Kernel {
  Head head;
  void *function;
};

// Digest and GPU.
using Key = std::array<std::int64_t, 3>;

// Dynamic shared memory that a launch has without asking.
constexpr std::uint32_t SHARED_BYTES_UNASKED = 48 << 10;
constexpr int MAX_DYNAMIC_SHARED_SIZE_BYTES = 8, MULTIPROCESSOR_COUNT = 16;  // of the driver API

Kernel loaded(const Tensor &package, const Key &key) {
  std::vector<char> bytes(package.numel());
  require(bytes.size() > sizeof(Head), "a package holds no kernel");
  if (package.is_cuda())
    check(cuda().copy_to_host(bytes.data(), reinterpret_cast<std::uint64_t>(package.data_ptr()), bytes.size()),
          "a package cannot be read (call the model once before its CUDA graph is captured)");
  else
    std::memcpy(bytes.data(), package.data_ptr(), bytes.size());
  Kernel kernel{};
  std::memcpy(&kernel.head, bytes.data(), sizeof(Head));
  const Head &head = kernel.head;
  require(std::memcmp(head.magic, MAGIC, sizeof MAGIC) == 0, "a package of another version of lospmm");
  require(head.digest[0] == key[0] && head.digest[1] == key[1], "a package of another kernel");
  require(bytes.size() == sizeof(Head) + head.name_bytes + head.cubin_bytes, "a package is cut short");
  const std::string name(bytes.data() + sizeof(Head), head.name_bytes);
  void *module = nullptr;
  check(cuda().load(&module, bytes.data() + sizeof(Head) + head.name_bytes), "a kernel cannot be loaded");
  check(cuda().function(&kernel.function, module, name.c_str()), name.c_str());
  if (head.shared_bytes > SHARED_BYTES_UNASKED)
    check(cuda().set_attribute(kernel.function, MAX_DYNAMIC_SHARED_SIZE_BYTES, static_cast<int>(head.shared_bytes)),
          name.c_str());
  return kernel;
}

std::mutex loading;

// Kernels are never unloaded, since a captured graph may hold them.
const Kernel &kernel_of(const Tensor &package, std::int64_t high, std::int64_t low, int device) {
  static std::map<Key, Kernel> kernels;
  const Key key{high, low, device};
  const std::lock_guard lock(loading);
  auto found = kernels.find(key);
  if (found == kernels.end()) found = kernels.emplace(key, loaded(package, key)).first;
  return found->second;
}

struct Transposes {
  void *of_4_bytes, *of_2_bytes;
  unsigned blocks;
};

const Transposes &transposes_on(int device) {
  static std::map<int, Transposes> all;
  const std::lock_guard lock(loading);
  auto found = all.find(device);
  if (found == all.end()) {
    void *module = nullptr;
    Transposes one{};
    int number = 0, multiprocessors = 0;
    check(cuda().device(&number, device), "no such GPU");
    check(cuda().load(&module, lospmm_transposes), "the transposes cannot be loaded");
    check(cuda().function(&one.of_4_bytes, module, "lospmm_transpose"), "lospmm_transpose");
    check(cuda().function(&one.of_2_bytes, module, "lospmm_transpose_16"), "lospmm_transpose_16");
    check(cuda().device_attribute(&multiprocessors, MULTIPROCESSOR_COUNT, number), "no multiprocessors");
    one.blocks = 6 * multiprocessors;
    found = all.emplace(device, one).first;
  }
  return found->second;
}

void run(const Kernel &kernel, void *b, void *c, void *residual, void *stream) {
  const Head &head = kernel.head;
  void *arguments[] = {&b, &c, &residual};
  check(cuda().launch(kernel.function, head.grid[0], head.grid[1], head.grid[2], head.block, 1, 1, head.shared_bytes, stream,
                      arguments, nullptr),
        "a launch failed");
}

// Writes ``from`` (rows, columns), row-major, to ``to`` (columns, rows).
void transpose(const void *from, void *to, std::uint64_t rows, std::uint64_t columns, std::uint32_t element_bytes, int device,
               void *stream) {
  const Transposes &transposes = transposes_on(device);
  std::uint64_t shape = rows | columns << 32;
  void *arguments[] = {&from, &to, &shape};
  void *const function = element_bytes == 4 ? transposes.of_4_bytes : transposes.of_2_bytes;
  check(cuda().launch(function, transposes.blocks, 1, 1, 256, 1, 1, 0, stream, arguments, nullptr), "a launch failed");
}

std::uint32_t element_bytes(const Tensor &x) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return 4;
    case ScalarType::Half:
    case ScalarType::BFloat16: return 2;
    default: throw std::runtime_error("lospmm: an input is neither float32, float16 nor bfloat16");
  }
}

void check_input(const Kernel &kernel, const Tensor &x) {
  require(element_bytes(x) == kernel.head.element_bytes, "an input is of another type than its kernel's");
  require(static_cast<std::uint64_t>(x.numel()) == kernel.head.b_elements, "an input is of another size than its kernel's");
}

// As the kernel's vector loads need it: PyTorch's own allocations are, views may not be.
bool is_aligned(const Tensor &x, const Kernel &kernel) {
  return reinterpret_cast<std::uintptr_t>(x.data_ptr()) % kernel.head.alignment_bytes == 0;
}

Tensor readable(const Tensor &x, const Kernel &kernel) {
  const Tensor found = torch::stable::contiguous(x);
  return is_aligned(found, kernel) ? found : torch::stable::clone(found);
}

// C of the given shape, for an input (k, n), or (batch, channels, height, width) of a convolution.
Tensor apply(Tensor input, Tensor package, std::int64_t high, std::int64_t low, std::vector<std::int64_t> shape,
             std::optional<Tensor> residual) {
  const int device = input.get_device();
  const OnDevice on(device);
  Tensor c = empty_like(input, shape);
  const Kernel &kernel = kernel_of(package, high, low, device);
  check_input(kernel, input);
  require(static_cast<std::uint64_t>(c.numel()) == kernel.head.c_elements, "the result is of another size than its kernel's");
  require(!residual || (residual->numel() == c.numel() && element_bytes(*residual) == kernel.head.element_bytes),
          "a residual is of another size or type than the result");
  input = readable(input, kernel);
  if (residual) residual = readable(*residual, kernel);
  run(kernel, input.data_ptr(), c.data_ptr(), residual ? residual->data_ptr() : nullptr, stream_of(device));
  return c;
}

// Whether the last dimension is the outermost in memory, and the others lie as in a contiguous tensor.
bool is_features_first(const std::vector<std::int64_t> &sizes, const std::vector<std::int64_t> &strides) {
  std::int64_t step = 1;
  for (std::size_t at = sizes.size() - 1; at-- > 0; step *= sizes[at])
    if (sizes[at] != 1 && strides[at] != step) return false;
  return sizes.back() == 1 || strides.back() == step;
}

// (..., m) for ``x`` (..., k) with the n rows of the kernel. The result's strides are those of a transposed (m, ...) where
// ``features_first``, and else contiguous.
Tensor linear(Tensor x, Tensor package, std::int64_t high, std::int64_t low, std::int64_t m, bool features_first) {
  const int device = x.get_device();
  const OnDevice on(device);
  const std::vector<std::int64_t> sizes = x.sizes().vec(), strides = x.strides().vec();
  require(!sizes.empty() && sizes.back() > 0, "an input has no features");
  const std::int64_t k = sizes.back(), n = x.numel() / k;
  Tensor c = empty_like(x, {m, n});
  const Kernel &kernel = kernel_of(package, high, low, device);
  check_input(kernel, x);
  require(static_cast<std::uint64_t>(m * n) == kernel.head.c_elements, "the result is of another size than its kernel's");
  void *const stream = stream_of(device);
  const std::uint32_t bytes = kernel.head.element_bytes;
  constexpr std::uintptr_t TRANSPOSED_ALIGNMENT = 16;

  std::optional<Tensor> held;
  void *b = x.data_ptr();
  const bool is_turned = is_features_first(sizes, strides);
  if (!is_turned || !is_aligned(x, kernel)) {
    Tensor from = x;
    if (is_turned || !x.is_contiguous() || reinterpret_cast<std::uintptr_t>(b) % TRANSPOSED_ALIGNMENT) {
      from = empty_like(x, sizes);
      torch::stable::copy_(from, x);
    }
    held = empty_like(x, {k, n});
    transpose(from.data_ptr(), held->data_ptr(), n, k, bytes, device, stream);
    b = held->data_ptr();
  }
  run(kernel, b, c.data_ptr(), nullptr, stream);

  std::vector<std::int64_t> shape(sizes.begin(), sizes.end() - 1), steps(sizes.size());
  shape.push_back(m);
  if (!features_first && m > 1 && n > 1) {
    Tensor y = empty_like(x, shape);
    transpose(c.data_ptr(), y.data_ptr(), m, n, bytes, device, stream);
    return y;
  }
  steps.back() = n;
  std::int64_t step = 1;
  for (std::size_t at = sizes.size() - 1; at-- > 0; step *= sizes[at]) steps[at] = step;
  AtenTensorHandle view = nullptr;
  require(aoti_torch__reinterpret_tensor(c.get(), static_cast<std::int64_t>(shape.size()), shape.data(), steps.data(), 0,
                                         &view) == 0,
          "a result cannot be viewed");
  return Tensor(view);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lospmm, library) {
  library.def("apply(Tensor input, Tensor package, int high, int low, int[] shape, Tensor? residual=None) -> Tensor");
  library.def("linear(Tensor x, Tensor package, int high, int low, int m, bool features_first=False) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lospmm, CUDA, library) {
  library.impl("apply", TORCH_BOX(&apply));
  library.impl("linear", TORCH_BOX(&linear));
}
