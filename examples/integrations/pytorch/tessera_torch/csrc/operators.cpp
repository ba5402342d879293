// The operators torch.ops.tessera: caches of conversations, made by recipe libraries (recipe_library.hpp) that are loaded by path.
//
// A cache goes from call to call as a handle, a tensor of one number. Operators that change the cache say that they change
// the handle, so that torch.compile keeps them in order and drops none.
#include <ATen/DeviceGuard.h>
#include <torch/library.h>
#include <torch/types.h>

#include <tessera/core/error.hpp>

#include "tensor_rows.hpp"

namespace tessera_torch {
namespace {

// --- operators ---------------------------------------------------------------------------------------------------------

Tensor create(const std::string& library, std::int64_t layers, std::int64_t q_heads, std::int64_t kv_heads,
              at::IntArrayRef sliding, std::int64_t window, double scale, double soft_cap,
              c10::optional<std::int64_t> budget, const std::vector<std::string>& settings, std::int64_t sequences,
              std::int64_t tokens, const c10::optional<Tensor>& sinks, c10::optional<at::Device> device,
              at::ArrayRef<double> rope_frequencies, at::ArrayRef<double> table, std::int64_t step_tokens,
              at::IntArrayRef budgets, at::ArrayRef<double> shares, std::int64_t prompt, std::int64_t answer) {
  return guarded([&](registry& all) {
    cache_request request =
        request_of(layers, q_heads, kv_heads, sliding, window, scale, soft_cap, budget, settings, sinks, table);
    request.shape.rope_frequencies.assign(rope_frequencies.begin(), rope_frequencies.end());
    request.workers = all.executor();
    request.sequences = index_t(sequences);
    request.tokens = index_t(tokens);
    request.step_tokens = index_t(step_tokens);
    request.first_prompt = index_t(prompt);
    request.first_answer = index_t(answer);
    const auto options_of = [&](std::int64_t b) {
      tessera::sequence_options own;
      if (!budgets.empty()) own.budget = {index_t(budgets[std::size_t(b)]), shares[std::size_t(b)]};
      return own;
    };
    for (std::int64_t b = 0; b < sequences && !budgets.empty(); ++b) {
      const index_t own = options_of(b).budget.is_share() ? 16 : index_t(budgets[std::size_t(b)]);
      request.smallest_budget = b == 0 ? own : std::min(request.smallest_budget, own);
    }
    conversations made(device, request.shape, sinks);
    request.memory = made.source();
    made.copy = symbol_of<decltype(&tessera_torch_copy)>(library, "tessera_torch_copy");
    taking_memory(all, made, [&] {
      made.cache.reset(symbol_of<decltype(&tessera_torch_make)>(library, "tessera_torch_make")(request));
      for (std::int64_t b = 0; b < sequences; ++b) made.ids.push_back(made.cache->open(options_of(b), made.stream()));
    });
    made.in_prompt.assign(std::size_t(sequences), false);
    return all.add(std::move(made));
  });
}

Tensor clone(const Tensor& handle) {
  return guarded([&](registry& all) {
    const conversations& from = all.find(handle);
    conversations twin(from.device, from.shape, from.sinks);
    twin.copy = from.copy;
    twin.step = from.step;
    taking_memory(all, twin, [&] { twin.cache.reset(from.copy(*from.cache, twin.source())); });
    twin.ids = from.ids;
    twin.in_prompt = from.in_prompt;
    return all.add(std::move(twin));
  });
}

void destroy(std::int64_t number) {
  guarded([&](registry& here) { here.all.erase(number); });
}

std::string parameters(const std::string& library) {
  return guarded([&](registry&) {
    return std::string(symbol_of<decltype(&tessera_torch_parameters)>(library, "tessera_torch_parameters")());
  });
}

/// One of the facts that a recipe's library answers: recipe_library.hpp lists them.
bool fact(const std::string& library, const std::string& name) {
  return guarded([&](registry&) { return symbol_of<bool (*)()>(library, ("tessera_torch_" + name).c_str())(); });
}

/// Room for so many more tokens of every sequence.
void reserve(const Tensor& handle, std::int64_t tokens) {
  guarded([&](registry& all) {
    conversations& here = all.find(handle);
    const at::OptionalDeviceGuard device(here.device);
    for (const index_t id : here.ids) here.cache->reserve(id, index_t(tokens), here.stream());
  });
}

/// One sequence's chunk: stored, shown to the scorer, attended. Rows have one sequence. is_last: nothing of the prompt comes
/// behind it, so a layer that can chooses at once. Where it cannot, `end_prompt` says why, once every layer has the rows.
void pass_chunk(conversations& here, index_t layer, index_t id, const tensor_rows& q, const tensor_rows& k,
                const tensor_rows& v, const tensor_rows& out, text_flags boundaries, bool is_last) {
  void* const stream = here.stream();
  const bool ends = is_last && here.cache->facts().drops_by_layer;  // then one layer at a time is whole
  if (layer == 0 && !ends) here.cache->reserve(id, k.tokens, stream);
  here.cache->prefill(layer, id, q, k, v, boundaries, stream);
  here.cache->prefill_attention(layer, id, q, out, {}, stream);
  if (!ends) return;
  try {
    here.cache->end_layer(layer, id, stream);
  } catch (const tessera::error&) {
  }
}

/// A chunk of prompts. Of sequence b, tokens [first[b], last[b]) are its own and the others padding, whose rows are 0.
Tensor prompt(const Tensor& handle, std::int64_t layer, const Tensor& q0, const Tensor& k0, const Tensor& v0,
              at::IntArrayRef first, at::IntArrayRef last, const c10::optional<Tensor>& boundaries, bool is_last) {
  const Tensor q = in_place(q0), k = in_place(k0), v = in_place(v0);
  const at::OptionalDeviceGuard device(at::device_of(q));
  const Tensor out = output_for(q, v.size(3), true);
  guarded([&](registry& all) {
    conversations& here = all.find(handle);
    check_rows(here, q, k, v);
    const Tensor flags = flags_of(boundaries, q.size(0), q.size(2));
    const tensor_rows q_rows = rows_of(q), k_rows = rows_of(k), v_rows = rows_of(v),
                      out_rows = rows_of(out.transpose(1, 2));
    for (std::size_t b = 0; b < here.ids.size(); ++b) {
      const auto begin = index_t(first[b]), end = index_t(last[b]);
      if (begin == end) continue;
      const auto part = [&](const tensor_rows& rows, const Tensor& x) {
        return part_of(rows, x.element_size(), index_t(b), begin, end);
      };
      pass_chunk(here, index_t(layer), here.ids[b], part(q_rows, q), part(k_rows, k), part(v_rows, v),
                 part(out_rows, out), row_of(flags, b, begin, end), is_last);
      here.in_prompt[b] = true;
    }
  });
  return out.to(q.scalar_type());
}

/// Of sequence b, the first tokens[b] rows repeat count[b] tokens of its prompt from position first[b] on.
Tensor reread(const Tensor& handle, std::int64_t layer, const Tensor& q0, const Tensor& k0, const Tensor& v0,
              at::IntArrayRef first, at::IntArrayRef count, at::IntArrayRef tokens) {
  const Tensor q = in_place(q0), k = in_place(k0), v = in_place(v0);
  const at::OptionalDeviceGuard device(at::device_of(q));
  const Tensor out = output_for(q, v.size(3), true);
  guarded([&](registry& all) {
    conversations& here = all.find(handle);
    check_rows(here, q, k, v);
    const tensor_rows rows[] = {rows_of(q), rows_of(k), rows_of(v), rows_of(out.transpose(1, 2))};
    for (std::size_t b = 0; b < here.ids.size(); ++b) {
      if (tokens[b] == 0) continue;
      const auto part = [&](int i, const Tensor& x) {
        return part_of(rows[i], x.element_size(), index_t(b), 0, index_t(tokens[b]));
      };
      here.cache->reread(index_t(layer), here.ids[b], index_t(first[b]), index_t(count[b]), part(0, q), part(1, k),
                         part(2, v), part(3, out), here.stream());
    }
  });
  return out.to(q.scalar_type());
}

void end_prompt(const Tensor& handle, const Tensor&) {
  guarded([&](registry& all) {
    conversations& here = all.find(handle);
    const at::OptionalDeviceGuard device(here.device);
    for (std::size_t b = 0; b < here.ids.size(); ++b) {
      if (!here.in_prompt[b]) continue;
      here.cache->end_prefill(here.ids[b], here.stream());
      here.in_prompt[b] = false;
    }
  });
}

/// Takes back the newest tokens of every sequence, of all or of none. `prompt_is_gone`: they are all of a prompt that has
/// not ended.
void crop(const Tensor& handle, const Tensor&, at::IntArrayRef tokens, bool prompt_is_gone) {
  guarded([&](registry& all) {
    conversations& here = all.find(handle);
    const at::OptionalDeviceGuard device(here.device);
    tessera::require(tokens.size() == here.ids.size(), "numbers of tokens to take back", tokens.size(),
                     "one for each sequence, which are " + std::to_string(here.ids.size()), "pass one for each");
    for (std::size_t b = 0; b < tokens.size(); ++b) {
      const index_t next = here.cache->next_position(here.ids[b]), settled = here.cache->settled(here.ids[b]);
      tessera::require(tokens[b] >= 0 && tokens[b] <= next - settled, "tokens to take back", tokens[b],
                       "0 to " + std::to_string(next - settled) + ": the method has settled the others",
                       "take back fewer tokens, or take a method that drops nothing");
    }
    for (std::size_t b = 0; b < tokens.size(); ++b) {
      const index_t next = here.cache->next_position(here.ids[b]);
      here.cache->truncate(here.ids[b], next - index_t(tokens[b]), here.stream());
      if (prompt_is_gone) here.in_prompt[b] = false;
    }
  });
}

/// The host's part of a step: before every step, also before a captured one is replayed; never captured itself.
/// `like`: an empty tensor of the model's device whose third size is the number of tokens.
void prepare_step(const Tensor& handle, const Tensor& like, const c10::optional<Tensor>& boundaries) {
  guarded([&](registry& all) {
    conversations& here = all.find(handle);
    const at::OptionalDeviceGuard device(here.device);
    const Tensor flags = flags_of(boundaries, std::int64_t(here.ids.size()), like.size(2));
    const text_flags every =
        flags.defined() ? text_flags(flags.data_ptr<std::uint8_t>(), std::size_t(flags.numel())) : text_flags();
    here.step = here.cache->prepare_step(here.ids, index_t(like.size(2)), every, here.stream());
    here.prepared = true;
  });
}

/// What the step that was prepared does besides storing and reading: a captured step serves steps of the same number.
std::int64_t actions(const Tensor& handle) {
  return guarded([&](registry& all) {
    const tessera::batch& step = all.find(handle).step;
    return std::int64_t(step.evicts_first) + 2 * std::int64_t(step.evicts_last);
  });
}

/// The device's part, before the first layer's `step`.
void begin_step(const Tensor& handle, const Tensor&) {
  guarded([&](registry& all) {
    conversations& here = all.find(handle);
    const at::OptionalDeviceGuard device(here.device);
    tessera::require(here.prepared, "the step", "not prepared", "one that is", "call prepare_step before begin_step");
    here.cache->begin_step(here.step, here.stream());
    here.prepared = false;
  });
}

Tensor step(const Tensor& handle, std::int64_t layer, const Tensor& q0, const Tensor& k0, const Tensor& v0) {
  const Tensor q = in_place(q0), k = in_place(k0), v = in_place(v0);
  const at::OptionalDeviceGuard device(at::device_of(q));
  const Tensor out = output_for(q, v.size(3), false);
  guarded([&](registry& all) {
    conversations& here = all.find(handle);
    check_rows(here, q, k, v);
    here.cache->decode(index_t(layer), here.step, rows_of(q), rows_of(k), rows_of(v), rows_of(out.transpose(1, 2)), {},
                       here.stream());
  });
  return out.to(q.scalar_type());
}

// Shapes alone, for torch.compile.
Tensor prompt_shape(const Tensor&, std::int64_t, const Tensor& q, const Tensor&, const Tensor& v, at::IntArrayRef,
                    at::IntArrayRef, const c10::optional<Tensor>&, bool) {
  return at::empty_symint({q.sym_size(0), q.sym_size(2), q.sym_size(1), v.sym_size(3)}, q.options());
}
Tensor reread_shape(const Tensor&, std::int64_t, const Tensor& q, const Tensor&, const Tensor& v, at::IntArrayRef,
                    at::IntArrayRef, at::IntArrayRef) {
  return at::empty_symint({q.sym_size(0), q.sym_size(2), q.sym_size(1), v.sym_size(3)}, q.options());
}
Tensor step_shape(const Tensor&, std::int64_t, const Tensor& q, const Tensor&, const Tensor& v) {
  return at::empty_symint({q.sym_size(0), q.sym_size(2), q.sym_size(1), v.sym_size(3)}, q.options());
}

// --- what a cache answers ------------------------------------------------------------------------------------------------

void set_budget(const Tensor& handle, std::int64_t tokens) {
  guarded([&](registry& all) {
    conversations& here = all.find(handle);
    taking_memory(all, here, [&] { here.cache->set_budget(index_t(tokens), here.stream()); });
  });
}

/// Memory for what is stored and so many more tokens of every sequence. Captured steps must be captured anew.
void fit_memory(const Tensor& handle, std::int64_t tokens) {
  guarded([&](registry& all) {
    conversations& here = all.find(handle);
    taking_memory(all, here, [&] { here.cache->fit_memory(index_t(tokens), here.stream()); });
  });
}

/// [sequences, 4]: bytes held, bytes read by the last step, bytes of an uncompressed cache, the next position.
Tensor figures(const Tensor& handle) {
  return guarded([&](registry& all) {
    const conversations& here = all.find(handle);
    const at::OptionalDeviceGuard device(here.device);
    const Tensor result = at::empty({std::int64_t(here.ids.size()), 4}, at::kLong);
    auto* to = result.data_ptr<std::int64_t>();
    for (const index_t id : here.ids) {
      *to++ = here.cache->bytes(id);
      *to++ = here.cache->bytes_read(id);
      *to++ = here.cache->full_bytes(here.cache->next_position(id));
      *to++ = here.cache->next_position(id);
    }
    return result;
  });
}

/// Logical positions that a layer stores, by sequence and kv_head.
std::vector<Tensor> positions(const Tensor& handle, std::int64_t layer) {
  return guarded([&](registry& all) {
    const conversations& here = all.find(handle);
    const at::OptionalDeviceGuard device(here.device);
    std::vector<Tensor> result;
    for (const index_t id : here.ids) {
      for (index_t head = 0; head < here.shape.kv_heads; ++head) {
        const auto kept = here.cache->positions(index_t(layer), id, head);
        result.push_back(at::tensor(at::ArrayRef<index_t>(kept), at::kInt));
      }
    }
    return result;
  });
}

}  // namespace
}  // namespace tessera_torch

TORCH_LIBRARY(tessera, m) {
  using namespace tessera_torch;
  m.def(
      "create(str library, int layers, int q_heads, int kv_heads, int[] sliding, int window, float scale, "
      "float soft_cap, int? budget, str[] settings, int sequences, int tokens, Tensor? sinks, "
      "Device? device=None, float[] rope_frequencies=[], float[] table=[], int step_tokens=1, "
      "int[] budgets=[], float[] shares=[], int first_prompt=0, int first_answer=0) -> Tensor",
      &create);
  m.def("clone(Tensor cache) -> Tensor");
  m.def("destroy(int handle) -> ()", &destroy);
  m.def("parameters(str library) -> str", &parameters);
  m.def("fact(str library, str name) -> bool", &fact);
  m.def(
      "prompt(Tensor(a!) cache, int layer, Tensor q, Tensor k, Tensor v, int[] first, int[] last, "
      "Tensor? boundaries=None, bool is_last=False) -> Tensor");
  m.def(
      "reread(Tensor(a!) cache, int layer, Tensor q, Tensor k, Tensor v, int[] first, int[] count, int[] tokens) -> "
      "Tensor");
  m.def("end_prompt(Tensor(a!) cache, Tensor like) -> ()");
  m.def("crop(Tensor(a!) cache, Tensor like, int[] tokens, bool prompt_is_gone) -> ()");
  m.def("reserve(Tensor(a!) cache, int tokens) -> ()");
  m.def("prepare_step(Tensor(a!) cache, Tensor like, Tensor? boundaries=None) -> ()");
  m.def("actions(Tensor cache) -> int");
  m.def("begin_step(Tensor(a!) cache, Tensor like) -> ()");
  m.def("step(Tensor(a!) cache, int layer, Tensor q, Tensor k, Tensor v) -> Tensor");
  m.def("set_budget(Tensor(a!) cache, int tokens) -> ()");
  m.def("fit_memory(Tensor(a!) cache, int tokens) -> ()");
  m.def("figures(Tensor cache) -> Tensor");
  m.def("positions(Tensor cache, int layer) -> Tensor[]");
}

namespace {
void implement(torch::Library& m) {
  using namespace tessera_torch;
  m.impl("prompt", &prompt);
  m.impl("reread", &reread);
  m.impl("end_prompt", &end_prompt);
  m.impl("crop", &crop);
  m.impl("prepare_step", &prepare_step);
  m.impl("begin_step", &begin_step);
  m.impl("step", &step);
}
}  // namespace

TORCH_LIBRARY_IMPL(tessera, CPU, m) {
  implement(m);
  m.impl("clone", &tessera_torch::clone);
  m.impl("reserve", &tessera_torch::reserve);
  m.impl("actions", &tessera_torch::actions);
  m.impl("set_budget", &tessera_torch::set_budget);
  m.impl("fit_memory", &tessera_torch::fit_memory);
  m.impl("figures", &tessera_torch::figures);
  m.impl("positions", &tessera_torch::positions);
}
#ifdef TESSERA_TORCH_CUDA
TORCH_LIBRARY_IMPL(tessera, CUDA, m) { implement(m); }
#endif
TORCH_LIBRARY_IMPL(tessera, Meta, m) {
  m.impl("prompt", &tessera_torch::prompt_shape);
  m.impl("reread", &tessera_torch::reread_shape);
  m.impl("step", &tessera_torch::step_shape);
  m.impl("end_prompt", [](const at::Tensor&, const at::Tensor&) {});
  m.impl("prepare_step", [](const at::Tensor&, const at::Tensor&, const c10::optional<at::Tensor>&) {});
  m.impl("begin_step", [](const at::Tensor&, const at::Tensor&) {});
}
