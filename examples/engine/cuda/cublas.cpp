#include "cublas.hpp"

#include <dlfcn.h>

namespace engine::cuda {
namespace {

/// Where the system or LD_LIBRARY_PATH has it, else where it was when this was built.
void* open_library() {
  static const std::string name = "libcublas.so." + std::to_string(CUBLAS_VER_MAJOR);
  if (void* const found = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) return found;
  const std::string reason = dlerror();
  if (void* const found = dlopen(TESSERA_CUBLAS, RTLD_NOW | RTLD_LOCAL)) return found;
  tessera::fail("cuBLAS", "none (" + reason + ")", name,
                "install it (CUDA's package libcublas), add its folder to LD_LIBRARY_PATH, or use --backend cpu");
}

template <class F>
void find(F& function, void* library, const char* name) {
  function = reinterpret_cast<F>(dlsym(library, name));
  tessera::require(function != nullptr, "cuBLAS", "a library without " + std::string(name), "version 12 or newer",
                   "install another one, or use --backend cpu");
}

}  // namespace

const cublas& cublas::loaded() {
  static const cublas functions = [] {
    void* const library = open_library();
    cublas all;
    find(all.create, library, "cublasCreate_v2");
    find(all.destroy, library, "cublasDestroy_v2");
    find(all.set_stream, library, "cublasSetStream_v2");
    find(all.set_workspace, library, "cublasSetWorkspace_v2");
    find(all.gemm, library, "cublasGemmEx");
    find(all.status_string, library, "cublasGetStatusString");
    return all;
  }();
  return functions;
}

}  // namespace engine::cuda
