// An operator that runs tuned kernels without Python: lospmm::apply.
//
// A kernel is a tensor of bytes, its package (lospmm/nn/package.py writes it): what a launch needs, and the cubin. It is
// read once for each GPU, and found by the digest that calls pass as two numbers; so it may lie on a CPU or a GPU and
// move. The operator allocates its result through PyTorch, launches on its current stream and waits for nothing but a
// package that is on the GPU, once: a CUDA graph can capture it after a first call.
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
constexpr int MAX_DYNAMIC_SHARED_SIZE_BYTES = 8;  // of the driver API

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

void run(const Kernel &kernel, void *b, void *c, void *residual, void *stream) {
  const Head &head = kernel.head;
  void *arguments[] = {&b, &c, &residual};
  check(cuda().launch(kernel.function, head.grid[0], head.grid[1], head.grid[2], head.block, 1, 1, head.shared_bytes, stream,
                      arguments, nullptr),
        "a launch failed");
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

// As the kernel's vector loads need it: PyTorch's own allocations are aligned, views may not be.
Tensor readable(const Tensor &x, const Kernel &kernel) {
  const Tensor found = torch::stable::contiguous(x);
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(found.data_ptr()) % kernel.head.alignment_bytes == 0;
  return is_aligned ? found : torch::stable::clone(found);
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

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lospmm, library) {
  library.def("apply(Tensor input, Tensor package, int high, int low, int[] shape, Tensor? residual=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lospmm, CUDA, library) {
  library.impl("apply", TORCH_BOX(&apply));
}
