// Every allocation of a conversation fails once: an error each time, and the cache answers as if it had not been called.
#include "catch.hpp"

#include <atomic>
#include <cstdlib>
#include <functional>
#include <new>

#include "methods/support/conversation.hpp"

namespace {

std::atomic<int> until_failure{-1};  // so many allocations succeed, one fails; -1: none fails

/// What an operator new of a program may throw, though no standard says so.
struct no_memory {};
std::atomic<bool> throws_own{false};  // no_memory in place of std::bad_alloc

void* allocate(std::size_t size, std::size_t alignment) {
  if (until_failure >= 0 && until_failure-- == 0) {
    if (throws_own) throw no_memory();
    throw std::bad_alloc();
  }
  size = (std::max<std::size_t>(size, 1) + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, size);
  if (!memory) throw std::bad_alloc();
  return memory;
}

}  // namespace

// All forms, for a sanitizer brings its own for those that are left out.
[[gnu::noinline]] void* operator new(std::size_t size) { return allocate(size, alignof(std::max_align_t)); }
[[gnu::noinline]] void* operator new(std::size_t size, std::align_val_t alignment) {
  return allocate(size, std::size_t(alignment));
}
[[gnu::noinline]] void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  try {
    return operator new(size);
  } catch (...) {
    return nullptr;
  }
}
void* operator new[](std::size_t size) { return operator new(size); }
void* operator new[](std::size_t size, std::align_val_t alignment) { return operator new(size, alignment); }
void* operator new[](std::size_t size, const std::nothrow_t& quiet) noexcept { return operator new(size, quiet); }
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { operator delete(p); }
void operator delete(void* p, std::align_val_t) noexcept { operator delete(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { operator delete(p); }
void operator delete[](void* p) noexcept { operator delete(p); }
void operator delete[](void* p, std::size_t) noexcept { operator delete(p); }
void operator delete[](void* p, std::align_val_t) noexcept { operator delete(p); }
void operator delete[](void* p, std::size_t, std::align_val_t) noexcept { operator delete(p); }

using namespace methods_test;

namespace {

/// Dense, sliding and the recipe's layers in one cache.
const tessera::model_shape shape{3, 4, 2, 12, {false, true, false}};
constexpr index_t sequences = 2;

/// A call of a conversation; what it writes.
struct call {
  const char* name;
  std::function<void(any_cache&, std::vector<float>&)> made;
};

/// Two conversations of two turns each: prompts in chunks, steps of one and of several tokens of one sequence and of both.
class script {
 public:
  explicit script(const model_data& data) : data_(data) {
    open(0);
    prompt(0, {30, 11});
    open(1);
    prompt(1, {40});
    for (const index_t tokens : {1, 1, 3}) step({0, 1}, tokens);
    for (int i = 0; i < 4; ++i) step({1}, 3);
    prompt(0, {9, 16});
    for (const index_t tokens : {1, 2}) step({1, 0}, tokens);
    draft({0, 1}, {-1, 0, 0, 2});
    accept({{0, {0, 2}}, {1, {}}});
    step({1, 0}, 1);
    go_back(0);
    close(1);
    fork(0, 1);
    for (const index_t tokens : {1, 2}) step({0, 1}, tokens);
    prompt(1, {12});
    step({1}, 1);
    close(1);
    load(0, 1);
    step({0, 1}, 1);
    close(1);
    open(1);
    prompt(1, {20});
    for (const index_t tokens : {1, 1}) step({0, 1}, tokens);
    close(0);
    close(1);
  }
  const std::vector<call>& calls() const { return calls_; }

 private:
  void open(index_t id) {
    next_[id] = 0;
    calls_.push_back({"open", [](any_cache& cache, std::vector<float>& out) { out.assign(1, float(cache.open())); }});
  }
  void fork(index_t id, index_t fresh) {
    next_[fresh] = next_[id];
    calls_.push_back(
        {"fork", [id](any_cache& cache, std::vector<float>& out) { out.assign(1, float(cache.fork(id))); }});
  }
  void load(index_t id, index_t fresh) {
    next_[fresh] = next_[id];
    calls_.push_back(
        {"load", [id](any_cache& cache, std::vector<float>& out) { out.assign(1, float(cache.fork_by_bytes(id))); }});
  }
  void close(index_t id) {
    calls_.push_back({"close", [id](any_cache& cache, std::vector<float>&) { cache.close(id); }});
  }
  void prompt(index_t id, const std::vector<index_t>& chunks) {
    for (const index_t count : chunks) {
      const index_t first = next_[id];
      for (index_t layer = 0; layer < shape.layers; ++layer) {
        calls_.push_back({"prefill", [=, this](any_cache& cache, std::vector<float>&) {
                            cache.prefill(layer, id, data_.queries(layer, first, count),
                                          data_.keys(layer, first, count), data_.values(layer, first, count));
                          }});
      }
      calls_.push_back({"prefill_attention", [=, this](any_cache& cache, std::vector<float>& out) {
                          out.assign(std::size_t(count * shape.q_heads * dim), 0.0f);
                          cache.prefill_attention(1, id, data_.queries(1, first, count),
                                                  tessera::nhd_rows(out.data(), count, shape.q_heads, dim), {});
                        }});
      next_[id] += count;
    }
    for (index_t layer = 0; id == 0 && layer < shape.layers; ++layer)
      calls_.push_back({"end_layer", [=](any_cache& cache, std::vector<float>&) { cache.end_layer(layer, id); }});
    calls_.push_back({"end_prefill", [id](any_cache& cache, std::vector<float>&) { cache.end_prefill(id); }});
  }
  /// A draft in every layer. Where it fails it is cancelled: then nothing is left of it. Some methods take no drafts.
  void draft(const std::vector<index_t>& ids, const std::vector<index_t>& parents) {
    const index_t first = next_[ids[0]], count = index_t(parents.size());
    calls_.push_back({"draft", [=, this](any_cache& cache, std::vector<float>& out) {
                        const std::size_t rows = ids.size() * std::size_t(count * shape.q_heads);
                        out.assign(rows * (dim + 1), 0.0f);
                        const index_t n = index_t(ids.size());
                        const auto repeated = [&](any_cache::rows all) {
                          all.sequences = n;
                          all.sequence_stride = 0;
                          return all;
                        };
                        bool has_begun = false;
                        try {
                          const tessera::host_vector<index_t> of(parents.begin(), parents.end());
                          const auto now = cache.prepare_draft(ids, tessera::draft_tree(of));
                          has_begun = true;
                          for (index_t layer = 0; layer < shape.layers; ++layer) {
                            cache.decode_draft(layer, now, repeated(data_.queries(layer, first, count)),
                                               repeated(data_.keys(layer, first, count)),
                                               repeated(data_.values(layer, first, count)),
                                               tessera::nhd_rows(out.data(), count, shape.q_heads, dim, n),
                                               tessera::nhd_rows(out.data() + rows * dim, count, shape.q_heads, 1, n));
                          }
                        } catch (const tessera::error&) {
                          out.assign(1, -1);
                        } catch (...) {
                          for (const index_t id : ids) {
                            if (has_begun) cache.cancel(id);
                          }
                          throw;
                        }
                      }});
  }
  void accept(const std::vector<tessera::accepted_tokens>& accepted) {
    calls_.push_back({"accept", [=](any_cache& cache, std::vector<float>& out) {
                        or_refused(out, [&] { cache.accept(accepted); });
                      }});
  }
  /// A chunk that is cancelled in its first layer, and the newest token, taken back: where the method can.
  void go_back(index_t id) {
    calls_.push_back({"cancel", [=, this](any_cache& cache, std::vector<float>& out) {
                        or_refused(out, [&] {
                          auto tried = cache.clone();
                          tried->prefill(0, id, data_.queries(0, 0, 3), data_.keys(0, 0, 3), data_.values(0, 0, 3));
                          tried->cancel(id);
                        });
                      }});
    calls_.push_back({"truncate", [=](any_cache& cache, std::vector<float>& out) {
                        or_refused(out, [&] { cache.truncate(id, cache.next_position(id) - 1); });
                      }});
  }
  template <class Call>
  static void or_refused(std::vector<float>& out, const Call& call) {
    try {
      call();
    } catch (const tessera::error&) {
      out.assign(1, -1);
    }
  }
  void step(const std::vector<index_t>& ids, index_t count) {
    const index_t first = next_[ids[0]];  // the same rows for all sequences of the batch
    for (const index_t id : ids) next_[id] += count;
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      calls_.push_back({"decode", [=, this](any_cache& cache, std::vector<float>& out) {
                          const std::size_t rows = ids.size() * std::size_t(count * shape.q_heads);
                          out.assign(rows * (dim + 1), 0.0f);
                          const auto repeated = [&](any_cache::rows all) {
                            all.sequences = index_t(ids.size());
                            all.sequence_stride = 0;
                            return all;
                          };
                          const index_t n = index_t(ids.size());
                          cache.decode(layer, ids, repeated(data_.queries(layer, first, count)),
                                       repeated(data_.keys(layer, first, count)),
                                       repeated(data_.values(layer, first, count)),
                                       tessera::nhd_rows(out.data(), count, shape.q_heads, dim, n),
                                       tessera::nhd_rows(out.data() + rows * dim, count, shape.q_heads, 1, n));
                        }});
    }
  }

  const model_data& data_;
  index_t next_[sequences] = {};
  std::vector<call> calls_;
};

/// Everything that a cache says of itself but the bytes that it has allocated.
std::vector<std::vector<index_t>> answers(const any_cache& cache) {
  std::vector<std::vector<index_t>> all;
  for (index_t id = 0; id < sequences; ++id) {
    try {
      all.push_back({cache.next_position(id), index_t(cache.bytes_read(id)), cache.plan(id).read});
    } catch (const tessera::error&) {
      all.push_back({-1});
      continue;
    }
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      for (index_t head = 0; head < shape.kv_heads; ++head) {
        all.push_back(cache.positions(layer, id, head));
        all.push_back(cache.readable(layer, id, head));
      }
      for (const auto& attended : cache.attended(layer, id)) all.push_back(attended);
    }
  }
  return all;
}

/// Whether the call came through when its n-th allocation failed; `reached`: whether there was an n-th.
bool comes_through(const call& one, any_cache& cache, std::vector<float>& out, int n, bool& reached) {
  out.clear();
  out.reserve(1 << 14);  // memory for the results is not the cache's
  until_failure = n;
  bool failed = false;
  try {
    one.made(cache, out);
  } catch (const std::bad_alloc&) {
    failed = true;
  } catch (const no_memory&) {
    failed = true;
  }
  reached = until_failure < 0;
  until_failure = -1;
  return !failed;
}

settings chosen_for(const std::string& method) {
  settings chosen{method, 24};
  for (const number& one : numbers_of(method)) {
    if (one.name == "window") chosen.values["window"] = 4;
    if (one.name == "recent" && method == "fastkvzip") chosen.values["recent"] = 4;
    if (one.name == "max_new") chosen.values["max_new"] = 8;
    if (one.name == "read_tokens") chosen.values["read_tokens"] = 16;
  }
  return chosen;
}

}  // namespace

TEST_CASE("every allocation of a conversation fails once, however, and the cache answers as if it had not been called",
          "[allocations]") {
  support::rng random(4711);
  const model_data data(random, shape, 200);
  const script whole(data);
  const auto& calls = whole.calls();
  const int stride = std::max(1, 20 / support::scaled(20));  // all of them, but for a quick look
  for (const auto& method : all_methods()) {
    CAPTURE(method);
    const auto spared = make_cache(chosen_for(method), shape, std::make_shared<tessera::cpu::executor>(1));
    spared->trace_attended(true);
    const auto battered = spared->clone();  // sees every failure, from the first call to the last
    index_t failures = 0;
    bool reached = false;
    for (std::size_t at = 0; at < calls.size(); ++at) {
      const call& one = calls[at];
      CAPTURE(at, one.name);
      const auto before = answers(*spared);
      // What this call and the next ones should come to.
      std::vector<std::vector<float>> outputs(std::min<std::size_t>(shape.layers, calls.size() - at));
      const auto expected = spared->clone();
      std::vector<std::vector<std::vector<index_t>>> expected_answers;
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        calls[at + i].made(*expected, outputs[i]);
        expected_answers.push_back(answers(*expected));
      }
      const auto goes_on = [&](any_cache& cache) {
        std::vector<float> out;
        for (std::size_t i = 0; i < outputs.size(); ++i) {
          out.clear();
          calls[at + i].made(cache, out);
          REQUIRE(support::same_bits(out, outputs[i]));
          REQUIRE(answers(cache) == expected_answers[i]);
        }
      };
      std::vector<float> out;
      reached = true;
      throws_own = true;
      for (int n = int(at) % stride; reached;
           n += stride) {  // a copy has no scratch: it allocates all that a call may have to
        CAPTURE(n);
        const auto copy = spared->clone();
        if (comes_through(one, *copy, out, n, reached)) {
          REQUIRE(answers(*copy) == expected_answers[0]);
          continue;
        }
        ++failures;
        REQUIRE(std::string(one.name) != "close");
        REQUIRE(answers(*copy) == before);
        goes_on(*copy);
      }
      throws_own = false;
      for (int n = 0; !comes_through(one, *battered, out, n, reached); ++n) {
        ++failures;
        REQUIRE(answers(*battered) == before);
      }
      REQUIRE(support::same_bits(out, outputs[0]));
      REQUIRE(answers(*battered) == expected_answers[0]);
      one.made(*spared, out);
    }
    CHECK(failures * stride > 200);
  }
}
