// Runs a model that PyTorch compiled ahead of time, with lospmm's kernels in it: no Python (docs/native.md).
//
//     run_pt2 liblospmm_torch.so model.pt2 input.pt output.pt
//
// The input and the output are single tensors, as torch.save writes them.
#include <dlfcn.h>

#include <fstream>
#include <iostream>
#include <iterator>

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/serialize.h>
#include <torch/torch.h>

int main(int count, char **words) {
  if (count != 5) {
    std::cerr << "usage: run_pt2 liblospmm_torch.so model.pt2 input.pt output.pt\n";
    return 2;
  }
  if (!dlopen(words[1], RTLD_NOW)) {
    std::cerr << dlerror() << '\n';
    return 2;
  }
  const c10::InferenceMode mode;
  std::ifstream file(words[3], std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const torch::Tensor input = torch::pickle_load(bytes).toTensor().cuda();
  torch::inductor::AOTIModelPackageLoader model(words[2]);
  const torch::Tensor output = model.run({input}).at(0).cpu();
  const std::vector<char> saved = torch::pickle_save(output);
  std::ofstream(words[4], std::ios::binary).write(saved.data(), static_cast<std::streamsize>(saved.size()));
}
