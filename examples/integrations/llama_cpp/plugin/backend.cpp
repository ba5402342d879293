// A backend of ggml that takes over the attention of steps in a program that nobody has changed:
//
//   GGML_BACKEND_PATH=libggml-tessera.so TESSERA_READ=top_k:256 llama-simple -m MODEL.gguf ...
//
// It claims nodes FLASH_ATTN_EXT of few rows on tensors of the host, and with quest the nodes that write llama.cpp's
// memory. All else is left to the other backends. The settings stand in read_options.hpp. Built against the headers of
// the same ggml.
#include <ggml-backend-impl.h>
#include <ggml-backend.h>
#include <ggml.h>

#include <atomic>
#include <cstdio>
#include <map>
#include <memory>
#include <tuple>

#include "step_attention.hpp"

using namespace tessera_plugin;

namespace {

/// What one context has.
class reading_backend {
 public:
  explicit reading_backend(const read_options& options) : options_(options), workers_(options.threads) {}
  ~reading_backend() {
    if (!options_.reports || counts_.nodes == 0) return;
    offset_t bytes = 0;
    for (const auto& [root, bounds] : bounds_) bytes += bounds.bytes();
    std::fprintf(stderr,
                 "tessera: %lld attentions of steps read %lld of %lld keys and values; bounds take %.1f MB, and were "
                 "made anew %lld times\n",
                 (long long)counts_.nodes, (long long)counts_.attended, (long long)counts_.visible, double(bytes) / 1e6,
                 (long long)counts_.rebuilt);
  }

  /// Errors   what an operation refuses: tessera::error.
  void compute(ggml_tensor* node) {
    if (node->op == GGML_OP_SET_ROWS)
      write(node);
    else if (node->op == GGML_OP_FLASH_ATTN_EXT)
      attend(node);
    else
      tessera::fail("node of the graph", ggml_op_name(node->op), "one that was claimed",
                    "build the plug-in for this llama.cpp");
  }

 private:
  /// Rows of llama.cpp's memory, as its own node writes them.
  void write(ggml_tensor* node) {
    const ggml_tensor &rows = *node->src[0], &indices = *node->src[1];
    const ggml_tensor* const root = root_of(node);
    const bool writes_keys = std::string_view(root->name).starts_with("cache_k");
    cell_bounds* const bounds = writes_keys ? &bounds_[root->data] : nullptr;
    if (writes_keys) new_cells_.clear();
    for (std::int64_t row = 0; row < rows.ne[1]; ++row) {
      const char* const at = static_cast<const char*>(indices.data) + row * std::int64_t(indices.nb[0]);
      const std::int64_t cell = indices.type == GGML_TYPE_I64 ? *reinterpret_cast<const std::int64_t*>(at)
                                                              : *reinterpret_cast<const std::int32_t*>(at);
      ggml_fp32_to_fp16_row(
          reinterpret_cast<const float*>(static_cast<const char*>(rows.data) + row * std::int64_t(rows.nb[1])),
          reinterpret_cast<ggml_fp16_t*>(static_cast<char*>(node->data) + cell * std::int64_t(node->nb[1])),
          node->ne[0]);
      if (!writes_keys) continue;
      bounds->written(cell);
      new_cells_.push_back(cell);
    }
  }

  void attend(ggml_tensor* tensor) {
    const step_node node(tensor);
    cell_bounds* const bounds = options_.method == read_method::quest ? &bounds_[root_of(node.k)->data] : nullptr;
    switch (node.dim()) {
      case 64:
        return with<64>(node, bounds);
      case 80:
        return with<80>(node, bounds);
      case 96:
        return with<96>(node, bounds);
      case 128:
        return with<128>(node, bounds);
      case 192:
        return with<192>(node, bounds);
      default:
        return with<256>(node, bounds);
    }
  }
  template <int D>
  void with(const step_node& node, cell_bounds* bounds) {
    auto& attention = std::get<std::unique_ptr<step_attention<D>>>(attentions_);
    if (!attention) attention = std::make_unique<step_attention<D>>();
    attention->compute(node, options_, bounds, new_cells_, workers_, counts_);
  }

  read_options options_;
  tessera::cpu::executor workers_;
  std::map<const void*, cell_bounds> bounds_;  // by the memory of a layer's keys
  std::vector<std::int64_t> new_cells_;        // of the layer that was written last
  std::tuple<std::unique_ptr<step_attention<64>>, std::unique_ptr<step_attention<80>>,
             std::unique_ptr<step_attention<96>>, std::unique_ptr<step_attention<128>>,
             std::unique_ptr<step_attention<192>>, std::unique_ptr<step_attention<256>>>
      attentions_;
  read_counts counts_;
};

/// What the newest context has said. Nodes are claimed by it; a context computes by its own settings.
struct {
  read_options options;
  /// llama.cpp asks with a graph of one token whether flash attention runs where the layer is, and turns it off
  /// otherwise (`-fa auto`). So nothing is claimed until a prompt's graph was shown, which comes behind that question.
  std::atomic<bool> has_shown_prompt = false;
} newest_context;

constexpr const char* name = "Tessera";

ggml_guid_t guid() {
  static ggml_guid id = {0x74, 0x65, 0x73, 0x73, 0x65, 0x72, 0x61, 0x2d,
                         0x72, 0x65, 0x61, 0x64, 0x2d, 0x30, 0x30, 0x31};
  return &id;
}

/// Exceptions do not pass through ggml: a sentence on the standard error stream, and the graph fails.
ggml_status compute_graph(ggml_backend_t backend, ggml_cgraph* graph) {
  try {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
      ggml_tensor* const node = ggml_graph_node(graph, i);
      const bool is_view = node->op == GGML_OP_NONE || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_VIEW ||
                           node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE;
      if (!is_view && (node->flags & GGML_TENSOR_FLAG_COMPUTE))
        static_cast<reading_backend*>(backend->context)->compute(node);
    }
    return GGML_STATUS_SUCCESS;
  } catch (const std::exception& problem) {
    std::fprintf(stderr, "tessera: %s\n", problem.what());
    return GGML_STATUS_FAILED;
  }
}

/// Null where settings are wrong: llama.cpp then makes no context.
ggml_backend_t make_backend(ggml_backend_dev_t device, const char*) {
  try {
    const read_options options = read_options::of_environment();
    auto context = std::make_unique<reading_backend>(options);
    auto backend = std::make_unique<ggml_backend>();
    *backend = {};
    backend->guid = guid();
    backend->iface.get_name = [](ggml_backend_t) { return name; };
    backend->iface.free = [](ggml_backend_t self) {
      delete static_cast<reading_backend*>(self->context);
      delete self;
    };
    backend->iface.graph_compute = compute_graph;
    backend->device = device;
    backend->context = context.release();
    newest_context.options = options;
    newest_context.has_shown_prompt = false;
    return backend.release();
  } catch (const std::exception& problem) {
    std::fprintf(stderr, "tessera: %s\n", problem.what());
    return nullptr;
  }
}

bool supports(ggml_backend_dev_t, const ggml_tensor* node) {
  switch (node->op) {
    case GGML_OP_NONE:
    case GGML_OP_RESHAPE:
    case GGML_OP_VIEW:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE:
      return true;
    default:
      if (node->op == GGML_OP_FLASH_ATTN_EXT && node->src[0]->ne[1] > newest_context.options.step_tokens)
        newest_context.has_shown_prompt = true;
      return newest_context.has_shown_prompt &&
             (is_claimed(newest_context.options, node) || is_claimed_write(newest_context.options, node));
  }
}

void describe(ggml_backend_dev_t device, ggml_backend_dev_props* props) {
  *props = {};
  props->name = name, props->description = "Steps that read some of the cells";
  props->type = GGML_BACKEND_DEVICE_TYPE_ACCEL;
  props->caps.buffer_from_host_ptr = true;
  (void)device;
}

/// Memory is the CPU's: nothing is copied.
ggml_backend_device_i device_interface() {
  ggml_backend_device_i made = {};
  made.get_name = [](ggml_backend_dev_t) { return name; };
  made.get_description = [](ggml_backend_dev_t) { return "Steps that read some of the cells"; };
  made.get_memory = [](ggml_backend_dev_t, std::size_t* free, std::size_t* total) { *free = *total = 0; };
  made.get_type = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; };
  made.get_props = describe;
  made.init_backend = make_backend;
  made.get_buffer_type = [](ggml_backend_dev_t) { return ggml_backend_cpu_buffer_type(); };
  made.buffer_from_host_ptr = [](ggml_backend_dev_t, void* memory, std::size_t size, std::size_t) {
    return ggml_backend_cpu_buffer_from_ptr(memory, size);
  };
  made.supports_op = supports;
  made.supports_buft = [](ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
    return ggml_backend_buft_is_host(type);
  };
  return made;
}

ggml_backend_dev_t the_device(ggml_backend_reg_t registry, std::size_t) {
  static ggml_backend_device device = {device_interface(), registry, nullptr};
  return &device;
}

ggml_backend_reg_i registry_interface() {
  ggml_backend_reg_i made = {};
  made.get_name = [](ggml_backend_reg_t) { return name; };
  made.get_device_count = [](ggml_backend_reg_t) { return std::size_t(1); };
  made.get_device = the_device;
  return made;
}

}  // namespace

/// What ggml looks for in a library that it loads.
extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init() {
  static ggml_backend_reg registry = {GGML_BACKEND_API_VERSION, registry_interface(), nullptr};
  return &registry;
}
